//! `head`: the last norm and the logits, for the rows that want them.

use lily_model::weights::MatrixView;

use crate::fast::{Activations, Machine, Precision, Projection, project as project_fast};
use crate::plain::{norm_rows, project};

/// Plain form: `x` is `[rows, hidden]` of the residual stream, `logits` `[rows, vocab]`.
pub fn reference(lm_head: &MatrixView<'_>, norm: &[f32], eps: f32, x: &[f32], logits: &mut [f32]) {
    project(lm_head, &norm_rows(x, norm, eps), logits);
}

/// Fast form; `normed` is scratch of the shape of `x`.
pub fn fast(
    machine: &Machine,
    lm_head: MatrixView<'_>,
    norm: &[f32],
    eps: f32,
    x: &[f32],
    normed: &mut Activations,
    logits: &mut [f32],
) {
    normed.norm(machine, x, norm, eps);
    project_fast(machine, normed, [Projection { matrix: lm_head, out: logits, precision: Precision::Int8 }]);
}
