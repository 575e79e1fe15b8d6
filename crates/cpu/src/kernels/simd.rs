//! Vectors of sixteen f32, one implementation per instruction set, and kernels written over them.
//!
//! A kernel is a struct with its arguments and an [`Kernel`] implementation; [`run`] enters it through a
//! function that is compiled for the instruction set, and everything below is inlined into that function. The
//! sixteen lanes are a unit of meaning, not of hardware: AVX2 holds them in two registers and NEON in four, so
//! that a sum over lanes has one order everywhere.

use half::{bf16, f16};

use super::portable::Portable;
use super::tile::TileOps;
use crate::isa::Isa;

/// Lanes of a vector.
pub const LANES: usize = 16;

/// Sixteen f32 and what kernels do with them. Multiply-add is fused on every instruction set.
///
/// All functions are `unsafe` for two reasons: the instruction set must be there (entering through [`run`]
/// sees to it), and those with pointers read or write sixteen elements, unaligned, from there on.
#[allow(missing_docs, clippy::missing_safety_doc)]
pub trait Simd: TileOps {
    /// Sixteen f32.
    type F: Copy;

    /// Sums that the registers hold beside the operands; divides [`LANES`].
    const ROWS: usize;

    unsafe fn splat(value: f32) -> Self::F;
    unsafe fn load(from: *const f32) -> Self::F;
    unsafe fn store(to: *mut f32, v: Self::F);
    unsafe fn load_f16(from: *const f16) -> Self::F;
    unsafe fn load_u8(from: *const u8) -> Self::F;
    unsafe fn load_i8(from: *const i8) -> Self::F;
    unsafe fn load_bf16(from: *const bf16) -> Self::F;
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger. Which operand a NaN gives way to differs between instruction sets.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// The smaller; NaN as in [`Simd::max`].
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// To the nearest integer, halves to even.
    unsafe fn round(a: Self::F) -> Self::F;
    /// Two to the power `n`, an integer from -126 to 127.
    unsafe fn exp2_int(n: Self::F) -> Self::F;
    /// Integers from -127 to 127 to memory as bytes.
    unsafe fn store_i8(to: *mut i8, v: Self::F);
    /// `v` where `x >= limit`, else 0.
    unsafe fn keep_from(x: Self::F, limit: f32, v: Self::F) -> Self::F;

    /// The sum of all lanes, halves added to halves: lane i to i + 8, then i + 4, i + 2, i + 1.
    #[inline(always)]
    unsafe fn sum(v: Self::F) -> f32 {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: `lanes` has sixteen elements.
        unsafe { Self::store(lanes.as_mut_ptr(), v) };
        let mut width = LANES / 2;
        while width > 0 {
            for lane in 0..width {
                lanes[lane] += lanes[lane + width];
            }
            width /= 2;
        }
        lanes[0]
    }

    /// Sixteen 4-bit numbers from eight bytes, low nibbles first.
    #[inline(always)]
    unsafe fn load_u4(from: *const u8) -> Self::F {
        let mut apart = [0u8; LANES];
        for (i, pair) in apart.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            // SAFETY: eight bytes are readable by contract.
            let both = unsafe { *from.add(i) };
            *pair = [both & 15, both >> 4];
        }
        // SAFETY: `apart` has sixteen elements.
        unsafe { Self::load_u8(apart.as_ptr()) }
    }

    /// Lane i is [`Simd::sum`] of vector i.
    #[inline(always)]
    unsafe fn sum_each(v: &[Self::F; LANES]) -> Self::F {
        let mut sums = [0.0f32; LANES];
        for (sum, v) in sums.iter_mut().zip(v) {
            // SAFETY: the instruction set is there by contract.
            *sum = unsafe { Self::sum(*v) };
        }
        // SAFETY: `sums` has sixteen elements.
        unsafe { Self::load(sums.as_ptr()) }
    }

    /// The largest lane (of numbers; a NaN may be passed over).
    #[inline(always)]
    unsafe fn max_lane(v: Self::F) -> f32 {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: `lanes` has sixteen elements.
        unsafe { Self::store(lanes.as_mut_ptr(), v) };
        lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    /// The first `count` lanes from memory, the others `fill`.
    #[inline(always)]
    unsafe fn load_some(from: *const f32, count: usize, fill: f32) -> Self::F {
        let mut lanes = [fill; LANES];
        // SAFETY: `count` elements are readable by contract, and at most sixteen are copied.
        unsafe {
            std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), count.min(LANES));
            Self::load(lanes.as_ptr())
        }
    }

    /// The first `count` lanes to memory.
    #[inline(always)]
    unsafe fn store_some(to: *mut f32, count: usize, v: Self::F) {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: `count` elements are writable by contract, and at most sixteen are copied.
        unsafe {
            Self::store(lanes.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, count.min(LANES));
        }
    }

    /// `exp(x)`: relative error at most 2e-7, 0 below -87.33, `exp(88.37)` from there on.
    ///
    /// Range reduction by ln 2 in two parts and the degree-6 polynomial of Cephes' `expf`.
    #[inline(always)]
    unsafe fn exp(x: Self::F) -> Self::F {
        // SAFETY: the instruction set is there by contract; no memory is touched.
        unsafe {
            let inside = Self::max(Self::splat(EXP_LOWEST), Self::min(Self::splat(EXP_HIGHEST), x));
            let n = Self::round(Self::mul(inside, Self::splat(std::f32::consts::LOG2_E)));
            let r = Self::fma(n, Self::splat(-LN2_HIGH), inside);
            let r = Self::fma(n, Self::splat(-LN2_LOW), r);
            let mut p = Self::splat(EXP_POLYNOMIAL[0]);
            for &c in &EXP_POLYNOMIAL[1..] {
                p = Self::fma(p, r, Self::splat(c));
            }
            let p = Self::add(Self::fma(p, Self::mul(r, r), r), Self::splat(1.0));
            Self::keep_from(x, EXP_LOWEST, Self::mul(p, Self::exp2_int(n)))
        }
    }
}

