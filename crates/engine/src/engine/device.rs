//! The backend behind a wall: a panic in it is an error like any other.
//!
//! That is sound because nothing of the engine's own is touched inside the wall, and because the contract of
//! [`Backend`] says what a panic may cost: the sequences that the call named.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::backend::{Backend, BackendError, Want};

/// See the module's page.
pub(super) struct Device {
    backend: Box<dyn Backend>,
    trouble: Option<String>,
}

impl Device {
    pub(super) fn new(backend: Box<dyn Backend>) -> Device {
        Device { backend, trouble: None }
    }

    /// Calls the backend; a panic becomes [`BackendError::Panicked`].
    pub(super) fn call<T>(
        &mut self,
        call: impl FnOnce(&mut dyn Backend) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let backend = &mut *self.backend;
        let outcome = catch_unwind(AssertUnwindSafe(|| call(backend)))
            .unwrap_or_else(|panic| Err(BackendError::Panicked(message(&*panic).to_owned())));
        if let Err(error @ BackendError::Device(_)) = &outcome {
            self.trouble = Some(error.to_string());
        }
        outcome
    }

    /// Has it compute one token of no one's, which ends its trouble where it works again.
    pub(super) fn attempt(&mut self) {
        let opened = self.call(|backend| backend.open(None));
        let Ok(sequence) = opened else { return };
        let computed = self.call(|backend| {
            let ticket = backend.extend(sequence, &[0], Want::Token)?;
            backend.collect(ticket)
        });
        match computed {
            Ok(_) => {
                tracing::info!("the device works again");
                self.worked();
            }
            Err(error) => tracing::debug!(%error, "the device was tried"),
        }
        // A panic in there leaves a sequence that nobody uses.
        let _ = self.call(|backend| {
            backend.close(sequence);
            Ok(())
        });
    }

    /// Notes that it computed something.
    pub(super) fn worked(&mut self) {
        self.trouble = None;
    }

    /// How it failed at last, unless it has worked since.
    pub(super) fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// The backend itself, for calls that have nothing to fail at.
    pub(super) fn backend(&mut self) -> &mut dyn Backend {
        &mut *self.backend
    }

    /// As [`Device::backend`], to be asked.
    pub(super) fn asked(&self) -> &dyn Backend {
        &*self.backend
    }
}

/// What a panic said.
pub(super) fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}
