//! Which tensors the kernels of a layer read together.

use lily_model::weights::{LayerWeights, Matrix, Mixer, Weights};

/// The projections of one kernel.
#[derive(Clone, Debug)]
pub struct Group<'a> {
    /// The stage's name.
    pub name: &'static str,
    /// Name and matrix of each projection.
    pub matrices: Vec<(&'static str, &'a Matrix)>,
}

/// The projections of a layer's kernels, in the order of the pass.
pub fn groups(layer: &LayerWeights) -> Vec<Group<'_>> {
    let (moe, group) = (&layer.moe, |name, matrices| Group { name, matrices });
    let mut groups = match &layer.mixer {
        Mixer::Delta(w) => vec![
            group(
                "delta_in",
                vec![("qkv", &w.in_proj_qkv), ("z", &w.in_proj_z), ("b", &w.in_proj_b), ("a", &w.in_proj_a)],
            ),
            group("delta_out", vec![("out", &w.out_proj)]),
        ],
        Mixer::Attention(w) => vec![
            group("attn_in", vec![("q", &w.q_proj), ("k", &w.k_proj), ("v", &w.v_proj)]),
            group("attn_out", vec![("o", &w.o_proj)]),
        ],
    };
    let up = vec![
        ("gate", &moe.gate_proj),
        ("up", &moe.up_proj),
        ("shared_gate", &moe.shared_gate_proj),
        ("shared_up", &moe.shared_up_proj),
    ];
    groups.push(group(
        "moe_route",
        vec![("router", &moe.gate), ("shared_expert_gate", &moe.shared_expert_gate)],
    ));
    groups.push(group("moe_up", up));
    groups.push(group("moe_down", vec![("down", &moe.down_proj), ("shared_down", &moe.shared_down_proj)]));
    groups
}

/// The vectors of a layer, by name.
pub fn vectors(layer: &LayerWeights) -> Vec<(&'static str, &[f32])> {
    let mut vectors: Vec<(&str, &[f32])> =
        vec![("input_norm", &layer.input_norm), ("post_norm", &layer.post_norm)];
    match &layer.mixer {
        Mixer::Delta(w) => vectors.extend([
            ("conv1d", &w.conv1d[..]),
            ("a_log", &w.a_log),
            ("dt_bias", &w.dt_bias),
            ("norm", &w.norm),
        ]),
        Mixer::Attention(w) => vectors.extend([("q_norm", &w.q_norm[..]), ("k_norm", &w.k_norm)]),
    }
    vectors
}

/// What belongs to no layer: the embedding table and the head.
pub fn outer_groups(weights: &Weights) -> [Group<'_>; 2] {
    [
        Group { name: "embed", matrices: vec![("embed_tokens", &weights.embed_tokens)] },
        Group { name: "head", matrices: vec![("lm_head", &weights.lm_head)] },
    ]
}
