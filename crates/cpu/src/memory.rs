//! Counting the bytes that sequences and snapshots hold, and allocating them without dying.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lily_engine::backend::BackendError;

/// Bytes held by everything that was charged to it and is still alive. Cheap to clone; clones share a count.
#[derive(Clone, Debug, Default)]
pub struct Meter(Arc<AtomicUsize>);

impl Meter {
    /// Bytes held now.
    pub fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Counts `bytes` until the returned charge is dropped.
    pub fn charge(&self, bytes: usize) -> Charge {
        self.0.fetch_add(bytes, Ordering::Relaxed);
        Charge { meter: self.clone(), bytes }
    }
}

/// Bytes on a [`Meter`], taken off when this is dropped.
#[derive(Debug)]
pub struct Charge {
    meter: Meter,
    bytes: usize,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.meter.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// `elements` default values, or an error that names `what` they were for.
pub fn zeroed<T: Clone + Default>(what: &'static str, elements: usize) -> Result<Vec<T>, BackendError> {
    let mut values = Vec::new();
    grow(what, &mut values, elements)?;
    Ok(values)
}

/// Lengthens `values` to at least `elements`; what it holds stays.
pub fn grow<T: Clone + Default>(
    what: &'static str,
    values: &mut Vec<T>,
    elements: usize,
) -> Result<(), BackendError> {
    if elements > values.len() {
        values.try_reserve_exact(elements - values.len()).map_err(|_| BackendError::OutOfMemory {
            what,
            bytes: elements.saturating_mul(size_of::<T>()),
        })?;
        values.resize(elements, T::default());
    }
    Ok(())
}
