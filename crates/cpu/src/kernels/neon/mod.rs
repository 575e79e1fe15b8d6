//! aarch64 with the byte dot product, and the same with the byte matrix product: sixteen f32 in four registers.
//!
//! | module | gives |
//! |---|---|
//! | here | f32 vectors |
//! | [`instructions`] | those that stable Rust has no intrinsic for, and transpositions |
//! | [`tile`] | one token against rows where they lie; scales; the choice between the two below |
//! | [`dot`] | unpacking and multiplying with one byte dot product for each row and four activations |
//! | [`i8mm`] | the same with one byte matrix product for two rows, two tokens and eight activations |

mod dot;
mod i8mm;
mod instructions;
mod tile;

use std::arch::aarch64::*;
use std::arch::asm;

use half::{bf16, f16};

use super::simd::{Kernel, LANES, Simd};

/// Runs a kernel compiled for the byte dot product.
///
/// # Safety
/// The machine has it.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: by contract.
    unsafe { kernel.compute::<Neon<false>>() }
}

/// As [`enter`], with the byte matrix product.
///
/// # Safety
/// The machine has both.
#[target_feature(enable = "neon,dotprod,i8mm")]
pub(super) unsafe fn enter_i8mm<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: by contract.
    unsafe { kernel.compute::<Neon<true>>() }
}

/// Four registers of four, with or without the byte matrix product.
#[derive(Clone, Copy, Debug)]
pub struct Neon<const I8MM: bool>;

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

impl<const I8MM: bool> Simd for Neon<I8MM> {
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
    unsafe fn load_i8(from: *const i8) -> Self::F {
        // SAFETY: sixteen elements are readable.
        unsafe {
            let bytes = vld1q_s8(from);
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            [
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_high_s16(low)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_high_s16(high)),
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
    unsafe fn sum_each(v: &[Self::F; LANES]) -> Self::F {
        // SAFETY: the instruction set is there.
        unsafe {
            let mut sums = [vdupq_n_f32(0.0); QUARTERS];
            for (sum, v) in sums.iter_mut().zip(v.as_chunks::<WORDS>().0) {
                // The tree of `sum` for four vectors at once: its last two steps bring each to its lane.
                let mut fours = [*sum; WORDS];
                for (four, v) in fours.iter_mut().zip(v) {
                    *four = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
                }
                let two = |a: float32x4_t, b: float32x4_t| {
                    let (a, b) = (vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b));
                    let (low, high) = (vzip1q_f64(a, b), vzip2q_f64(a, b));
                    vaddq_f32(vreinterpretq_f32_f64(low), vreinterpretq_f32_f64(high))
                };
                *sum = vpaddq_f32(two(fours[0], fours[1]), two(fours[2], fours[3]));
            }
            sums
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
