//! Floats into affine groups, with the results of `mlx.core.quantize` to the bit.
//!
//! Of a group of 64 elements the one that is farthest from zero is kept as it is (up to bf16): it becomes the bias,
//! and the scale is a whole fraction of it, near a fifteenth (4-bit) or a 255th (8-bit) of the group's range, so that
//! zero is met as well. Elements are rounded to the nearest step, halves to even. All of it is f32; scale and bias
//! become bf16 at the end, after the elements were chosen under the f32 ones. The facts are those of
//! `mlx/backend/cpu/quantized.cpp`; [`crate::affine`] is the way back. [`Rounding::LeastSquares`] departs from it.

mod fit;

use half::bf16;

use crate::weights::{Format, GROUP_SIZE};

/// The smallest step.
const SMALLEST_STEP: f32 = 1e-7;
/// Added to a number from 0 to 2^22, it leaves the nearest whole number in the lowest bits: one and a half times the
/// number from which on f32 has no fractions.
const WHOLE: f32 = 12_582_912.0;
/// Elements that are looked at side by side.
const LANES: usize = 16;

/// How scale and bias of a group are found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// As MLX finds them, to the bit.
    #[default]
    Mlx,
    /// So that the squared error is least.
    LeastSquares,
}

/// A group that the format cannot hold: an element is infinite or not a number, or the range of all is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotFinite;

/// Where a row goes: `format.row_bytes(cols)` bytes of elements, and of scales and biases two bytes for each group.
pub struct AffineRow<'a> {
    /// Packed elements.
    pub data: &'a mut [u8],
    /// bf16 scales, little-endian.
    pub scales: &'a mut [u8],
    /// bf16 biases, little-endian.
    pub biases: &'a mut [u8],
}

/// Writes `row`, whose length is a multiple of [`GROUP_SIZE`], as `format`, which is affine.
///
/// # Errors
/// [`NotFinite`].
///
/// # Panics
/// Where `format` is not affine or a length is not what the others ask for.
pub fn quantize_row(
    format: Format,
    rounding: Rounding,
    row: &[f32],
    out: AffineRow<'_>,
) -> Result<(), NotFinite> {
    assert!(format.is_affine() && row.len().is_multiple_of(GROUP_SIZE), "whole groups of an affine format");
    assert_eq!(out.data.len(), format.row_bytes(row.len()), "packed elements for the row");
    let (groups, _) = row.as_chunks::<GROUP_SIZE>();
    let (scales, _) = out.scales.as_chunks_mut::<2>();
    let (biases, _) = out.biases.as_chunks_mut::<2>();
    assert!(
        scales.len() == groups.len() && biases.len() == groups.len(),
        "a scale and a bias for each group"
    );
    let highest = if format == Format::Affine8 { 255.0 } else { 15.0 };
    let mut elements = [0; GROUP_SIZE];
    let packed = out.data.chunks_exact_mut(format.row_bytes(GROUP_SIZE));
    for (((group, packed), scale_out), bias_out) in groups.iter().zip(packed).zip(scales).zip(biases) {
        let (low, high) = ends(group)?;
        let mut line = scale_and_bias(low, high, highest);
        if rounding == Rounding::LeastSquares {
            line = fit::fit(group, highest, line, low, high);
        }
        let (scale, bias) = line;
        choose(group, scale, bias, highest, &mut elements);
        if format == Format::Affine8 {
            packed.copy_from_slice(&elements);
        } else {
            for (byte, pair) in packed.iter_mut().zip(elements.chunks_exact(2)) {
                *byte = pair[0] | pair[1] << 4;
            }
        }
        *scale_out = bf16::from_f32(scale).to_le_bytes();
        *bias_out = bf16::from_f32(bias).to_le_bytes();
    }
    Ok(())
}

/// The least and the greatest of a group.
fn ends(group: &[f32; GROUP_SIZE]) -> Result<(f32, f32), NotFinite> {
    let (mut low, mut high) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
    // Zero as long as all are finite.
    let mut strays = [0.0; LANES];
    let (chunks, _) = group.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            let w = chunk[lane];
            low[lane] = if w < low[lane] { w } else { low[lane] };
            high[lane] = if w > high[lane] { w } else { high[lane] };
            strays[lane] += w * 0.0;
        }
    }
    let low = low.into_iter().fold(f32::INFINITY, f32::min);
    let high = high.into_iter().fold(f32::NEG_INFINITY, f32::max);
    if strays.iter().any(|&stray| stray != 0.0) || !(high - low).is_finite() {
        return Err(NotFinite);
    }
    Ok((low, high))
}

/// MLX's scale and bias of a group from `low` to `high` whose elements are 0 to `highest`.
fn scale_and_bias(low: f32, high: f32, highest: f32) -> (f32, f32) {
    let step = ((high - low) / highest).max(SMALLEST_STEP);
    // The scale points from the edge towards the rest.
    let (edge, scale) = if low.abs() > high.abs() { (low, step) } else { (high, -step) };
    let steps = (edge / scale).round_ties_even();
    if steps == 0.0 { (scale, 0.0) } else { (edge / steps, edge) }
}

/// The elements nearest to `group`.
fn choose(group: &[f32; GROUP_SIZE], scale: f32, bias: f32, highest: f32, out: &mut [u8; GROUP_SIZE]) {
    for (q, &w) in out.iter_mut().zip(group) {
        let position = (w - bias) / scale;
        // Kept between whole numbers before it is rounded, which comes to the same.
        let position = if position > 0.0 { position } else { 0.0 };
        let position = if position < highest { position } else { highest };
        *q = (position + WHOLE).to_bits() as u8;
    }
}
