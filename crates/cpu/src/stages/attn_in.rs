//! `attn_in`: the input norm of an attention layer, its projections, the norm of each head, and rotary
//! embedding. What it leaves in `k` and `v` goes into the KV cache.
//!
//! Source of the arithmetic: `Qwen3_5MoeAttention.forward` and `Qwen3_5MoeTextRotaryEmbedding` in
//! transformers' `models/qwen3_5_moe/modeling_qwen3_5_moe.py`. Text has equal positions in all three sections
//! of the interleaved `mrope`, so that it is the ordinary rotary embedding.

use lily_model::geometry::AttentionGeometry;
use lily_model::weights::AttentionWeights;

use crate::fast::{Activations, Machine, Precision, Projection, project};
use crate::kernels::OutRows;
use crate::kernels::f32_ops;
use crate::plain::{norm_rows, project as project_plain, rms_norm, rms_norm_in_place};
use crate::segment::Segment;

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

/// [`rotary_angles`] of every row of a pass, `[rows, rotary_dim]`.
pub fn rotary_angles_of(geometry: &AttentionGeometry, segments: &[Segment<'_>], out: &mut [f32]) {
    let width = geometry.rotary_dim;
    for segment in segments {
        for (offset, row) in segment.rows.clone().enumerate() {
            let position = segment.sequence.length + offset;
            rotary_angles(geometry, position, &mut out[row * width..(row + 1) * width]);
        }
    }
}

/// Stores the keys and values of a pass, `[rows, kv_heads * head_dim]`, in the caches of layer `layer`.
pub fn write_cache(
    geometry: &AttentionGeometry,
    layer: usize,
    segments: &mut [Segment<'_>],
    k: &[f32],
    v: &[f32],
) {
    let width = geometry.kv_heads * geometry.head_dim;
    for Segment { sequence, rows } in segments {
        let start = sequence.length;
        let cache = sequence.layers[layer].attention_mut();
        for (offset, row) in rows.clone().enumerate() {
            let row = row * width..(row + 1) * width;
            cache.write(start + offset, &k[row.clone()], &v[row]);
        }
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
    project_plain(&weights.q_proj.view(), &normed, &mut query_and_gate);
    project_plain(&weights.k_proj.view(), &normed, out.k);
    project_plain(&weights.v_proj.view(), &normed, out.v);

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

/// What the fast form writes.
pub struct FastProjections<'a> {
    /// Queries, normed and turned: `[tokens, heads * head_dim]`.
    pub q: &'a mut [f32],
    /// What `q_proj` gives, whose second halves are the gates: `[tokens, heads, 2, head_dim]`.
    pub query_and_gate: &'a mut [f32],
    /// What `k_proj` gives: scratch of the shape of `k`.
    pub raw_k: &'a mut [f32],
    /// Keys, normed and turned: `[tokens, kv_heads * head_dim]`.
    pub k: &'a mut [f32],
    /// Values: `[tokens, kv_heads * head_dim]`.
    pub v: &'a mut [f32],
}

/// Fast form; `normed` is scratch of the shape of `x`, `angles` as in the plain form.
#[allow(clippy::too_many_arguments, reason = "one argument per tensor of the stage")]
pub fn fast(
    machine: &Machine,
    geometry: &AttentionGeometry,
    weights: &AttentionWeights,
    norm: &[f32],
    eps: f32,
    x: &[f32],
    angles: &[f32],
    normed: &mut Activations,
    out: FastProjections<'_>,
) {
    normed.norm(machine, x, norm, eps);
    let FastProjections { q, query_and_gate, raw_k, k, v } = out;
    let int8 = |matrix, out| Projection { matrix, out, precision: Precision::Int8 };
    project(
        machine,
        normed,
        [
            int8(weights.q_proj.view(), &mut *query_and_gate),
            int8(weights.k_proj.view(), &mut *raw_k),
            int8(weights.v_proj.view(), v),
        ],
    );
    let dim = geometry.head_dim;
    let (width, key_width) = (geometry.heads * dim, geometry.kv_heads * dim);
    let (queries, keys) = (OutRows::new(q, width), OutRows::new(k, key_width));
    machine.each_row(x.len() / norm.len(), |token| {
        let angles = &angles[token * geometry.rotary_dim..(token + 1) * geometry.rotary_dim];
        // SAFETY: each token's rows are one task's.
        let (queries, keys) = unsafe { (queries.row(token, 0..width), keys.row(token, 0..key_width)) };
        let raw = query_and_gate[token * 2 * width..].chunks_exact(2 * dim);
        for (query, raw) in queries.chunks_exact_mut(dim).zip(raw) {
            f32_ops::rms_norm(machine.isa, &raw[..dim], &weights.q_norm, eps, query);
            rotate(query, angles);
        }
        let raw = raw_k[token * key_width..].chunks_exact(dim);
        for (key, raw) in keys.chunks_exact_mut(dim).zip(raw) {
            f32_ops::rms_norm(machine.isa, raw, &weights.k_norm, eps, key);
            rotate(key, angles);
        }
    });
}
