//! The loop of the engine's thread.
//!
//! Each iteration lets go of what was cancelled, gives free places to what waits, and then gives the device one
//! decode step for all sequences that have a token to go on from and one chunk of one unfinished prompt. So
//! between two tokens of a stream lies at most one chunk, of [`EngineOptions::busy_chunk`] tokens, however long
//! the prompts are and however many; and a stream delays a prompt by one step per chunk. Prompts take turns,
//! the one that was served longest ago first, so that a short one beside `k` others waits for `k` chunks for
//! each of its own and never for a whole prompt.
//!
//! With [`EngineOptions::pipeline`], and as long as every running sequence leaves the choice of tokens to the
//! device, an iteration collects only what the iteration *before* it enqueued: the device always has the next
//! step before the host has seen the last token. A step enqueued for a sequence that turns out to have ended
//! is harmless: its output is dropped, and the sequence is closed once no ticket names it.
//!
//! Errors stay with the requests they concern: an enqueue that fails fails its sequence (a failed batch is
//! tried again one by one to find out which that is), a collect that fails fails the sequences in it, a panic of
//! the backend fails the sequences that the call named. Only a lack of memory is answered otherwise, by
//! `admission`, which is also where requests get their sequences.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use lily_model::tokenizer::Tokenizer;

use super::EngineOptions;
use super::active::Active;
use super::device::{Device, message};
use super::queue::{Awaited, Queue};
use super::spill::Spill;
use super::stats::Stats;
use crate::backend::{Backend, BackendError, DecodeStep, SequenceId, SnapshotId, StepOutput, Ticket};
use crate::prefix_cache::PrefixCache;
use crate::prefix_cache::disk::Store;

/// How often the disk is asked whether it is done, when there is nothing else to do.
const DISK_POLL: Duration = Duration::from_millis(1);

/// Work that was enqueued and not collected.
pub(super) struct Work {
    ticket: Ticket,
    pub(super) kind: Kind,
    pub(super) sequences: Vec<SequenceId>,
}

#[derive(Clone, Copy)]
pub(super) enum Kind {
    /// A chunk that brings its sequence to this length, and what was frozen there.
    Prefill {
        length: usize,
        snapshot: Option<SnapshotId>,
    },
    Decode,
}

/// See the module's page.
pub(super) struct Scheduler {
    pub(super) device: Device,
    pub(super) cache: PrefixCache,
    tokenizer: Tokenizer,
    pub(super) options: EngineOptions,
    /// The most tokens of a prompt between two tokens of a stream.
    busy_chunk: usize,
    queue: Arc<Queue>,
    /// In order of admission.
    pub(super) active: Vec<Active>,
    /// In the order of enqueueing, which is the order of collecting.
    pub(super) in_flight: VecDeque<Work>,
    /// Chunks enqueued so far.
    chunks: u64,
    pub(super) stats: Stats,
    /// The cache's second place.
    pub(super) disk: Option<Spill>,
}

impl Scheduler {
    pub(super) fn new(
        backend: Box<dyn Backend>,
        tokenizer: Tokenizer,
        options: EngineOptions,
        busy_chunk: usize,
        queue: Arc<Queue>,
    ) -> Scheduler {
        let disk = options.cache.disk.as_ref().filter(|_| options.cache.bytes > 0);
        let disk = disk.and_then(|disk| match Store::open(disk, &backend.layout()) {
            Ok(store) => Spill::start(store),
            Err(error) => {
                let dir = disk.dir.display();
                tracing::warn!(%error, %dir, "the cache directory cannot be used; nothing outlives this process");
                None
            }
        });
        Scheduler {
            disk,
            device: Device::new(backend),
            cache: PrefixCache::new(options.cache.bytes),
            tokenizer,
            options,
            busy_chunk,
            queue,
            active: Vec::new(),
            in_flight: VecDeque::new(),
            chunks: 0,
            stats: Stats::default(),
        }
    }

