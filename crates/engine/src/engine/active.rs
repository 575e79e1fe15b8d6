//! One request that has a place: what of it is enqueued, what is known, and what its reader has been told.
//!
//! It keeps every token it has read or chosen. So its sequence can be taken away at any time and computed again
//! later, from a snapshot or from the beginning, and its reader notices nothing but a pause.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use lily_model::detokenizer::Detokenizer;
use lily_model::tokenizer::Tokenizer;

use super::generation::{Event, EventSender, FinishReason, Timings, Usage};
use super::queue::Job;
use super::spill::Loading;
use super::steering::{Course, Steering};
use crate::backend::{DecodeStep, Input, SequenceId, StepOutput, Want};
use crate::prefix_cache::tree::EntryId;
use crate::sampler::{Sampler, SamplerState, TokenLogprobs};
use crate::stop::StopMatcher;

/// See the module's page.
pub(super) struct Active {
    /// `None` until it can begin, and again where its memory was needed elsewhere.
    pub(super) sequence: Option<SequenceId>,
    /// The snapshot that the sequence began from.
    pub(super) held: Option<EntryId>,
    /// When it last had a chunk of its prompt processed, in chunks of all prompts.
    pub(super) served: u64,
    /// How many requests had ended when there was no memory for it; it tries again when one more has.
    pub(super) waits_for_end: Option<u64>,
    /// Its beginning is being read from the disk.
    pub(super) loading: Option<Loading>,
    /// The disk was asked for its beginning.
    pub(super) looked_on_disk: bool,
    /// The prompt, then every token chosen.
    tokens: Vec<u32>,
    prompt: usize,
    chunk: usize,
    max_tokens: usize,
    ignore_eos: bool,
    /// `None` where the device's own choice is all that is asked for.
    sampler: Option<Sampler>,
    /// The device chooses as `sampler` would, which only follows.
    on_device: bool,
    /// `None` where nothing overrules that choice, or nothing does any more.
    steering: Option<Steering>,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    events: EventSender,

    /// Tokens that the sequence was given, from a snapshot or by an enqueued step.
    enqueued: usize,
    /// Tokens that are prefilled, because they were known when the sequence was opened.
    prefill: usize,
    /// Lengths at which a snapshot is due, ascending, all beyond `enqueued`.
    cuts: VecDeque<usize>,
    /// Prompt tokens that came from a snapshot, once the first sequence was opened.
    cached: Option<usize>,
    /// Tokens whose choice was enqueued; at most one more than `chosen`.
    requested: usize,
    /// Tokens known here.
    chosen: usize,
    /// Tickets that name this sequence and are not collected.
    in_flight: usize,
    /// Nothing more is enqueued or sent; the sequence is closed when nothing is in flight.
    finished: bool,
    /// It came to an end of its own.
    answered: bool,

    submitted: Instant,
    admitted: Instant,
    first_token: Option<Instant>,
    last_token: Instant,
}

impl Active {
    pub(super) fn new(job: Job, tokenizer: &Tokenizer) -> Active {
        let mut steering = job.steering;
        let needs_logits = steering.as_ref().is_some_and(Steering::needs_logits);
        let by_host = needs_logits || !job.sampling.device_can_sample();
        let sampler = by_host.then(|| Sampler::new(job.sampling, &job.prompt));
        if let Some(steering) = &mut steering {
            steering.prepare();
        }
        Active {
            sequence: None,
            held: None,
            served: 0,
            waits_for_end: None,
            loading: None,
            looked_on_disk: false,
            prompt: job.prompt.len(),
            tokens: job.prompt,
            chunk: job.chunk,
            max_tokens: job.max_tokens,
            ignore_eos: job.ignore_eos,
            sampler,
            on_device: false,
            steering,
            detokenizer: Detokenizer::new(tokenizer.clone()),
            stops: job.stops,
            events: job.events,
            enqueued: 0,
            prefill: 0,
            cuts: VecDeque::new(),
            cached: None,
            requested: 0,
            chosen: 0,
            in_flight: 0,
            finished: false,
            answered: false,
            submitted: job.submitted,
            admitted: Instant::now(),
            first_token: None,
            last_token: job.submitted,
        }
    }

    /// The prompt, and what was chosen so far: what has to be processed before it can go on.
    pub(super) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The prompt alone.
    pub(super) fn prompt(&self) -> &[u32] {
        &self.tokens[..self.prompt]
    }

