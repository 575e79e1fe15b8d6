//! One token against sixteen whole rows of 2048 4-bit weights, or eight of 4096, which is what most of a decoded token's
//! time goes to.
//!
//! # Work and memory
//! A strip is 16 KiB of weights, 1 KiB of scales and 1 KiB of biases, each in one piece of memory, on one thread. Scales and
//! biases are made f32 with rows in lanes, 4 KiB in the first cache. Then, in sixteen steps, a line of each of sixteen rows
//! (two of eight) is read and multiplied, a tree brings the dot products into lanes, and each group adds two products to the
//! rows' sums. A step also asks for 1 KiB of the next strip, a line after each that it reads, in the order of memory, and for
//! a line of scales and one of biases of the strip after that. Half as many rows of twice the width, because sixteen would be
//! 32 KiB and meet in two of the first cache's sets.
//!
//! # Floor
//! A plain read of the same memory. One Zen 5 core reaches 37 GB/s where that has 41, two reach 74 where it has 81. The same
//! steps as a loop reach 31 and 62. Presumably a load of a loop looks like a walk along its row, and the processor brings lines
//! from beyond the row's end that no one waits for; written out, the next address of a load is in the next strip.
//! `docs/lab/cpu.md` has what was tried.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use lily_model::weights::GROUP_SIZE;

use super::super::simd::prefetch;
use super::super::tile::{Activation, LINE, LINE_GROUPS, PANEL_ROWS, Strip};
use super::{WORDS, both_groups, sum_halves, transpose};

/// Bytes of a strip's weights.
const BYTES: usize = Strip::GROUPS * GROUP_SIZE / 2;
/// Lines that a step reads.
const STEP_LINES: usize = PANEL_ROWS;
/// Steps of a strip.
const STEPS: usize = BYTES / LINE / STEP_LINES;
/// Scales of a strip as f32: the vectors of [`unpack`] one after the other.
type Affine = MaybeUninit<[f32; Strip::GROUPS]>;

// Each step asks for a line of scales, which is a row's where there are sixteen.
const _: () = assert!(STEPS * LINE == Strip::GROUPS * 2 && STEPS == WORDS);

/// [`TileOps::multiply_strip`](super::super::tile::TileOps::multiply_strip).
///
/// # Safety
/// As there, and the instruction set is there.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn multiply<const ROWS: usize>(strip: Strip, ask: Strip, token: &Activation) {
    const { assert!(ROWS == PANEL_ROWS || ROWS == PANEL_ROWS / 2) };
    // SAFETY: a strip's weights, scales and biases, the groups of a row of activations, and `ROWS` sums are there by contract;
    // requests touch nothing.
    unsafe {
        let (mut scales, mut biases) = (Affine::uninit(), Affine::uninit());
        unpack::<ROWS>(strip.scales, &mut scales);
        unpack::<ROWS>(strip.biases, &mut biases);
        let (scales, biases) = (scales.as_ptr().cast::<f32>(), biases.as_ptr().cast::<f32>());
        let (zero, low) = (_mm512_setzero_si512(), _mm512_set1_epi8(15));
        let mut acc = if ROWS == PANEL_ROWS {
            _mm512_loadu_ps(token.acc)
        } else {
            _mm512_castps256_ps512(_mm256_loadu_ps(token.acc))
        };
        // The dot products of the lines of a step, even and odd weights apart, and a request after each. `evens` and `odds`
        // are activations of the step's first and second line.
        macro_rules! dots {
            ($sums:ident, $step:literal, $evens:ident, $odds:ident, $($at:literal)*) => {$(
                let line = $step * (STEP_LINES / ROWS) + $at / ROWS;
                let from = strip.data.add($at % ROWS * (BYTES / ROWS) + line * LINE);
                let both = _mm512_loadu_si512(from.cast());
                let even = _mm512_dpbusd_epi32(zero, _mm512_and_si512(both, low), $evens[$at / ROWS]);
                let odd = _mm512_and_si512(_mm512_srli_epi16::<4>(both), low);
                let mut dots = _mm512_dpbusd_epi32(even, odd, $odds[$at / ROWS]);
                // As `ask_after`, with the distance in the instruction.
                asm!(
                    "prefetchnta [{place} + {distance}]", "/* {value} */",
                    place = in(reg) ask.data, value = inout(zmm_reg) dots,
                    distance = const ($step * STEP_LINES + $at) * LINE,
                    options(nostack, preserves_flags, readonly)
                );
                $sums[$at] = dots;
            )*};
        }
        macro_rules! steps {
            ($($step:literal)*) => {$(
                prefetch(ask.scales.wrapping_add($step * LINE));
                prefetch(ask.biases.wrapping_add($step * LINE));
                // Of the second line, or the same once more.
                let second = (STEP_LINES / ROWS - 1) * LINE_GROUPS * GROUP_SIZE;
                let q = token.q.add($step * (STEP_LINES / ROWS) * LINE_GROUPS * GROUP_SIZE);
                let evens = [both_groups(q, 1), both_groups(q.add(second), 1)];
                let q = q.add(GROUP_SIZE / 2);
                let odds = [both_groups(q, 1), both_groups(q.add(second), 1)];
                let mut sums = [zero; STEP_LINES];
                dots!(sums, $step, evens, odds, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
                acc = add_groups::<ROWS>(acc, $step, sum_halves(&sums), scales, biases, token);
                // Otherwise the compiler puts off all trees to the end, and the dots go to memory.
                asm!("/* {acc} */", acc = inout(zmm_reg) acc, options(nostack, preserves_flags, nomem));
            )*};
        }
        steps!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
        if ROWS == PANEL_ROWS {
            _mm512_storeu_ps(token.acc, acc);
        } else {
            _mm256_storeu_ps(token.acc, _mm512_castps512_ps256(acc));
        }
    }
}