/// Asks the cache for the line of `place`: a hint, which reads nothing and is right for any address.
#[inline(always)]
pub fn prefetch(place: *const u8) {
    // SAFETY: the instruction is part of every x86-64 and never faults.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(place.cast());
    }
    // SAFETY: the instruction is part of every aarch64 and never faults.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{place}]", place = in(reg) place, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = place;
}

/// [`prefetch`] into the second cache on x86-64.
#[inline(always)]
pub fn prefetch_second_cache(place: *const u8) {
    // SAFETY: as above.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(place.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    prefetch(place);
}

/// Below this the result of `exp` would be subnormal and is 0.
pub(crate) const EXP_LOWEST: f32 = -87.33;
/// Above this two to the power of the rounded quotient would overflow.
pub(crate) const EXP_HIGHEST: f32 = 88.37;
/// ln 2 with its lowest bits cut off, so that small multiples of it are exact.
pub(crate) const LN2_HIGH: f32 = 0.693_359_4;
/// What [`LN2_HIGH`] is short of ln 2.
pub(crate) const LN2_LOW: f32 = -2.121_944_4e-4;
/// Cephes `expf`, highest power first: `exp(r) = 1 + r + r^2 p(r)` for `|r| <= ln 2 / 2`.
pub(crate) const EXP_POLYNOMIAL: [f32; 6] =
    [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// A computation that is compiled for every instruction set. `compute` must be `#[inline(always)]`, and so
/// must everything that it calls, or the vector operations become function calls.
pub trait Kernel {
    /// What it gives back.
    type Output;

    /// The computation.
    ///
    /// # Safety
    /// The machine has the instruction set of `S`; [`run`] sees to it.
    unsafe fn compute<S: Simd>(self) -> Self::Output;
}

/// Runs `kernel` with `isa`. Panics where the machine lacks it: [`Isa::detect`] never gives such a one.
#[inline]
pub fn run<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    if isa == Isa::Portable {
        // SAFETY: plain Rust needs no instruction set.
        return unsafe { kernel.compute::<Portable>() };
    }
    assert!(isa.is_available(), "this machine has no {isa}");
    match isa {
        // SAFETY: the instruction set was checked above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { super::avx2::enter(kernel) },
        // SAFETY: the instruction set was checked above.
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => unsafe { super::avx2::enter_vnni(kernel) },
        // SAFETY: the instruction set was checked above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni => unsafe { super::avx512::enter(kernel) },
        // SAFETY: the instruction set was checked above.
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => unsafe { super::avx512::enter_amx(kernel) },
        // SAFETY: the instruction set was checked above.
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDot => unsafe { super::neon::enter(kernel) },
        // SAFETY: the instruction set was checked above.
        #[cfg(target_arch = "aarch64")]
        Isa::NeonI8mm => unsafe { super::neon::enter_i8mm(kernel) },
        _ => unreachable!("an instruction set of another architecture is never available"),
    }
}
