//! The one interface between the engine and a device.
//!
//! A backend knows sequences, not operators: it opens one (fresh, or from a snapshot), extends it by tokens,
//! enqueues a decode step for a batch of them, and hands back what was sampled. Enqueue and collect are
//! separate calls so that step n+1 can be on the device before the host has seen token n: a
//! [`DecodeStep`] may say "the token you just sampled" instead of naming one.
//!
//! A backend holds no policy: which sequence runs, how long a chunk is and what is evicted is decided above.
//!
//! # What a new backend owes
//!
//! - **The same state.** The state of a sequence after some tokens is a function of those tokens alone: not of
//!   how they were cut into calls, of what shared a step, or of whether the way began at a snapshot. The prefix
//!   cache, preemption and the disk tier rest on it. What shares a step changes no bit, on any backend. The CPU gives a
//!   token the same bits in every way; the GPUs read prompts with other kernels than they decode with, and CUDA's cut them
//!   into chunks of 64 positions, so that a token differs in last bits between the two and where a prompt is cut off
//!   that grid.
//! - **Keys and values in pages** that sequences and snapshots share. A full page is never written again; one
//!   that is partly filled and shared is copied before it is written. So [`Backend::open`] and
//!   [`Backend::snapshot`] cost a copy of the recurrent state, whatever the length.
//! - **True counts.** [`Backend::memory`] counts every byte of state once, however many share it, and is exact
//!   after each call: the cache's budget and admission read nothing else.
//! - **Errors, not ends.** A call that would pass [`Memory::limit`], or that the device has no memory for, fails
//!   with [`BackendError::OutOfMemory`] and changes nothing. The engine then frees what it can and asks again.
//! - **Panics lose no more than their sequences.** After a panic in [`Backend::extend`] or [`Backend::decode`]
//!   the sequences named may be gone, and the engine closes them; everything else must still work.

use std::io::{self, Read, Write};

use lily_model::geometry::Geometry;

use crate::sampler::SamplerState;

/// A sequence that a backend holds state for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// A frozen copy of a sequence's state at some length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SnapshotId(pub u64);

/// Work that was enqueued and not yet collected.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Ticket(pub u64);

/// What the host wants back from a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Nothing: the state advances and no row goes through the head.
    Nothing,
    /// The token after the last row, chosen on the device: the greedy one (lowest id among equals), or as
    /// [`Backend::sample_on_device`] said.
    Token,
    /// The last row's logits, `[vocab]`, beside that token.
    Logits,
    /// Every row's logits, `[tokens, vocab]`, beside that token.
    AllLogits,
}

/// The token that a decode step consumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// This one.
    Token(u32),
    /// The token that the device chose after the sequence's previous step, be it a prefill or a decode, which must have wanted
    /// more than [`Want::Nothing`]. That step need not have been collected.
    LastSampled,
}

/// One sequence's part in a batched decode step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeStep {
    /// The sequence to advance by one token.
    pub sequence: SequenceId,
    /// The token it consumes.
    pub input: Input,
    /// What comes back ([`Want::AllLogits`] is the same as [`Want::Logits`] here).
    pub want: Want,
}

/// What one sequence's step produced.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutput {
    /// The sequence that advanced.
    pub sequence: SequenceId,
    /// The token chosen after the last row; `None` for [`Want::Nothing`].
    pub token: Option<u32>,
    /// f32 logits, `[rows, vocab]`, rows as [`Want`] says; empty where none were wanted.
    pub logits: Vec<f32>,
}

/// Tokens of a prompt that one call of [`Backend::extend`] is best given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillChunks {
    /// While nobody waits for a next token: as many as make the device fast, and few enough to cancel in between.
    pub alone: usize,
    /// While streams run, which wait for such a call between two of their tokens.
    pub busy: usize,
}

/// What a device can do at the most, measured on it now: the base of the floors that speeds are quoted against.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Bytes per second that a plain read of memory far larger than any cache reaches, with all the threads or
    /// cores that the backend computes with.
    pub read_bytes_per_second: f64,
    /// Operations per second (multiplication and addition are two) of the instruction that multiplies weights
    /// with activations, operands in registers; `None` where there is no such instruction.
    pub matrix_ops_per_second: Option<f64>,
}

/// What a stage of the model took of a step, all layers together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageTime {
    /// The stage's name.
    pub stage: &'static str,
    /// Kernels that ran for it.
    pub kernels: usize,
    /// Seconds of the device.
    pub seconds: f64,
}

/// Bytes of state, which is what grows with requests: recurrent states, pages of keys and values. Weights and
/// scratch buffers are not in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// What sequences, snapshots and exports hold together; what several share counts once.
    pub used: u64,
    /// The part of `used` that snapshots hold, be it shared with sequences or not.
    pub snapshots: u64,
    /// The most that `used` may become.
    pub limit: u64,
}

/// Writes a snapshot's state down. It owns or shares what it needs, so that it can be called on another thread
/// while the device goes on, and after the snapshot was discarded.
pub type Export = Box<dyn FnOnce(&mut dyn Write) -> io::Result<()> + Send>;

