//! AVX2 with FMA and F16C, and the same with the byte dot product of AVX-VNNI: sixteen f32 in two registers.
//!
//! Without VNNI bytes are multiplied into pairs of 16-bit sums. A 4-bit weight times an int8 activation, twice,
//! is at most 3,810, so eight units can be summed before they are widened; 8-bit weights are taken as two
//! 4-bit halves, so that nothing saturates.

use std::arch::asm;
use std::arch::x86_64::*;

use half::{bf16, f16};
use lily_model::weights::GROUP_SIZE;

use super::portable::unit_offset;
use super::simd::{Kernel, LANES, Simd};
use super::tile::{
    Activation, Ahead, GROUP_BYTES, GROUP_UNITS, LINE, PANEL_ROWS, PANELS, SCALE_GROUPS, Source, TileOps,
    UNIT_BYTES, Upcoming,
};

/// Runs a kernel compiled for AVX2, FMA and F16C.
///
/// # Safety
/// The machine has them.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: by contract.
    unsafe { kernel.compute::<Avx2<false>>() }
}

/// As [`enter`], with AVX-VNNI.
///
/// # Safety
/// The machine has all four.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(super) unsafe fn enter_vnni<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: by contract.
    unsafe { kernel.compute::<Avx2<true>>() }
}

/// Two registers of eight, with or without AVX-VNNI.
#[derive(Clone, Copy, Debug)]
pub struct Avx2<const VNNI: bool>;

/// Lanes, and u32 words, of a register.
const WORDS: usize = 8;
/// Registers of sixteen lanes.
const HALVES: usize = LANES / WORDS;

/// Applies an intrinsic to both halves.
macro_rules! both {
    ($op:ident, $($v:ident),+) => {
        // SAFETY: the instruction set is there.
        unsafe { [$op($($v[0]),+), $op($($v[1]),+)] }
    };
}

impl<const VNNI: bool> Simd for Avx2<VNNI> {
    type F = [__m256; HALVES];

