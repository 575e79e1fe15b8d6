//! `moe_up`: gate and up projections of the routed experts and of the shared one, joined by SwiGLU.

use lily_model::geometry::MoeGeometry;
use lily_model::weights::{MatrixView, MoeWeights};

use crate::plain::{linear, silu};
use crate::stages::moe_route::Choice;

/// Plain form: `normed` is `[tokens, hidden]`, `choices` `[tokens, top_k]`; the inner activations go to
/// `routed` `[tokens, top_k, expert_width]` and `shared` `[tokens, shared_width]`.
pub fn reference(
    geometry: &MoeGeometry,
    weights: &MoeWeights,
    normed: &[f32],
    choices: &[Choice],
    routed: &mut [f32],
    shared: &mut [f32],
) {
    let hidden = weights.gate_proj.cols;
    let row_of = |token: usize| &normed[token * hidden..(token + 1) * hidden];
    for expert in 0..geometry.experts {
        let slots = slots_of(choices, expert);
        swiglu(
            &weights.gate_proj.at(expert),
            &weights.up_proj.at(expert),
            &slots,
            |i| row_of(i / geometry.top_k),
            routed,
        );
    }
    let all: Vec<usize> = (0..normed.len() / hidden).collect();
    swiglu(&weights.shared_gate_proj.view(), &weights.shared_up_proj.view(), &all, row_of, shared);
}

/// Positions in `choices` that name `expert`.
pub fn slots_of(choices: &[Choice], expert: usize) -> Vec<usize> {
    (0..choices.len()).filter(|&i| choices[i].expert as usize == expert).collect()
}

/// `out[slot] = silu(gate x) * (up x)` for the inputs of `slots`.
fn swiglu<'a>(
    gate: &MatrixView<'_>,
    up: &MatrixView<'_>,
    slots: &[usize],
    x: impl Fn(usize) -> &'a [f32],
    out: &mut [f32],
) {
    if slots.is_empty() {
        return;
    }
    let width = gate.rows;
    linear(gate, slots.len(), |i| x(slots[i]), |row, i, value| out[slots[i] * width + row] = silu(value));
    linear(up, slots.len(), |i| x(slots[i]), |row, i, value| out[slots[i] * width + row] *= value);
}
