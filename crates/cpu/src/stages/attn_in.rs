//! `attn_in`: the input norm of an attention layer, its projections, the norm of each head, and rotary
//! embedding. What it leaves in `k` and `v` goes into the KV cache.
//!
//! Source of the arithmetic: `Qwen3_5MoeAttention.forward` and `Qwen3_5MoeTextRotaryEmbedding` in
//! transformers' `models/qwen3_5_moe/modeling_qwen3_5_moe.py`. Text has equal positions in all three sections
//! of the interleaved `mrope`, so that it is the ordinary rotary embedding.

use lily_model::geometry::AttentionGeometry;
use lily_model::weights::AttentionWeights;

use crate::plain::{norm_rows, project, rms_norm, rms_norm_in_place};

/// What the stage produces; every buffer is `[tokens, width]`.
pub struct Projections<'a> {
    /// Queries, normed and turned: `[tokens, heads * head_dim]`.
    pub q: &'a mut [f32],
    /// Output gate before its sigmoid: `[tokens, heads * head_dim]`.
    pub gate: &'a mut [f32],
    /// Keys, normed and turned: `[tokens, kv_heads * head_dim]`.
    pub k: &'a mut [f32],
    /// Values: `[tokens, kv_heads * head_dim]`.
    pub v: &'a mut [f32],
}

/// Rotary angles of one position: `cos` then `sin`, `rotary_dim / 2` each, written to `out`.
///
/// Angles are rounded to f32 before the cosine, as the reference implementation does; far into a long
/// context that rounding is visible, and both must make it.
pub fn rotary_angles(geometry: &AttentionGeometry, position: usize, out: &mut [f32]) {
    let half = geometry.rotary_dim / 2;
    let (cos, sin) = out.split_at_mut(half);
    for i in 0..half {
        let exponent = (2 * i) as f32 / geometry.rotary_dim as f32;
        let frequency = 1.0 / (geometry.rope_theta as f32).powf(exponent);
        (sin[i], cos[i]) = (position as f32 * frequency).sin_cos();
    }
}

/// Turns the first `rotary_dim` elements of a head: element `i` with element `i + rotary_dim / 2`.
pub fn rotate(head: &mut [f32], angles: &[f32]) {
    let half = angles.len() / 2;
    let (cos, sin) = angles.split_at(half);
    for i in 0..half {
        let (low, high) = (head[i], head[i + half]);
        head[i] = low * cos[i] - high * sin[i];
        head[i + half] = high * cos[i] + low * sin[i];
    }
}

/// Plain form: `x` is the residual stream `[tokens, hidden]`, `norm` the layer's input norm, `angles` the
/// [`rotary_angles`] of each token's position, `[tokens, rotary_dim]`.
pub fn reference(
    geometry: &AttentionGeometry,
    weights: &AttentionWeights,
    norm: &[f32],
    eps: f32,
    x: &[f32],
    angles: &[f32],
    out: Projections<'_>,
) {
    let normed = norm_rows(x, norm, eps);
    let tokens = x.len() / norm.len();
    let dim = geometry.head_dim;
    let mut query_and_gate = vec![0.0; tokens * geometry.heads * 2 * dim];
    project(&weights.q_proj.view(), &normed, &mut query_and_gate);
    project(&weights.k_proj.view(), &normed, out.k);
    project(&weights.v_proj.view(), &normed, out.v);

    let angles_of = |token: usize| &angles[token * geometry.rotary_dim..(token + 1) * geometry.rotary_dim];
    for (i, pair) in query_and_gate.chunks_exact(2 * dim).enumerate() {
        let query = &mut out.q[i * dim..(i + 1) * dim];
        rms_norm(&pair[..dim], &weights.q_norm, eps, query);
        rotate(query, angles_of(i / geometry.heads));
        out.gate[i * dim..(i + 1) * dim].copy_from_slice(&pair[dim..]);
    }
    for (i, key) in out.k.chunks_exact_mut(dim).enumerate() {
        rms_norm_in_place(key, &weights.k_norm, eps);
        rotate(key, angles_of(i / geometry.kv_heads));
    }
}