    /// Tokens that the sequence was given.
    pub(super) fn enqueued(&self) -> usize {
        self.enqueued
    }

    /// Tokens chosen so far.
    pub(super) fn chosen(&self) -> usize {
        self.chosen
    }

    /// How long it has had its place.
    pub(super) fn held_for(&self) -> Duration {
        self.admitted.elapsed()
    }

    /// The most tokens that the sequence will hold.
    pub(super) fn most_tokens(&self) -> usize {
        self.prompt + self.max_tokens
    }

    /// Lengths at which snapshots are still to be taken.
    pub(super) fn cuts(&self) -> &VecDeque<usize> {
        &self.cuts
    }

    /// It goes on in `sequence`, which holds its first `length` tokens, and is snapshotted at `cuts`. True the
    /// first time.
    pub(super) fn begin(&mut self, sequence: SequenceId, length: usize, cuts: Vec<usize>) -> bool {
        self.sequence = Some(sequence);
        self.enqueued = length;
        self.prefill = self.tokens.len();
        self.cuts = cuts.into_iter().filter(|&cut| cut > length).collect();
        let first = self.cached.is_none();
        self.cached.get_or_insert(length.min(self.prompt));
        first
    }

    /// The state of its sampler, where a device could choose in its place: nothing overrules the choice, and nothing
    /// but the token is asked for.
    pub(super) fn sampler_state(&self) -> Option<SamplerState> {
        let sampler = self.sampler.as_ref().filter(|_| self.steering.is_none())?;
        sampler.state()
    }

    /// Whether the device chooses the tokens of the sequence that was begun, from [`Active::sampler_state`].
    pub(super) fn sampled_on_device(&mut self, on_device: bool) {
        self.on_device = on_device;
    }

    /// Its sequence is gone; it begins anew when there is room. Nothing may be in flight.
    pub(super) fn park(&mut self) -> Option<SequenceId> {
        self.enqueued = 0;
        self.prefill = 0;
        self.requested = self.chosen;
        self.cuts.clear();
        self.sequence.take()
    }

    /// Whether it has neither begun nor ended.
    pub(super) fn is_parked(&self) -> bool {
        self.sequence.is_none() && !self.finished
    }

    /// Whether the host chooses this sequence's tokens, so that its next step has to wait for the last one.
    pub(super) fn needs_host(&self) -> bool {
        self.wants_logits() || self.steering.is_some()
    }

    /// Whether the sequence can be closed.
    pub(super) fn is_over(&self) -> bool {
        self.finished && self.in_flight == 0
    }

    /// Whether it came to an end of its own, so that its sequence is as good as any.
    pub(super) fn is_answered(&self) -> bool {
        self.answered
    }

    /// Whether its reader waits for the next token.
    pub(super) fn is_streaming(&self) -> bool {
        self.sequence.is_some() && !self.finished && self.enqueued >= self.prefill
    }

    /// Notices that nobody listens any more.
    pub(super) fn notice_cancellation(&mut self) {
        self.finished |= self.events.is_cancelled();
    }

    fn wants_logits(&self) -> bool {
        self.sampler.is_some() && !self.on_device
    }

    fn want(&self) -> Want {
        if self.wants_logits() { Want::Logits } else { Want::Token }
    }

    /// Whether a part of the prompt is still to be enqueued.
    pub(super) fn is_prefilling(&self) -> bool {
        self.sequence.is_some() && !self.finished && self.enqueued < self.prefill
    }

    /// The next chunk to enqueue, of at most `most` tokens and never across a place where a snapshot is due, and
    /// what to ask of it.
    pub(super) fn next_chunk(&self, most: usize) -> Option<(SequenceId, &[u32], Want)> {
        let sequence = self.sequence.filter(|_| self.is_prefilling())?;
        let end = (self.enqueued + self.chunk.min(most)).min(self.prefill);
        let end = self.cuts.front().map_or(end, |&cut| end.min(cut));
        let want = if end == self.prefill { self.want() } else { Want::Nothing };
        Some((sequence, &self.tokens[self.enqueued..end], want))
    }

