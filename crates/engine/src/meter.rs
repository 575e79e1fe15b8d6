//! Counting the bytes that a backend's sequences and snapshots hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::backend::BackendError;

/// Bytes held by everything that was charged to it and is still alive, up to a limit. Cheap to clone; clones
/// share a count.
#[derive(Clone, Debug)]
pub struct Meter {
    bytes: Arc<AtomicUsize>,
    limit: usize,
}

impl Default for Meter {
    /// A meter without a limit.
    fn default() -> Meter {
        Meter::new(usize::MAX)
    }
}

impl Meter {
    /// A meter that lets nothing pass `limit` bytes.
    pub fn new(limit: usize) -> Meter {
        Meter { bytes: Arc::default(), limit }
    }

    /// Bytes held now.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The most that may be held.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Counts `bytes`, which are for `what`, until the returned charge is dropped. Without room for them nothing
    /// is counted.
    pub fn charge(&self, what: &'static str, bytes: usize) -> Result<Charge, BackendError> {
        let more = |held: usize| held.checked_add(bytes).filter(|&sum| sum <= self.limit);
        let counted = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        counted.map_err(|_| BackendError::OutOfMemory { what, bytes })?;
        Ok(Charge { meter: self.clone(), bytes })
    }

    /// Counts `bytes`, whatever the limit, until [`Meter::subtract`] takes them off.
    pub fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Undoes [`Meter::add`].
    pub fn subtract(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Bytes on a [`Meter`], taken off when this is dropped.
#[derive(Debug)]
pub struct Charge {
    meter: Meter,
    bytes: usize,
}

impl Charge {
    /// How many they are.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.meter.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
