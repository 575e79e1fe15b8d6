//! `attn_core`: causal attention of every query head over the KV cache, times the output gate.
//!
//! Source of the arithmetic: `eager_attention_forward` and `Qwen3_5MoeAttention.forward` in transformers'
//! `models/qwen3_5_moe/modeling_qwen3_5_moe.py`.

use lily_model::geometry::AttentionGeometry;

use crate::plain::{add_scaled, dot, sigmoid};

/// Plain form for one token at `position`: softmax over positions `0..=position`.
///
/// `key(p, h)` and `value(p, h)` are the rows of KV head `h` at position `p`, `[head_dim]` each; `q`, `gate`
/// and `out` are `[heads * head_dim]`.
pub fn reference<'a>(
    geometry: &AttentionGeometry,
    position: usize,
    q: &[f32],
    gate: &[f32],
    key: impl Fn(usize, usize) -> &'a [f32],
    value: impl Fn(usize, usize) -> &'a [f32],
    out: &mut [f32],
) {
    let dim = geometry.head_dim;
    let scale = 1.0 / (dim as f32).sqrt();
    let mut weights = vec![0.0; position + 1];
    for head in 0..geometry.heads {
        let kv_head = head * geometry.kv_heads / geometry.heads;
        let range = head * dim..(head + 1) * dim;
        for (p, weight) in weights.iter_mut().enumerate() {
            *weight = dot(&q[range.clone()], key(p, kv_head)) * scale;
        }
        let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        weights.iter_mut().for_each(|w| *w = (*w - largest).exp());
        let total: f32 = weights.iter().sum();
        let out = &mut out[range.clone()];
        out.fill(0.0);
        for (p, weight) in weights.iter().enumerate() {
            add_scaled(out, weight / total, value(p, kv_head));
        }
        for (o, g) in out.iter_mut().zip(&gate[range]) {
            *o *= sigmoid(*g);
        }
    }
}
