//! `delta_in`: the input norm of a Gated DeltaNet layer, then its four projections.
//!
//! Source of the arithmetic: `Qwen3_5MoeGatedDeltaNet.forward` in transformers'
//! `models/qwen3_5_moe/modeling_qwen3_5_moe.py`.

use lily_model::weights::DeltaWeights;

use crate::fast::{Activations, Machine, Precision, Projection, project};
use crate::plain::{norm_rows, project as project_plain};

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
    project_plain(&weights.in_proj_qkv.view(), &normed, out.qkv);
    project_plain(&weights.in_proj_z.view(), &normed, out.z);
    project_plain(&weights.in_proj_b.view(), &normed, out.b);
    project_plain(&weights.in_proj_a.view(), &normed, out.a);
}

/// Fast form: all four projections share one fork. `normed` is scratch of the shape of `x`.
///
/// The two that become gates keep f32 activations: they are few rows, and what they decide lasts for the rest
/// of the sequence.
pub fn fast(
    machine: &Machine,
    weights: &DeltaWeights,
    norm: &[f32],
    eps: f32,
    x: &[f32],
    normed: &mut Activations,
    out: Projections<'_>,
) {
    normed.norm(machine, x, norm, eps);
    let int8 = |matrix, out| Projection { matrix, out, precision: Precision::Int8 };
    let f32 = |matrix, out| Projection { matrix, out, precision: Precision::F32 };
    project(
        machine,
        normed,
        [
            int8(weights.in_proj_qkv.view(), out.qkv),
            int8(weights.in_proj_z.view(), out.z),
            f32(weights.in_proj_b.view(), out.b),
            f32(weights.in_proj_a.view(), out.a),
        ],
    );
}
