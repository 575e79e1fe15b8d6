//! What was computed before and may be needed again: snapshots of sequences on one radix tree.
//!
//! A recurrent state cannot be rewound, so a request that agrees with an earlier one for a thousand tokens and
//! then differs can use the earlier work only from a snapshot that was taken at or before the point where they
//! part. [`PrefixCache`] keeps such snapshots in the backend, each at an exact length of the tokens that led to
//! it, within a budget of bytes. [`positions`] says where they are taken; [`tree`] finds the deepest one;
//! [`disk`] keeps some of them beyond the end of the process.
//!
//! The bytes are the backend's own count ([`Memory::snapshots`]), in which a page that several snapshots share
//! counts once: nothing is estimated here. The snapshot that was used least recently goes first, and never one
//! that a running request began from; taking one out of the middle of a conversation leaves the deeper ones as
//! they are, because a snapshot is whole in itself.
//!
//! [`Memory::snapshots`]: crate::backend::Memory::snapshots

pub mod disk;
pub mod fingerprint;
pub mod positions;
pub mod record;
pub mod tree;

use crate::backend::{Backend, SnapshotId};
use tree::{EntryId, RadixTree};

/// Where a request can begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// The entry, to be held while the request runs.
    pub entry: EntryId,
    /// What to open.
    pub snapshot: SnapshotId,
    /// Tokens that it stands for.
    pub length: usize,
}

/// What a cache has done so far, and holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Snapshots held now.
    pub snapshots: usize,
    /// Snapshots put in so far.
    pub stored: u64,
    /// Snapshots that had to go so far.
    pub evicted: u64,
}

/// See the module's page.
#[derive(Debug)]
pub struct PrefixCache {
    tree: RadixTree<SnapshotId>,
    budget: u64,
    counts: CacheCounts,
}

impl PrefixCache {
    /// A cache whose snapshots hold at most `budget` bytes; 0 keeps nothing.
    pub fn new(budget: u64) -> PrefixCache {
        PrefixCache { tree: RadixTree::default(), budget, counts: CacheCounts::default() }
    }

    /// Whether a snapshot of `length` tokens could be kept at all.
    pub fn takes(&self, backend: &dyn Backend, length: usize) -> bool {
        self.budget > 0 && backend.sequence_bytes(length) <= self.budget
    }

    /// Tokens of `prompt` that some snapshot's path shares, and the deepest snapshot to begin from. It is
    /// strictly shorter than the prompt, because logits come only from a token that is processed.
    pub fn find(&self, prompt: &[u32]) -> (usize, Option<Hit>) {
        let found = self.tree.find(prompt, prompt.len().saturating_sub(1));
        let hit = found.entry.and_then(|(entry, length)| {
            let &snapshot = self.tree.value(entry)?;
            Some(Hit { entry, snapshot, length })
        });
        (found.shared, hit)
    }

    /// Whether there is a snapshot at exactly `tokens`.
    pub fn has(&self, tokens: &[u32]) -> bool {
        self.tree.at(tokens).is_some()
    }

    /// The snapshot at exactly `tokens`.
    pub fn at(&self, tokens: &[u32]) -> Option<SnapshotId> {
        self.tree.value(self.tree.at(tokens)?).copied()
    }

    /// Counts the snapshot at exactly `tokens`, where there is one, as used now.
    pub fn touch(&mut self, tokens: &[u32]) {
        if let Some(entry) = self.tree.at(tokens) {
            self.tree.touch(entry);
        }
    }

    /// Counts an entry as used now and keeps it until it was released as often.
    pub fn hold(&mut self, entry: EntryId) {
        self.tree.touch(entry);
        self.tree.hold(entry);
    }

    /// Undoes one [`PrefixCache::hold`].
    pub fn release(&mut self, entry: EntryId) {
        self.tree.release(entry);
    }

    /// Takes over `snapshot`, which stands for `tokens`, and lets go of older ones until the budget holds.
    pub fn insert(&mut self, backend: &mut dyn Backend, tokens: &[u32], snapshot: SnapshotId) {
        match self.tree.insert(tokens, snapshot) {
            Ok(_) => self.counts.stored += 1,
            // The same work was done beside this one; the bits are the same, so either will do.
            Err(snapshot) => backend.discard(snapshot),
        }
        while backend.memory().snapshots > self.budget && self.evict(backend) {}
    }

    /// Lets go of the snapshot that was used least recently; false where every one is held.
    pub fn evict(&mut self, backend: &mut dyn Backend) -> bool {
        let Some(snapshot) = self.tree.oldest().and_then(|oldest| self.tree.remove(oldest)) else {
            return false;
        };
        backend.discard(snapshot);
        self.counts.evicted += 1;
        true
    }

    /// Forgets every snapshot, held or not, and returns them for the backend to discard.
    pub fn clear(&mut self) -> Vec<SnapshotId> {
        let snapshots = self.tree.entries().map(|(_, _, &snapshot)| snapshot).collect();
        self.tree = RadixTree::default();
        snapshots
    }

    /// What it has done and holds.
    pub fn counts(&self) -> CacheCounts {
        CacheCounts { snapshots: self.tree.len(), ..self.counts }
    }

    /// The tree, to be looked at.
    pub fn tree(&self) -> &RadixTree<SnapshotId> {
        &self.tree
    }
}