    const ROWS: usize = 4;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        // SAFETY: the instruction set is there.
        unsafe { [_mm256_set1_ps(value); HALVES] }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        // SAFETY: sixteen elements are readable.
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(WORDS))] }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::F) {
        // SAFETY: sixteen elements are writable.
        unsafe {
            _mm256_storeu_ps(to, v[0]);
            _mm256_storeu_ps(to.add(WORDS), v[1]);
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self::F {
        // SAFETY: sixteen elements are readable.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(WORDS).cast())),
            ]
        }
    }

    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self::F {
        // SAFETY: sixteen elements are readable.
        unsafe {
            let bytes = _mm_loadu_si128(from.cast());
            [
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes))),
            ]
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self::F {
        // SAFETY: sixteen elements are readable.
        unsafe {
            let halves = [_mm_loadu_si128(from.cast()), _mm_loadu_si128(from.add(WORDS).cast())];
            // Not `map`: its closure would be compiled without the instruction set.
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves[0]))),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves[1]))),
            ]
        }
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps, a, b)
    }

    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_sub_ps, a, b)
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps, a, b)
    }

    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_div_ps, a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm256_fmadd_ps, a, b, c)
    }

    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_max_ps, a, b)
    }

    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_min_ps, a, b)
    }

    #[inline(always)]
    unsafe fn round(a: Self::F) -> Self::F {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        // SAFETY: the instruction set is there.
        unsafe { [_mm256_round_ps::<NEAREST>(a[0]), _mm256_round_ps::<NEAREST>(a[1])] }
    }

    #[inline(always)]
    unsafe fn exp2_int(n: Self::F) -> Self::F {
        // SAFETY: the instruction set is there.
        unsafe {
            let bias = _mm256_set1_epi32(127);
            let biased = [
                _mm256_add_epi32(_mm256_cvtps_epi32(n[0]), bias),
                _mm256_add_epi32(_mm256_cvtps_epi32(n[1]), bias),
            ];
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased[0])),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased[1])),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, v: Self::F) {
        // SAFETY: sixteen elements are writable.
        unsafe {
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
            let words = _mm256_permute4x64_epi64::<0xd8>(words);
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.cast(), bytes);
        }
    }

    #[inline(always)]
    unsafe fn keep_from(x: Self::F, limit: f32, v: Self::F) -> Self::F {
        // SAFETY: the instruction set is there.
        unsafe {
            let limit = _mm256_set1_ps(limit);
            [
                _mm256_and_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(x[0], limit), v[0]),
                _mm256_and_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(x[1], limit), v[1]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn sum(v: Self::F) -> f32 {
        // SAFETY: the instruction set is there.
        unsafe {
            let eight = _mm256_add_ps(v[0], v[1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    /// A tree that adds and transposes at once: each level halves both the vectors and the lanes of each.
    #[inline(always)]
    unsafe fn sum_each(v: &[Self::F; LANES]) -> Self::F {
        // SAFETY: the instruction set is there.
        unsafe {
            let mut sums = [_mm256_setzero_ps(); HALVES];
            for (half, sum) in sums.iter_mut().enumerate() {
                let mut eights = [_mm256_setzero_ps(); WORDS];
                for (eight, v) in eights.iter_mut().zip(&v[half * WORDS..]) {
                    *eight = _mm256_add_ps(v[0], v[1]);
                }
                let mut fours = [_mm256_setzero_ps(); WORDS / 2];
                for (i, four) in fours.iter_mut().enumerate() {
                    let (a, b) = (eights[i], eights[i + 4]);
                    *four = _mm256_add_ps(
                        _mm256_permute2f128_ps::<0x20>(a, b),
                        _mm256_permute2f128_ps::<0x31>(a, b),
                    );
                }
                let mut twos = [_mm256_setzero_ps(); 2];
                for (i, two) in twos.iter_mut().enumerate() {
                    let (a, b) = (fours[2 * i], fours[2 * i + 1]);
                    *two = _mm256_add_ps(_mm256_shuffle_ps::<0x44>(a, b), _mm256_shuffle_ps::<0xee>(a, b));
                }
                let [a, b] = twos;
                *sum = _mm256_add_ps(_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xdd>(a, b));
            }
            sums
        }
    }
}

/// Columns of an 8x8 matrix of u32 that is given by rows.
///
/// # Safety
/// The instruction set is there.
#[inline(always)]
unsafe fn transpose(rows: &[__m256i; WORDS]) -> [__m256i; WORDS] {
    // SAFETY: by contract.
    unsafe {
        let zero = _mm256_setzero_si256();
        // quads[c][q]: columns c and c + 4 of rows 4q..4q + 4, half of the register each.
        let mut quads = [[zero; 2]; 4];
        for q in 0..2 {
            let (a, b, c, d) = (rows[4 * q], rows[4 * q + 1], rows[4 * q + 2], rows[4 * q + 3]);
            let (ab, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
            let (cd, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
            quads[0][q] = _mm256_unpacklo_epi64(ab, cd);
            quads[1][q] = _mm256_unpackhi_epi64(ab, cd);
            quads[2][q] = _mm256_unpacklo_epi64(ab_high, cd_high);
            quads[3][q] = _mm256_unpackhi_epi64(ab_high, cd_high);
        }
        let mut columns = [zero; WORDS];
        for (c, [a, b]) in quads.into_iter().enumerate() {
            columns[c] = _mm256_permute2x128_si256::<0x20>(a, b);
            columns[c + 4] = _mm256_permute2x128_si256::<0x31>(a, b);
        }
        columns
    }
}

/// Bytes `at..at + 32` of eight rows from `first` on; the cache is asked for those `ahead` further on.
///
/// # Safety
/// Those bytes of the rows that exist are readable, and the instruction set is there.
#[inline(always)]
unsafe fn half_lines(from: &Source, first: usize, at: usize, ahead: usize) -> [__m256i; WORDS] {
    // SAFETY: by contract; a prefetch touches nothing.
    unsafe {
        let mut rows = [_mm256_setzero_si256(); WORDS];
        for (row, line) in rows.iter_mut().enumerate() {
            let place = from.row(first + row).add(at);
            *line = _mm256_loadu_si256(place.cast());
            if ahead > 0 {
                _mm_prefetch::<_MM_HINT_T0>(place.wrapping_add(ahead).cast());
            }
        }
        rows
    }
}

/// Four byte products summed into each of eight i32, `w` unsigned and `x` signed.
///
/// # Safety
/// AVX-VNNI is there.
#[inline(always)]
unsafe fn dot_vnni(sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
    // SAFETY: by contract.
    unsafe { _mm256_dpbusd_avx_epi32(sum, w, x) }
}

/// Asks the cache for a line that is read once. An instruction of its own, not the intrinsic, because the
/// compiler would gather those in front of the reads that they are to stand between.
///
/// # Safety
/// None beyond the instruction's: it touches nothing and never faults.
#[inline(always)]
pub(super) unsafe fn ask(place: *const u8) {
    // SAFETY: a hint.
    unsafe { asm!("prefetchnta [{place}]", place = in(reg) place, options(nostack, preserves_flags)) };
}

/// The dot products of one group of packed weights with eight rows from `first` on.
///
/// # Safety
/// 32 bytes from `at` on of the rows that exist are readable, `q` is good for a group, and the instruction set
/// is there.
#[inline(always)]
unsafe fn row_dots<const VNNI: bool>(
    from: &Source,
    first: usize,
    at: usize,
    q: *const i8,
    (next, apart): (*const u8, usize),
) -> __m256i {
    // SAFETY: by contract.
    unsafe {
        let zero = _mm256_setzero_si256();
        let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
        let evens = _mm256_loadu_si256(q.cast());
        let odds = _mm256_loadu_si256(q.add(GROUP_SIZE / 2).cast());
        let mut sums = [zero; WORDS];
        for (row, sum) in sums.iter_mut().enumerate() {
            if row % 2 == 0 {
                // One for each line read: in a burst they would hold up the reads behind them.
                ask(next.wrapping_add(row / 2 * apart));
            }
            let line = _mm256_loadu_si256(from.row(first + row).add(at).cast());
            let (a, b) = (_mm256_and_si256(line, low), _mm256_and_si256(_mm256_srli_epi16::<4>(line), low));
            *sum = if VNNI {
                dot_vnni(dot_vnni(zero, a, evens), b, odds)
            } else {
                let pairs = _mm256_add_epi16(_mm256_maddubs_epi16(a, evens), _mm256_maddubs_epi16(b, odds));
                _mm256_madd_epi16(pairs, ones)
            };
        }
        // As in `sum_each`, a tree that adds and transposes at once.
        let mut fours = [zero; WORDS / 2];
        for (i, four) in fours.iter_mut().enumerate() {
            let (a, b) = (sums[i], sums[i + 4]);
            let (low, high) =
                (_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b));
            *four = _mm256_add_epi32(low, high);
        }
        let mut twos = [_mm256_setzero_ps(); 2];
        for (i, two) in twos.iter_mut().enumerate() {
            let (a, b) = (fours[2 * i], fours[2 * i + 1]);
            let sum = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
            *two = _mm256_castsi256_ps(sum);
        }
        let [a, b] = twos;
        let (even, odd) = (_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xdd>(a, b));
        _mm256_add_epi32(_mm256_castps_si256(even), _mm256_castps_si256(odd))
    }
}

impl<const VNNI: bool> TileOps for Avx2<VNNI> {
    const TOKENS: usize = 3;
    const DIRECT_TOKENS: usize = 4;

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
            let mut acc = Self::load(token.acc);
            for group in 0..groups {
                let q = token.q.add(group * GROUP_SIZE);
                let at = group * GROUP_SIZE / 2;
                let (next, apart) = ahead.lines(group, PANEL_ROWS * GROUP_SIZE / 2 / LINE, from.data);
                let rest = next.wrapping_add(WORDS / 2 * apart);
                let dots = [
                    row_dots::<VNNI>(&from, 0, at, q, (next, apart)),
                    row_dots::<VNNI>(&from, WORDS, at, q, (rest, apart)),
                ];
                let scale = Self::load(scales.add(group * PANEL_ROWS));
                let bias = Self::load(biases.add(group * PANEL_ROWS));
                let both = Self::mul(scale, Self::splat(*token.scales.add(group)));
                let dots = [_mm256_cvtepi32_ps(dots[0]), _mm256_cvtepi32_ps(dots[1])];
                acc = Self::fma(dots, both, acc);
                acc = Self::fma(bias, Self::splat(*token.sums.add(group)), acc);
            }
            Self::store(token.acc, acc);
        }
    }

    #[inline(always)]
    unsafe fn unpack_4(from: Source, groups: usize, to: *mut u8) {
        // SAFETY: `groups` groups of each row are readable and their units writable, by contract.
        unsafe {
            let low = _mm256_set1_epi8(15);
            for group in 0..groups {
                for half in 0..HALVES {
                    let lines = half_lines(&from, half * WORDS, group * GROUP_SIZE / 2, 0);
                    let to = to.add(group * GROUP_BYTES + half * UNIT_BYTES / HALVES);
                    for (j, word) in transpose(&lines).into_iter().enumerate() {
                        let evens = _mm256_and_si256(word, low);
                        let odds = _mm256_and_si256(_mm256_srli_epi16::<4>(word), low);
                        _mm256_storeu_si256(to.add(2 * j * UNIT_BYTES).cast(), evens);
                        _mm256_storeu_si256(to.add((2 * j + 1) * UNIT_BYTES).cast(), odds);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn unpack_8(from: Source, groups: usize, ahead: usize, to: *mut u8) {
        // Half a line of a row is half a group.
        const PARTS: usize = 2;
        // SAFETY: `groups` groups of each row are readable and their units writable, by contract.
        unsafe {
            let apart = _mm_set_epi32(0x0f0d_0e0c, 0x0b09_0a08, 0x0705_0604, 0x0301_0200);
            let apart = _mm256_broadcastsi128_si256(apart);
            for part in 0..groups * PARTS {
                for half in 0..HALVES {
                    let lines = half_lines(&from, half * WORDS, part * GROUP_SIZE / PARTS, ahead);
                    let words = transpose(&lines);
                    let to = to.add(part * GROUP_BYTES / PARTS + half * UNIT_BYTES / HALVES);
                    for (j, [a, b]) in words.as_chunks::<2>().0.iter().enumerate() {
                        // Two evens, then two odds, of each word.
                        let (a, b) = (_mm256_shuffle_epi8(*a, apart), _mm256_shuffle_epi8(*b, apart));
                        let evens = _mm256_blend_epi16::<0xaa>(a, _mm256_slli_epi32::<16>(b));
                        let odds = _mm256_blend_epi16::<0xaa>(_mm256_srli_epi32::<16>(a), b);
                        _mm256_storeu_si256(to.add(2 * j * UNIT_BYTES).cast(), evens);
                        _mm256_storeu_si256(to.add((2 * j + 1) * UNIT_BYTES).cast(), odds);
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
            let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            for part in (0..groups).step_by(PART) {
                let count = PART.min(groups - part);
                for half in 0..HALVES {
                    let mut rows = [_mm256_setzero_si256(); WORDS];
                    for (row, line) in rows.iter_mut().enumerate() {
                        let place = from.row(half * WORDS + row).add(part * 2);
                        _mm_prefetch::<_MM_HINT_T0>(place.wrapping_add(ahead).cast());
                        *line = match count {
                            PART => _mm256_loadu_si256(place.cast()),
                            WORDS => _mm256_zextsi128_si256(_mm_loadu_si128(place.cast())),
                            _ => {
                                let mut padded = [0u8; PART * 2];
                                std::ptr::copy_nonoverlapping(place, padded.as_mut_ptr(), count * 2);
                                _mm256_loadu_si256(padded.as_ptr().cast())
                            }
                        };
                    }
                    for (j, pair) in transpose(&rows).into_iter().enumerate() {
                        let group = part + 2 * j;
                        let to = to.add(group * PANEL_ROWS + half * WORDS);
                        // The scratch has room for all groups; what is past the last is never read.
                        if group < SCALE_GROUPS {
                            _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pair)));
                            let odd = _mm256_castsi256_ps(_mm256_and_si256(pair, high));
                            _mm256_storeu_ps(to.add(PANEL_ROWS), odd);
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
                    let dots = if VNNI {
                        group_dots_vnni(weights, group, tokens)
                    } else if wide {
                        let low = group_dots::<N, 0>(weights, group, tokens);
                        let mut dots = group_dots::<N, 4>(weights, group, tokens);
                        for (dots, low) in dots.iter_mut().zip(low) {
                            for (dot, low) in dots.iter_mut().zip(low) {
                                *dot = _mm256_add_epi32(_mm256_slli_epi32::<4>(*dot), low);
                            }
                        }
                        dots
                    } else {
                        group_dots::<N, 0>(weights, group, tokens)
                    };
                    for half in 0..HALVES {
                        let lane = group * PANEL_ROWS + half * WORDS;
                        let scale = _mm256_loadu_ps(scales[p].add(lane));
                        let bias = _mm256_loadu_ps(biases[p].add(lane));
                        for (token, dots) in tokens.iter().zip(&dots) {
                            let acc = token.acc.add(p * PANEL_ROWS + half * WORDS);
                            let both = _mm256_mul_ps(scale, _mm256_set1_ps(*token.scales.add(group)));
                            let sum =
                                _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[half]), both, _mm256_loadu_ps(acc));
                            let x_sum = _mm256_set1_ps(*token.sums.add(group));
                            _mm256_storeu_ps(acc, _mm256_fmadd_ps(bias, x_sum, sum));
                        }
                    }
                }
            }
        }
    }
}

/// One group's dot products of sixteen rows with `N` tokens.
///
/// # Safety
/// `weights` has a group of units, tokens have `group`, and AVX-VNNI is there.
#[inline(always)]
unsafe fn group_dots_vnni<const N: usize>(
    weights: *const u8,
    group: usize,
    tokens: &[Activation; N],
) -> [[__m256i; HALVES]; N] {
    // SAFETY: by contract.
    unsafe {
        let mut dots = [[_mm256_setzero_si256(); HALVES]; N];
        for unit in 0..GROUP_UNITS {
            let w = weights.add(unit * UNIT_BYTES);
            let w = [_mm256_loadu_si256(w.cast()), _mm256_loadu_si256(w.add(UNIT_BYTES / HALVES).cast())];
            for (dots, token) in dots.iter_mut().zip(tokens) {
                let x = broadcast(token, group, unit);
                for (dot, w) in dots.iter_mut().zip(w) {
                    *dot = dot_vnni(*dot, w, x);
                }
            }
        }
        dots
    }
}

/// As [`group_dots_vnni`] without VNNI, for bits `SHIFT..SHIFT + 4` of the weights.
///
/// # Safety
/// As [`group_dots_vnni`], with AVX2.
#[inline(always)]
unsafe fn group_dots<const N: usize, const SHIFT: i32>(
    weights: *const u8,
    group: usize,
    tokens: &[Activation; N],
) -> [[__m256i; HALVES]; N] {
    /// Units whose 16-bit sums cannot overflow: 8 * 2 * 15 * 127 = 30,480.
    const SAFE_UNITS: usize = 8;
    // SAFETY: by contract.
    unsafe {
        let (ones, low) = (_mm256_set1_epi16(1), _mm256_set1_epi8(15));
        let mut dots = [[_mm256_setzero_si256(); HALVES]; N];
        for first in (0..GROUP_UNITS).step_by(SAFE_UNITS) {
            let mut sums = [[_mm256_setzero_si256(); HALVES]; N];
            for unit in first..first + SAFE_UNITS {
                let w = weights.add(unit * UNIT_BYTES);
                let w = [_mm256_loadu_si256(w.cast()), _mm256_loadu_si256(w.add(UNIT_BYTES / HALVES).cast())];
                let w = [
                    _mm256_and_si256(_mm256_srli_epi16::<SHIFT>(w[0]), low),
                    _mm256_and_si256(_mm256_srli_epi16::<SHIFT>(w[1]), low),
                ];
                for (sums, token) in sums.iter_mut().zip(tokens) {
                    let x = broadcast(token, group, unit);
                    for (sum, w) in sums.iter_mut().zip(w) {
                        *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(w, x));
                    }
                }
            }
            for (dots, sums) in dots.iter_mut().zip(sums) {
                for (dot, sum) in dots.iter_mut().zip(sums) {
                    *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(sum, ones));
                }
            }
        }
        dots
    }
}

/// The four activations that meet a unit, in every lane.
///
/// # Safety
/// The token has the group, and the instruction set is there.
#[inline(always)]
unsafe fn broadcast(token: &Activation, group: usize, unit: usize) -> __m256i {
    // SAFETY: by contract.
    unsafe {
        let x = token.q.add(group * GROUP_SIZE + unit_offset(unit));
        _mm256_set1_epi32(x.cast::<i32>().read_unaligned())
    }
}
