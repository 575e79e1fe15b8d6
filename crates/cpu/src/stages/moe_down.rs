//! `moe_down`: down projections, their weighted sum, the shared expert, and the residual.

use lily_model::geometry::MoeGeometry;
use lily_model::weights::MoeWeights;

use crate::fast::{Activations, Machine};
use crate::kernels::OutRows;
use crate::kernels::f32_ops;
use crate::kernels::matmul::Next;
use crate::plain::linear;
use crate::stages::moe_route::{Choice, Routing};
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

/// Tokens of an expert whose products are held before they are added.
pub const TOKEN_BLOCK: usize = 96;
/// Elements between the rows of `products` beyond `hidden`, so that they do not meet in one set of the cache.
const PADDING: usize = 16;

/// Elements of the scratch that [`fast`] needs.
pub fn scratch_elements(hidden: usize) -> usize {
    TOKEN_BLOCK * (hidden + PADDING)
}

/// Fast form: each task owns some columns of the residual stream and adds all experts to them, so that there
/// is one fork, no list of products to sum afterwards, and one order: by expert, the shared one last.
///
/// `products` is scratch of [`scratch_elements`].
pub fn fast(
    machine: &Machine,
    weights: &MoeWeights,
    routing: &Routing,
    routed: &Activations,
    shared: &Activations,
    products: &mut [f32],
    x: &mut [f32],
) {
    let hidden = weights.down_proj.rows;
    let products = OutRows::with_stride(products, hidden, hidden + PADDING);
    let x = OutRows::new(x, hidden);
    let tokens = routing.shared.len();
    let task_rows = machine.wide_task_rows(hidden);
    let block = |task: usize| task * task_rows..hidden.min((task + 1) * task_rows);
    let first = match routing.active.first() {
        Some(&expert) => weights.down_proj.at(expert as usize),
        None => weights.shared_down_proj.view(),
    };
    machine.pool.for_each_in_runs(hidden.div_ceil(task_rows), |task, next| {
        let rows = block(task);
        // SAFETY: these columns of both outputs are this task's.
        let add = |products: OutRows<'_>, i: usize, factor: f32, token: usize| unsafe {
            let (product, sum) = (products.row(i, rows.clone()), x.row(token, rows.clone()));
            f32_ops::axpy(machine.isa, factor, product, sum);
        };
        for (index, &expert) in routing.active.iter().enumerate() {
            let matrix = weights.down_proj.at(expert as usize);
            let next = match routing.active.get(index + 1) {
                Some(&expert) => weights.down_proj.at(expert as usize),
                None => weights.shared_down_proj.view(),
            };
            let next = Next::rows(&next, rows.start);
            let slots = routing.slots(index);
            for start in slots.clone().step_by(TOKEN_BLOCK) {
                let block = start..slots.end.min(start + TOKEN_BLOCK);
                // SAFETY: as above.
                unsafe {
                    let tokens = routed.indices(block.clone());
                    routed.multiply(machine, matrix, rows.clone(), tokens, products, next);
                }
                for (i, slot) in block.enumerate() {
                    add(products, i, routing.weights[slot], routing.tokens[slot] as usize);
                }
            }
        }
        let matrix = weights.shared_down_proj.view();
        let next = next.map_or(Next::UNKNOWN, |next| Next::rows(&first, block(next).start));
        for start in (0..tokens).step_by(TOKEN_BLOCK) {
            let block = start..tokens.min(start + TOKEN_BLOCK);
            // SAFETY: as above.
            unsafe {
                let tokens = shared.indices(block.clone());
                shared.multiply(machine, matrix, rows.clone(), tokens, products, next);
            }
            for (i, token) in block.enumerate() {
                add(products, i, routing.shared[token], token);
            }
        }
    });
}
