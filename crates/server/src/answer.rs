//! One answer while it is generated: the engine's events, taken apart into reasoning, content and tool calls.
//!
//! Protocols differ in how they write the same news; what is common to them, and to `lily chat`, is here.

use std::time::{Duration, Instant};

use lily_engine::engine::{Event, FinishReason, Generation, Timings, Usage};
use lily_engine::output::{Delta, OutputParser};
use lily_engine::sampler::TokenLogprobs;
use serde_json::Value;

use crate::record::Record;
use crate::turns::{self, Turns, Written};

/// How an answer's text is to be read.
#[derive(Clone, Copy, Debug)]
pub enum Form<'a> {
    /// A turn of a conversation, with reasoning and tool calls in it.
    Turn {
        /// Whether the prompt ended inside a thinking block.
        thinking: bool,
        /// The tools that were declared.
        tools: &'a [Value],
    },
    /// The continuation of a prompt that is no conversation: all of it is content.
    Plain,
}

/// An answer under way. Dropping it stops the work.
#[derive(Debug)]
pub struct Answer {
    generation: Generation,
    started: Instant,
    /// `None` where the text is taken as it comes.
    parser: Option<OutputParser>,
    reasoning_tokens: usize,
    called: bool,
    turn: String,
    /// What is kept of it, and where.
    kept: Option<(Turns, Written)>,
    /// Whether it is kept even where it calls nothing.
    by_items: bool,
    record: Record,
}

/// What happened next.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// `done` of the prompt's `total` tokens have been read.
    Prefill {
        /// Tokens read, those from the prefix cache included.
        done: usize,
        /// Tokens that came from the prefix cache.
        cached: usize,
        /// Tokens of the prompt.
        total: usize,
        /// Time since the request.
        elapsed: Duration,
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
    /// Which of the request's stop strings ended it, if one did.
    pub stop: Option<usize>,
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
    /// Time from the request to its first token.
    pub fn first_token(&self) -> Duration {
        self.timings.queue + self.timings.prefill
    }

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
    /// Follows `generation`, reads its text as `form` says and writes what happens into `record`.
    pub fn new(generation: Generation, form: Form<'_>, record: Record) -> Answer {
        let parser = match form {
            Form::Turn { thinking, tools } => Some(OutputParser::new(thinking, tools)),
            Form::Plain => None,
        };
        Answer {
            generation,
            started: Instant::now(),
            parser,
            reasoning_tokens: 0,
            called: false,
            turn: turns::new_id(),
            kept: None,
            by_items: false,
            record,
        }
    }

    /// The same, kept in `turns` when it is complete and calls something; `opening` is the end of its prompt, from
    /// where the model's turn begins.
    pub fn kept_in(self, turns: &Turns, opening: &str) -> Answer {
        let written = Written { opening: opening.to_string(), ..Written::default() };
        Answer { kept: Some((turns.clone(), written)), ..self }
    }

    /// The same, for protocols that give an id to more than calls: kept even where it calls nothing.
    pub fn known_by_items(self) -> Answer {
        Answer { by_items: true, ..self }
    }

    /// The answer's id, which is to be a part of the ids of its calls and items: `call_` id `_0`.
    pub fn turn(&self) -> &str {
        &self.turn
    }

    /// Waits for what happens next; nothing comes after [`News::End`]. An error is one sentence about a
    /// failure of the engine.
    pub async fn next(&mut self) -> Result<News, String> {
        match self.generation.recv().await {
            Some(Event::Prefill { done, cached, total }) => {
                Ok(News::Prefill { done, cached, total, elapsed: self.started.elapsed() })
            }
            Some(Event::Token { id, text, logprobs, gap }) => {
                let thinking = self.parser.as_ref().is_some_and(OutputParser::in_reasoning);
                self.reasoning_tokens += usize::from(thinking);
                if let Some((_, written)) = &mut self.kept {
                    written.tokens.push(id);
                }
                let deltas = self.take_apart(&text);
                self.record.token(id, &text, gap, &deltas);
                let scored = logprobs.filter(|_| !thinking).map(|logprobs| (id, logprobs));
                Ok(News::Token { deltas, scored })
            }
            Some(Event::Finished { reason, stop, tail, usage, timings }) => {
                let mut deltas = self.take_apart(&tail);
                let held = self.parser.as_mut().map(OutputParser::finish).unwrap_or_default();
                self.note(&held);
                deltas.extend(held);
                // What was cut off at a stop string or a limit is not what the client has.
                let complete = reason == FinishReason::EndOfSequence && (self.called || self.by_items);
                if let (true, Some((turns, written))) = (complete, self.kept.take()) {
                    turns.keep(&self.turn, written);
                }
                let (called, reasoning_tokens) = (self.called, self.reasoning_tokens);
                let end = End { reason, stop, called, usage, reasoning_tokens, timings };
                self.record.ended(&tail, &deltas, &end);
                Ok(News::End { deltas, end })
            }
            Some(Event::Failed(reason)) => Err(self.failed(reason)),
            None => {
                Err(self.failed("the engine ended before the answer did; restart the program".to_string()))
            }
        }
    }

    /// Waits for the end: all parts, all scored tokens, and how it ended.
    pub async fn collect(mut self) -> Result<(Vec<Delta>, Vec<(u32, TokenLogprobs)>, End), String> {
        let (mut parts, mut scored) = (Vec::new(), Vec::new());
        loop {
            match self.next().await? {
                News::Prefill { .. } => {}
                News::Token { deltas, scored: token } => {
                    parts.extend(deltas);
                    scored.extend(token);
                }
                News::End { deltas, end } => {
                    parts.extend(deltas);
                    return Ok((parts, scored, end));
                }
            }
        }
    }

    fn failed(&mut self, reason: String) -> String {
        self.record.failed(&reason);
        reason
    }

    fn take_apart(&mut self, text: &str) -> Vec<Delta> {
        let deltas = match &mut self.parser {
            Some(parser) => parser.push(text),
            None if text.is_empty() => Vec::new(),
            None => vec![Delta::Content(text.to_string())],
        };
        self.note(&deltas);
        deltas
    }

    fn note(&mut self, deltas: &[Delta]) {
        self.called |= deltas.iter().any(|delta| matches!(delta, Delta::ToolCall { .. }));
        if let Some((_, written)) = &mut self.kept {
            written.hear(deltas);
        }
    }
}