/// The groups of a step in their order. `dots` are those of the even and of the odd ones, rows in lanes; of eight rows, in the
/// lower half those of the first line, and only that half of `acc` counts.
///
/// # Safety
/// Scales and biases are a strip's, the token has a row's groups, and the instruction set is there.
#[inline(always)]
unsafe fn add_groups<const ROWS: usize>(
    acc: __m512,
    step: usize,
    dots: [__m512i; 2],
    scales: *const f32,
    biases: *const f32,
    token: &Activation,
) -> __m512 {
    // SAFETY: by contract.
    unsafe {
        if ROWS == PANEL_ROWS {
            let mut acc = acc;
            for (i, dots) in dots.into_iter().enumerate() {
                let group = step * LINE_GROUPS + i;
                let scale = _mm512_loadu_ps(scales.add(group * PANEL_ROWS));
                let bias = _mm512_loadu_ps(biases.add(group * PANEL_ROWS));
                let scale = _mm512_mul_ps(scale, _mm512_set1_ps(*token.scales.add(group)));
                let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, acc);
                acc = _mm512_fmadd_ps(bias, _mm512_set1_ps(*token.sums.add(group)), sum);
            }
            return acc;
        }
        let mut acc = _mm512_castps512_ps256(acc);
        let dots = dots.map(|dots| [_mm512_castsi512_si256(dots), _mm512_extracti64x4_epi64::<1>(dots)]);
        for (i, dots) in [dots[0][0], dots[1][0], dots[0][1], dots[1][1]].into_iter().enumerate() {
            let group = 2 * step * LINE_GROUPS + i;
            // The second half of a row's groups is in the upper halves of the vectors.
            let half = Strip::GROUPS / PANEL_ROWS;
            let at = group % half * PANEL_ROWS + group / half * ROWS;
            let (scale, bias) = (_mm256_loadu_ps(scales.add(at)), _mm256_loadu_ps(biases.add(at)));
            let scale = _mm256_mul_ps(scale, _mm256_set1_ps(*token.scales.add(group)));
            let sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, acc);
            acc = _mm256_fmadd_ps(bias, _mm256_set1_ps(*token.sums.add(group)), sum);
        }
        _mm512_castps256_ps512(acc)
    }
}

