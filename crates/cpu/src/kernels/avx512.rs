//! AVX-512 with VNNI: sixteen f32 in one register, and sixty-four byte products in one instruction. Where the
//! processor has AMX as well, products of several tokens are made in [`amx`].

mod strip;

use std::arch::asm;
use std::arch::x86_64::*;

use half::{bf16, f16};
use lily_model::weights::GROUP_SIZE;

use super::amx;
use super::matmul::Int8;
use super::simd::{Kernel, LANES, Simd};
use super::tile::{
    Activation, Ahead, GROUP_BYTES, GROUP_UNITS, PANEL_ROWS, PANELS, Source, Strip, TILE_ROWS, TileOps,
    UNIT_BYTES, Upcoming,
};

/// Runs a kernel compiled for this instruction set.
///
/// # Safety
/// The machine has it.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: by contract.
    unsafe { kernel.compute::<Avx512<false>>() }
}

/// As [`enter`] with AMX.
///
/// # Safety
/// The machine has it, and the system lets the process use it.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn enter_amx<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: by contract.
    unsafe { kernel.compute::<Avx512<true>>() }
}

/// One register of sixteen; with `AMX`, several tokens are multiplied by matrix instructions.
#[derive(Clone, Copy, Debug)]
pub struct Avx512<const AMX: bool>;

/// u32 words of a cache line.
const WORDS: usize = 16;
/// Units of even weights of a group, and of odd ones.
const HALF_UNITS: usize = GROUP_UNITS / 2;
/// Bytes of a group of a panel whose nibbles stay packed.
const PACKED_GROUP_BYTES: usize = GROUP_BYTES / 2;

impl<const AMX: bool> Simd for Avx512<AMX> {
    type F = __m512;

    const ROWS: usize = 16;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        // SAFETY: the instruction set is there.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: sixteen elements are readable.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m512) {
        // SAFETY: sixteen elements are writable.
        unsafe { _mm512_storeu_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> __m512 {
        // SAFETY: sixteen elements are readable.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> __m512 {
        // SAFETY: sixteen elements are readable.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> __m512 {
        // SAFETY: sixteen elements are readable.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_u4(from: *const u8) -> __m512 {
        // SAFETY: eight bytes are readable.
        unsafe {
            let both = _mm_loadl_epi64(from.cast());
            let low = _mm_set1_epi8(15);
            let (even, odd) = (_mm_and_si128(both, low), _mm_and_si128(_mm_srli_epi16::<4>(both), low));
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(even, odd)))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> __m512 {
        // SAFETY: sixteen elements are readable.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the instruction set is there.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the instruction set is there.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the instruction set is there.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the instruction set is there.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the instruction set is there.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the instruction set is there.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the instruction set is there.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        // SAFETY: the instruction set is there.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    unsafe fn exp2_int(n: __m512) -> __m512 {
        // SAFETY: the instruction set is there.
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
    }

    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, v: __m512) {
        // SAFETY: sixteen elements are writable.
        unsafe { _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v))) }
    }

    #[inline(always)]
    unsafe fn keep_from(x: __m512, limit: f32, v: __m512) -> __m512 {
        // SAFETY: the instruction set is there.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, _mm512_set1_ps(limit)), v) }
    }

    #[inline(always)]
    unsafe fn sum(v: __m512) -> f32 {
        // SAFETY: the instruction set is there.
        unsafe {
            let eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    /// A tree that adds and transposes at once: each level halves both the vectors and the lanes of each.
    #[inline(always)]
    unsafe fn sum_each(v: &[__m512; LANES]) -> __m512 {
        // SAFETY: the instruction set is there.
        unsafe {
            let mut eights = [_mm512_setzero_ps(); 8];
            // Rows 0, 4, 8, 12, then 1, 5, 9, 13, ...: the order that the last two levels undo.
            for (i, eight) in eights.iter_mut().enumerate() {
                let first = (i % 2) * 8 + i / 2;
                let (a, b) = (v[first], v[first + 4]);
                *eight =
                    _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
            }
            let mut fours = [_mm512_setzero_ps(); 4];
            for (i, four) in fours.iter_mut().enumerate() {
                let (a, b) = (eights[2 * i], eights[2 * i + 1]);
                *four = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
            }
            let mut twos = [_mm512_setzero_ps(); 2];
            for (i, two) in twos.iter_mut().enumerate() {
                let (a, b) = (fours[2 * i], fours[2 * i + 1]);
                *two = _mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xee>(a, b));
            }
            let [a, b] = twos;
            _mm512_add_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b))
        }
    }

    #[inline(always)]
    unsafe fn max_lane(v: __m512) -> f32 {
        // SAFETY: the instruction set is there.
        unsafe { _mm512_reduce_max_ps(v) }
    }

    #[inline(always)]
    unsafe fn load_some(from: *const f32, count: usize, fill: f32) -> __m512 {
        // SAFETY: `count` elements are readable; masked lanes are not touched.
        unsafe { _mm512_mask_loadu_ps(_mm512_set1_ps(fill), first_lanes(count), from) }
    }

    #[inline(always)]
    unsafe fn store_some(to: *mut f32, count: usize, v: __m512) {
        // SAFETY: `count` elements are writable; masked lanes are not touched.
        unsafe { _mm512_mask_storeu_ps(to, first_lanes(count), v) }
    }
}

