//! What can be asked of the engine, and why it may refuse.

use std::time::Duration;

use crate::constraint::{Constraint, ConstraintError};
use crate::sampler::{InvalidParam, SamplingParams};
use crate::stop::InvalidStop;

/// One sequence to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The prompt's tokens, at least one.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// The most tokens to generate, at least 1; `None` runs to the end of the context.
    pub max_tokens: Option<usize>,
    /// Text that ends the answer and is not part of it: see [`crate::stop`].
    pub stop: Vec<String>,
    /// Generate past end-of-sequence tokens.
    pub ignore_eos: bool,
    /// What the answer must look like, after its reasoning where the prompt opens a block of it. The answer ends
    /// when nothing can follow; at `max_tokens` it is cut off like any other.
    pub constraint: Option<Constraint>,
    /// The most tokens of reasoning, where the prompt ends inside a block of it: then the block is closed in the
    /// chat template's words, which count like other tokens of the answer. `None` leaves its end to the model.
    pub thinking_budget: Option<usize>,
    /// Tokens per prefill call, at least 1; `None` takes the engine's
    /// ([`EngineOptions::prefill_chunk`](crate::engine::EngineOptions::prefill_chunk)).
    pub prefill_chunk: Option<usize>,
}

impl Request {
    /// A greedy request that runs to the end of the sequence or of the context.
    pub fn new(prompt: Vec<u32>) -> Request {
        Request {
            prompt,
            sampling: SamplingParams::default(),
            max_tokens: None,
            stop: Vec::new(),
            ignore_eos: false,
            constraint: None,
            thinking_budget: None,
            prefill_chunk: None,
        }
    }
}

/// Why a request was not taken. Nothing was started.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// There is nothing to continue.
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {prompt} tokens, but the context holds {limit} and the answer needs at least one; shorten the prompt or start with a larger --ctx-len"
    )]
    PromptTooLong {
        /// Tokens in the prompt.
        prompt: usize,
        /// Tokens that prompt and answer may hold together.
        limit: usize,
    },
    /// The prompt is within the context, but no memory will ever be free for it.
    #[error(
        "the prompt has {prompt} tokens, but the {memory} bytes that there are for the state of requests hold {fits} tokens at the most, the answer included; shorten the prompt, or free memory and start again"
    )]
    NeverFits {
        /// Tokens in the prompt.
        prompt: usize,
        /// Tokens of prompt and answer that memory holds.
        fits: usize,
        /// Bytes that there are for state.
        memory: u64,
    },
    /// A prompt token that the model does not have.
    #[error("the prompt's token {token} is outside the vocabulary of {vocab}; use the model's own tokenizer")]
    BadToken {
        /// The offending id.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A limit of zero.
    #[error("{field} is 0; it must be at least 1")]
    Zero {
        /// `max_tokens` or `prefill_chunk`.
        field: &'static str,
    },
    /// A sampling parameter outside its range.
    #[error(transparent)]
    Sampling(#[from] InvalidParam),
    /// Stop strings that cannot be used.
    #[error(transparent)]
    Stop(#[from] InvalidStop),
    /// A constraint that cannot be enforced.
    #[error(transparent)]
    Constraint(#[from] ConstraintError),
    /// As many requests were taken as may be.
    #[error("{running} requests are running and {waiting} are waiting, which is the most; try again later")]
    Busy {
        /// Requests that hold a place.
        running: usize,
        /// Requests that wait for one.
        waiting: usize,
        /// When a place is likely to be free, by how long requests held theirs lately; zero where none has ended.
        free_in: Duration,
    },
    /// The engine no longer takes requests.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}
