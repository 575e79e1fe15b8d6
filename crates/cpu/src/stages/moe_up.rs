//! `moe_up`: gate and up projections of the routed experts and of the shared one, joined by SwiGLU.

use std::cell::RefCell;
use std::ops::Range;

use lily_model::geometry::MoeGeometry;
use lily_model::weights::{MatrixView, MoeWeights};

use crate::fast::{Activations, ActivationsWriter, Machine};
use crate::kernels::OutRows;
use crate::kernels::f32_ops;
use crate::kernels::matmul::Next;
use crate::memory::Buffer;
use crate::plain::{linear, silu};
use crate::stages::moe_route::{Choice, Routing};

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
        swiglu_plain(
            &weights.gate_proj.at(expert),
            &weights.up_proj.at(expert),
            &slots,
            |i| row_of(i / geometry.top_k),
            routed,
        );
    }
    let all: Vec<usize> = (0..normed.len() / hidden).collect();
    swiglu_plain(&weights.shared_gate_proj.view(), &weights.shared_up_proj.view(), &all, row_of, shared);
}

/// Positions in `choices` that name `expert`.
pub fn slots_of(choices: &[Choice], expert: usize) -> Vec<usize> {
    (0..choices.len()).filter(|&i| choices[i].expert as usize == expert).collect()
}

/// `out[slot] = silu(gate x) * (up x)` for the inputs of `slots`.
fn swiglu_plain<'a>(
    gate: &MatrixView<'_>,
    up: &MatrixView<'_>,
    slots: &[usize],
    x: impl Fn(usize) -> &'a [f32] + Sync,
    out: &mut [f32],
) {
    if slots.is_empty() {
        return;
    }
    let width = gate.rows;
    linear(gate, slots.len(), |i| x(slots[i]), |row, i, value| out[slots[i] * width + row] = silu(value));
    linear(up, slots.len(), |i| x(slots[i]), |row, i, value| out[slots[i] * width + row] *= value);
}

/// Fast form: routed and shared experts in one fork, each expert's weights read once for all its tokens.
///
/// `routed` `[slots, expert_width]` and `shared` `[tokens, shared_width]` receive the inner activations.
pub fn fast(
    machine: &Machine,
    weights: &MoeWeights,
    normed: &Activations,
    routing: &Routing,
    routed: &mut Activations,
    shared: &mut Activations,
) {
    let (width, shared_width) = (weights.gate_proj.rows, weights.shared_gate_proj.rows);
    let tokens = routing.shared.len();
    let out = routed.writer();
    let shared_out = shared.writer();
    let task_rows = machine.task_rows_of_each(tokens, routing.active.len() + 1, width);
    let per_expert = width.div_ceil(task_rows);
    let routed_tasks = routing.active.len() * per_expert;
    let block = |index: usize, rows: usize| index * task_rows..rows.min((index + 1) * task_rows);
    // The gate and up projections of a task, and which of their rows it multiplies.
    let locate = |task: usize| {
        if task < routed_tasks {
            let expert = routing.active[task / per_expert] as usize;
            let matrices = [weights.gate_proj.at(expert), weights.up_proj.at(expert)];
            (matrices, block(task % per_expert, width))
        } else {
            let matrices = [weights.shared_gate_proj.view(), weights.shared_up_proj.view()];
            (matrices, block(task - routed_tasks, shared_width))
        }
    };
    machine.pool.for_each_in_runs(routed_tasks + shared_width.div_ceil(task_rows), |task, next| {
        let (matrices, rows) = locate(task);
        let next = next.map_or(Next::UNKNOWN, |next| {
            let ([gate, _], rows) = locate(next);
            Next::rows(&gate, rows.start)
        });
        // SAFETY: each expert's slots and each block of columns of them are one task's.
        unsafe {
            if task < routed_tasks {
                let slots = routing.slots(task / per_expert);
                let (first, tokens) = (slots.start, &routing.tokens[slots]);
                swiglu(machine, normed, matrices, rows, tokens, &out, first, next);
            } else {
                let tokens = normed.indices(0..tokens);
                swiglu(machine, normed, matrices, rows, tokens, &shared_out, 0, next);
            }
        }
    });
}

/// Bytes that a thread keeps for the gates of `tokens` tokens, at the most.
pub fn scratch_bytes(geometry: &MoeGeometry, tokens: usize) -> usize {
    tokens * geometry.expert_width.max(geometry.shared_width) * size_of::<f32>()
}

thread_local! {
    /// Gates of the present task, `[tokens, rows up to the task's last]`: in a cache of the core, where a buffer for all experts would
    /// not be.
    static GATES: RefCell<Buffer<f32>> = const { RefCell::new(Buffer::new()) };
}

/// Rows `rows` of gate and up for `tokens`; the joined activations go to rows `first` and following of `out`.
/// `next` is what this thread multiplies afterwards.
///
/// # Safety
/// Columns `rows` of those rows of `out` are this call's alone.
#[allow(clippy::too_many_arguments, reason = "one argument per tensor")]
unsafe fn swiglu(
    machine: &Machine,
    x: &Activations,
    matrices: [MatrixView<'_>; 2],
    rows: Range<usize>,
    tokens: &[u32],
    out: &ActivationsWriter<'_>,
    first: usize,
    next: Next,
) {
    let mut buffer = GATES.take();
    let needed = tokens.len() * rows.end;
    if buffer.len() < needed {
        buffer.resize(needed);
    }
    let gates = OutRows::new(&mut buffer[..needed], rows.end);
    // SAFETY: by contract; the gates are this thread's.
    unsafe {
        x.multiply_two(machine, matrices, rows.clone(), tokens, [gates, out.values().from_row(first)], next);
        for i in 0..tokens.len() {
            let gate = gates.row(i, rows.clone());
            out.fill(machine.isa, first + i, rows.clone(), |x| f32_ops::silu_gate(machine.isa, gate, x));
        }
    }
    GATES.set(buffer);
}