    /// Runs until the queue is closed and everything taken is finished, or until it is aborted.
    pub(super) fn run(&mut self) {
        loop {
            if self.active.is_empty() {
                // A device that failed is tried again where nobody else does.
                let limit = self.device.trouble().map(|_| self.options.retry_device);
                match self.queue.wait_for_work(limit) {
                    Awaited::Request => {}
                    Awaited::Nothing => {
                        self.device.attempt();
                        self.publish();
                        continue;
                    }
                    Awaited::End => return,
                }
            }
            if self.queue.is_aborting() {
                return;
            }
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.iterate())) {
                self.start_over(message(&*panic));
            }
            if self.active.iter().all(Active::is_parked) && self.active.iter().any(|a| a.loading.is_some()) {
                std::thread::sleep(DISK_POLL);
            }
        }
    }

    fn iterate(&mut self) {
        self.active.iter_mut().for_each(Active::notice_cancellation);
        self.close_finished();
        while self.active.len() < self.options.max_running {
            let Some(job) = self.queue.take() else { break };
            self.active.push(Active::new(job, &self.tokenizer));
        }
        self.begin_parked();

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
        if !self.close_finished() {
            self.publish();
        }
    }

    fn enqueue_decode(&mut self) {
        loop {
            let steps: Vec<DecodeStep> = self.active.iter().filter_map(Active::next_step).collect();
            if steps.is_empty() {
                return;
            }
            match self.device.call(|backend| backend.decode(&steps)) {
                Ok(ticket) => self.decode_enqueued(ticket, &steps),
                Err(BackendError::OutOfMemory { .. }) if self.relieve() => continue,
                Err(error) if steps.len() == 1 => self.fail(steps[0].sequence, &error),
                // Whatever the panic left of the sequences is not to be trusted.
                Err(error @ BackendError::Panicked(_)) => {
                    steps.iter().for_each(|step| self.fail(step.sequence, &error));
                }
                Err(error) => {
                    tracing::warn!(%error, sequences = steps.len(), "a batch failed; trying its sequences alone");
                    for step in steps {
                        match self.device.call(|backend| backend.decode(&[step])) {
                            Ok(ticket) => self.decode_enqueued(ticket, &[step]),
                            Err(error) => self.fail(step.sequence, &error),
                        }
                    }
                }
            }
            return;
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
        loop {
            let streams = self.active.iter().any(Active::is_streaming);
            let most = if streams { self.busy_chunk } else { usize::MAX };
            let waiting = self.active.iter_mut().filter(|active| active.is_prefilling());
            let Some(active) = waiting.min_by_key(|active| active.served) else { return };
            let Some((sequence, chunk, want)) = active.next_chunk(most) else { return };
            let tokens = chunk.len();
            match self.device.call(|backend| backend.extend(sequence, chunk, want)) {
                Ok(ticket) => {
                    self.chunks += 1;
                    self.stats.prefilled_tokens += tokens as u64;
                    active.served = self.chunks;
                    let due = active.chunk_enqueued(tokens);
                    let length = active.enqueued();
                    let snapshot = if due { self.freeze(sequence) } else { None };
                    let kind = Kind::Prefill { length, snapshot };
                    self.in_flight.push_back(Work { ticket, kind, sequences: vec![sequence] });
                }
                Err(BackendError::OutOfMemory { .. }) if self.relieve() => continue,
                Err(error) => self.fail(sequence, &error),
            }
            return;
        }
    }

    /// Collects the `count` pieces of work that were enqueued first.
    pub(super) fn collect(&mut self, count: usize) {
        let count = count.min(self.in_flight.len());
        for work in self.in_flight.drain(..count).collect::<Vec<_>>() {
            let Work { ticket, kind, sequences } = work;
            match self.device.call(|backend| backend.collect(ticket)) {
                Ok(outputs) => {
                    self.device.worked();
                    self.deliver(kind, &sequences, outputs);
                }
                Err(error) => {
                    tracing::warn!(%error, sequences = sequences.len(), "enqueued work failed");
                    if let Kind::Prefill { snapshot: Some(snapshot), .. } = kind {
                        self.device.backend().discard(snapshot);
                    }
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
            let named = self.active.iter_mut().find(|active| active.sequence == Some(sequence));
            let Some(active) = named else { continue };
            let chosen = active.chosen();
            match (output, kind) {
                (Some(output), Kind::Prefill { length, snapshot }) => {
                    if let Some(snapshot) = snapshot {
                        self.cache.insert(self.device.backend(), &active.tokens()[..length], snapshot);
                    }
                    active.chunk_collected(length, output, &self.options.eos_token_ids);
                }
                (Some(output), Kind::Decode) => active.step_collected(output, &self.options.eos_token_ids),
                (None, _) => active.collect_failed(format!("the backend returned nothing for {sequence:?}")),
            }
            self.stats.generated_tokens += (active.chosen() - chosen) as u64;
        }
    }

    pub(super) fn find(&mut self, sequence: SequenceId) -> Option<&mut Active> {
        self.active.iter_mut().find(|active| active.sequence == Some(sequence))
    }

    fn fail(&mut self, sequence: SequenceId, error: &BackendError) {
        tracing::warn!(%error, ?sequence, "a step could not be enqueued");
        if let Some(active) = self.find(sequence) {
            active.fail(error.to_string());
        }
    }

    /// Lets go of every request that is over; true where that closed a sequence.
    pub(super) fn close_finished(&mut self) -> bool {
        let (over, active) = std::mem::take(&mut self.active).into_iter().partition(Active::is_over);
        self.active = active;
        let over: Vec<Active> = over;
        let mut closed = false;
        for active in &over {
            closed |= active.sequence.is_some();
            self.close(active);
        }
        if !over.is_empty() {
            // Whoever sees the place free is to see the memory free too.
            self.publish();
            over.iter().for_each(|active| self.queue.release(active.held_for()));
        }
        closed
    }

    /// Makes the figures visible to the handles.
    fn publish(&mut self) {
        self.stats.memory = self.device.asked().memory();
        self.stats.cache = self.cache.counts();
        self.queue.publish(self.stats, self.device.trouble());
    }

    /// After a panic of the engine's own: nothing that was under way can be trusted, so all of it goes, and what
    /// waits is served by what is left.
    fn start_over(&mut self, panic: &str) {
        tracing::error!(panic, "the engine panicked; every running request fails, and it goes on");
        for work in self.in_flight.drain(..).collect::<Vec<_>>() {
            let snapshot = match work.kind {
                Kind::Prefill { snapshot, .. } => snapshot,
                Kind::Decode => None,
            };
            let _ = self.device.call(|backend| {
                snapshot.into_iter().for_each(|snapshot| backend.discard(snapshot));
                backend.collect(work.ticket)
            });
        }
        let snapshots = self.cache.clear();
        let _ = self.device.call(|backend| {
            snapshots.into_iter().for_each(|snapshot| backend.discard(snapshot));
            Ok(())
        });
        for mut active in std::mem::take(&mut self.active) {
            active.fail(BackendError::Panicked(panic.to_owned()).to_string());
            let _ = self.device.call(|backend| {
                active.sequence.into_iter().for_each(|sequence| backend.close(sequence));
                Ok(())
            });
        }
        self.publish();
        self.queue.release_all();
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
