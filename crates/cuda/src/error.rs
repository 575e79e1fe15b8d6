//! Why the CUDA backend cannot start or go on: each a sentence that says what to do.

use lily_engine::backend::BackendError;

/// The CPU backend runs whatever of this happens.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// The driver's library cannot be loaded.
    #[error("there is no NVIDIA driver (libcuda cannot be loaded); install one, or use --backend cpu")]
    NoDriver,
    /// The driver does not know functions that Lily calls.
    #[error(
        "the NVIDIA driver supports CUDA {found}, and Lily needs {needed}; install a newer one, or use --backend cpu"
    )]
    DriverTooOld {
        /// The version that it supports.
        found: String,
        /// The least that is needed.
        needed: &'static str,
    },
    /// The driver sees no card, or not the one asked for.
    #[error(
        "there is no CUDA device {asked}; the driver sees {count}, counted from 0 (--device N chooses one)"
    )]
    NoDevice {
        /// What was asked for.
        asked: usize,
        /// How many there are.
        count: usize,
    },
    /// The card lacks instructions that the kernels are made of.
    #[error("{card} has compute capability {found}, and Lily needs 8.0 (Ampere) or later; use --backend cpu")]
    CardTooOld {
        /// Its name.
        card: String,
        /// What it has.
        found: String,
    },
    /// The run-time compiler's library cannot be loaded.
    #[error(
        "NVIDIA's run-time compiler (libnvrtc of CUDA 12 or 13) cannot be loaded; install it \
         (`pip install nvidia-cuda-nvrtc` and its folder in LD_LIBRARY_PATH will do), or use --backend cpu"
    )]
    NoCompiler,
    /// The run-time compiler refused a kernel: a bug, or a compiler that is too old.
    #[error("the kernels of {file} cannot be compiled for {architecture}: {message}")]
    Compile {
        /// The file of kernels.
        file: &'static str,
        /// The architecture.
        architecture: String,
        /// What the compiler said.
        message: String,
    },
    /// The model and its state do not fit.
    #[error(
        "{card} has {free} to give and the model needs {needed} ({parts}); lower --ctx-len, free memory on the card, raise \
         --gpu-memory where it was given, or use --backend cpu"
    )]
    CardTooSmall {
        /// Its name.
        card: String,
        /// Its free memory, or what the model may take of it.
        free: String,
        /// What is needed.
        needed: String,
        /// What it is needed for.
        parts: String,
    },
    /// The checkpoint's shapes or formats are none that the kernels are written for.
    #[error("the CUDA backend cannot run this checkpoint: {0}; use --backend cpu")]
    Model(String),
    /// The driver refused a call.
    #[error("the CUDA driver failed at {call}: {message}")]
    Driver {
        /// The function.
        call: &'static str,
        /// The driver's own words.
        message: String,
    },
    /// The device has no memory left.
    #[error("the card has no memory for {what} ({bytes} bytes)")]
    OutOfMemory {
        /// What it was for.
        what: &'static str,
        /// Its size.
        bytes: usize,
    },
}

impl From<CudaError> for BackendError {
    fn from(error: CudaError) -> BackendError {
        match error {
            CudaError::OutOfMemory { what, bytes } => BackendError::OutOfMemory { what, bytes },
            other => BackendError::Device(other.to_string()),
        }
    }
}
