//! Who gets a sequence, what it begins from, and what gives way when memory runs out.
//!
//! A request that has a place gets its sequence when there is room for it: for what is known of it, some tokens
//! more, and as much for every sequence that is open. Requests begin in order of arrival. One that shares a long
//! beginning with a prompt that is being processed just now waits for the snapshot at the end of it, instead of
//! doing the same work beside it; that is what a crowd of sub-agents with one system block does.
//!
//! Room is an estimate, because nobody knows how long an answer becomes. When it was too small, or the device
//! has less memory than it said, snapshots go first, the least recently used before others; then the youngest
//! sequence gives up its memory, to be computed again when one has ended: its tokens are known, and the same
//! tokens give the same state. The oldest sequence is never asked, so there is always one that comes to its end.
//! A request fails for lack of memory only when it has all of it to itself.

use std::sync::mpsc::TryRecvError;

use super::active::Active;
use super::scheduler::{Kind, Scheduler};
use super::spill::Loading;
use crate::backend::{BackendError, SequenceId, SnapshotId};
use crate::prefix_cache::disk::Key;
use crate::prefix_cache::positions::positions;

/// Tokens that a sequence is given room for beyond those known: an answer of ordinary length. More would leave
/// memory unused, fewer would make sequences give way more often.
const HEADROOM: usize = 512;

/// Tokens less to process that make it worth to wait for a snapshot, or to take one where prompts were seen to
/// part.
const WORTH: usize = 64;

/// Whether a request could begin.
enum Began {
    Yes,
    /// It waits for something that another request is about to do; those behind it may pass.
    Later,
    /// There is no room; nobody passes it.
    Full,
}

impl Scheduler {
    /// Gives sequences to requests that have none.
    pub(super) fn begin_parked(&mut self) {
        for index in 0..self.active.len() {
            if self.active[index].is_parked() && matches!(self.begin(index), Began::Full) {
                return;
            }
        }
    }

    fn begin(&mut self, index: usize) -> Began {
        let active = &self.active[index];
        let open = self.active.iter().any(|other| other.sequence.is_some());
        if open && active.waits_for_end.is_some_and(|ends| ends == self.stats.ended) {
            return Began::Full;
        }
        let known = self.cache.find(active.tokens()).1.map_or(0, |hit| hit.length);
        let waits = active.loading.is_none() && self.is_about_to_be_known(active, known);
        if waits || self.is_loading(index, known) {
            return Began::Later;
        }
        // What came from the disk is in the cache now.
        let (shared, hit) = self.cache.find(self.active[index].tokens());
        let known = hit.map_or(0, |hit| hit.length);
        let active = &self.active[index];
        if open && !self.has_room(active) {
            return Began::Full;
        }

        if let Some(hit) = hit {
            self.cache.hold(hit.entry);
        }
        let opened = loop {
            match self.device.call(|backend| backend.open(hit.map(|hit| hit.snapshot))) {
                Err(BackendError::OutOfMemory { .. }) if self.cache.evict(self.device.backend()) => {}
                opened => break opened,
            }
        };
        let active = &mut self.active[index];
        match opened {
            Ok(sequence) => {
                active.held = hit.map(|hit| hit.entry);
                if let Some(state) = active.sampler_state() {
                    let taken = self.device.call(|backend| backend.sample_on_device(sequence, &state));
                    // Where that failed, the sequence's first step will say so.
                    active.sampled_on_device(taken.unwrap_or(false));
                }
                let cuts = self.cuts(index, known, shared);
                let active = &mut self.active[index];
                if active.begin(sequence, known, cuts) {
                    self.stats.prompt_tokens += active.prompt().len() as u64;
                    self.stats.cached_tokens += known as u64;
                }
                Began::Yes
            }
            Err(error) => {
                if let Some(hit) = hit {
                    self.cache.release(hit.entry);
                }
                if open && matches!(error, BackendError::OutOfMemory { .. }) {
                    active.waits_for_end = Some(self.stats.ended);
                    return Began::Full;
                }
                tracing::warn!(%error, "a sequence could not be opened");
                active.fail(error.to_string());
                Began::Yes
            }
        }
    }

