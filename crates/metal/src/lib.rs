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
//! In go source text with the geometry as macros, buffers, and passes: lists of dispatches with what each
//! is bound to, what it touches and what it waits for. Out come completed passes, their times on the GPU, and
//! errors by kind.
//!
//! # What to read first
//!
//! [`device`], which is all that a GPU is asked for; [`error`] says what can go wrong.

pub mod device;
pub mod error;

pub use device::Device;
pub use error::DeviceError;
