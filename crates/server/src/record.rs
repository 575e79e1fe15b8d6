//! What is written down about requests: a line in the log for each answer, figures for monitoring, and, where
//! asked for, the text itself.
//!
//! A [`Recorder`] belongs to the model that is served; it hands out one [`Record`] for each answer, which follows
//! it to its end. An answer that is dropped before, because its client went away, is written down too. Prompt and
//! answer are never written down unless [`Recorder::log_text`] or [`Recorder::trace_dir`] asks for it.

mod trace;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lily_engine::engine::{FinishReason, Request};
use lily_engine::output::Delta;
use lily_model::tokenizer::Tokenizer;

use crate::answer::End;
use crate::metrics::Metrics;
use trace::Trace;

/// What all requests are written down to. The default is nothing but the log. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Recorder {
    /// Figures for monitoring.
    pub metrics: Option<Metrics>,
    /// Whether prompts and answers go into the log.
    pub log_text: bool,
    /// Where each exchange is written into a file of its own, token by token.
    pub trace_dir: Option<Arc<Path>>,
}

/// Follows one answer. The default follows nothing.
#[derive(Debug, Default)]
pub struct Record(Option<Box<Open>>);

/// An answer that has not ended.
#[derive(Debug)]
struct Open {
    id: String,
    metrics: Option<Metrics>,
    log_text: bool,
    trace: Option<Trace>,
    prompt_tokens: usize,
    generated: usize,
    started: Instant,
    first_token: Option<Duration>,
}

/// The name of one choice among those of a request: that of the request, numbered from the second on.
pub fn choice_id(request: &str, index: u64) -> String {
    if index == 0 { request.to_string() } else { format!("{request}-{index}") }
}

impl Recorder {
    /// Begins to follow the answer to `request`, whose name is `id`.
    pub fn begin(&self, id: &str, tokenizer: &Tokenizer, request: &Request) -> Record {
        let text = self.log_text || self.trace_dir.is_some();
        Record(Some(Box::new(Open {
            id: id.to_string(),
            metrics: self.metrics.clone(),
            log_text: self.log_text,
            trace: text.then(|| Trace::new(id, self.trace_dir.clone(), tokenizer.clone(), request)),
            prompt_tokens: request.prompt.len(),
            generated: 0,
            started: Instant::now(),
            first_token: None,
        })))
    }
}

impl Record {
    /// Forgets the answer: the engine did not take the request.
    pub fn discard(mut self) {
        self.0 = None;
    }

    /// A token came, `gap` after the one before it, with `text` and what was read into that.
    pub fn token(&mut self, id: u32, text: &str, gap: Duration, deltas: &[Delta]) {
        let Some(open) = &mut self.0 else { return };
        open.generated += 1;
        if let Some(metrics) = &open.metrics {
            match open.first_token {
                None => metrics.first_token(gap),
                Some(_) => metrics.next_token(gap),
            }
        }
        open.first_token.get_or_insert(gap);
        if let Some(trace) = &mut open.trace {
            trace.step(Some(id), text, gap, deltas);
        }
    }

    /// The answer came to its end, with `tail` and what was read into that.
    pub fn ended(&mut self, tail: &str, deltas: &[Delta], end: &End) {
        let Some(mut open) = self.0.take() else { return };
        let finish = match end.reason {
            FinishReason::EndOfSequence | FinishReason::StopString if end.called => "tool_calls",
            reason => reason.as_str(),
        };
        if let Some(metrics) = &open.metrics {
            // An answer that is nothing but its end has a first token all the same.
            if open.first_token.is_none() {
                metrics.first_token(end.first_token());
            }
            metrics.ended(end);
        }
        if let Some(trace) = &mut open.trace {
            trace.step(None, tail, Duration::ZERO, deltas);
        }
        tracing::info!(
            id = open.id,
            prompt = end.usage.prompt_tokens,
            cached = end.usage.cached_tokens,
            completion = end.usage.completion_tokens,
            reasoning = end.reasoning_tokens,
            ttft_ms = milliseconds(end.first_token()),
            queue_ms = milliseconds(end.timings.queue),
            prefill_ms = milliseconds(end.timings.prefill),
            decode_ms = milliseconds(end.timings.decode),
            tokens_per_s = (end.decode_rate() * 10.0).round() / 10.0,
            finish,
            "answered"
        );
        open.write_text(finish, None);
    }

    /// The engine failed; `reason` says how.
    pub fn failed(&mut self, reason: &str) {
        let Some(open) = self.0.take() else { return };
        open.count("error");
        let (prompt, completion) = (open.prompt_tokens, open.generated);
        tracing::warn!(id = open.id, prompt, completion, reason, finish = "error", "failed");
        open.write_text("error", Some(reason));
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let Some(open) = self.0.take() else { return };
        open.count("abort");
        let (prompt, completion) = (open.prompt_tokens, open.generated);
        let after_ms = milliseconds(open.started.elapsed());
        tracing::info!(id = open.id, prompt, completion, after_ms, finish = "abort", "the client went away");
        open.write_text("abort", None);
    }
}

impl Open {
    /// Counts an answer that did not come to its end, before its line goes into the log: whoever has read that is to
    /// find it counted.
    fn count(&self, finish: &'static str) {
        if let Some(metrics) = &self.metrics {
            metrics.finished(finish);
        }
    }

    /// Prompt and answer, where they are asked for.
    fn write_text(self, finish: &str, reason: Option<&str>) {
        let Some(trace) = &self.trace else { return };
        if self.log_text {
            tracing::info!(id = self.id, prompt = trace.prompt(), answer = trace.answer(), "text");
        }
        trace.write(&self.id, finish, reason);
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
