//! What happens to a request, from a prompt's tokens to the answer's text.
//!
//! This crate sits between the server, which knows protocols, and the backends, which know tensors. It knows
//! neither: tokens, sampling parameters and stop strings go in; pieces of text, a finish reason and counts
//! come out.
//!
//! ```text
//! Request ──submit──▶ queue ──admit──▶ prefill chunks ─┐
//!                                                      ├─▶ one device, through the Backend trait
//!                                      decode steps ◀──┘        │
//!                                                               ▼
//! Generation ◀──Event── stop strings ◀── detokenizer ◀── sampler (or the device's own choice)
//!     │
//!     └─▶ reasoning and tool calls told apart (for the server, on its own thread)
//! ```
//!
//! One thread owns the device and does everything between admission and events, so nothing here is locked
//! but the queue. What it promises:
//!
//! - The text of a request does not depend on what runs beside it, on how its prompt is cut into chunks, or
//!   on how its text is cut into events.
//! - Whatever is wrong with a request is said by [`engine::Engine::submit`], before anything is computed. What
//!   goes wrong later reaches that request alone, as [`engine::Event::Failed`].
//! - A request whose [`engine::Generation`] is dropped frees its place within one step.
//!
//! Read first: [`backend`], the contract that every device fulfils; then [`engine`], the handle; then
//! `engine/scheduler.rs`, the loop. [`constraint`] keeps an answer to a grammar. [`sampler`] and [`stop`] stand alone, as do [`reasoning`] and
//! [`tool_calls`], which take the model's text apart; [`output`] is the two together.

pub mod backend;
pub mod constraint;
pub mod engine;
pub mod meter;
pub mod output;
pub mod prefix_cache;
pub mod reasoning;
pub mod sampler;
pub mod stop;
mod tags;
pub mod tool_calls;
