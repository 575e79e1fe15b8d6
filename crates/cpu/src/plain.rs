//! Plain f32 arithmetic: the few operations that the reference form of every stage is written in.
//!
//! Nothing here is written for one machine. Each result depends on its own inputs only and is summed in one fixed
//! order, so it has the same bits whatever else is computed beside it, and products may be shared out to threads:
//! those of the caller's [`rayon`] pool, where there is enough to do.

use lily_model::weights::{Format, GROUP_SIZE, MatrixView};
use rayon::prelude::*;

/// Independent partial sums of [`dot`]: enough for the compiler to use whole vector registers.
const LANES: usize = 16;
/// Rows of a matrix that meet an input while it is in the first cache.
const ROW_BLOCK: usize = 8;
/// Multiplications that are worth another thread: some ten microseconds.
pub(crate) const TASK: usize = 1 << 17;

/// `sum(a[i] * b[i])` over slices of equal length.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    debug_assert_eq!(a.len(), b.len());
    let mut sums = [0.0f32; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    add_products(a_blocks, b_blocks, &mut sums);
    for (lane, (x, y)) in a_rest.iter().zip(b_rest).enumerate() {
        sums[lane] += x * y;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
        width /= 2;
    }
    sums[0]
}

/// Adds the products of each lane. A function of its own, because the compiler would otherwise keep the sums in the order
/// in which they are joined at last, and turn every product into it: half as fast.
#[inline(never)]
fn add_products(a: &[[f32; LANES]], b: &[[f32; LANES]], sums: &mut [f32; LANES]) {
    for (x, y) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] += x[lane] * y[lane];
        }
    }
}

/// `out += factor * x`.
pub fn add_scaled(out: &mut [f32], factor: f32, x: &[f32]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o += factor * x;
    }
}

/// Root-mean-square norm of one row: `out = x / sqrt(mean(x^2) + eps) * weight`.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let inverse = inverse_rms(x, eps);
    for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
        *o = x * inverse * w;
    }
}

/// [`rms_norm`] written over its input.
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    let inverse = inverse_rms(x, eps);
    for (x, w) in x.iter_mut().zip(weight) {
        *x = *x * inverse * w;
    }
}

fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// `1 / (1 + exp(-x))`.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `x * sigmoid(x)`.
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `ln(1 + exp(x))`, the identity where `exp` would only lose digits (as PyTorch's `softplus`).
pub fn softplus(x: f32) -> f32 {
    const LINEAR_FROM: f32 = 20.0;
    if x > LINEAR_FROM { x } else { x.exp().ln_1p() }
}

/// bfloat16 number `index` of little-endian bytes.
fn bf16_at(bytes: &[u8], index: usize) -> f32 {
    let bits = u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]);
    f32::from_bits(u32::from(bits) << 16)
}

/// Scale and bias of each group of row `row` of an affine matrix.
fn group_parameters(matrix: &MatrixView<'_>, row: usize) -> impl Iterator<Item = (f32, f32)> {
    let groups = matrix.cols / GROUP_SIZE;
    (row * groups..(row + 1) * groups).map(|i| (bf16_at(matrix.scales, i), bf16_at(matrix.biases, i)))
}

/// Row `row` of `matrix` as f32, exactly what the checkpoint's format means (`out` holds `matrix.cols`).
pub fn dequantize_row(matrix: &MatrixView<'_>, row: usize, out: &mut [f32]) {
    let bytes = matrix.format.row_bytes(matrix.cols);
    let data = &matrix.data[row * bytes..(row + 1) * bytes];
    match matrix.format {
        Format::Affine4 => {
            for (group, (scale, bias)) in group_parameters(matrix, row).enumerate() {
                let out = &mut out[group * GROUP_SIZE..(group + 1) * GROUP_SIZE];
                let data = &data[group * GROUP_SIZE / 2..(group + 1) * GROUP_SIZE / 2];
                for (pair, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(data) {
                    *pair = [byte & 0xf, byte >> 4].map(|q| scale * f32::from(q) + bias);
                }
            }
        }
        Format::Affine8 => {
            for (group, (scale, bias)) in group_parameters(matrix, row).enumerate() {
                let range = group * GROUP_SIZE..(group + 1) * GROUP_SIZE;
                for (o, &q) in out[range.clone()].iter_mut().zip(&data[range]) {
                    *o = scale * f32::from(q) + bias;
                }
            }
        }
        Format::Bf16 => {
            for (i, o) in out.iter_mut().enumerate() {
                *o = bf16_at(data, i);
            }
        }
        Format::F16 => {
            for (o, pair) in out.iter_mut().zip(data.as_chunks::<2>().0) {
                *o = half::f16::from_le_bytes(*pair).to_f32();
            }
        }
        Format::F32 => {
            for (o, quad) in out.iter_mut().zip(data.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*quad);
            }
        }
    }
}

/// `put(row, i, matrix[row] . x(i))` for every row of `matrix` and every `i < count`: each weight row is
/// expanded once and used for all inputs. `put` is called on this thread.
pub fn linear<'a>(
    matrix: &MatrixView<'_>,
    count: usize,
    x: impl Fn(usize) -> &'a [f32] + Sync,
    mut put: impl FnMut(usize, usize, f32),
) {
    if count == 0 {
        return;
    }
    let cols = matrix.cols;
    // A block of rows after the other, in each `[count, rows]`.
    let mut products = vec![0.0; matrix.rows * count];
    let blocks = products.par_chunks_mut(ROW_BLOCK * count).enumerate();
    blocks.with_min_len(TASK.div_ceil(ROW_BLOCK * count * cols)).for_each(|(block, products)| {
        let rows = products.len() / count;
        let mut weights = vec![0.0; rows * cols];
        for (row, weights) in weights.chunks_exact_mut(cols).enumerate() {
            dequantize_row(matrix, block * ROW_BLOCK + row, weights);
        }
        for (i, products) in products.chunks_exact_mut(rows).enumerate() {
            for (product, weights) in products.iter_mut().zip(weights.chunks_exact(cols)) {
                *product = dot(weights, x(i));
            }
        }
    });
    for (block, products) in products.chunks(ROW_BLOCK * count).enumerate() {
        for (i, products) in products.chunks_exact(products.len() / count).enumerate() {
            for (row, &product) in products.iter().enumerate() {
                put(block * ROW_BLOCK + row, i, product);
            }
        }
    }
}

/// `out[t] = matrix x[t]` for every row of `x` `[tokens, cols]`; `out` is `[tokens, rows]`.
pub fn project(matrix: &MatrixView<'_>, x: &[f32], out: &mut [f32]) {
    let (rows, cols) = (matrix.rows, matrix.cols);
    linear(
        matrix,
        x.len() / cols,
        |t| &x[t * cols..(t + 1) * cols],
        |row, t, value| out[t * rows + row] = value,
    );
}

/// RMS norm of every row of `x` `[tokens, weight.len()]`.
pub fn norm_rows(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut normed = vec![0.0; x.len()];
    for (row, out) in x.chunks_exact(weight.len()).zip(normed.chunks_exact_mut(weight.len())) {
        rms_norm(row, weight, eps, out);
    }
    normed
}

/// Adds the product of `matrix` with each row of `input`, `[tokens, cols]`, to `x`, `[tokens, rows]`.
pub(crate) fn linear_onto(matrix: &MatrixView<'_>, input: &[f32], x: &mut [f32]) {
    let (rows, cols) = (matrix.rows, matrix.cols);
    linear(
        matrix,
        input.len() / cols,
        |t| &input[t * cols..(t + 1) * cols],
        |row, t, value| x[t * rows + row] += value,
    );
}
