//! One running request: what of it is enqueued, what is known, and what its reader has been told.

use std::time::Instant;

use lily_model::detokenizer::Detokenizer;
use lily_model::tokenizer::Tokenizer;

use super::generation::{Event, EventSender, FinishReason, Timings, Usage};
use super::queue::Job;
use crate::backend::{DecodeStep, Input, SequenceId, StepOutput, Want};
use crate::sampler::Sampler;
use crate::stop::StopMatcher;

/// See the module's page.
pub(super) struct Active {
    pub(super) sequence: SequenceId,
    prompt: Vec<u32>,
    chunk: usize,
    max_tokens: usize,
    ignore_eos: bool,
    /// `None` where the device's own choice is all that is asked for.
    sampler: Option<Sampler>,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    events: EventSender,

    /// Prompt tokens handed to the backend.
    prompt_enqueued: usize,
    /// Prompt tokens processed.
    prompt_done: usize,
    /// Tokens whose choice was enqueued; at most one more than `chosen`.
    requested: usize,
    /// Tokens known here.
    chosen: usize,
    /// The last of them.
    last: u32,
    /// Tickets that name this sequence and are not collected.
    in_flight: usize,
    /// Nothing more is enqueued or sent; the sequence is closed when nothing is in flight.
    finished: bool,

    submitted: Instant,
    admitted: Instant,
    first_token: Option<Instant>,
}

impl Active {
    pub(super) fn new(job: Job, sequence: SequenceId, tokenizer: &Tokenizer) -> Active {
        let sampler = (!job.sampling.device_can_sample()).then(|| Sampler::new(job.sampling, &job.prompt));
        Active {
            sequence,
            prompt: job.prompt,
            chunk: job.chunk,
            max_tokens: job.max_tokens,
            ignore_eos: job.ignore_eos,
            sampler,
            detokenizer: Detokenizer::new(tokenizer.clone()),
            stops: job.stops,
            events: job.events,
            prompt_enqueued: 0,
            prompt_done: 0,
            requested: 0,
            chosen: 0,
            last: 0,
            in_flight: 0,
            finished: false,
            submitted: job.submitted,
            admitted: Instant::now(),
            first_token: None,
        }
    }

    /// Whether the host chooses this sequence's tokens, so that its next step has to wait for the last one.
    pub(super) fn needs_host(&self) -> bool {
        self.sampler.is_some()
    }

    /// Whether the sequence can be closed.
    pub(super) fn is_over(&self) -> bool {
        self.finished && self.in_flight == 0
    }

    /// Notices that nobody listens any more.
    pub(super) fn notice_cancellation(&mut self) {
        self.finished |= self.events.is_cancelled();
    }

    fn want(&self) -> Want {
        if self.needs_host() { Want::Logits } else { Want::Token }
    }

    /// The prompt's next chunk to enqueue and what to ask of it.
    pub(super) fn next_chunk(&self) -> Option<(&[u32], Want)> {
        let rest = &self.prompt[self.prompt_enqueued..];
        if self.finished || rest.is_empty() {
            return None;
        }
        let chunk = &rest[..self.chunk.min(rest.len())];
        Some((chunk, if chunk.len() == rest.len() { self.want() } else { Want::Nothing }))
    }

    /// A chunk of `tokens` was enqueued.
    pub(super) fn chunk_enqueued(&mut self, tokens: usize) {
        self.in_flight += 1;
        self.prompt_enqueued += tokens;
        if self.prompt_enqueued == self.prompt.len() {
            self.requested = 1;
        }
    }

    /// The decode step that can be enqueued now.
    pub(super) fn next_step(&self) -> Option<DecodeStep> {
        if self.finished || self.requested == 0 || self.requested >= self.max_tokens {
            return None;
        }
        let input = match self.requested - self.chosen {
            0 => Input::Token(self.last),
            1 if !self.needs_host() => Input::LastSampled,
            _ => return None,
        };
        Some(DecodeStep { sequence: self.sequence, input, want: self.want() })
    }

    /// The step from [`Active::next_step`] was enqueued.
    pub(super) fn step_enqueued(&mut self) {
        self.in_flight += 1;
        self.requested += 1;
    }

    /// A prefill chunk of `tokens` was collected.
    pub(super) fn chunk_collected(&mut self, tokens: usize, output: StepOutput, eos: &[u32]) {
        self.in_flight -= 1;
        if self.finished {
            return;
        }
        self.prompt_done += tokens;
        self.events.send(Event::Prefill { done: self.prompt_done, total: self.prompt.len() });
        if self.prompt_done == self.prompt.len() {
            self.choose(output, eos);
        }
    }

    /// A decode step was collected. One that was enqueued before its sequence was seen to end is dropped here.
    pub(super) fn step_collected(&mut self, output: StepOutput, eos: &[u32]) {
        self.in_flight -= 1;
        if !self.finished {
            self.choose(output, eos);
        }
    }

    /// A ticket with this sequence in it was lost.
    pub(super) fn collect_failed(&mut self, message: String) {
        self.in_flight -= 1;
        self.fail(message);
    }

    /// Ends the request with a sentence that says why.
    pub(super) fn fail(&mut self, message: String) {
        if !self.finished {
            self.finished = true;
            self.events.send(Event::Failed(message));
        }
    }

    /// Takes the next token out of `output` and tells the reader.
    fn choose(&mut self, mut output: StepOutput, eos: &[u32]) {
        let (id, logprobs) = match &mut self.sampler {
            Some(sampler) => match sampler.sample(&mut output.logits) {
                Ok(sampled) => (sampled.token, sampled.logprobs),
                Err(error) => return self.fail(error.to_string()),
            },
            None => match output.token {
                Some(token) => (token, None),
                None => return self.fail("the backend chose no token though one was asked for".to_owned()),
            },
        };
        self.chosen += 1;
        self.last = id;
        self.first_token.get_or_insert_with(Instant::now);
        if !self.ignore_eos && eos.contains(&id) {
            return self.finish(FinishReason::EndOfSequence);
        }
        let piece = self.detokenizer.push(id);
        let released = self.stops.push(&piece);
        self.events.send(Event::Token { id, text: released.text, logprobs });
        if released.stopped {
            self.finish(FinishReason::StopString);
        } else if self.chosen == self.max_tokens {
            self.finish(FinishReason::Length);
        }
    }

    fn finish(&mut self, reason: FinishReason) {
        // What the detokenizer still holds can complete a stop string. After one, the matcher swallows it.
        let released = self.stops.push(&self.detokenizer.finish());
        let (reason, tail) = if released.stopped {
            (FinishReason::StopString, released.text)
        } else {
            (reason, released.text + &self.stops.finish())
        };
        let now = Instant::now();
        let first_token = self.first_token.unwrap_or(now);
        self.finished = true;
        self.events.send(Event::Finished {
            reason,
            tail,
            usage: Usage { prompt_tokens: self.prompt.len(), completion_tokens: self.chosen },
            timings: Timings {
                queue: self.admitted - self.submitted,
                prefill: first_token - self.admitted,
                decode: now - first_token,
            },
        });
    }
}
