//! `delta_out`: the output projection of a Gated DeltaNet layer, added to the residual stream.

use lily_model::weights::DeltaWeights;

use crate::plain::linear;

/// Plain form: `core` is `[tokens, value_width]`, `x` the residual stream `[tokens, hidden]`.
pub fn reference(weights: &DeltaWeights, core: &[f32], x: &mut [f32]) {
    let matrix = weights.out_proj.view();
    let (rows, cols) = (matrix.rows, matrix.cols);
    linear(
        &matrix,
        core.len() / cols,
        |t| &core[t * cols..(t + 1) * cols],
        |row, t, value| x[t * rows + row] += value,
    );
}
