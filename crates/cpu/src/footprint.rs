//! What the fast pass takes of memory beside the mapped weights, known before anything is allocated.
//!
//! Every size comes from the module that allocates it, so that whoever adds a buffer there sees where it counts.

use lily_model::geometry::{Geometry, LayerKind};

use crate::backend::prefill_chunk;
use crate::kernels::attention::SPAN_POSITIONS;
use crate::kernels::matmul::packed_bytes;
use crate::kv_cache::KvFormat;
use crate::sequence::Sequence;
use crate::stages::moe_up;
use crate::workspace::Workspace;

/// What the kernels keep for each thread, at the most: unpacked pages and tiles, a head's state.
const THREAD_BYTES: usize = 1 << 20;
/// Logits of the last decode step, which are kept, and of a prefill.
const LOGIT_ROWS: usize = 2;

/// Memory of its own that a [`CpuBackend`](crate::CpuBackend) with int8 arithmetic takes, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Recurrent state and KV cache of one sequence.
    pub state: usize,
    /// Scratch buffers, logits and what was derived from the weights.
    pub scratch: usize,
}

impl Footprint {
    /// For one sequence of `tokens` tokens with its keys and values in `format`, computed by `threads` threads.
    pub fn new(geometry: &Geometry, format: KvFormat, threads: usize, tokens: usize) -> Footprint {
        let delta = &geometry.delta;
        let rows = prefill_chunk().min(tokens);
        // In the weights as the model has them, and by head as the pass wants them.
        let taps = 2 * geometry.count(LayerKind::Delta) * delta.conv_channels() * delta.conv_width;
        // What threads that share a query leave for each span: sums, and two numbers for each head.
        let attention = &geometry.attention;
        let spans = tokens.div_ceil(SPAN_POSITIONS) * attention.heads * (attention.head_dim + 2);
        let widest = geometry.hidden.max(attention.heads * attention.head_dim).max(delta.value_width());
        let thread = THREAD_BYTES + packed_bytes(rows, widest) + moe_up::scratch_bytes(&geometry.moe, rows);
        let floats = taps + spans + LOGIT_ROWS * geometry.vocab;
        Footprint {
            state: Sequence::bytes(geometry, format, tokens),
            scratch: floats * size_of::<f32>() + Workspace::bytes(geometry, rows, 1) + threads * thread,
        }
    }

    /// All of it.
    pub fn total(&self) -> usize {
        self.state.saturating_add(self.scratch)
    }
}
