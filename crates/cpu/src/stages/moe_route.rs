//! `moe_route`: the norm before the experts, the router, and which experts each token takes.
//!
//! Source of the arithmetic: `Qwen3_5MoeTopKRouter` and `Qwen3_5MoeSparseMoeBlock` in transformers'
//! `models/qwen3_5_moe/modeling_qwen3_5_moe.py`.

use lily_model::geometry::MoeGeometry;
use lily_model::weights::MoeWeights;

use crate::fast::{Activations, Machine, Precision, Projection, project as project_fast};
use crate::kernels::OutRows;
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

/// [`choose`] without the softmax over all logits, of which the scaling leaves nothing: the same experts, and
/// weights that differ by rounding.
fn choose_fast(logits: &[f32], choices: &mut [Choice]) {
    choices.fill(Choice { expert: 0, weight: f32::NEG_INFINITY });
    let last = choices.len() - 1;
    for (expert, &logit) in logits.iter().enumerate() {
        if logit > choices[last].weight {
            // Insertion from the end; an equal logit of a lower index stays in front.
            let place = choices.partition_point(|choice| choice.weight >= logit);
            choices.copy_within(place..last, place + 1);
            choices[place] = Choice { expert: expert as u32, weight: logit };
        }
    }
    let largest = choices[0].weight;
    choices.iter_mut().for_each(|choice| choice.weight = (choice.weight - largest).exp());
    let total: f32 = choices.iter().map(|choice| choice.weight).sum();
    choices.iter_mut().for_each(|choice| choice.weight /= total);
}

/// Below every probability: marks an expert that was already chosen.
const TAKEN: f32 = -1.0;

/// What the fast form leaves for `moe_up` and `moe_down`: the tokens of each expert, side by side.
///
/// A *slot* is one token at one of its experts. Slots are sorted by expert and then by token, so that an
/// expert's weights are read once for all its tokens.
#[derive(Debug, Default)]
pub struct Routing {
    /// Experts that some token chose, in the order of their index.
    pub active: Vec<u32>,
    /// Slots of `active[i]` are `starts[i]..starts[i + 1]`.
    pub starts: Vec<u32>,
    /// The token of each slot.
    pub tokens: Vec<u32>,
    /// The share of each slot in its token's output.
    pub weights: Vec<f32>,
    /// The shared expert's factor, one per token.
    pub shared: Vec<f32>,
    logits: Vec<f32>,
    choices: Vec<Choice>,
    /// Where each expert's next slot goes.
    next: Vec<u32>,
}

impl Routing {
    /// Bytes that it takes for so many tokens, at the most.
    pub fn bytes(geometry: &MoeGeometry, tokens: usize) -> usize {
        let MoeGeometry { experts, top_k, .. } = *geometry;
        let slot = size_of::<Choice>() + size_of::<u32>() + size_of::<f32>();
        let token = experts * size_of::<f32>() + top_k * slot + size_of::<f32>();
        // Experts: which are active, where they start, where the next slot goes.
        tokens * token + 3 * experts * size_of::<u32>()
    }

    /// Slots of the `index`th active expert.
    pub fn slots(&self, index: usize) -> std::ops::Range<usize> {
        self.starts[index] as usize..self.starts[index + 1] as usize
    }

    /// Sorts `choices` `[tokens, top_k]` into slots (a counting sort by expert).
    fn sort(&mut self, experts: usize, top_k: usize) {
        let slots = self.choices.len();
        self.next.clear();
        self.next.resize(experts, 0);
        for choice in &self.choices {
            self.next[choice.expert as usize] += 1;
        }
        self.active.clear();
        self.starts.clear();
        let mut start = 0;
        for (expert, next) in self.next.iter_mut().enumerate() {
            let count = *next;
            *next = start;
            if count > 0 {
                self.active.push(expert as u32);
                self.starts.push(start);
            }
            start += count;
        }
        self.starts.push(start);
        self.tokens.resize(slots, 0);
        self.weights.resize(slots, 0.0);
        for (index, choice) in self.choices.iter().enumerate() {
            let next = &mut self.next[choice.expert as usize];
            self.tokens[*next as usize] = (index / top_k) as u32;
            self.weights[*next as usize] = choice.weight;
            *next += 1;
        }
    }
}

/// Fast form: `normed` receives what the experts read.
///
/// The router's projections keep f32 activations: a rounding there would not blur the answer but send tokens
/// to other experts.
#[allow(clippy::too_many_arguments, reason = "one argument per tensor of the stage")]
pub fn fast(
    machine: &Machine,
    geometry: &MoeGeometry,
    weights: &MoeWeights,
    norm: &[f32],
    eps: f32,
    x: &[f32],
    normed: &mut Activations,
    routing: &mut Routing,
) {
    let tokens = x.len() / norm.len();
    normed.norm(machine, x, norm, eps);
    routing.logits.resize(tokens * geometry.experts, 0.0);
    routing.shared.resize(tokens, 0.0);
    routing.choices.resize(tokens * geometry.top_k, Choice::default());
    let f32 = |matrix, out| Projection { matrix, out, precision: Precision::F32 };
    project_fast(
        machine,
        normed,
        [
            f32(weights.gate.view(), &mut routing.logits),
            f32(weights.shared_expert_gate.view(), &mut routing.shared),
        ],
    );
    routing.shared.iter_mut().for_each(|s| *s = sigmoid(*s));
    let logits = &routing.logits;
    let top_k = geometry.top_k;
    let choices = OutRows::new(&mut routing.choices, top_k);
    machine.each_row(tokens, |token| {
        // SAFETY: each token's choices are one task's.
        let choices = unsafe { choices.row(token, 0..top_k) };
        choose_fast(&logits[token * geometry.experts..][..geometry.experts], choices);
    });
    routing.sort(geometry.experts, geometry.top_k);
}
