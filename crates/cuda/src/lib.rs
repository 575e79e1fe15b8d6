//! The model on an NVIDIA card.
//!
//! # What it is for
//!
//! The stages as CUDA kernels (`kernels/*.cu`, with a page of their own), and the Rust that brings them onto a
//! card. Driver and run-time compiler are loaded when the program runs: it builds without a CUDA toolkit, starts
//! without a driver, and says in a sentence what is missing ([`error`]).
//!
//! # What flows in and out
//!
//! In go the mapped [`Weights`](lily_model::weights::Weights), which are copied to the card in the layout that
//! the kernels want, and token ids. Out come chosen tokens and, where asked for, logits. [`CudaBackend`]
//! implements the engine's [`Backend`](lily_engine::backend::Backend).
//!
//! # How a step runs
//!
//! The plan of `lily-gpu`, recorded for the card's size, is captured once for each number of rows as a graph whose
//! kernels may begin before their predecessors end. A step is a block of numbers to the card, a graph, and the
//! chosen tokens back ([`backend`]); while a decode goes on, the graph alone ([`ring`]). Tokens that a request wants
//! drawn are settled by kernels behind the graph ([`sampling`]).
//!
//! # What to read first
//!
//! [`backend`]; then [`program`], which turns plans into graphs, and [`weights`], which loads.

pub mod backend;
pub mod cache;
pub mod compile;
pub mod driver;
pub mod error;
pub mod limits;
pub mod memory_plan;
pub mod pages;
pub mod program;
pub mod ring;
pub mod sampling;
pub mod sequence;
pub mod sources;
pub mod tiles;
pub mod weights;

pub use backend::{CudaBackend, CudaOptions};
pub use error::CudaError;
