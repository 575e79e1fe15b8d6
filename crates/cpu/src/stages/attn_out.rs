//! `attn_out`: the output projection of an attention layer, added to the residual stream.

use lily_model::weights::AttentionWeights;

use crate::fast::{Activations, Machine, project_onto};
use crate::plain::linear_onto;

/// Plain form: `core` is `[tokens, heads * head_dim]`, `x` the residual stream `[tokens, hidden]`.
pub fn reference(weights: &AttentionWeights, core: &[f32], x: &mut [f32]) {
    linear_onto(&weights.o_proj.view(), core, x);
}

/// Fast form; `product` is scratch of the shape of `x`.
pub fn fast(
    machine: &Machine,
    weights: &AttentionWeights,
    core: &Activations,
    product: &mut [f32],
    x: &mut [f32],
) {
    project_onto(machine, core, weights.o_proj.view(), product, x);
}
