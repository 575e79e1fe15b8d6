//! Each stage in plain f32 does what the same part of `transformers` does: fed with recorded inputs of one
//! DeltaNet and one attention layer of the demo, it writes the recorded outputs.

#[path = "common/golden.rs"]
mod golden;

use golden::{Golden, relative_error};
use lily_cpu::stages::moe_route::Choice;
use lily_cpu::stages::{
    attn_core, attn_in, attn_out, delta_core, delta_in, delta_out, embed, head, moe_down, moe_route, moe_up,
};
use lily_model::checkpoint::Checkpoint;
use lily_model::weights::{AttentionWeights, DeltaWeights, LayerWeights, Mixer, Weights};

/// f32 sums of up to 2,048 products in another order.
const TOLERANCE: f32 = 1e-5;

struct Recorded {
    golden: Golden,
    weights: Weights,
    tokens: Vec<u32>,
}

impl Recorded {
    fn open() -> Recorded {
        let golden = Golden::open("transformers_stages.safetensors");
        let weights = Checkpoint::demo().unwrap().weights().unwrap();
        let tokens = golden.ids("tokens");
        Recorded { golden, weights, tokens }
    }

    fn get(&self, name: &str) -> Vec<f32> {
        self.golden.floats(name)
    }

    fn delta(&self) -> (&LayerWeights, &DeltaWeights) {
        let layer = &self.weights.layers[self.golden.ids("layers")[0] as usize];
        let Mixer::Delta(mixer) = &layer.mixer else { panic!("the recorded layer is not a DeltaNet layer") };
        (layer, mixer)
    }

    fn attention(&self) -> (&LayerWeights, &AttentionWeights) {
        let layer = &self.weights.layers[self.golden.ids("layers")[1] as usize];
        let Mixer::Attention(mixer) = &layer.mixer else {
            panic!("the recorded layer is not an attention layer")
        };
        (layer, mixer)
    }

    #[track_caller]
    fn expect(&self, name: &str, found: &[f32]) {
        let error = relative_error(found, &self.get(name));
        println!("{name}: relative error {error:.1e}");
        assert!(error <= TOLERANCE, "{name} is off by {error:.1e}");
    }
}

#[test]
fn embed_reads_the_table() {
    let r = Recorded::open();
    let mut out = vec![0.0; r.tokens.len() * r.weights.geometry.hidden];
    embed::reference(&r.weights.embed_tokens.view(), &r.tokens, &mut out);
    assert_eq!(out, r.get("embed"), "dequantized rows are exact");
}

#[test]
fn delta_in_projects() {
    let r = Recorded::open();
    let (layer, mixer) = r.delta();
    let [mut qkv, mut z, mut b, mut a] =
        ["delta.qkv", "delta.z", "delta.b", "delta.a"].map(|name| vec![0.0; r.get(name).len()]);
    let out = delta_in::Projections { qkv: &mut qkv, z: &mut z, b: &mut b, a: &mut a };
    delta_in::reference(mixer, &layer.input_norm, r.weights.geometry.rms_eps, &r.get("delta.input"), out);
    r.expect("delta.qkv", &qkv);
    r.expect("delta.z", &z);
    r.expect("delta.b", &b);
    r.expect("delta.a", &a);
}

#[test]
fn delta_core_convolves_recurs_and_norms() {
    let r = Recorded::open();
    let (_, mixer) = r.delta();
    let delta = &r.weights.geometry.delta;
    let [qkv, z, b, a] = ["delta.qkv", "delta.z", "delta.b", "delta.a"].map(|name| r.get(name));
    let mut state = vec![0.0; delta.state_elements()];
    let mut tail = vec![0.0; delta.conv_tail_elements()];
    let mut out = vec![0.0; z.len()];
    let inputs = delta_core::Inputs { qkv: &qkv, z: &z, b: &b, a: &a };
    delta_core::reference(delta, mixer, r.weights.geometry.rms_eps, inputs, &mut state, &mut tail, &mut out);
    r.expect("delta.state", &state);
    r.expect("delta.gated_norm", &out);
    assert_eq!(tail, qkv[qkv.len() - tail.len()..], "the tail is the last inputs of the convolution");
}

#[test]
fn delta_out_adds_to_the_residual() {
    let r = Recorded::open();
    let mut x = r.get("delta.input");
    delta_out::reference(r.delta().1, &r.get("delta.gated_norm"), &mut x);
    r.expect("delta.after_mixer", &x);
}

/// The gates among the outputs of `q_proj`, where each head has its query first and its gate after it.
fn gates(r: &Recorded) -> Vec<f32> {
    let dim = r.weights.geometry.attention.head_dim;
    r.get("attn.q_proj").chunks_exact(2 * dim).flat_map(|pair| pair[dim..].to_vec()).collect()
}

#[test]
fn attn_in_projects_norms_and_turns() {
    let r = Recorded::open();
    let (layer, mixer) = r.attention();
    let geometry = &r.weights.geometry.attention;
    let mut angles = vec![0.0; r.tokens.len() * geometry.rotary_dim];
    for (position, out) in angles.chunks_exact_mut(geometry.rotary_dim).enumerate() {
        attn_in::rotary_angles(geometry, position, out);
    }
    let [mut q, mut gate, mut k, mut v] =
        ["attn.query", "attn.query", "attn.key", "attn.v_proj"].map(|name| vec![0.0; r.get(name).len()]);
    let out = attn_in::Projections { q: &mut q, gate: &mut gate, k: &mut k, v: &mut v };
    let eps = r.weights.geometry.rms_eps;
    attn_in::reference(geometry, mixer, &layer.input_norm, eps, &r.get("attn.input"), &angles, out);
    r.expect("attn.query", &q);
    r.expect("attn.key", &k);
    r.expect("attn.v_proj", &v);
    let error = relative_error(&gate, &gates(&r));
    assert!(error <= TOLERANCE, "the gate is off by {error:.1e}");
}