/// Why a backend could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The sequence, snapshot or ticket is not (or no longer) known: a bug in the caller.
    #[error("the backend does not know {0}; it was closed or never opened")]
    Unknown(String),
    /// The sequence would grow past the context that the backend was built for.
    #[error(
        "{needed} tokens do not fit the context of {limit}; shorten the prompt or start with a larger --ctx-len"
    )]
    ContextFull {
        /// Tokens that the step would have brought the sequence to.
        needed: usize,
        /// The most a sequence may hold.
        limit: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    BadToken {
        /// The offending id.
        token: u32,
        /// Rows of the embedding table.
        vocab: usize,
    },
    /// State for the sequence does not fit into memory.
    #[error("no memory for {what} ({bytes} bytes); close other sequences or lower --ctx-len")]
    OutOfMemory {
        /// What was to be allocated.
        what: &'static str,
        /// Its size.
        bytes: usize,
    },
    /// What was to be imported is not what an export wrote.
    #[error("the saved state cannot be used: {0}; it will be computed again")]
    BadExport(String),
    /// The device failed.
    #[error("the device failed: {0}")]
    Device(String),
    /// The backend panicked: a bug. The engine says it in a backend's stead.
    #[error("the backend panicked ({0}); please report this")]
    Panicked(String),
}

/// A device that runs the model.
pub trait Backend: Send {
    /// Shape of the model it holds.
    fn geometry(&self) -> &Geometry;

    /// One line for people: device, instruction set, threads.
    fn description(&self) -> String;

    /// The most tokens that one sequence may hold.
    fn context_limit(&self) -> usize;

    /// Whether an enqueue returns before the work is done, so that a step is best enqueued before the last one is
    /// collected.
    fn runs_ahead(&self) -> bool {
        false
    }

    /// How a prompt is best cut.
    fn prefill_chunks(&self) -> PrefillChunks {
        PrefillChunks { alone: 512, busy: 512 }
    }

    /// Measures what the device can do at the most, which takes a second or so and, for a small model, memory;
    /// `None` where the backend has no way to.
    fn limits(&mut self) -> Option<Limits> {
        None
    }

    /// Decodes one token of `sequence`, as [`Backend::decode`] does with [`Want::Token`], and times every stage of that
    /// step by itself; `None`, and nothing has changed, where the backend has no such timing. What kernels of different
    /// stages do at the same time in a step they do one after the other here, so the times may come to more than a
    /// step takes.
    fn decode_timed(
        &mut self,
        sequence: SequenceId,
        input: Input,
    ) -> Result<Option<Vec<StageTime>>, BackendError> {
        let _ = (sequence, input);
        Ok(None)
    }

    /// Opens a sequence: empty, or continuing `from` a snapshot (which stays valid).
    fn open(&mut self, from: Option<SnapshotId>) -> Result<SequenceId, BackendError>;

    /// Tokens that the sequence holds.
    fn length(&self, sequence: SequenceId) -> Result<usize, BackendError>;

    /// Has the device choose the tokens of `sequence` from now on as a sampler in this state would, and advance the
    /// state with each step that wants more than [`Want::Nothing`]. Snapshots do not hold it. `false`, and nothing
    /// has changed, where the device cannot or has no memory for it: the engine then chooses from logits.
    fn sample_on_device(&mut self, sequence: SequenceId, state: &SamplerState) -> Result<bool, BackendError> {
        let _ = (sequence, state);
        Ok(false)
    }

    /// Enqueues prefill of `tokens` (at least one) at the end of the sequence. The answer does not depend
    /// on how a prompt is cut into calls. On error the sequence is as it was.
    fn extend(&mut self, sequence: SequenceId, tokens: &[u32], want: Want) -> Result<Ticket, BackendError>;

    /// Enqueues one token for each sequence named (each at most once). The answer of a sequence does not
    /// depend on which others are in the batch. On error every sequence is as it was.
    fn decode(&mut self, steps: &[DecodeStep]) -> Result<Ticket, BackendError>;

    /// Waits for enqueued work and returns one output per sequence, in the order given. The engine collects
    /// tickets in the order of enqueueing, each once.
    fn collect(&mut self, ticket: Ticket) -> Result<Vec<StepOutput>, BackendError>;

    /// Freezes the sequence's state at its present length, as if all that was enqueued for it were done.
    fn snapshot(&mut self, sequence: SequenceId) -> Result<SnapshotId, BackendError>;

    /// Frees a snapshot. Unknown ids are ignored.
    fn discard(&mut self, snapshot: SnapshotId);

    /// What state takes now, and the most that it may take.
    fn memory(&self) -> Memory;

    /// Bytes of [`Memory::used`] that a sequence of `tokens` tokens takes which shares nothing. For 0 tokens it
    /// is what does not grow: the recurrent state.
    fn sequence_bytes(&self, tokens: usize) -> u64;

    /// Names everything that the bytes of an export and the bits of the state in it depend on, apart from the
    /// weights: format, numerics, sizes. An export is imported only where the name is the same.
    fn layout(&self) -> String;

    /// Prepares to write a snapshot's state down.
    fn export(&mut self, snapshot: SnapshotId) -> Result<Export, BackendError>;

    /// Makes a snapshot of `length` tokens of what an [`Export`] wrote. Bytes that were not written by an export
    /// of that length and this layout are refused as [`BackendError::BadExport`], or give a snapshot whose
    /// numbers are wrong; nothing else comes of them.
    fn import(&mut self, length: usize, state: &mut dyn Read) -> Result<SnapshotId, BackendError>;

    /// Frees a sequence. Unknown ids are ignored. The engine collects every ticket that names it first.
    fn close(&mut self, sequence: SequenceId);
}
