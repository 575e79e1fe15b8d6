//! `embed`: token ids to rows of the embedding table.
//!
//! The table is read in place; one row per token is expanded to f32. There is nothing to gain from a second
//! form: the plain one is the only one.

use lily_model::weights::MatrixView;

use crate::plain::dequantize_row;

/// Writes row `tokens[t]` of `table` `[vocab, hidden]` to `out` `[tokens, hidden]`.
///
/// Every token must be below `table.rows`; the backend refuses others before any work starts.
pub fn reference(table: &MatrixView<'_>, tokens: &[u32], out: &mut [f32]) {
    for (&token, row) in tokens.iter().zip(out.chunks_exact_mut(table.cols)) {
        dequantize_row(table, token as usize, row);
    }
}
