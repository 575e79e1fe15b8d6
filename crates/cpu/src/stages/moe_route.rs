//! `moe_route`: the norm before the experts, the router, and which experts each token takes.
//!
//! Source of the arithmetic: `Qwen3_5MoeTopKRouter` and `Qwen3_5MoeSparseMoeBlock` in transformers'
//! `models/qwen3_5_moe/modeling_qwen3_5_moe.py`.

use lily_model::geometry::MoeGeometry;
use lily_model::weights::MoeWeights;

use crate::plain::{project, rms_norm, sigmoid};

/// One expert of one token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Choice {
    /// Index of the expert.
    pub expert: u32,
    /// Its share of the token's output; the shares of a token sum to one.
    pub weight: f32,
}

/// Plain form: `x` is the residual stream `[tokens, hidden]`, `norm` the layer's post norm.
///
/// `normed` `[tokens, hidden]` is what the experts read, `choices` is `[tokens, top_k]`, likeliest expert
/// first, and `shared` `[tokens]` the shared expert's factor.
#[allow(clippy::too_many_arguments, reason = "one argument per tensor of the stage")]
pub fn reference(
    geometry: &MoeGeometry,
    weights: &MoeWeights,
    norm: &[f32],
    eps: f32,
    x: &[f32],
    normed: &mut [f32],
    choices: &mut [Choice],
    shared: &mut [f32],
) {
    for (row, out) in x.chunks_exact(norm.len()).zip(normed.chunks_exact_mut(norm.len())) {
        rms_norm(row, norm, eps, out);
    }
    let mut logits = vec![0.0; shared.len() * geometry.experts];
    project(&weights.gate.view(), normed, &mut logits);
    project(&weights.shared_expert_gate.view(), normed, shared);
    for (logits, choices) in
        logits.chunks_exact_mut(geometry.experts).zip(choices.chunks_exact_mut(geometry.top_k))
    {
        choose(logits, choices);
    }
    shared.iter_mut().for_each(|s| *s = sigmoid(*s));
}

/// The `choices.len()` largest of the softmax over `logits`, largest first, the lower index first among
/// equals, scaled to sum to one. `logits` is used up.
pub fn choose(logits: &mut [f32], choices: &mut [Choice]) {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut total = 0.0;
    for logit in logits.iter_mut() {
        *logit = (*logit - largest).exp();
        total += *logit;
    }
    logits.iter_mut().for_each(|p| *p /= total);
    let mut kept = 0.0;
    for choice in choices.iter_mut() {
        let mut best = 0;
        for (expert, probability) in logits.iter().enumerate() {
            if *probability > logits[best] {
                best = expert;
            }
        }
        *choice = Choice { expert: best as u32, weight: logits[best] };
        kept += logits[best];
        logits[best] = TAKEN;
    }
    choices.iter_mut().for_each(|c| c.weight /= kept);
}

/// Below every probability: marks an expert that was already chosen.
const TAKEN: f32 = -1.0;
