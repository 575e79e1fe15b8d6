//! The model on an Apple GPU.
//!
//! # What it is for
//!
//! The stages as Metal kernels (`kernels/*.metal`), and the Rust that brings them onto a GPU. No Mac is at hand
//! where this is written, so nothing of it but Apple's own driver and compiler goes unexecuted: all calls to
//! Metal stand behind one small trait, [`device::Device`], and an emulator implements it too.
//!
//! # What flows in and out
//!
//! In go the mapped [`Weights`](lily_model::weights::Weights), which stay where they are, and token ids. Out come
//! the next tokens, the largest logits or as requests ask, and, where asked for, logits. [`MetalBackend`] implements the engine's
//! [`Backend`](lily_engine::backend::Backend) on any [`Device`].
//!
//! # How a step runs
//!
//! The plan of `lily-gpu` becomes one pass: its dispatches, with barriers where it has edges. Two passes are under way
//! at once, and the second begins with the token that the first leaves in the GPU's memory ([`backend`]).
//!
//! # What to read first
//!
//! [`device`], which is all that a GPU is asked for; then [`backend`], and [`program`], which turns plans into passes.

#[cfg(target_os = "macos")]
pub mod apple;
pub mod backend;
pub mod device;
#[cfg(all(feature = "emulator", target_os = "linux"))]
pub mod emulator;
pub mod error;
pub mod limits;
pub mod memory_plan;
pub mod pool;
pub mod profile;
pub mod program;
pub mod reach;
pub mod sampling;
pub mod sequence;
pub mod slot;
pub mod sources;
pub mod store;
pub mod tensors;
pub mod weights;

pub use backend::{MetalBackend, MetalOptions};
pub use device::Device;
pub use error::{DeviceError, MetalError};
