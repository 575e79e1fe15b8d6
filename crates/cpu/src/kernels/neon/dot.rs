//! Tiles for the byte dot product: rows in lanes, as [`tile`](super::super::tile) says.
//!
//! The dot product is of signed bytes, so 8-bit weights are taken as two 4-bit halves.

use std::arch::aarch64::*;

use lily_model::weights::GROUP_SIZE;

use super::super::portable::unit_offset;
use super::super::tile::{Activation, GROUP_BYTES, GROUP_UNITS, Source, UNIT_BYTES};
use super::instructions::{byte_dot_lane, words};
use super::{BYTES, QUARTERS, WORDS};

/// As [`TileOps::unpack_4`](super::super::tile::TileOps::unpack_4).
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn unpack_4(from: Source, groups: usize, to: *mut u8) {
    // SAFETY: `groups` groups of each row are readable and their units writable, by contract.
    unsafe {
        let low = vdupq_n_u8(15);
        for part in 0..groups * GROUP_SIZE / 2 / BYTES {
            for quarter in 0..QUARTERS {
                let columns = words(&from, quarter * WORDS, part * BYTES, 0);
                for (j, word) in columns.into_iter().enumerate() {
                    let to = to.add(2 * (part * WORDS + j) * UNIT_BYTES + quarter * BYTES);
                    let word = vreinterpretq_u8_u32(word);
                    vst1q_u8(to, vandq_u8(word, low));
                    vst1q_u8(to.add(UNIT_BYTES), vshrq_n_u8::<4>(word));
                }
            }
        }
    }
}

/// As [`TileOps::unpack_8`](super::super::tile::TileOps::unpack_8).
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn unpack_8(from: Source, groups: usize, ahead: usize, to: *mut u8) {
    // SAFETY: `groups` groups of each row are readable and their units writable, by contract.
    unsafe {
        for part in 0..groups * GROUP_SIZE / BYTES {
            for quarter in 0..QUARTERS {
                let columns = words(&from, quarter * WORDS, part * BYTES, ahead);
                for (j, [a, b]) in columns.as_chunks::<2>().0.iter().enumerate() {
                    let to = to.add(2 * (part * WORDS / 2 + j) * UNIT_BYTES + quarter * BYTES);
                    let (a, b) = (vreinterpretq_u8_u32(*a), vreinterpretq_u8_u32(*b));
                    // Two bytes of each row from `a`, then from `b`.
                    let evens = (vuzp1q_u8(a, a), vuzp1q_u8(b, b));
                    let odds = (vuzp2q_u8(a, a), vuzp2q_u8(b, b));
                    for (unit, (a, b)) in [evens, odds].into_iter().enumerate() {
                        let (a, b) = (vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b));
                        vst1q_u8(to.add(unit * UNIT_BYTES), vreinterpretq_u8_u16(vzip1q_u16(a, b)));
                    }
                }
            }
        }
    }
}

/// One panel's dot products of one group with `N` tokens, `[token][quarter]`.
///
/// # Safety
/// `weights` has a group of units, whose weights are at most 15 where not `wide`; the tokens have `group`; the
/// instruction set is there.
#[inline(always)]
pub(super) unsafe fn group_dots<const N: usize>(
    weights: *const u8,
    group: usize,
    wide: bool,
    tokens: &[Activation; N],
) -> [[int32x4_t; QUARTERS]; N] {
    // SAFETY: by contract.
    unsafe {
        if !wide {
            return part_dots::<N, NARROW>(weights, group, tokens);
        }
        let mut dots = part_dots::<N, LOW>(weights, group, tokens);
        let high = part_dots::<N, HIGH>(weights, group, tokens);
        for (dots, high) in dots.iter_mut().zip(high) {
            for (dot, high) in dots.iter_mut().zip(high) {
                *dot = vaddq_s32(*dot, vshlq_n_s32::<4>(high));
            }
        }
        dots
    }
}

/// Weights are 4-bit.
const NARROW: u8 = 0;
/// The low four bits of 8-bit weights.
const LOW: u8 = 1;
/// The high four bits of 8-bit weights.
const HIGH: u8 = 2;

/// As [`group_dots`] with `PART` of the weights.
///
/// # Safety
/// As [`group_dots`].
#[inline(always)]
unsafe fn part_dots<const N: usize, const PART: u8>(
    weights: *const u8,
    group: usize,
    tokens: &[Activation; N],
) -> [[int32x4_t; QUARTERS]; N] {
    // SAFETY: by contract.
    unsafe {
        let mut dots = [[vdupq_n_s32(0); QUARTERS]; N];
        // A register of activations meets four units: evens in even ones, odds in odd ones.
        for first in (0..GROUP_UNITS).step_by(2 * WORDS) {
            for parity in 0..2 {
                let mut x = [vdupq_n_s8(0); N];
                for (x, token) in x.iter_mut().zip(tokens) {
                    *x = vld1q_s8(token.q.add(group * GROUP_SIZE + unit_offset(first + parity)));
                }
                for quarter in 0..QUARTERS {
                    let mut w = [vdupq_n_s8(0); WORDS];
                    for (j, w) in w.iter_mut().enumerate() {
                        let unit = first + 2 * j + parity;
                        let bytes = vld1q_u8(weights.add(unit * UNIT_BYTES + quarter * BYTES));
                        *w = vreinterpretq_s8_u8(match PART {
                            LOW => vandq_u8(bytes, vdupq_n_u8(15)),
                            HIGH => vshrq_n_u8::<4>(bytes),
                            _ => bytes,
                        });
                    }
                    for (dots, x) in dots.iter_mut().zip(x) {
                        let dot = &mut dots[quarter];
                        *dot = byte_dot_lane::<0>(*dot, w[0], x);
                        *dot = byte_dot_lane::<1>(*dot, w[1], x);
                        *dot = byte_dot_lane::<2>(*dot, w[2], x);
                        *dot = byte_dot_lane::<3>(*dot, w[3], x);
                    }
                }
            }
        }
        dots
    }
}

const _: () = assert!(GROUP_BYTES == GROUP_UNITS * QUARTERS * BYTES);
