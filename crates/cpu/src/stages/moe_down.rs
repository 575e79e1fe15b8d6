//! `moe_down`: down projections, their weighted sum, the shared expert, and the residual.

use lily_model::geometry::MoeGeometry;
use lily_model::weights::MoeWeights;

use crate::plain::linear;
use crate::stages::moe_route::Choice;
use crate::stages::moe_up::slots_of;

/// Plain form: `routed` `[tokens, top_k, expert_width]` and `shared` `[tokens, shared_width]` come from
/// `moe_up`, `choices` `[tokens, top_k]` and `shared_factor` `[tokens]` from `moe_route`; `x` is the residual
/// stream `[tokens, hidden]`. Experts are added in the order of their index, the shared one last.
pub fn reference(
    geometry: &MoeGeometry,
    weights: &MoeWeights,
    routed: &[f32],
    shared: &[f32],
    choices: &[Choice],
    shared_factor: &[f32],
    x: &mut [f32],
) {
    let hidden = weights.down_proj.rows;
    let width = geometry.expert_width;
    let mut sum = vec![0.0; x.len()];
    for expert in 0..geometry.experts {
        let slots = slots_of(choices, expert);
        if slots.is_empty() {
            continue;
        }
        linear(
            &weights.down_proj.at(expert),
            slots.len(),
            |i| &routed[slots[i] * width..(slots[i] + 1) * width],
            |row, i, value| sum[slots[i] / geometry.top_k * hidden + row] += choices[slots[i]].weight * value,
        );
    }
    let width = geometry.shared_width;
    linear(
        &weights.shared_down_proj.view(),
        shared_factor.len(),
        |t| &shared[t * width..(t + 1) * width],
        |row, t, value| sum[t * hidden + row] += shared_factor[t] * value,
    );
    for (x, sum) in x.iter_mut().zip(&sum) {
        *x += sum;
    }
}