    /// Whether a prompt that is being processed will leave a snapshot that is better than `known` tokens.
    fn is_about_to_be_known(&self, active: &Active, known: usize) -> bool {
        let tokens = active.tokens();
        let better = |at: usize, shared: usize| at >= known + WORTH && at <= shared && at < tokens.len();
        self.active.iter().any(|other| {
            let due = || {
                let in_flight = self.in_flight.iter().filter_map(|work| match work.kind {
                    Kind::Prefill { length, snapshot: Some(_) } => {
                        work.sequences.iter().any(|&s| Some(s) == other.sequence).then_some(length)
                    }
                    _ => None,
                });
                let loading = other.loading.iter().map(|loading| loading.key.length);
                other.cuts().iter().copied().chain(in_flight).chain(loading)
            };
            // Cheap first: whether anything is due at all.
            if std::ptr::eq(other, active) || !due().any(|at| better(at, usize::MAX)) {
                return false;
            }
            let shared = other.prompt().iter().zip(tokens).take_while(|(a, b)| a == b).count();
            due().any(|at| better(at, shared))
        })
    }

    /// Whether a longer beginning than the `known` tokens is on its way from the disk; puts it into the cache when
    /// it has come.
    fn is_loading(&mut self, index: usize, known: usize) -> bool {
        let Some(disk) = &self.disk else { return false };
        let active = &mut self.active[index];
        if !std::mem::replace(&mut active.looked_on_disk, true) {
            let found = disk.store().find(active.tokens(), known + WORTH);
            let found = found.filter(|key| self.cache.takes(self.device.asked(), key.length));
            active.loading = found.and_then(|key| disk.load(key, active.tokens()));
        }
        let Some(Loading { key, state }) = active.loading.take() else { return false };
        match state.try_recv() {
            Err(TryRecvError::Empty) => active.loading = Some(Loading { key, state }),
            Ok(Some(state)) => self.import(index, key, &state),
            // It was gone or damaged, or its thread is.
            Ok(None) | Err(TryRecvError::Disconnected) => {}
        }
        self.active[index].loading.is_some()
    }

    fn import(&mut self, index: usize, key: Key, state: &[u8]) {
        loop {
            match self.device.call(|backend| backend.import(key.length, &mut &*state)) {
                Ok(snapshot) => {
                    let tokens = &self.active[index].tokens()[..key.length];
                    self.stats.loaded += 1;
                    return self.cache.insert(self.device.backend(), tokens, snapshot);
                }
                Err(BackendError::OutOfMemory { .. }) if self.cache.evict(self.device.backend()) => {}
                Err(error @ BackendError::BadExport(_)) => {
                    if let Some(disk) = &self.disk {
                        disk.store().refuse(key, &error.to_string());
                    }
                    return;
                }
                Err(error) => {
                    return tracing::warn!(%error, "a record of the cache directory was not taken in");
                }
            }
        }
    }

    /// Has the disk keep what the next prompt of a conversation begins with in any case: the system block, and
    /// all up to the answer. The answer itself may come back changed, and is short.
    fn spill(&mut self, active: &Active) {
        let Some(disk) = &self.disk else { return };
        let options = &self.options.cache;
        let cuts = positions(active.prompt(), options.markers.as_ref(), options.every);
        let (first, last) = (cuts.first(), cuts.last().filter(|_| cuts.len() > 1));
        for &cut in first.into_iter().chain(last).filter(|&&cut| cut >= WORTH) {
            let tokens = &active.prompt()[..cut];
            if let Some(key) = disk.store().at(tokens) {
                disk.touch(key);
                continue;
            }
            let Some(snapshot) = self.cache.at(tokens) else { continue };
            let estimate = self.device.asked().sequence_bytes(cut).saturating_add(size_of_val(tokens) as u64);
            match self.device.call(|backend| backend.export(snapshot)) {
                Ok(export) => disk.save(tokens.to_vec(), estimate, export),
                Err(error) => tracing::warn!(%error, "a snapshot could not be exported"),
            }
        }
    }

