//! Tiles for the byte matrix product: pairs of rows, eight weights at a time.
//!
//! One instruction multiplies two rows of eight weights by two tokens of eight activations, twice the work of a
//! dot product. So a group of a panel is laid out here, in the same bytes as elsewhere, as eight *chunks*:
//! chunk `c` holds, for each of the eight pairs of rows in turn, the eight weights of both rows that meet
//! activations `8 c..8 c + 8` in the order of [`QuantizedRows`](super::super::activations::QuantizedRows), so
//! even weights in the first four chunks and odd ones in the others. Sixteen packed bytes of two rows then need
//! no transposition: their halves are joined, and that is a register of the tile.
//!
//! Weights are unsigned and activations signed, as the instruction is, so 8-bit weights cost no more.

use std::arch::aarch64::*;

use lily_model::weights::GROUP_SIZE;

use super::super::tile::{Activation, GROUP_BYTES, MAX_TOKENS, PANEL_ROWS, Source};
use super::instructions::{byte_matrix, bytes, zip_halves};
use super::{BYTES, QUARTERS, WORDS};

/// Weights of a row, and activations of a token, in one operand.
const CHUNK: usize = 8;
/// Chunks of a group.
const CHUNKS: usize = GROUP_SIZE / CHUNK;
/// Chunks of even weights, in front of as many of odd ones.
const EVENS: usize = CHUNKS / 2;
/// Pairs of rows of a panel.
const ROW_PAIRS: usize = PANEL_ROWS / 2;
/// Bytes of a chunk of a panel.
const CHUNK_BYTES: usize = PANEL_ROWS * CHUNK;

/// As [`TileOps::unpack_4`](super::super::tile::TileOps::unpack_4), in chunks.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn unpack_4(from: Source, groups: usize, to: *mut u8) {
    /// Registers of packed bytes of a group of a row; each holds the nibbles of two chunks of either kind.
    const PARTS: usize = GROUP_SIZE / 2 / BYTES;
    // SAFETY: `groups` groups of each row are readable and their chunks writable, by contract.
    unsafe {
        let low = vdupq_n_u8(15);
        for part in 0..groups * PARTS {
            let (group, first) = (part / PARTS, part % PARTS * 2);
            for pair in 0..ROW_PAIRS {
                let [a, b] = bytes::<2>(&from, 2 * pair, part * BYTES, 0);
                let to = to.add(group * GROUP_BYTES + first * CHUNK_BYTES + pair * BYTES);
                for (chunk, packed) in zip_halves(a, b).into_iter().enumerate() {
                    let to = to.add(chunk * CHUNK_BYTES);
                    vst1q_u8(to, vandq_u8(packed, low));
                    vst1q_u8(to.add(EVENS * CHUNK_BYTES), vshrq_n_u8::<4>(packed));
                }
            }
        }
    }
}

/// As [`TileOps::unpack_8`](super::super::tile::TileOps::unpack_8), in chunks.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn unpack_8(from: Source, groups: usize, ahead: usize, to: *mut u8) {
    // SAFETY: `groups` groups of each row are readable and their chunks writable, by contract.
    unsafe {
        for part in 0..groups * EVENS {
            let (group, chunk) = (part / EVENS, part % EVENS);
            for pair in 0..ROW_PAIRS {
                let [a, b] = bytes::<2>(&from, 2 * pair, part * BYTES, ahead);
                let to = to.add(group * GROUP_BYTES + chunk * CHUNK_BYTES + pair * BYTES);
                vst1q_u8(to, vuzp1q_u8(a, b));
                vst1q_u8(to.add(EVENS * CHUNK_BYTES), vuzp2q_u8(a, b));
            }
        }
    }
}

/// One panel's dot products of one group with `N` tokens, `[token][quarter]`.
///
/// # Safety
/// `weights` has a group of chunks, the tokens have `group`, and the instruction set is there.
#[inline(always)]
pub(super) unsafe fn group_dots<const N: usize>(
    weights: *const u8,
    group: usize,
    tokens: &[Activation; N],
) -> [[int32x4_t; QUARTERS]; N] {
    /// Most pairs of tokens; those past `N` are never touched.
    const PAIRS: usize = MAX_TOKENS.div_ceil(2);
    // SAFETY: by contract.
    unsafe {
        // Two rows by two tokens: those of the first row, then those of the second.
        let mut sums = [[vdupq_n_s32(0); ROW_PAIRS]; PAIRS];
        for first in (0..CHUNKS).step_by(2) {
            let mut x = [[vdupq_n_s8(0); 2]; PAIRS];
            for (pair, x) in x.iter_mut().enumerate().take(N.div_ceil(2)) {
                let load = |token: usize| {
                    // Where the number of tokens is odd the last is its own neighbour.
                    let q = tokens[token.min(N - 1)].q.add(group * GROUP_SIZE + first * CHUNK);
                    vld1q_u8(q.cast())
                };
                let [a, b] = zip_halves(load(2 * pair), load(2 * pair + 1));
                *x = [vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b)];
            }
            for chunk in 0..2 {
                for row_pair in 0..ROW_PAIRS {
                    let w = vld1q_u8(weights.add((first + chunk) * CHUNK_BYTES + row_pair * BYTES));
                    for (sums, x) in sums.iter_mut().zip(x).take(N.div_ceil(2)) {
                        sums[row_pair] = byte_matrix(sums[row_pair], w, x[chunk]);
                    }
                }
            }
        }
        let mut dots = [[vdupq_n_s32(0); QUARTERS]; N];
        for (token, dots) in dots.iter_mut().enumerate() {
            let pairs = sums[token / 2].as_chunks::<2>().0;
            for (dot, [a, b]) in dots.iter_mut().zip(pairs) {
                *dot = if token % 2 == 0 { vuzp1q_s32(*a, *b) } else { vuzp2q_s32(*a, *b) };
            }
        }
        dots
    }
}

const _: () = assert!(CHUNKS * CHUNK_BYTES == GROUP_BYTES && ROW_PAIRS * 2 == QUARTERS * WORDS);