    /// A chunk of `tokens` was enqueued. True where a snapshot is due now.
    pub(super) fn chunk_enqueued(&mut self, tokens: usize) -> bool {
        self.in_flight += 1;
        self.enqueued += tokens;
        if self.enqueued == self.prefill {
            self.requested = self.chosen + 1;
        }
        let due = self.cuts.front() == Some(&self.enqueued);
        if due {
            self.cuts.pop_front();
        }
        due
    }

    /// The decode step that can be enqueued now.
    pub(super) fn next_step(&self) -> Option<DecodeStep> {
        let sequence = self.sequence.filter(|_| self.is_streaming())?;
        if self.requested >= self.max_tokens {
            return None;
        }
        let input = match self.requested - self.chosen {
            0 => Input::Token(*self.tokens.last()?),
            1 if !self.needs_host() => Input::LastSampled,
            _ => return None,
        };
        Some(DecodeStep { sequence, input, want: self.want() })
    }

    /// The step from [`Active::next_step`] was enqueued.
    pub(super) fn step_enqueued(&mut self) {
        self.in_flight += 1;
        self.enqueued += 1;
        self.requested += 1;
    }

    /// A prefill chunk that brought the sequence to `length` tokens was collected.
    pub(super) fn chunk_collected(&mut self, length: usize, output: StepOutput, eos: &[u32]) {
        self.in_flight -= 1;
        if self.finished {
            return;
        }
        if self.chosen == 0 {
            let cached = self.cached.unwrap_or(0);
            self.events.send(Event::Prefill { done: length, cached, total: self.prompt });
        }
        if length == self.prefill {
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
    fn choose(&mut self, output: StepOutput, eos: &[u32]) {
        let (id, logprobs) = match self.pick(output) {
            Ok(picked) => picked,
            Err(reason) => return self.fail(reason),
        };
        self.chosen += 1;
        self.tokens.push(id);
        let now = Instant::now();
        self.first_token.get_or_insert(now);
        let gap = now - std::mem::replace(&mut self.last_token, now);
        let ends = !self.ignore_eos || self.steering.as_ref().is_some_and(Steering::ends_answer);
        if ends && eos.contains(&id) {
            return self.finish(FinishReason::EndOfSequence);
        }
        let piece = self.detokenizer.push(id);
        let course = match &mut self.steering {
            Some(steering) => steering.accept(id, &piece, self.detokenizer.is_whole()),
            None => Ok(Course::Steered),
        };
        let released = self.stops.push(&piece);
        self.events.send(Event::Token { id, text: released.text, logprobs, gap });
        if released.stopped {
            self.finish(FinishReason::StopString);
            return;
        }
        match course {
            Ok(Course::Complete) => return self.finish(FinishReason::EndOfSequence),
            Ok(Course::Free) => self.steering = None,
            Ok(Course::Steered) => {}
            Err(reason) => return self.fail(reason),
        }
        if self.chosen == self.max_tokens {
            self.finish(FinishReason::Length);
        }
    }

    /// The next token: what is forced, else what the sampler finds among those allowed, else the device's own.
    fn pick(&mut self, mut output: StepOutput) -> Result<(u32, Option<TokenLogprobs>), String> {
        if let Some(forced) = self.steering.as_mut().and_then(Steering::forced) {
            return Ok((forced, None));
        }
        let wants_logits = self.wants_logits();
        let Some(sampler) = self.sampler.as_mut().filter(|_| wants_logits) else {
            let missing = "the backend chose no token though one was asked for";
            let token = output.token.ok_or_else(|| missing.to_owned())?;
            if let Some(sampler) = &mut self.sampler {
                sampler.follow(token);
            }
            return Ok((token, None));
        };
        let allowed = self.steering.as_mut().map_or(Ok(None), Steering::allowed)?;
        let restrict = |logits: &mut [f32]| {
            if let Some(allowed) = &allowed {
                allowed.apply(logits);
            }
        };
        let sampled =
            sampler.sample_among(&mut output.logits, restrict).map_err(|error| error.to_string())?;
        Ok((sampled.token, sampled.logprobs))
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
        self.answered = true;
        self.events.send(Event::Finished {
            reason,
            stop: self.stops.found(),
            tail,
            usage: Usage {
                prompt_tokens: self.prompt,
                cached_tokens: self.cached.unwrap_or(0),
                completion_tokens: self.chosen,
            },
            timings: Timings {
                queue: self.admitted - self.submitted,
                prefill: first_token - self.admitted,
                decode: now - first_token,
            },
        });
    }
}
