//! Instructions that the compiler in use has no stable intrinsic for, and movements between registers.

use std::arch::aarch64::*;
use std::arch::asm;

use super::super::simd::prefetch;
use super::super::tile::Source;
use super::WORDS;

/// `sum[i] += w[4 i..] . x[4 i..]`, four byte products each.
///
/// # Safety
/// The byte dot product is there.
#[inline(always)]
pub(super) unsafe fn byte_dot(mut sum: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: arithmetic between registers.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {w:v}.16b, {x:v}.16b",
            sum = inout(vreg) sum, w = in(vreg) w, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// `sum[i] += w[4 i..] . x[4 LANE..]`, four byte products each.
///
/// # Safety
/// The byte dot product is there.
#[inline(always)]
pub(super) unsafe fn byte_dot_lane<const LANE: i32>(
    mut sum: int32x4_t,
    w: int8x16_t,
    x: int8x16_t,
) -> int32x4_t {
    // SAFETY: arithmetic between registers.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {w:v}.16b, {x:v}.4b[{lane}]",
            sum = inout(vreg) sum, w = in(vreg) w, x = in(vreg) x, lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// `sum[2 i + j] += w[8 i..] . x[8 j..]`, eight byte products each, `w` unsigned and `x` signed: two rows of
/// weights by two tokens.
///
/// # Safety
/// The byte matrix product is there.
#[inline(always)]
pub(super) unsafe fn byte_matrix(mut sum: int32x4_t, w: uint8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: arithmetic between registers.
    unsafe {
        asm!(
            "usmmla {sum:v}.4s, {w:v}.16b, {x:v}.16b",
            sum = inout(vreg) sum, w = in(vreg) w, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Columns of a 4x4 matrix of u32 that is given by rows.
///
/// # Safety
/// The instruction set is there.
#[inline(always)]
pub(super) unsafe fn transpose(rows: [uint32x4_t; WORDS]) -> [uint32x4_t; WORDS] {
    // SAFETY: by contract.
    unsafe {
        let (a, b) = (vtrn1q_u32(rows[0], rows[1]), vtrn2q_u32(rows[0], rows[1]));
        let (c, d) = (vtrn1q_u32(rows[2], rows[3]), vtrn2q_u32(rows[2], rows[3]));
        let [a, b, c, d] = [
            vreinterpretq_u64_u32(a),
            vreinterpretq_u64_u32(b),
            vreinterpretq_u64_u32(c),
            vreinterpretq_u64_u32(d),
        ];
        [
            vreinterpretq_u32_u64(vtrn1q_u64(a, c)),
            vreinterpretq_u32_u64(vtrn1q_u64(b, d)),
            vreinterpretq_u32_u64(vtrn2q_u64(a, c)),
            vreinterpretq_u32_u64(vtrn2q_u64(b, d)),
        ]
    }
}

/// The lower and the upper eight bytes of `a` and `b`, joined.
///
/// # Safety
/// The instruction set is there.
#[inline(always)]
pub(super) unsafe fn zip_halves(a: uint8x16_t, b: uint8x16_t) -> [uint8x16_t; 2] {
    // SAFETY: by contract.
    unsafe {
        let (a, b) = (vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b));
        [vreinterpretq_u8_u64(vzip1q_u64(a, b)), vreinterpretq_u8_u64(vzip2q_u64(a, b))]
    }
}

/// Bytes `at..at + 16` of `ROWS` rows from `first` on; the cache is asked for those `ahead` further on.
///
/// # Safety
/// Those bytes of the rows that exist are readable, and the instruction set is there.
#[inline(always)]
pub(super) unsafe fn bytes<const ROWS: usize>(
    from: &Source,
    first: usize,
    at: usize,
    ahead: usize,
) -> [uint8x16_t; ROWS] {
    // SAFETY: by contract.
    unsafe {
        let mut rows = [vdupq_n_u8(0); ROWS];
        for (row, line) in rows.iter_mut().enumerate() {
            let place = from.row(first + row).add(at);
            *line = vld1q_u8(place);
            if ahead > 0 {
                prefetch(place.wrapping_add(ahead));
            }
        }
        rows
    }
}

/// As [`bytes`] of four rows, by words of four bytes: word `j` of each row in element `j`.
///
/// # Safety
/// As [`bytes`].
#[inline(always)]
pub(super) unsafe fn words(from: &Source, first: usize, at: usize, ahead: usize) -> [uint32x4_t; WORDS] {
    // SAFETY: by contract.
    unsafe {
        let mut rows = [vdupq_n_u32(0); WORDS];
        for (row, bytes) in rows.iter_mut().zip(bytes::<WORDS>(from, first, at, ahead)) {
            *row = vreinterpretq_u32_u8(bytes);
        }
        transpose(rows)
    }
}