#[test]
fn attn_core_attends_and_gates() {
    let r = Recorded::open();
    let geometry = &r.weights.geometry.attention;
    let dim = geometry.head_dim;
    let (width, kv_width) = (geometry.heads * dim, geometry.kv_heads * dim);
    let [q, k, v] = ["attn.query", "attn.key", "attn.v_proj"].map(|name| r.get(name));
    let gate = gates(&r);
    let mut out = vec![0.0; q.len()];
    for (position, out) in out.chunks_exact_mut(width).enumerate() {
        let range = position * width..(position + 1) * width;
        attn_core::reference(
            geometry,
            position,
            &q[range.clone()],
            &gate[range],
            |p, head| &k[p * kv_width + head * dim..][..dim],
            |p, head| &v[p * kv_width + head * dim..][..dim],
            out,
        );
    }
    r.expect("attn.gated", &out);
}

#[test]
fn attn_out_adds_to_the_residual() {
    let r = Recorded::open();
    let mut x = r.get("attn.input");
    attn_out::reference(r.attention().1, &r.get("attn.gated"), &mut x);
    r.expect("attn.after_mixer", &x);
}

/// The experts and their shares as `transformers` recorded them.
fn recorded_choices(r: &Recorded, layer: &str) -> Vec<Choice> {
    let experts = r.golden.ids(&format!("{layer}.top_experts"));
    let weights = r.get(&format!("{layer}.top_weights"));
    experts.into_iter().zip(weights).map(|(expert, weight)| Choice { expert, weight }).collect()
}

/// The factor of the shared expert of each token.
fn recorded_shared_factor(r: &Recorded, layer: &str) -> Vec<f32> {
    r.get(&format!("{layer}.shared_gate")).iter().map(|gate| 1.0 / (1.0 + (-gate).exp())).collect()
}

#[test]
fn moe_route_chooses_the_same_experts_in_both_layers() {
    let r = Recorded::open();
    let geometry = &r.weights.geometry.moe;
    for (name, layer) in [("delta", r.delta().0), ("attn", r.attention().0)] {
        let x = r.get(&format!("{name}.after_mixer"));
        let mut normed = vec![0.0; x.len()];
        let mut choices = vec![Choice::default(); r.tokens.len() * geometry.top_k];
        let mut shared = vec![0.0; r.tokens.len()];
        moe_route::reference(
            geometry,
            &layer.moe,
            &layer.post_norm,
            r.weights.geometry.rms_eps,
            &x,
            &mut normed,
            &mut choices,
            &mut shared,
        );
        r.expect(&format!("{name}.post_norm"), &normed);
        let recorded = recorded_choices(&r, name);
        let experts = |choices: &[Choice]| choices.iter().map(|c| c.expert).collect::<Vec<_>>();
        assert_eq!(experts(&choices), experts(&recorded), "{name}: likeliest expert first");
        let weights: Vec<f32> = choices.iter().map(|c| c.weight).collect();
        r.expect(&format!("{name}.top_weights"), &weights);
        let error = relative_error(&shared, &recorded_shared_factor(&r, name));
        assert!(error <= TOLERANCE, "{name}: the shared expert's factor is off by {error:.1e}");
    }
}

#[test]
fn moe_up_joins_gate_and_up_in_both_layers() {
    let r = Recorded::open();
    for (name, layer) in [("delta", r.delta().0), ("attn", r.attention().0)] {
        let mut routed = vec![0.0; r.get(&format!("{name}.routed_inner")).len()];
        let mut shared = vec![0.0; r.get(&format!("{name}.shared_inner")).len()];
        let normed = r.get(&format!("{name}.post_norm"));
        let choices = recorded_choices(&r, name);
        moe_up::reference(&r.weights.geometry.moe, &layer.moe, &normed, &choices, &mut routed, &mut shared);
        r.expect(&format!("{name}.routed_inner"), &routed);
        r.expect(&format!("{name}.shared_inner"), &shared);
    }
}

#[test]
fn moe_down_sums_experts_into_the_residual_in_both_layers() {
    let r = Recorded::open();
    for (name, layer) in [("delta", r.delta().0), ("attn", r.attention().0)] {
        let [routed, shared] = ["routed_inner", "shared_inner"].map(|part| r.get(&format!("{name}.{part}")));
        let choices = recorded_choices(&r, name);
        let factor = recorded_shared_factor(&r, name);
        let mut x = r.get(&format!("{name}.after_mixer"));
        moe_down::reference(&r.weights.geometry.moe, &layer.moe, &routed, &shared, &choices, &factor, &mut x);
        r.expect(&format!("{name}.output"), &x);
    }
}

#[test]
fn head_norms_and_projects() {
    let r = Recorded::open();
    let hidden = r.weights.geometry.hidden;
    let x = r.get("head.input");
    let mut logits = vec![0.0; r.weights.geometry.vocab];
    let last = &x[x.len() - hidden..];
    head::reference(
        &r.weights.lm_head.view(),
        &r.weights.norm,
        r.weights.geometry.rms_eps,
        last,
        &mut logits,
    );
    r.expect("head.logits", &logits);
}
