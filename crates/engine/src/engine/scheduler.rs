//! The loop of the engine's thread.
//!
//! Each iteration lets go of what was cancelled, admits what waits, and then gives the device one decode step
//! for all sequences that have a token to go on from and one chunk of the oldest unfinished prompt. So a long
//! prompt delays a running stream by one chunk at most, and a stream delays a prompt by one step per chunk.
//!
//! With [`EngineOptions::pipeline`], and as long as every running sequence leaves the choice of tokens to the
//! device, an iteration collects only what the iteration *before* it enqueued: the device always has the next
//! step before the host has seen the last token. A step enqueued for a sequence that turns out to have ended
//! is harmless: its output is dropped, and the sequence is closed once no ticket names it.
//!
//! Errors stay with the requests they concern: an enqueue that fails fails its sequence (a failed batch is
//! tried again one by one to find out which that is), a collect that fails fails the sequences in it.

use std::collections::VecDeque;
use std::sync::Arc;

use lily_model::tokenizer::Tokenizer;

use super::EngineOptions;
use super::active::Active;
use super::queue::{Job, Queue};
use crate::backend::{Backend, BackendError, DecodeStep, SequenceId, StepOutput, Ticket};
use crate::engine::Event;

/// Work that was enqueued and not collected.
struct Work {
    ticket: Ticket,
    kind: Kind,
    sequences: Vec<SequenceId>,
}

#[derive(Clone, Copy)]
enum Kind {
    /// A chunk of this many tokens.
    Prefill(usize),
    Decode,
}

/// See the module's page.
pub(super) struct Scheduler {
    backend: Box<dyn Backend>,
    tokenizer: Tokenizer,
    options: EngineOptions,
    queue: Arc<Queue>,
    /// In order of admission.
    active: Vec<Active>,
    /// In the order of enqueueing, which is the order of collecting.
    in_flight: VecDeque<Work>,
}

impl Scheduler {
    pub(super) fn new(
        backend: Box<dyn Backend>,
        tokenizer: Tokenizer,
        options: EngineOptions,
        queue: Arc<Queue>,
    ) -> Scheduler {
        Scheduler { backend, tokenizer, options, queue, active: Vec::new(), in_flight: VecDeque::new() }
    }

    /// Runs until the queue is closed and everything taken is finished, or until it is aborted.
    pub(super) fn run(&mut self) {
        while !self.active.is_empty() || self.queue.wait_for_work() {
            if self.queue.is_aborting() {
                return;
            }
            self.iterate();
        }
    }

    fn iterate(&mut self) {
        self.active.iter_mut().for_each(Active::notice_cancellation);
        self.close_finished();
        self.admit();

        let overlap = self.options.pipeline && !self.active.iter().any(Active::needs_host);
        if !overlap {
            self.collect(self.in_flight.len());
        }
        let earlier = self.in_flight.len();
        self.enqueue_decode();
        if !self.options.pipeline {
            // The tokens are there already: let them go before the chunk is computed.
            self.collect(self.in_flight.len());
        }
        self.enqueue_prefill();
        self.collect(if overlap { earlier } else { self.in_flight.len() });
        self.close_finished();
    }

    /// Gives free places to waiting requests.
    fn admit(&mut self) {
        while self.active.len() < self.options.max_running {
            let Some(job) = self.queue.take() else { return };
            match self.backend.open(None) {
                Ok(sequence) => self.active.push(Active::new(job, sequence, &self.tokenizer)),
                Err(BackendError::OutOfMemory { .. }) if !self.active.is_empty() => {
                    // A running sequence will free what this one needs.
                    self.queue.put_back(job);
                    return;
                }
                Err(error) => self.refuse(job, &error),
            }
        }
    }

    fn refuse(&self, job: Job, error: &BackendError) {
        tracing::warn!(%error, "a sequence could not be opened");
        job.events.send(Event::Failed(error.to_string()));
        self.queue.release();
    }

