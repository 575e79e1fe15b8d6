//! [`TileOps`] for aarch64.
//!
//! # Decode
//!
//! One group of a row is two registers of packed bytes, whose low nibbles meet the even activations and whose
//! high nibbles the odd ones as they lie. Four dot products leave four sums, and pairwise additions bring the
//! sums of four rows to their lanes: no transposition of weights, nothing written but the result.
//!
//! For two tokens that costs as many instructions as a tile; for more the tile costs fewer.

use std::arch::aarch64::*;

use lily_model::weights::GROUP_SIZE;

use super::super::simd::{Simd, prefetch};
use super::super::tile::{
    Activation, Ahead, GROUP_BYTES, LINE, PANEL_ROWS, PANELS, SCALE_GROUPS, Source, TileOps, Upcoming,
};
use super::instructions::{byte_dot, transpose};
use super::{BYTES, Neon, QUARTERS, WORDS, dot, i8mm};

/// Bytes of a group of packed 4-bit weights of one row.
const PACKED: usize = GROUP_SIZE / 2;

impl<const I8MM: bool> TileOps for Neon<I8MM> {
    // Their sums fill sixteen registers and leave room for the operands; those of six would be spilled.
    const TOKENS: usize = 4;
    const DIRECT_TOKENS: usize = 2;

