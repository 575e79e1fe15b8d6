//! aarch64 with the byte dot product: sixteen f32 in four registers.
//!
//! The dot product is of signed bytes, so 8-bit weights are taken as two 4-bit halves.

use std::arch::aarch64::*;
use std::arch::asm;

use half::{bf16, f16};
use lily_model::weights::GROUP_SIZE;

use super::portable::unit_offset;
use super::simd::{Kernel, LANES, Simd};
use super::tile::{
    Activation, Ahead, GROUP_BYTES, GROUP_UNITS, PANEL_ROWS, PANELS, SCALE_GROUPS, Source, TileOps,
    UNIT_BYTES,
};

/// Runs a kernel compiled for this instruction set.
///
/// # Safety
/// The machine has it.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: by contract.
    unsafe { kernel.compute::<Neon>() }
}

/// Four registers of four.
#[derive(Clone, Copy, Debug)]
pub struct Neon;

/// Lanes, and u32 words, of a register.
const WORDS: usize = 4;
/// Registers of sixteen lanes.
const QUARTERS: usize = LANES / WORDS;
/// Bytes of a register.
const BYTES: usize = 16;

/// Applies an intrinsic to all quarters.
macro_rules! all {
    ($op:ident, $($v:ident),+) => {
        // SAFETY: the instruction set is there.
        unsafe { [$op($($v[0]),+), $op($($v[1]),+), $op($($v[2]),+), $op($($v[3]),+)] }
    };
}

impl Simd for Neon {
    type F = [float32x4_t; QUARTERS];