/// The bf16 of a strip as f32, a vector for each group, rows in lanes; of eight rows, a vector for a group of the first half
/// of a row and the same one of the second.
///
/// # Safety
/// A strip's scales follow `from`, and the instruction set is there.
#[inline(always)]
unsafe fn unpack<const ROWS: usize>(from: *const u8, to: &mut Affine) {
    // SAFETY: by contract; the vectors are as many as a strip has, each word of a line having two.
    unsafe {
        let to = to.as_mut_ptr().cast::<f32>();
        let mut rows = [_mm512_setzero_si512(); WORDS];
        for (row, line) in rows.iter_mut().enumerate() {
            let lines = PANEL_ROWS / ROWS;
            *line = _mm512_loadu_si512(from.add((row % ROWS * lines + row / ROWS) * LINE).cast());
        }
        let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        for (pair, both) in transpose(&rows).into_iter().enumerate() {
            let to = to.add(pair * 2 * PANEL_ROWS);
            _mm512_storeu_ps(to, _mm512_castsi512_ps(_mm512_slli_epi32::<16>(both)));
            _mm512_storeu_ps(to.add(PANEL_ROWS), _mm512_castsi512_ps(_mm512_and_si512(both, high)));
        }
    }
}

#[cfg(test)]
mod tests {
    use lily_model::weights::{Format, MatrixView};

    use super::*;
    use crate::isa::Isa;
    use crate::kernels::OutRows;
    use crate::kernels::activations::QuantizedRows;
    use crate::kernels::matmul::matmul_rows;

    /// Here, because which processors take this form is a matter of speed (`asks_second_cache`).
    fn strips_have_the_bits_of_any_other_form<const ROWS: usize>() {
        if !Isa::Avx512Vnni.is_available() {
            return;
        }
        let cols = Strip::GROUPS / ROWS * GROUP_SIZE;
        let bytes =
            |count: usize, seed: usize| -> Vec<u8> { (0..count).map(|i| (i * seed % 251) as u8).collect() };
        // bf16 of which none is large: the exponent's bits are 0x3c.. to 0x3f..
        let affine = |seed: usize| -> Vec<u8> {
            (0..Strip::GROUPS).flat_map(|i| [(i * seed % 256) as u8, 0x3c + (i * seed % 4) as u8]).collect()
        };
        let (data, scales, biases) = (bytes(BYTES, 7919), affine(31), affine(47));
        let x: Vec<f32> = (0..cols).map(|i| (i * 6151 % 1013) as f32 / 500.0 - 1.0).collect();
        let mut quantized = QuantizedRows::new();
        quantized.quantize(Isa::Portable, &x, cols);
        let x = quantized;
        let w = MatrixView {
            rows: ROWS,
            cols,
            format: Format::Affine4,
            data: &data,
            scales: &scales,
            biases: &biases,
        };
        let mut want = vec![f32::NAN; ROWS];
        // SAFETY: one thread.
        unsafe { matmul_rows(Isa::Portable, w, 0..ROWS, &x, x.all(), OutRows::new(&mut want, ROWS)) };
        let mut got = vec![0.0f32; ROWS];
        let strip = Strip { data: data.as_ptr(), scales: scales.as_ptr(), biases: biases.as_ptr() };
        let token = Activation {
            q: x.q(0).as_ptr(),
            scales: x.scales(0).as_ptr(),
            sums: x.sums(0).as_ptr(),
            acc: got.as_mut_ptr(),
        };
        // SAFETY: the instruction set is there, and everything has a strip's size.
        unsafe { multiply::<ROWS>(strip, strip, &token) };
        let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|v| v.to_bits()).collect() };
        assert_eq!(bits(&got), bits(&want), "{ROWS} rows of {cols}");
    }

    #[test]
    fn sixteen_rows_have_the_bits_of_any_other_form() {
        strips_have_the_bits_of_any_other_form::<PANEL_ROWS>();
    }

    #[test]
    fn eight_rows_have_the_bits_of_any_other_form() {
        strips_have_the_bits_of_any_other_form::<{ PANEL_ROWS / 2 }>();
    }
}
