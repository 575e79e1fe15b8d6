//! The model on any 64-bit CPU.
//!
//! # What it is for
//!
//! Two things. It is Lily's backend where there is no GPU: int8 activations against the checkpoint's 4-bit
//! weights, read in place from the mapped file, with the best vector instructions that the machine has. And it
//! is the reference: the same stages in plain f32, which every other backend and every fast kernel is compared
//! with.
//!
//! # What flows in and out
//!
//! In go [`Weights`](lily_model::weights::Weights), which are never copied or repacked, and token ids. Out come
//! greedy tokens and, where asked for, logits. [`CpuBackend`] implements the engine's
//! [`Backend`](lily_engine::backend::Backend); nothing else is needed to run the model.
//!
//! # Two numerics, one promise
//!
//! [`Numerics::F32`] runs the reference forms of the stages; [`Numerics::Int8`] runs the fast ones. In both,
//! the bits of an answer do not depend on how a prompt is cut into calls, on the number of threads, or on which
//! other sequences share a step. That holds because each number (a weight row times a token, a head's attention
//! at a position, a head's state after a token) is computed by the same instructions in the same order
//! whatever is computed beside it. Code that breaks this for speed breaks the prefix cache.
//!
//! # What to read first
//!
//! [`stages`], the twelve steps of the pass, each with its plain form; [`reference_pass`], which strings the plain
//! forms together and reads like the model; [`backend`], which keeps the sequences; then [`fast_pass`] and
//! [`kernels`].

pub mod backend;
pub mod fast;
pub mod fast_pass;
pub mod footprint;
pub mod isa;
pub mod kernels;
pub mod kv_cache;
pub mod limits;
pub mod memory;
pub mod plain;
pub mod pool;
pub mod prefault;
pub mod reference_pass;
pub mod saved;
pub mod segment;
pub mod sequence;
pub mod stages;
pub mod workspace;

pub use backend::{CpuBackend, CpuOptions, Numerics};