    /// Whether what `active` will need fits beside what every open sequence will.
    fn has_room(&self, active: &Active) -> bool {
        let backend = self.device.asked();
        // The snapshot that a sequence began from stays as long as the sequence does.
        let held = if self.options.cache.bytes > 0 { backend.sequence_bytes(0) } else { 0 };
        let needs = |active: &Active| {
            let tokens = active.most_tokens().min(active.tokens().len() + HEADROOM);
            backend.sequence_bytes(tokens).saturating_add(held)
        };
        let open = self.active.iter().filter(|other| other.sequence.is_some());
        let sum = open.map(needs).fold(needs(active), u64::saturating_add);
        sum <= backend.memory().limit
    }

    /// Where the sequence at `index`, of which `known` tokens came from the cache, is to be snapshotted. Those of
    /// the places that are in the cache already count as used, because they are likely to be again.
    fn cuts(&mut self, index: usize, known: usize, shared: usize) -> Vec<usize> {
        let options = &self.options.cache;
        if options.bytes == 0 {
            return Vec::new();
        }
        let active = &self.active[index];
        let mut cuts = positions(active.prompt(), options.markers.as_ref(), options.every);
        for &cut in cuts.iter().filter(|&&cut| cut < known) {
            self.cache.touch(&active.tokens()[..cut]);
        }
        // The one it begins from last: of all it is the likeliest to be needed.
        self.cache.touch(&active.tokens()[..known]);
        if shared >= known + WORTH && shared < active.tokens().len() {
            // Two prompts parted here; a third may.
            cuts.push(shared);
            cuts.sort_unstable();
            cuts.dedup();
        }
        cuts
    }

    /// Freezes a sequence for the cache, where it has room for it.
    pub(super) fn freeze(&mut self, sequence: SequenceId) -> Option<SnapshotId> {
        let active = self.active.iter().find(|active| active.sequence == Some(sequence))?;
        let tokens = &active.tokens()[..active.enqueued()];
        if tokens.is_empty() || self.cache.has(tokens) || !self.cache.takes(self.device.asked(), tokens.len())
        {
            return None;
        }
        loop {
            match self.device.call(|backend| backend.snapshot(sequence)) {
                Ok(snapshot) => return Some(snapshot),
                Err(BackendError::OutOfMemory { .. }) if self.cache.evict(self.device.backend()) => {}
                Err(error) => {
                    tracing::debug!(%error, "no snapshot was taken");
                    return None;
                }
            }
        }
    }

    /// Frees some memory; false where there is nothing left to free.
    pub(super) fn relieve(&mut self) -> bool {
        self.cache.evict(self.device.backend()) || self.give_way()
    }

    /// Takes the memory of the youngest sequence, should there be an older one.
    fn give_way(&mut self) -> bool {
        // A sequence that a ticket names cannot be closed.
        self.collect(self.in_flight.len());
        if self.close_finished() {
            return true;
        }
        let mut open = (0..self.active.len()).filter(|&index| self.active[index].sequence.is_some());
        let (Some(_), Some(youngest)) = (open.next(), open.next_back()) else { return false };
        let ended = self.stats.ended;
        let active = &mut self.active[youngest];
        active.waits_for_end = Some(ended);
        let sequence = active.park();
        let held = active.held.take();
        tracing::info!(?sequence, "a sequence gives way to older ones and will be computed again");
        sequence.into_iter().for_each(|sequence| self.device.backend().close(sequence));
        held.into_iter().for_each(|entry| self.cache.release(entry));
        self.stats.gave_way += 1;
        true
    }

    /// Closes the sequence of a request that is over. What it computed stays in the cache if it came to an end
    /// of its own.
    pub(super) fn close(&mut self, active: &Active) {
        self.stats.ended += 1;
        if let Some(sequence) = active.sequence {
            if active.is_answered() {
                self.keep_end(active, sequence);
                self.spill(active);
            }
            self.device.backend().close(sequence);
        }
        if let Some(entry) = active.held {
            self.cache.release(entry);
        }
    }

    fn keep_end(&mut self, active: &Active, sequence: SequenceId) {
        let tokens = &active.tokens()[..active.enqueued()];
        if self.cache.has(tokens) || !self.cache.takes(self.device.asked(), tokens.len()) {
            return;
        }
        match self.device.call(|backend| backend.snapshot(sequence)) {
            Ok(snapshot) => self.cache.insert(self.device.backend(), tokens, snapshot),
            Err(error) => tracing::debug!(%error, "the end of an answer was not kept"),
        }
    }
}
