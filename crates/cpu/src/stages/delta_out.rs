//! `delta_out`: the output projection of a Gated DeltaNet layer, added to the residual stream.

use lily_model::weights::DeltaWeights;

use crate::fast::{Activations, Machine, project_onto};
use crate::plain::linear_onto;

/// Plain form: `core` is `[tokens, value_width]`, `x` the residual stream `[tokens, hidden]`.
pub fn reference(weights: &DeltaWeights, core: &[f32], x: &mut [f32]) {
    linear_onto(&weights.out_proj.view(), core, x);
}

/// Fast form; `product` is scratch of the shape of `x`.
pub fn fast(
    machine: &Machine,
    weights: &DeltaWeights,
    core: &Activations,
    product: &mut [f32],
    x: &mut [f32],
) {
    project_onto(machine, core, weights.out_proj.view(), product, x);
}
