//! `delta_in`: the input norm of a Gated DeltaNet layer, then its four projections.
//!
//! Source of the arithmetic: `Qwen3_5MoeGatedDeltaNet.forward` in transformers'
//! `models/qwen3_5_moe/modeling_qwen3_5_moe.py`.

use lily_model::weights::DeltaWeights;

use crate::plain::{norm_rows, project};

/// What the stage hands to `delta_core`; every buffer is `[tokens, width]`.
pub struct Projections<'a> {
    /// Queries, keys, values before the convolution: `[tokens, conv_channels]`.
    pub qkv: &'a mut [f32],
    /// Output gate: `[tokens, value_width]`.
    pub z: &'a mut [f32],
    /// Write strength before its sigmoid: `[tokens, value_heads]`.
    pub b: &'a mut [f32],
    /// Decay before its softplus: `[tokens, value_heads]`.
    pub a: &'a mut [f32],
}

/// Plain form: `x` is the residual stream `[tokens, hidden]`, `norm` the layer's input norm.
pub fn reference(weights: &DeltaWeights, norm: &[f32], eps: f32, x: &[f32], out: Projections<'_>) {
    let normed = norm_rows(x, norm, eps);
    project(&weights.in_proj_qkv.view(), &normed, out.qkv);
    project(&weights.in_proj_z.view(), &normed, out.z);
    project(&weights.in_proj_b.view(), &normed, out.b);
    project(&weights.in_proj_a.view(), &normed, out.a);
}