/// A mask of the first `count` lanes, at most sixteen.
#[inline(always)]
pub(super) fn first_lanes(count: usize) -> u16 {
    ((1u32 << count.min(LANES)) - 1) as u16
}

/// Columns of a 16x16 matrix of u32 that is given by rows.
///
/// # Safety
/// The instruction set is there.
#[inline(always)]
pub(super) unsafe fn transpose(rows: &[__m512i; WORDS]) -> [__m512i; WORDS] {
    // SAFETY: by contract.
    unsafe {
        let zero = _mm512_setzero_si512();
        // quads[c][q]: columns c, c + 4, c + 8, c + 12 of rows 4q..4q + 4, a quarter of the register each.
        let mut quads = [[zero; 4]; 4];
        for q in 0..4 {
            let (a, b, c, d) = (rows[4 * q], rows[4 * q + 1], rows[4 * q + 2], rows[4 * q + 3]);
            let (ab, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let (cd, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            quads[0][q] = _mm512_unpacklo_epi64(ab, cd);
            quads[1][q] = _mm512_unpackhi_epi64(ab, cd);
            quads[2][q] = _mm512_unpacklo_epi64(ab_high, cd_high);
            quads[3][q] = _mm512_unpackhi_epi64(ab_high, cd_high);
        }
        let mut columns = [zero; WORDS];
        for (c, [a, b, p, q]) in quads.into_iter().enumerate() {
            let (even, odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
            let (even_2, odd_2) = (_mm512_shuffle_i32x4::<0x88>(p, q), _mm512_shuffle_i32x4::<0xdd>(p, q));
            columns[c] = _mm512_shuffle_i32x4::<0x88>(even, even_2);
            columns[c + 4] = _mm512_shuffle_i32x4::<0x88>(odd, odd_2);
            columns[c + 8] = _mm512_shuffle_i32x4::<0xdd>(even, even_2);
            columns[c + 12] = _mm512_shuffle_i32x4::<0xdd>(odd, odd_2);
        }
        columns
    }
}

/// Byte `at` and the 63 after it of every row, or half of them where `half`; the cache is asked for `ahead`.
///
/// # Safety
/// Those bytes of the rows that exist are readable, and the instruction set is there.
#[inline(always)]
unsafe fn lines(from: &Source, at: usize, half: bool, ahead: usize) -> [__m512i; WORDS] {
    // SAFETY: by contract; a prefetch touches nothing.
    unsafe {
        let mut rows = [_mm512_setzero_si512(); WORDS];
        for (row, line) in rows.iter_mut().enumerate() {
            let place = from.row(row).add(at);
            *line = if half {
                _mm512_zextsi256_si512(_mm256_loadu_si256(place.cast()))
            } else {
                _mm512_loadu_si512(place.cast())
            };
            if ahead > 0 {
                _mm_prefetch::<_MM_HINT_T0>(place.wrapping_add(ahead).cast());
            }
        }
        rows
    }
}

/// Half a group of activations from `q` on, and the same half of the group `second` further on.
///
/// # Safety
/// Both are readable, and the instruction set is there.
#[inline(always)]
unsafe fn both_groups(q: *const i8, second: usize) -> __m512i {
    // SAFETY: by contract.
    unsafe {
        let first = _mm512_castsi256_si512(_mm256_loadu_si256(q.cast()));
        _mm512_inserti64x4::<1>(first, _mm256_loadu_si256(q.add(second * GROUP_SIZE).cast()))
    }
}

/// Asks the cache, the second one where `SECOND`, for a line that is read once, after `value` is there. The compiler
/// would gather such requests in front of the arithmetic, and in a burst they hold up the reads behind them.
///
/// # Safety
/// The instruction set is there; the line is not touched, and the request never faults.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) unsafe fn ask_after<const SECOND: bool>(place: *const u8, mut value: __m512i) -> __m512i {
    // SAFETY: a hint.
    unsafe {
        if SECOND {
            asm!(
                "prefetcht1 [{place}]", "/* {value} */",
                place = in(reg) place, value = inout(zmm_reg) value,
                options(nostack, preserves_flags)
            );
        } else {
            asm!(
                "prefetchnta [{place}]", "/* {value} */",
                place = in(reg) place, value = inout(zmm_reg) value,
                options(nostack, preserves_flags)
            );
        }
    }
    value
}

/// The dot products of two groups, `[first, second][row]`, straight from sixteen rows of packed weights.
///
/// # Safety
/// 64 bytes from `at` on (32 where `half`) of the rows that exist are readable, and `q` is good for the groups
/// 0 and `second`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn line_dots<const SECOND: bool>(
    from: &Source,
    at: usize,
    half: bool,
    q: *const i8,
    second: usize,
    (next, apart): (*const u8, usize),
) -> [__m512i; 2] {
    const HALF_GROUP: usize = GROUP_SIZE / 2;
    // SAFETY: by contract.
    unsafe {
        let zero = _mm512_setzero_si512();
        let low = _mm512_set1_epi8(15);
        let (evens, odds) = (both_groups(q, second), both_groups(q.add(HALF_GROUP), second));
        // Lanes 0..8 are sums of the first group, the others of the second.
        let mut sums = [zero; PANEL_ROWS];
        for (row, sum) in sums.iter_mut().enumerate() {
            let place = from.row(row).add(at);
            let line = if half {
                _mm512_zextsi256_si512(_mm256_loadu_si256(place.cast()))
            } else {
                _mm512_loadu_si512(place.cast())
            };
            let even = _mm512_dpbusd_epi32(zero, _mm512_and_si512(line, low), evens);
            let both = _mm512_dpbusd_epi32(even, _mm512_and_si512(_mm512_srli_epi16::<4>(line), low), odds);
            *sum = ask_after::<SECOND>(next.wrapping_add(row * apart), both);
        }
        sum_halves(&sums)
    }
}

/// For sixteen rows `[sums of lanes 0..8, sums of the others][row]`: as in `sum_each`, a tree that adds and transposes at
/// once; rows go in in the order it undoes.
///
/// # Safety
/// The instruction set is there.
#[inline(always)]
unsafe fn sum_halves(rows: &[__m512i; PANEL_ROWS]) -> [__m512i; 2] {
    // SAFETY: by contract. Written out, because an array that a loop fills may be left in memory.
    unsafe {
        let a = eights(
            pairs(fours(rows[0], rows[4]), fours(rows[1], rows[5])),
            pairs(fours(rows[2], rows[6]), fours(rows[3], rows[7])),
        );
        let b = eights(
            pairs(fours(rows[8], rows[12]), fours(rows[9], rows[13])),
            pairs(fours(rows[10], rows[14]), fours(rows[11], rows[15])),
        );
        [_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b)]
    }
}