    #[inline(always)]
    unsafe fn multiply_rows(
        from: Source,
        scales: *const f32,
        biases: *const f32,
        groups: usize,
        ahead: Ahead,
        token: &Activation,
    ) {
        // SAFETY: all pointers are good for `groups` groups and a panel's sums, by contract.
        unsafe {
            let mut rows = [from.data; PANEL_ROWS];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = from.row(i);
            }
            let mut acc = Self::load(token.acc);
            for group in 0..groups {
                let q = token.q.add(group * GROUP_SIZE);
                let lines = ahead.lines(group, PANEL_ROWS * PACKED / LINE, from.data);
                let dots = row_dots(&rows, group * PACKED, q, lines);
                let scale = Self::load(scales.add(group * PANEL_ROWS));
                let bias = Self::load(biases.add(group * PANEL_ROWS));
                let both = Self::mul(scale, Self::splat(*token.scales.add(group)));
                acc = Self::fma(dots, both, acc);
                acc = Self::fma(bias, Self::splat(*token.sums.add(group)), acc);
            }
            Self::store(token.acc, acc);
        }
    }

    #[inline(always)]
    unsafe fn unpack_4(from: Source, groups: usize, to: *mut u8) {
        // SAFETY: by contract.
        unsafe {
            if I8MM {
                i8mm::unpack_4(from, groups, to);
            } else {
                dot::unpack_4(from, groups, to);
            }
        }
    }

    #[inline(always)]
    unsafe fn unpack_8(from: Source, groups: usize, ahead: usize, to: *mut u8) {
        // SAFETY: by contract.
        unsafe {
            if I8MM {
                i8mm::unpack_8(from, groups, ahead, to);
            } else {
                dot::unpack_8(from, groups, ahead, to);
            }
        }
    }

    #[inline(always)]
    unsafe fn unpack_scales(from: Source, groups: usize, ahead: usize, to: *mut f32) {
        // bf16 of one register.
        const PART: usize = 2 * WORDS;
        // SAFETY: `groups` bf16 of each row are readable, of which no more are copied, and their lanes writable.
        unsafe {
            let high = vdupq_n_u32(0xffff_0000);
            for part in (0..groups).step_by(PART) {
                let count = PART.min(groups - part);
                for quarter in 0..QUARTERS {
                    let mut rows = [vdupq_n_u32(0); WORDS];
                    for (row, line) in rows.iter_mut().enumerate() {
                        let place = from.row(quarter * WORDS + row).add(part * 2);
                        prefetch(place.wrapping_add(ahead));
                        let mut padded = [0u8; BYTES];
                        let place = if count == PART {
                            place
                        } else {
                            std::ptr::copy_nonoverlapping(place, padded.as_mut_ptr(), count * 2);
                            padded.as_ptr()
                        };
                        *line = vreinterpretq_u32_u8(vld1q_u8(place));
                    }
                    for (j, pair) in transpose(rows).into_iter().enumerate() {
                        let group = part + 2 * j;
                        let to = to.add(group * PANEL_ROWS + quarter * WORDS);
                        // The scratch has room for all groups; what is past the last is never read.
                        if group < SCALE_GROUPS {
                            vst1q_f32(to, vreinterpretq_f32_u32(vshlq_n_u32::<16>(pair)));
                            vst1q_f32(to.add(PANEL_ROWS), vreinterpretq_f32_u32(vandq_u32(pair, high)));
                        }
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn multiply<const N: usize>(
        weights: [*const u8; PANELS],
        scales: [*const f32; PANELS],
        biases: [*const f32; PANELS],
        groups: usize,
        wide: bool,
        tokens: &[Activation; N],
        upcoming: Upcoming,
    ) {
        for p in 0..PANELS {
            for group in 0..groups {
                if p == 0 {
                    upcoming.ask_all(group);
                }
                // SAFETY: all pointers are good for `groups` groups and a tile's sums, by contract.
                unsafe {
                    let weights = weights[p].add(group * GROUP_BYTES);
                    let dots = if I8MM {
                        i8mm::group_dots(weights, group, tokens)
                    } else {
                        dot::group_dots(weights, group, wide, tokens)
                    };
                    for (token, dots) in tokens.iter().zip(&dots) {
                        let x_scale = vdupq_n_f32(*token.scales.add(group));
                        let x_sum = vdupq_n_f32(*token.sums.add(group));
                        for (quarter, dot) in dots.iter().enumerate() {
                            let lane = group * PANEL_ROWS + quarter * WORDS;
                            let scale = vld1q_f32(scales[p].add(lane));
                            let bias = vld1q_f32(biases[p].add(lane));
                            let acc = token.acc.add(p * PANEL_ROWS + quarter * WORDS);
                            let both = vmulq_f32(scale, x_scale);
                            let sum = vfmaq_f32(vld1q_f32(acc), vcvtq_f32_s32(*dot), both);
                            vst1q_f32(acc, vfmaq_f32(sum, bias, x_sum));
                        }
                    }
                }
            }
        }
    }
}

/// The dot products of one group of packed weights with sixteen rows, as f32. `next` and `apart` are the lines
/// to ask for meanwhile.
///
/// # Safety
/// [`PACKED`] bytes from `at` on of the rows are readable, `q` is good for a group, and the
/// instruction set is there.
#[inline(always)]
unsafe fn row_dots(
    rows: &[*const u8; PANEL_ROWS],
    at: usize,
    q: *const i8,
    (next, apart): (*const u8, usize),
) -> [float32x4_t; QUARTERS] {
    /// Rows for each line that is read.
    const LINE_ROWS: usize = LINE / PACKED;
    // SAFETY: by contract.
    unsafe {
        let low = vdupq_n_u8(15);
        let evens = [vld1q_s8(q), vld1q_s8(q.add(BYTES))];
        let odds = [vld1q_s8(q.add(PACKED)), vld1q_s8(q.add(PACKED + BYTES))];
        let mut dots = [vdupq_n_f32(0.0); QUARTERS];
        for (quarter, dots) in dots.iter_mut().enumerate() {
            let mut sums = [vdupq_n_s32(0); WORDS];
            for (i, sum) in sums.iter_mut().enumerate() {
                let row = quarter * WORDS + i;
                if row.is_multiple_of(LINE_ROWS) {
                    // One for each line read: in a burst they would hold up the reads behind them.
                    prefetch(next.wrapping_add(row / LINE_ROWS * apart));
                }
                let place = rows[row].add(at);
                for half in 0..2 {
                    let packed = vld1q_u8(place.add(half * BYTES));
                    let (a, b) = (vandq_u8(packed, low), vshrq_n_u8::<4>(packed));
                    *sum = byte_dot(*sum, vreinterpretq_s8_u8(a), evens[half]);
                    *sum = byte_dot(*sum, vreinterpretq_s8_u8(b), odds[half]);
                }
            }
            let pairs = [vpaddq_s32(sums[0], sums[1]), vpaddq_s32(sums[2], sums[3])];
            *dots = vcvtq_f32_s32(vpaddq_s32(pairs[0], pairs[1]));
        }
        dots
    }
}
