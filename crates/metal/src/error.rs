//! What can go wrong between Lily and a GPU, by kind, and why a model cannot run on one.

use std::time::Duration;

use lily_engine::backend::BackendError;

/// A device could not do what it was asked. After [`DeviceError::OutOfMemory`] it can be asked again; after
/// [`DeviceError::Lost`] nothing will succeed any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// There is no GPU that will do.
    #[error("{0}; use --backend cpu")]
    NoDevice(String),
    /// The compiler refused a source.
    #[error("the Metal compiler refuses {source_name}: {log}")]
    Compile {
        /// The file, as [`Source::name`](crate::device::Source::name) has it.
        source_name: String,
        /// What it said.
        log: String,
    },
    /// A library has no kernel of that name, or the device cannot run it.
    #[error("there is no kernel {kernel}: {reason}")]
    Kernel {
        /// The name.
        kernel: String,
        /// What the device said.
        reason: String,
    },
    /// There is no memory for a buffer, or for all buffers of a pass at once.
    #[error("the GPU has no memory for {what} ({bytes} bytes)")]
    OutOfMemory {
        /// What it was for.
        what: String,
        /// Its size; 0 where the device did not say.
        bytes: u64,
    },
    /// A pass took too long: the device ended it, or nobody answered.
    #[error("{pass} was not done after {} s", .after.as_secs())]
    Timeout {
        /// The pass's label.
        pass: String,
        /// How long it was waited for.
        after: Duration,
    },
    /// The GPU was removed, reset, or taken away from this process.
    #[error("the GPU was lost in {pass}: {reason}")]
    Lost {
        /// The pass's label.
        pass: String,
        /// What the device said.
        reason: String,
    },
    /// A pass failed for any other reason: an access that the device refuses, a fault of a kernel.
    #[error("{pass} failed: {reason}")]
    Failed {
        /// The pass's label.
        pass: String,
        /// What the device said.
        reason: String,
    },
}

impl DeviceError {
    /// The engine's form of an error while `bytes` were wanted for `what`.
    pub fn while_for(self, what: &'static str, bytes: usize) -> BackendError {
        match self {
            DeviceError::OutOfMemory { .. } => BackendError::OutOfMemory { what, bytes },
            other => other.into(),
        }
    }
}

impl From<DeviceError> for BackendError {
    fn from(error: DeviceError) -> BackendError {
        match error {
            DeviceError::OutOfMemory { bytes, .. } => BackendError::OutOfMemory {
                what: "a pass on the GPU",
                bytes: usize::try_from(bytes).unwrap_or(usize::MAX),
            },
            other => BackendError::Device(other.to_string()),
        }
    }
}

/// Why the Metal backend cannot start. The CPU backend runs whatever of this happens.
#[derive(Debug, thiserror::Error)]
pub enum MetalError {
    /// The device refused something.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The checkpoint's shapes or formats are none that the kernels are written for.
    #[error("the Metal backend cannot run this checkpoint: {0}; use --backend cpu")]
    Model(String),
    /// The model and its state do not fit.
    #[error(
        "macOS lets the GPU of this {device} keep {free} and the model needs {needed} ({parts}); {advice}"
    )]
    TooSmall {
        /// The device's name.
        device: String,
        /// What the GPU may keep.
        free: String,
        /// What is needed.
        needed: String,
        /// What it is needed for.
        parts: String,
        /// What to do about it.
        advice: String,
    },
}