/// Quarters of `a` and `b` onto their neighbours.
///
/// # Safety
/// The instruction set is there.
#[inline(always)]
unsafe fn fours(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: by contract.
    unsafe { _mm512_add_epi32(_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b)) }
}

/// The same with pairs of lanes.
///
/// # Safety
/// The instruction set is there.
#[inline(always)]
unsafe fn pairs(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: by contract.
    unsafe { _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)) }
}

/// The same with lanes.
///
/// # Safety
/// The instruction set is there.
#[inline(always)]
unsafe fn eights(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: by contract.
    unsafe {
        let (a, b) = (_mm512_castsi512_ps(a), _mm512_castsi512_ps(b));
        let (even, odd) = (_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b));
        _mm512_add_epi32(_mm512_castps_si512(even), _mm512_castps_si512(odd))
    }
}

impl<const AMX: bool> TileOps for Avx512<AMX> {
    const TOKENS: usize = 6;
    const DIRECT_TOKENS: usize = if AMX { 2 } else { 4 };
    const GROUP_BYTES_4: usize = PACKED_GROUP_BYTES;
    const MATRIX: bool = AMX;
    const STRIPS: bool = true;

    #[inline(always)]
    unsafe fn multiply_strip<const ROWS: usize>(strip: Strip, ask: Strip, token: &Activation) {
        // SAFETY: by contract.
        unsafe { strip::multiply::<ROWS>(strip, ask, token) };
    }

