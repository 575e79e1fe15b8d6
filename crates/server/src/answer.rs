//! One answer while it is generated: the engine's events, taken apart into reasoning, content and tool calls.
//!
//! Protocols differ in how they write the same news; what is common to them, and to `lily chat`, is here.

use std::time::Duration;

use lily_engine::engine::{Event, FinishReason, Generation, Timings, Usage};
use lily_engine::output::{Delta, OutputParser};
use lily_engine::sampler::TokenLogprobs;
use serde_json::Value;

/// An answer under way. Dropping it stops the work.
#[derive(Debug)]
pub struct Answer {
    generation: Generation,
    parser: OutputParser,
    reasoning_tokens: usize,
    called: bool,
}

/// What happened next.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// `done` of the prompt's `total` tokens have been read.
    Prefill {
        /// Tokens read.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// A token was chosen.
    Token {
        /// What became certain with it; often nothing.
        deltas: Vec<Delta>,
        /// The token's id and log probabilities, where those were asked for and it is no thinking.
        scored: Option<(u32, TokenLogprobs)>,
    },
    /// The answer is complete.
    End {
        /// What was held back.
        deltas: Vec<Delta>,
        /// How it ended.
        end: End,
    },
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// Why, in the engine's terms.
    pub reason: FinishReason,
    /// Whether it holds tool calls.
    pub called: bool,
    /// Tokens read and written.
    pub usage: Usage,
    /// Tokens of thinking among those written.
    pub reasoning_tokens: usize,
    /// Where the time went.
    pub timings: Timings,
}

impl End {
    /// Prompt tokens per second of prefill; those that came from the cache took no work.
    pub fn prefill_rate(&self) -> f64 {
        rate(self.usage.prompt_tokens - self.usage.cached_tokens, self.timings.prefill)
    }

    /// Generated tokens per second of decode; the first token is prefill's.
    pub fn decode_rate(&self) -> f64 {
        rate(self.usage.completion_tokens.saturating_sub(1), self.timings.decode)
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    // Work that took no time that a clock could see has no rate worth dividing by zero for.
    tokens as f64 / time.as_secs_f64().max(f64::EPSILON)
}

impl Answer {
    /// Follows `generation`, whose prompt ended inside a thinking block (`thinking`) or not and declared
    /// `tools`.
    pub fn new(generation: Generation, thinking: bool, tools: &[Value]) -> Answer {
        let parser = OutputParser::new(thinking, tools);
        Answer { generation, parser, reasoning_tokens: 0, called: false }
    }

    /// Waits for what happens next; nothing comes after [`News::End`]. An error is one sentence about a
    /// failure of the engine.
    pub async fn next(&mut self) -> Result<News, String> {
        match self.generation.recv().await {
            Some(Event::Prefill { done, total }) => Ok(News::Prefill { done, total }),
            Some(Event::Token { id, text, logprobs }) => {
                let thinking = self.parser.in_reasoning();
                self.reasoning_tokens += usize::from(thinking);
                let deltas = self.parser.push(&text);
                self.note_calls(&deltas);
                let scored = logprobs.filter(|_| !thinking).map(|logprobs| (id, logprobs));
                Ok(News::Token { deltas, scored })
            }
            Some(Event::Finished { reason, tail, usage, timings }) => {
                let mut deltas = self.parser.push(&tail);
                deltas.extend(self.parser.finish());
                self.note_calls(&deltas);
                let (called, reasoning_tokens) = (self.called, self.reasoning_tokens);
                Ok(News::End { deltas, end: End { reason, called, usage, reasoning_tokens, timings } })
            }
            Some(Event::Failed(reason)) => Err(reason),
            None => Err("the engine ended before the answer did; restart the program".to_string()),
        }
    }

    fn note_calls(&mut self, deltas: &[Delta]) {
        self.called |= deltas.iter().any(|delta| matches!(delta, Delta::ToolCall(_)));
    }
}
