//! `head`: the last norm and the logits, for the rows that want them.

use lily_model::weights::MatrixView;

use crate::plain::{norm_rows, project};

/// Plain form: `x` is `[rows, hidden]` of the residual stream, `logits` `[rows, vocab]`.
pub fn reference(lm_head: &MatrixView<'_>, norm: &[f32], eps: f32, x: &[f32], logits: &mut [f32]) {
    project(lm_head, &norm_rows(x, norm, eps), logits);
}