    const ROWS: usize = 4;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        // SAFETY: the instruction set is there.
        unsafe { [vdupq_n_f32(value); QUARTERS] }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        // SAFETY: sixteen elements are readable.
        unsafe { [vld1q_f32(from), vld1q_f32(from.add(4)), vld1q_f32(from.add(8)), vld1q_f32(from.add(12))] }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::F) {
        for (i, v) in v.into_iter().enumerate() {
            // SAFETY: sixteen elements are writable.
            unsafe { vst1q_f32(to.add(i * WORDS), v) };
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self::F {
        // SAFETY: sixteen elements are readable.
        unsafe {
            let (low, high) = (vld1q_u16(from.cast()), vld1q_u16(from.add(8).cast()));
            let [a, b] = widen_f16(low);
            let [c, d] = widen_f16(high);
            [a, b, c, d]
        }
    }

    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self::F {
        // SAFETY: sixteen elements are readable.
        unsafe {
            let bytes = vld1q_u8(from);
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
            [
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
                vcvtq_f32_u32(vmovl_high_u16(low)),
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
                vcvtq_f32_u32(vmovl_high_u16(high)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self::F {
        // SAFETY: sixteen elements are readable.
        unsafe {
            let (low, high) = (vld1q_u16(from.cast()), vld1q_u16(from.add(8).cast()));
            [
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(low))),
                vreinterpretq_f32_u32(vshll_high_n_u16::<16>(low)),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(high))),
                vreinterpretq_f32_u32(vshll_high_n_u16::<16>(high)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        all!(vaddq_f32, a, b)
    }

    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        all!(vsubq_f32, a, b)
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        all!(vmulq_f32, a, b)
    }

    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        all!(vdivq_f32, a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        all!(vfmaq_f32, c, a, b)
    }

    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        all!(vmaxq_f32, a, b)
    }

    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        all!(vminq_f32, a, b)
    }

    #[inline(always)]
    unsafe fn round(a: Self::F) -> Self::F {
        all!(vrndnq_f32, a)
    }

    #[inline(always)]
    unsafe fn exp2_int(n: Self::F) -> Self::F {
        let n = all!(vcvtnq_s32_f32, n);
        // SAFETY: the instruction set is there.
        let bias = unsafe { [vdupq_n_s32(127); QUARTERS] };
        let biased = all!(vaddq_s32, n, bias);
        // SAFETY: the instruction set is there.
        unsafe {
            [
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased[0])),
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased[1])),
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased[2])),
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased[3])),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, v: Self::F) {
        let words = all!(vcvtnq_s32_f32, v);
        // SAFETY: sixteen elements are writable.
        unsafe {
            let low = vcombine_s16(vqmovn_s32(words[0]), vqmovn_s32(words[1]));
            let high = vcombine_s16(vqmovn_s32(words[2]), vqmovn_s32(words[3]));
            vst1q_s8(to, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
        }
    }

    #[inline(always)]
    unsafe fn keep_from(x: Self::F, limit: f32, v: Self::F) -> Self::F {
        // SAFETY: the instruction set is there.
        let limit = unsafe { [vdupq_n_f32(limit); QUARTERS] };
        let mask = all!(vcgeq_f32, x, limit);
        let bits = all!(vreinterpretq_u32_f32, v);
        let kept = all!(vandq_u32, bits, mask);
        all!(vreinterpretq_f32_u32, kept)
    }

    #[inline(always)]
    unsafe fn sum(v: Self::F) -> f32 {
        // SAFETY: the instruction set is there.
        unsafe {
            let four = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }

    #[inline(always)]
    unsafe fn max_lane(v: Self::F) -> f32 {
        // SAFETY: the instruction set is there.
        unsafe { vmaxvq_f32(vmaxq_f32(vmaxq_f32(v[0], v[2]), vmaxq_f32(v[1], v[3]))) }
    }
}

/// Eight halves as f32. Written as instructions, because the intrinsics need the compiler's own half type.
///
/// # Safety
/// The instruction set is there.
#[inline(always)]
unsafe fn widen_f16(v: uint16x8_t) -> [float32x4_t; 2] {
    let (low, high): (float32x4_t, float32x4_t);
    // SAFETY: conversions between registers.
    unsafe {
        asm!(
            "fcvtl {low:v}.4s, {v:v}.4h",
            "fcvtl2 {high:v}.4s, {v:v}.8h",
            v = in(vreg) v, low = out(vreg) low, high = lateout(vreg) high,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    [low, high]
}

/// `sum[i] += w[4 i..] . x[4 LANE..]`, four byte products each.
///
/// # Safety
/// The byte dot product is there.
#[inline(always)]
unsafe fn dot_lane<const LANE: i32>(mut sum: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
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

/// Asks the cache for the line at `place`.
///
/// # Safety
/// None beyond the instruction's: it touches nothing and never faults.
#[inline(always)]
unsafe fn prefetch(place: *const u8) {
    // SAFETY: a hint.
    unsafe { asm!("prfm pldl1keep, [{place}]", place = in(reg) place, options(nostack, preserves_flags)) };
}

/// Columns of a 4x4 matrix of u32 that is given by rows.
///
/// # Safety
/// The instruction set is there.
#[inline(always)]
unsafe fn transpose(rows: [uint32x4_t; WORDS]) -> [uint32x4_t; WORDS] {
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

/// Bytes `at..at + 16` of four rows from `first` on, by words; the cache is asked for those `ahead` further on.
///
/// # Safety
/// Those bytes of the rows that exist are readable, and the instruction set is there.
#[inline(always)]
unsafe fn words(from: &Source, first: usize, at: usize, ahead: usize) -> [uint32x4_t; WORDS] {
    // SAFETY: by contract.
    unsafe {
        let mut rows = [vdupq_n_u32(0); WORDS];
        for (row, line) in rows.iter_mut().enumerate() {
            let place = from.row(first + row).add(at);
            *line = vreinterpretq_u32_u8(vld1q_u8(place));
            if ahead > 0 {
                prefetch(place.wrapping_add(ahead));
            }
        }
        transpose(rows)
    }
}

impl TileOps for Neon {
    const TOKENS: usize = 4;
    const DIRECT_TOKENS: usize = 0;

    #[inline(always)]
    unsafe fn multiply_rows(
        _from: Source,
        _scales: *const f32,
        _biases: *const f32,
        _groups: usize,
        _ahead: Ahead,
        _token: &Activation,
    ) {
        unreachable!("not faster than a tile")
    }

    #[inline(always)]
    unsafe fn unpack_4(from: Source, groups: usize, ahead: usize, to: *mut u8) {
        // SAFETY: `groups` groups of each row are readable and their units writable, by contract.
        unsafe {
            let low = vdupq_n_u8(15);
            for part in 0..groups * GROUP_SIZE / 2 / BYTES {
                for quarter in 0..QUARTERS {
                    let columns = words(&from, quarter * WORDS, part * BYTES, ahead);
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

    #[inline(always)]
    unsafe fn unpack_8(from: Source, groups: usize, ahead: usize, to: *mut u8) {
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
    ) {
        for p in 0..PANELS {
            for group in 0..groups {
                // SAFETY: all pointers are good for `groups` groups and a tile's sums, by contract.
                unsafe {
                    let weights = weights[p].add(group * GROUP_BYTES);
                    let mut dots = group_dots::<N, true>(weights, group, tokens);
                    if wide {
                        let high = group_dots::<N, false>(weights, group, tokens);
                        for (dots, high) in dots.iter_mut().zip(high) {
                            for (dot, high) in dots.iter_mut().zip(high) {
                                *dot = vaddq_s32(*dot, vshlq_n_s32::<4>(high));
                            }
                        }
                    }
                    for quarter in 0..QUARTERS {
                        let lane = group * PANEL_ROWS + quarter * WORDS;
                        let scale = vld1q_f32(scales[p].add(lane));
                        let bias = vld1q_f32(biases[p].add(lane));
                        for (token, dots) in tokens.iter().zip(&dots) {
                            let acc = token.acc.add(p * PANEL_ROWS + quarter * WORDS);
                            let both = vmulq_f32(scale, vdupq_n_f32(*token.scales.add(group)));
                            let sum = vfmaq_f32(vld1q_f32(acc), vcvtq_f32_s32(dots[quarter]), both);
                            let x_sum = vdupq_n_f32(*token.sums.add(group));
                            vst1q_f32(acc, vfmaq_f32(sum, bias, x_sum));
                        }
                    }
                }
            }
        }
    }
}

/// One group's dot products of sixteen rows with `N` tokens, for the weights' low or high four bits.
///
/// # Safety
/// `weights` has a group of units, tokens have `group`, and the instruction set is there.
#[inline(always)]
unsafe fn group_dots<const N: usize, const LOW: bool>(
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
                        let half = if LOW { vandq_u8(bytes, vdupq_n_u8(15)) } else { vshrq_n_u8::<4>(bytes) };
                        *w = vreinterpretq_s8_u8(half);
                    }
                    for (dots, x) in dots.iter_mut().zip(x) {
                        let dot = &mut dots[quarter];
                        *dot = dot_lane::<0>(*dot, w[0], x);
                        *dot = dot_lane::<1>(*dot, w[1], x);
                        *dot = dot_lane::<2>(*dot, w[2], x);
                        *dot = dot_lane::<3>(*dot, w[3], x);
                    }
                }
            }
        }
        dots
    }
}