    fn enqueue_decode(&mut self) {
        let steps: Vec<DecodeStep> = self.active.iter().filter_map(Active::next_step).collect();
        if steps.is_empty() {
            return;
        }
        match self.backend.decode(&steps) {
            Ok(ticket) => self.decode_enqueued(ticket, &steps),
            Err(error) if steps.len() == 1 => self.fail(steps[0].sequence, &error),
            Err(error) => {
                tracing::warn!(%error, sequences = steps.len(), "a batch failed; trying its sequences alone");
                for step in steps {
                    match self.backend.decode(&[step]) {
                        Ok(ticket) => self.decode_enqueued(ticket, &[step]),
                        Err(error) => self.fail(step.sequence, &error),
                    }
                }
            }
        }
    }

    fn decode_enqueued(&mut self, ticket: Ticket, steps: &[DecodeStep]) {
        let sequences: Vec<SequenceId> = steps.iter().map(|step| step.sequence).collect();
        for &sequence in &sequences {
            if let Some(active) = self.find(sequence) {
                active.step_enqueued();
            }
        }
        self.in_flight.push_back(Work { ticket, kind: Kind::Decode, sequences });
    }

    fn enqueue_prefill(&mut self) {
        let next = self.active.iter_mut().find_map(|active| {
            let (chunk, want) = active.next_chunk()?;
            let (tokens, enqueued) = (chunk.len(), self.backend.extend(active.sequence, chunk, want));
            Some((active, tokens, enqueued))
        });
        let Some((active, tokens, enqueued)) = next else { return };
        match enqueued {
            Ok(ticket) => {
                active.chunk_enqueued(tokens);
                let sequences = vec![active.sequence];
                self.in_flight.push_back(Work { ticket, kind: Kind::Prefill(tokens), sequences });
            }
            Err(error) => {
                tracing::warn!(%error, "a prefill could not be enqueued");
                active.fail(error.to_string());
            }
        }
    }

    /// Collects the `count` pieces of work that were enqueued first.
    fn collect(&mut self, count: usize) {
        for work in self.in_flight.drain(..count).collect::<Vec<_>>() {
            let Work { ticket, kind, sequences } = work;
            match self.backend.collect(ticket) {
                Ok(outputs) => self.deliver(kind, &sequences, outputs),
                Err(error) => {
                    tracing::warn!(%error, sequences = sequences.len(), "enqueued work failed");
                    for sequence in sequences {
                        if let Some(active) = self.find(sequence) {
                            active.collect_failed(error.to_string());
                        }
                    }
                }
            }
        }
    }

    fn deliver(&mut self, kind: Kind, sequences: &[SequenceId], outputs: Vec<StepOutput>) {
        let mut outputs = outputs.into_iter();
        for &sequence in sequences {
            let output = outputs.next().filter(|output| output.sequence == sequence);
            let Some(active) = self.active.iter_mut().find(|active| active.sequence == sequence) else {
                continue;
            };
            match (output, kind) {
                (Some(output), Kind::Prefill(tokens)) => {
                    active.chunk_collected(tokens, output, &self.options.eos_token_ids);
                }
                (Some(output), Kind::Decode) => active.step_collected(output, &self.options.eos_token_ids),
                (None, _) => active.collect_failed(format!("the backend returned nothing for {sequence:?}")),
            }
        }
    }

    fn find(&mut self, sequence: SequenceId) -> Option<&mut Active> {
        self.active.iter_mut().find(|active| active.sequence == sequence)
    }

    fn fail(&mut self, sequence: SequenceId, error: &BackendError) {
        tracing::warn!(%error, ?sequence, "a step could not be enqueued");
        if let Some(active) = self.find(sequence) {
            active.fail(error.to_string());
        }
    }

    fn close_finished(&mut self) {
        let (backend, queue) = (&mut self.backend, &self.queue);
        self.active.retain(|active| {
            if active.is_over() {
                backend.close(active.sequence);
                queue.release();
            }
            !active.is_over()
        });
    }

    /// The thread's last act: fails what is left, because of `panic` or because the engine was shut down.
    pub(super) fn stop(mut self, panic: Option<&str>) {
        let reason = panic.unwrap_or("it was shut down");
        for active in &mut self.active {
            active.fail(format!("the engine has stopped: {reason}"));
        }
        self.queue.stop(reason);
    }
}
