//! What the stored elements of a matrix mean, one row at a time: the definition that kernels are held to.
//!
//! Affine rows follow `mlx.core.quantize`: element `i` of a row is the `i`-th lowest field of `bits` bits of
//! the row read as little-endian u32 words, and `w = scale * q + bias` with the bf16 scale and bias of group
//! `i / 64`.

use half::{bf16, f16};

use crate::weights::{Format, GROUP_SIZE, MatrixView};

/// Row `row` of `matrix` as f32, into `out` of `matrix.cols` elements. Unquantized rows are converted, which
/// is exact; affine rows are `scale * q + bias` computed in f32.
///
/// # Panics
/// Where `row` is outside the matrix or `out` has another length.
pub fn dequantize_row(matrix: MatrixView<'_>, row: usize, out: &mut [f32]) {
    assert_eq!(out.len(), matrix.cols, "one element per column");
    let bytes = matrix.format.row_bytes(matrix.cols);
    let data = &matrix.data[row * bytes..(row + 1) * bytes];
    match matrix.format {
        Format::Affine4 => {
            for (pair, byte) in out.chunks_exact_mut(2).zip(data) {
                pair[0] = f32::from(byte & 0xf);
                pair[1] = f32::from(byte >> 4);
            }
            scale_groups(matrix, row, out);
        }
        Format::Affine8 => {
            for (w, byte) in out.iter_mut().zip(data) {
                *w = f32::from(*byte);
            }
            scale_groups(matrix, row, out);
        }
        format => read_floats(format, data, out),
    }
}

/// Unquantized little-endian elements as f32; every one of them is exact.
///
/// # Panics
/// Where `format` is affine.
pub fn read_floats(format: Format, bytes: &[u8], out: &mut [f32]) {
    let pairs = bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match format {
        Format::Bf16 => fill(out, pairs.map(|b| bf16::from_le_bytes(b).to_f32())),
        Format::F16 => fill(out, pairs.map(|b| f16::from_le_bytes(b).to_f32())),
        Format::F32 => {
            fill(out, bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        }
        Format::Affine4 | Format::Affine8 => panic!("{format:?} elements mean nothing without their scales"),
    }
}

fn fill(out: &mut [f32], values: impl Iterator<Item = f32>) {
    for (w, value) in out.iter_mut().zip(values) {
        *w = value;
    }
}

/// Turns the quantized values in `out` into weights.
fn scale_groups(matrix: MatrixView<'_>, row: usize, out: &mut [f32]) {
    let groups = matrix.cols / GROUP_SIZE;
    for (g, group) in out.chunks_exact_mut(GROUP_SIZE).enumerate() {
        let at = (row * groups + g) * 2;
        let read = |bytes: &[u8]| bf16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
        let (scale, bias) = (read(matrix.scales), read(matrix.biases));
        for w in group {
            *w = scale * *w + bias;
        }
    }
}