    #[inline(always)]
    unsafe fn multiply_rows(
        from: Source,
        scales: *const f32,
        biases: *const f32,
        groups: usize,
        ahead: Ahead,
        token: &Activation,
    ) {
        const LINE_GROUPS: usize = 2;
        // SAFETY: all pointers are good for `groups` groups and a panel's sums, by contract.
        unsafe {
            let mut acc = _mm512_loadu_ps(token.acc);
            for group in (0..groups).step_by(LINE_GROUPS) {
                let half = group + 1 == groups;
                let second = if half { group } else { group + 1 };
                let at = group * GROUP_SIZE / 2;
                let lines = ahead.lines(group / LINE_GROUPS, PANEL_ROWS, from.data);
                let q = token.q.add(group * GROUP_SIZE);
                let dots = if ahead.second_cache {
                    line_dots::<true>(&from, at, half, q, second - group, lines)
                } else {
                    line_dots::<false>(&from, at, half, q, second - group, lines)
                };
                for (group, dot) in
                    [group, second].into_iter().zip(dots).take(if half { 1 } else { LINE_GROUPS })
                {
                    let scale = _mm512_loadu_ps(scales.add(group * PANEL_ROWS));
                    let bias = _mm512_loadu_ps(biases.add(group * PANEL_ROWS));
                    let both = _mm512_mul_ps(scale, _mm512_set1_ps(*token.scales.add(group)));
                    let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), both, acc);
                    acc = _mm512_fmadd_ps(bias, _mm512_set1_ps(*token.sums.add(group)), sum);
                }
            }
            _mm512_storeu_ps(token.acc, acc);
        }
    }

    /// Leaves the nibbles packed: taking them apart where they are multiplied costs instructions that run
    /// beside the dot products, and stores and loads of twice the bytes would not.
    #[inline(always)]
    unsafe fn unpack_4(from: Source, groups: usize, to: *mut u8) {
        const LINE_GROUPS: usize = 2;
        // SAFETY: `groups` groups of each row are readable and their units writable, by contract.
        unsafe {
            for group in (0..groups).step_by(LINE_GROUPS) {
                let half = group + 1 == groups;
                let words = transpose(&lines(&from, group * GROUP_SIZE / 2, half, 0));
                let to = to.add(group * Self::GROUP_BYTES_4);
                for (j, word) in words.into_iter().enumerate().take(if half { WORDS / 2 } else { WORDS }) {
                    _mm512_storeu_si512(to.add(j * UNIT_BYTES).cast(), word);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn unpack_8(from: Source, groups: usize, ahead: usize, to: *mut u8) {
        // SAFETY: `groups` groups of each row are readable and their units writable, by contract.
        unsafe {
            let apart = _mm512_set4_epi32(0x0f0d_0e0c, 0x0b09_0a08, 0x0705_0604, 0x0301_0200);
            for group in 0..groups {
                let words = transpose(&lines(&from, group * GROUP_SIZE, false, ahead));
                let to = to.add(group * GROUP_BYTES);
                for (j, [a, b]) in words.as_chunks::<2>().0.iter().enumerate() {
                    // Two evens, then two odds, of each word.
                    let (a, b) = (_mm512_shuffle_epi8(*a, apart), _mm512_shuffle_epi8(*b, apart));
                    const HIGH: u32 = 0xaaaa_aaaa;
                    let evens = _mm512_mask_blend_epi16(HIGH, a, _mm512_slli_epi32::<16>(b));
                    let odds = _mm512_mask_blend_epi16(HIGH, _mm512_srli_epi32::<16>(a), b);
                    _mm512_storeu_si512(to.add(2 * j * UNIT_BYTES).cast(), evens);
                    _mm512_storeu_si512(to.add((2 * j + 1) * UNIT_BYTES).cast(), odds);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn unpack_scales(from: Source, groups: usize, ahead: usize, to: *mut f32) {
        // SAFETY: `groups` bf16 of each row are readable (others are masked) and their lanes writable.
        unsafe {
            let mask = ((1u64 << groups) - 1) as u32;
            let mut rows = [_mm512_setzero_si512(); WORDS];
            for (row, line) in rows.iter_mut().enumerate() {
                let place = from.row(row);
                *line = _mm512_maskz_loadu_epi16(mask, place.cast());
                _mm_prefetch::<_MM_HINT_T0>(place.wrapping_add(ahead).cast());
            }
            let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            for (j, pair) in transpose(&rows).into_iter().enumerate() {
                if 2 * j >= groups {
                    break;
                }
                let to = to.add(2 * j * PANEL_ROWS);
                _mm512_storeu_ps(to, _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pair)));
                if 2 * j + 1 < groups {
                    _mm512_storeu_ps(to.add(PANEL_ROWS), _mm512_castsi512_ps(_mm512_and_si512(pair, high)));
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
        // SAFETY: by contract.
        unsafe {
            if wide {
                multiply_tile::<N, true>(weights, scales, biases, groups, tokens, upcoming);
            } else {
                multiply_tile::<N, false>(weights, scales, biases, groups, tokens, upcoming);
            }
        }
    }

    #[inline(always)]
    unsafe fn multiply_matrix(products: &[Int8<'_>]) {
        // SAFETY: by contract.
        unsafe { amx::multiply(products) };
    }
}

/// Units `2 * pair` and `2 * pair + 1` of the group that `group` points to.
///
/// # Safety
/// The group is readable, and the instruction set is there.
#[inline(always)]
unsafe fn unit_pair<const WIDE: bool>(group: *const u8, pair: usize) -> [__m512i; 2] {
    // SAFETY: by contract.
    unsafe {
        if WIDE {
            let units = group.add(2 * pair * UNIT_BYTES);
            [_mm512_loadu_si512(units.cast()), _mm512_loadu_si512(units.add(UNIT_BYTES).cast())]
        } else {
            let low = _mm512_set1_epi8(15);
            let both = _mm512_loadu_si512(group.add(pair * UNIT_BYTES).cast());
            [_mm512_and_si512(both, low), _mm512_and_si512(_mm512_srli_epi16::<4>(both), low)]
        }
    }
}

/// [`TileOps::multiply`] for bytes (`WIDE`) or packed nibbles.
///
/// # Safety
/// As there, and the instruction set is there.
#[inline(always)]
unsafe fn multiply_tile<const N: usize, const WIDE: bool>(
    weights: [*const u8; PANELS],
    scales: [*const f32; PANELS],
    biases: [*const f32; PANELS],
    groups: usize,
    tokens: &[Activation; N],
    upcoming: Upcoming,
) {
    // With few tokens the dot products of one chain would wait for each other.
    const CHAINS: usize = 2;
    let group_bytes = if WIDE { GROUP_BYTES } else { PACKED_GROUP_BYTES };
    // SAFETY: all pointers are good for `groups` groups and [`TILE_ROWS`] sums, by contract.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); PANELS]; N];
        for (acc, token) in acc.iter_mut().zip(tokens) {
            for (p, acc) in acc.iter_mut().enumerate() {
                *acc = _mm512_loadu_ps(token.acc.add(p * PANEL_ROWS));
            }
        }
        for group in 0..groups {
            let mut dots = [[[_mm512_setzero_si512(); PANELS]; N]; CHAINS];
            for pair in 0..HALF_UNITS {
                upcoming.ask(group, pair);
                // Written out: in a closure the compiler may forget the instruction set.
                let units = [
                    unit_pair::<WIDE>(weights[0].add(group * group_bytes), pair),
                    unit_pair::<WIDE>(weights[1].add(group * group_bytes), pair),
                ];
                for odd in 0..2 {
                    let chain = if N <= 2 { odd } else { 0 };
                    for t in 0..N {
                        let x = tokens[t].q.add(group * GROUP_SIZE + pair * 4 + odd * GROUP_SIZE / 2);
                        let x = _mm512_set1_epi32(x.cast::<i32>().read_unaligned());
                        for p in 0..PANELS {
                            dots[chain][t][p] = _mm512_dpbusd_epi32(dots[chain][t][p], units[p][odd], x);
                        }
                    }
                }
            }
            for p in 0..PANELS {
                let scale = _mm512_loadu_ps(scales[p].add(group * PANEL_ROWS));
                let bias = _mm512_loadu_ps(biases[p].add(group * PANEL_ROWS));
                for t in 0..N {
                    let dot =
                        if N <= 2 { _mm512_add_epi32(dots[0][t][p], dots[1][t][p]) } else { dots[0][t][p] };
                    let both = _mm512_mul_ps(scale, _mm512_set1_ps(*tokens[t].scales.add(group)));
                    let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), both, acc[t][p]);
                    acc[t][p] = _mm512_fmadd_ps(bias, _mm512_set1_ps(*tokens[t].sums.add(group)), sum);
                }
            }
        }
        for (acc, token) in acc.iter().zip(tokens) {
            for (p, acc) in acc.iter().enumerate() {
                _mm512_storeu_ps(token.acc.add(p * PANEL_ROWS), *acc);
            }
        }
    }
}

const _: () = assert!(TILE_ROWS == PANELS * LANES && PANEL_ROWS == LANES);
const _: () = assert!(Upcoming::STEPS == HALF_UNITS);
