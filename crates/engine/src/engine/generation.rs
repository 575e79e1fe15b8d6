//! What a request gives back while it runs.

use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::sampler::TokenLogprobs;

/// News of one request, in the order [`Event::Prefill`]…, [`Event::Token`]…, then one [`Event::Finished`] or
/// [`Event::Failed`], which is the last. `Failed` can come at any time.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// `done` of the prompt's `total` tokens have been processed, or came from the prefix cache.
    Prefill {
        /// Tokens processed, those from the cache included.
        done: usize,
        /// Tokens that came from the cache.
        cached: usize,
        /// Tokens in the prompt.
        total: usize,
    },
    /// A token was chosen. An end-of-sequence token that ends the answer has no event of its own.
    Token {
        /// The token.
        id: u32,
        /// Text that became final with it: whole characters, special tokens left out, nothing that could
        /// still become a stop string. It can be empty, and can hold the text of earlier tokens.
        text: String,
        /// Present where [`SamplingParams::logprobs`](crate::sampler::SamplingParams::logprobs) asked.
        logprobs: Option<TokenLogprobs>,
        /// Time since the token before it; for the first, since the request was submitted.
        gap: Duration,
    },
    /// The answer is complete.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// Which of [`Request::stop`](crate::engine::Request::stop) ended it, if one did.
        stop: Option<usize>,
        /// Text that was held back until now; it follows that of the last [`Event::Token`].
        tail: String,
        /// What was processed.
        usage: Usage,
        /// Where the time went.
        timings: Timings,
    },
    /// The request failed; a sentence says why. Text sent before stands.
    Failed(String),
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended it.
    EndOfSequence,
    /// A stop string was found.
    StopString,
    /// `max_tokens` or the end of the context was reached.
    Length,
}

impl FinishReason {
    /// `stop` or `length`: OpenAI's name for it.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::EndOfSequence | FinishReason::StopString => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// Tokens processed for one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens in the prompt.
    pub prompt_tokens: usize,
    /// Those among them that the prefix cache had, so that they were not processed again.
    pub cached_tokens: usize,
    /// Tokens chosen, the end-of-sequence token and those of a stop string included, as vLLM counts them.
    pub completion_tokens: usize,
}

/// Where the time of one request went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// From submission until a place was free.
    pub queue: Duration,
    /// From there to the first token.
    pub prefill: Duration,
    /// From there to the end.
    pub decode: Duration,
}

/// A request that was taken. Dropping it cancels the request within one step.
///
/// Events wait in a queue without a fixed length, so that a slow reader never holds up the engine or other
/// readers; it is bounded all the same, by the tokens that a request may generate and the chunks of its
/// prompt.
#[derive(Debug)]
pub struct Generation {
    events: UnboundedReceiver<Event>,
}

impl Generation {
    /// The next event; `None` after the last.
    pub async fn recv(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// [`Generation::recv`] for threads outside an async runtime; inside one it panics.
    pub fn blocking_recv(&mut self) -> Option<Event> {
        self.events.blocking_recv()
    }
}

/// The engine's end of a [`Generation`].
#[derive(Debug)]
pub(super) struct EventSender(UnboundedSender<Event>);

impl EventSender {
    /// Nobody listening is no error: [`EventSender::is_cancelled`] notices.
    pub(super) fn send(&self, event: Event) {
        let _ = self.0.send(event);
    }

    /// Whether the [`Generation`] was dropped.
    pub(super) fn is_cancelled(&self) -> bool {
        self.0.is_closed()
    }
}

pub(super) fn channel() -> (EventSender, Generation) {
    let (sender, events) = unbounded_channel();
    (EventSender(sender), Generation { events })
}
