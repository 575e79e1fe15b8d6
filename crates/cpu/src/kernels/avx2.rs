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
    unsafe fn load_i8(from: *const i8) -> Self::F {
        // SAFETY: sixteen elements are readable.
        unsafe {
            let bytes = _mm_loadu_si128(from.cast());
            [
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes))),
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

/// Bytes `at..at + 32` of eight rows; the cache is asked for those `ahead` further on.
///
/// # Safety
/// Those bytes of each row are readable, and the instruction set is there.
#[inline(always)]
unsafe fn half_lines(from: &[*const u8; WORDS], at: usize, ahead: usize) -> [__m256i; WORDS] {
    // SAFETY: by contract; a prefetch touches nothing.
    unsafe {
        let mut rows = [_mm256_setzero_si256(); WORDS];
        for row in 0..WORDS {
            let place = from[row].add(at);
            rows[row] = _mm256_loadu_si256(place.cast());
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

/// Asks the cache, the second one where `SECOND`, for a line that is read once. An instruction of its own, not the
/// intrinsic, because the compiler would gather those in front of the reads that they are to stand between.
///
/// # Safety
/// None beyond the instruction's: it touches nothing and never faults.
#[inline(always)]
unsafe fn ask<const SECOND: bool>(place: *const u8) {
    // SAFETY: a hint.
    unsafe {
        if SECOND {
            asm!("prefetcht1 [{place}]", place = in(reg) place, options(nostack, preserves_flags));
        } else {
            asm!("prefetchnta [{place}]", place = in(reg) place, options(nostack, preserves_flags));
        }
    }
}

/// Sixteen bytes of one row, and of another in the upper half.
///
/// # Safety
/// Both are readable, and the instruction set is there.
#[inline(always)]
unsafe fn two_rows(a: *const u8, b: *const u8) -> __m256i {
    // SAFETY: by contract.
    unsafe {
        let a = _mm256_castsi128_si256(_mm_loadu_si128(a.cast()));
        _mm256_inserti128_si256::<1>(a, _mm_loadu_si128(b.cast()))
    }
}

/// Sixteen activations, in both halves.
///
/// # Safety
/// They are readable, and the instruction set is there.
#[inline(always)]
unsafe fn twice(q: *const i8) -> __m256i {
    // SAFETY: by contract.
    unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(q.cast())) }
}

/// The dot products of one group of packed weights with eight rows.
///
/// Row `i` and row `i + 4` share a register from the load on, so that the tree that adds and transposes has one level
/// less, and its second level still fits 16 bits: sixteen products of 15 and 127 are 30,480.
///
/// # Safety
/// 32 bytes from `at` on of each row are readable, `q` is good for a group, and the instruction set is there.
#[inline(always)]
unsafe fn row_dots<const VNNI: bool, const SECOND: bool>(
    rows: &[*const u8; WORDS],
    at: usize,
    q: *const i8,
    (next, apart): (*const u8, usize),
) -> __m256i {
    const PART: usize = 16;
    // SAFETY: by contract.
    unsafe {
        let zero = _mm256_setzero_si256();
        let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
        let evens = [twice(q), twice(q.add(PART))];
        let odds = [twice(q.add(GROUP_SIZE / 2)), twice(q.add(GROUP_SIZE / 2 + PART))];
        let mut sums = [zero; WORDS / 2];
        for i in 0..WORDS / 2 {
            // One for each line read: in a burst they would hold up the reads behind them.
            ask::<SECOND>(next.wrapping_add(i * apart));
            let (a, b) = (rows[i].add(at), rows[i + WORDS / 2].add(at));
            for part in 0..2 {
                let bytes = two_rows(a.add(part * PART), b.add(part * PART));
                let even = _mm256_and_si256(bytes, low);
                let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low);
                sums[i] = if VNNI {
                    dot_vnni(dot_vnni(sums[i], even, evens[part]), odd, odds[part])
                } else {
                    let even = _mm256_maddubs_epi16(even, evens[part]);
                    let both = _mm256_add_epi16(even, _mm256_maddubs_epi16(odd, odds[part]));
                    if part == 0 { both } else { _mm256_add_epi16(sums[i], both) }
                };
            }
        }
        // Two lanes for each row: rows 0, 2, 4, 6 in the first, the others in the second.
        let mut twos = [zero; 2];
        for (i, two) in twos.iter_mut().enumerate() {
            let (a, b) = (sums[i], sums[i + 2]);
            let (first, second) = (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
            *two = if VNNI {
                _mm256_add_epi32(first, second)
            } else {
                _mm256_madd_epi16(_mm256_add_epi16(first, second), ones)
            };
        }
        // Shifts and blends, because the compiler makes a horizontal addition, three times as slow, of two shuffles.
        const ODD: i32 = 0b1010_1010;
        let low_halves = _mm256_blend_epi32::<ODD>(twos[0], _mm256_slli_epi64::<32>(twos[1]));
        let high_halves = _mm256_blend_epi32::<ODD>(_mm256_srli_epi64::<32>(twos[0]), twos[1]);
        _mm256_add_epi32(low_halves, high_halves)
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
        // Lines of a group of eight rows.
        const HALF_LINES: usize = WORDS * GROUP_SIZE / 2 / LINE;
        // SAFETY: all pointers are good for `groups` groups and a panel's sums, by contract.
        unsafe {
            let all = from.row_starts();
            // Eight rows to the end, then the other eight: their addresses stay in registers.
            for (half, rows) in all.as_chunks::<WORDS>().0.iter().enumerate() {
                let lane = half * WORDS;
                let mut acc = _mm256_loadu_ps(token.acc.add(lane));
                for group in 0..groups {
                    let lines = ahead.lines(half * groups + group, HALF_LINES, from.data);
                    let (at, q) = (group * GROUP_SIZE / 2, token.q.add(group * GROUP_SIZE));
                    let dots = if ahead.second_cache {
                        row_dots::<VNNI, true>(rows, at, q, lines)
                    } else {
                        row_dots::<VNNI, false>(rows, at, q, lines)
                    };
                    let dots = _mm256_cvtepi32_ps(dots);
                    let scale = _mm256_loadu_ps(scales.add(group * PANEL_ROWS + lane));
                    let bias = _mm256_loadu_ps(biases.add(group * PANEL_ROWS + lane));
                    let both = _mm256_mul_ps(scale, _mm256_set1_ps(*token.scales.add(group)));
                    acc = _mm256_fmadd_ps(dots, both, acc);
                    acc = _mm256_fmadd_ps(bias, _mm256_set1_ps(*token.sums.add(group)), acc);
                }
                _mm256_storeu_ps(token.acc.add(lane), acc);
            }
        }
    }

    #[inline(always)]
    unsafe fn unpack_4(from: Source, groups: usize, to: *mut u8) {
        // SAFETY: `groups` groups of each row are readable and their units writable, by contract.
        unsafe {
            let low = _mm256_set1_epi8(15);
            for (half, rows) in from.row_starts().as_chunks::<WORDS>().0.iter().enumerate() {
                for group in 0..groups {
                    let lines = half_lines(rows, group * GROUP_SIZE / 2, 0);
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
            for (half, rows) in from.row_starts().as_chunks::<WORDS>().0.iter().enumerate() {
                for part in 0..groups * PARTS {
                    let lines = half_lines(rows, part * GROUP_SIZE / PARTS, ahead);
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
        // SAFETY: all pointers are good for `groups` groups and a tile's sums, by contract.
        unsafe {
            for p in 0..PANELS {
                for group in 0..groups {
                    if p == 0 && upcoming.stride > 0 {
                        upcoming.ask_all(group);
                    }
                    let units = weights[p].add(group * GROUP_BYTES);
                    let dots = if VNNI {
                        group_dots_vnni(units, group, tokens)
                    } else if wide {
                        let low = group_dots::<N, LOW>(units, group, tokens);
                        let mut dots = group_dots::<N, HIGH>(units, group, tokens);
                        for t in 0..N {
                            for half in 0..HALVES {
                                let high = _mm256_slli_epi32::<4>(dots[t][half]);
                                dots[t][half] = _mm256_add_epi32(high, low[t][half]);
                            }
                        }
                        dots
                    } else {
                        group_dots::<N, WHOLE>(units, group, tokens)
                    };
                    for half in 0..HALVES {
                        let lane = group * PANEL_ROWS + half * WORDS;
                        let scale = _mm256_loadu_ps(scales[p].add(lane));
                        let bias = _mm256_loadu_ps(biases[p].add(lane));
                        for t in 0..N {
                            let token = &tokens[t];
                            let acc = token.acc.add(p * PANEL_ROWS + half * WORDS);
                            let both = _mm256_mul_ps(scale, _mm256_set1_ps(*token.scales.add(group)));
                            let dot = _mm256_cvtepi32_ps(dots[t][half]);
                            let sum = _mm256_fmadd_ps(dot, both, _mm256_loadu_ps(acc));
                            let x_sum = _mm256_set1_ps(*token.sums.add(group));
                            _mm256_storeu_ps(acc, _mm256_fmadd_ps(bias, x_sum, sum));
                        }
                    }
                }
            }
        }
    }
}

/// What a pass without VNNI takes of the bytes of a tile: all, where none is larger than 15, or one half of their bits.
const WHOLE: u32 = 0;
const LOW: u32 = 1;
const HIGH: u32 = 2;

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

/// As [`group_dots_vnni`] without VNNI, for the bits of the weights that `PART` says.
///
/// # Safety
/// As [`group_dots_vnni`], with AVX2.
#[inline(always)]
unsafe fn group_dots<const N: usize, const PART: u32>(
    weights: *const u8,
    group: usize,
    tokens: &[Activation; N],
) -> [[__m256i; HALVES]; N] {
    /// Units whose 16-bit sums cannot overflow: 8 * 2 * 15 * 127 = 30,480.
    const SAFE_UNITS: usize = 8;
    // SAFETY: by contract.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut dots = [[_mm256_setzero_si256(); HALVES]; N];
        for first in (0..GROUP_UNITS).step_by(SAFE_UNITS) {
            let mut sums = [[_mm256_setzero_si256(); HALVES]; N];
            for unit in first..first + SAFE_UNITS {
                let w = weights.add(unit * UNIT_BYTES);
                let w = [part_of::<PART>(w), part_of::<PART>(w.add(UNIT_BYTES / HALVES))];
                for t in 0..N {
                    let x = broadcast(&tokens[t], group, unit);
                    for half in 0..HALVES {
                        let products = _mm256_maddubs_epi16(w[half], x);
                        sums[t][half] =
                            if unit == first { products } else { _mm256_add_epi16(sums[t][half], products) };
                    }
                }
            }
            for t in 0..N {
                for half in 0..HALVES {
                    let sum = _mm256_madd_epi16(sums[t][half], ones);
                    dots[t][half] = if first == 0 { sum } else { _mm256_add_epi32(dots[t][half], sum) };
                }
            }
        }
        dots
    }
}

/// Half a unit, or half of its bits.
///
/// # Safety
/// 32 bytes are readable, and the instruction set is there.
#[inline(always)]
unsafe fn part_of<const PART: u32>(from: *const u8) -> __m256i {
    // SAFETY: by contract.
    unsafe {
        let (bytes, low) = (_mm256_loadu_si256(from.cast()), _mm256_set1_epi8(15));
        match PART {
            WHOLE => bytes,
            LOW => _mm256_and_si256(bytes, low),
            _ => _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low),
        }
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
