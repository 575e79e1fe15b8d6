//! The geometry as the kernels of both backends get it: names that stand for numbers when they are compiled.

use lily_model::geometry::{Geometry, LayerKind};

/// Names and values, the way C writes them.
pub fn macros(geometry: &Geometry) -> Vec<(&'static str, String)> {
    let Geometry { attention, delta, moe, .. } = geometry;
    let numbers = [
        ("HIDDEN", geometry.hidden),
        ("VOCAB", geometry.vocab),
        ("HEADS", attention.heads),
        ("KV_HEADS", attention.kv_heads),
        ("HEAD_DIM", attention.head_dim),
        ("ROTARY_DIM", attention.rotary_dim),
        ("KEY_HEADS", delta.key_heads),
        ("VALUE_HEADS", delta.value_heads),
        ("KEY_DIM", delta.key_dim),
        ("VALUE_DIM", delta.value_dim),
        ("CONV_WIDTH", delta.conv_width),
        ("EXPERTS", moe.experts),
        ("TOP_K", moe.top_k),
        ("EXPERT_WIDTH", moe.expert_width),
        ("SHARED_WIDTH", moe.shared_width),
        ("DELTA_LAYERS", geometry.count(LayerKind::Delta)),
        ("ATTN_LAYERS", geometry.count(LayerKind::Attention)),
    ];
    let mut macros: Vec<_> = numbers.map(|(name, value)| (name, value.to_string())).into();
    macros.push(("RMS_EPS", format!("{:e}f", geometry.rms_eps)));
    macros
}
