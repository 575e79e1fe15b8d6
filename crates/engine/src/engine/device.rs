//! The backend behind a wall: a panic in it is an error like any other.
//!
//! That is sound because nothing of the engine's own is touched inside the wall, and because the contract of
//! [`Backend`] says what a panic may cost: the sequences that the call named.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::backend::{Backend, BackendError};

/// See the module's page.
pub(super) struct Device(Box<dyn Backend>);

impl Device {
    pub(super) fn new(backend: Box<dyn Backend>) -> Device {
        Device(backend)
    }

    /// Calls the backend; a panic becomes [`BackendError::Panicked`].
    pub(super) fn call<T>(
        &mut self,
        call: impl FnOnce(&mut dyn Backend) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let backend = &mut *self.0;
        catch_unwind(AssertUnwindSafe(|| call(backend)))
            .unwrap_or_else(|panic| Err(BackendError::Panicked(message(&*panic).to_owned())))
    }

    /// The backend itself, for calls that have nothing to fail at.
    pub(super) fn backend(&mut self) -> &mut dyn Backend {
        &mut *self.0
    }

    /// As [`Device::backend`], to be asked.
    pub(super) fn asked(&self) -> &dyn Backend {
        &*self.0
    }
}

/// What a panic said.
pub(super) fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}
