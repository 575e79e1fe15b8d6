//! The threads between the engine and the disk.
//!
//! Snapshots are written by a thread of their own: the engine hands over an [`Export`], which costs it nothing,
//! and goes on. At most [`PENDING`] wait, because each keeps its state in memory; where writing is slower than
//! talking, the one that waited longest is given up, being the oldest turn of some conversation. Records are
//! read and checked by a thread for each; only the copy into the backend is the engine's, about a tenth of a
//! second for a gigabyte.

use std::collections::{BTreeSet, VecDeque};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::backend::Export;
use crate::prefix_cache::disk::{Key, Store};

/// Snapshots that wait to be written.
const PENDING: usize = 4;

/// A snapshot to write.
struct Save {
    tokens: Vec<u32>,
    /// Bytes that it will take, about.
    estimate: u64,
    export: Export,
}

#[derive(Default)]
struct Waiting {
    saves: VecDeque<Save>,
    /// Records that were used from memory, and so are not to age.
    used: BTreeSet<Key>,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

/// See the module's page. When it is dropped, what waits is written first.
pub(super) struct Spill {
    store: Arc<Store>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// A record on its way into memory.
pub(super) struct Loading {
    pub(super) key: Key,
    /// `None` comes where there is no such record after all.
    pub(super) state: Receiver<Option<Vec<u8>>>,
}

impl Spill {
    /// Starts the writing thread; `None`, with a line in the log, where the system refuses one.
    pub(super) fn start(store: Store) -> Option<Spill> {
        let (store, shared) = (Arc::new(store), Arc::new(Shared::default()));
        let thread = {
            let (store, shared) = (Arc::clone(&store), Arc::clone(&shared));
            std::thread::Builder::new().name("lily-cache".to_owned()).spawn(move || write(&store, &shared))
        };
        match thread {
            Ok(thread) => Some(Spill { store, shared, thread: Some(thread) }),
            Err(error) => {
                tracing::warn!(%error, "no thread for the cache directory, which is not used");
                None
            }
        }
    }

    /// What is on the disk.
    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    /// Has a snapshot of `tokens` written some time soon.
    pub(super) fn save(&self, tokens: Vec<u32>, estimate: u64, export: Export) {
        let mut waiting = self.shared.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.saves.iter().any(|save| save.tokens == tokens) {
            return;
        }
        if waiting.saves.len() == PENDING {
            waiting.saves.pop_front();
        }
        waiting.saves.push_back(Save { tokens, estimate, export });
        self.shared.changed.notify_all();
    }

    /// Has a record counted as used.
    pub(super) fn touch(&self, key: Key) {
        self.shared.waiting.lock().unwrap_or_else(PoisonError::into_inner).used.insert(key);
        self.shared.changed.notify_all();
    }

    /// Has a record read.
    pub(super) fn load(&self, key: Key, tokens: &[u32]) -> Option<Loading> {
        let (sender, state) = sync_channel(1);
        let store = Arc::clone(&self.store);
        let tokens = tokens[..key.length].to_vec();
        let thread = std::thread::Builder::new().name("lily-load".to_owned());
        let read = move || {
            // The request may be gone by now.
            let _ = sender.send(store.load(key, &tokens));
        };
        thread.spawn(read).ok().map(|_| Loading { key, state })
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        self.shared.waiting.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // Should it have panicked, there is nothing left to write.
            let _ = thread.join();
        }
    }
}

/// The writing thread's life.
fn write(store: &Store, shared: &Shared) {
    let mut complained = false;
    loop {
        let waiting = shared.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let idle =
            |waiting: &mut Waiting| waiting.saves.is_empty() && waiting.used.is_empty() && !waiting.closed;
        let mut waiting = shared.changed.wait_while(waiting, idle).unwrap_or_else(PoisonError::into_inner);
        if let Some(key) = waiting.used.pop_first() {
            drop(waiting);
            store.touch(key);
            continue;
        }
        let Some(Save { tokens, estimate, export }) = waiting.saves.pop_front() else { return };
        drop(waiting);
        match store.save(&tokens, estimate, export) {
            Ok(_) => complained = false,
            // A full disk is said once, not for every turn.
            Err(error) if !complained => {
                complained = true;
                tracing::warn!(%error, "a snapshot could not be written to the cache directory");
            }
            Err(_) => {}
        }
    }
}
