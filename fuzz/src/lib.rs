//! What each fuzz target checks, as a function of some bytes: it returns where all is well, and panics where not.
//!
//! The targets in `fuzz_targets/` call these with what `libFuzzer` makes up; `crates/server/tests/fuzz.rs` includes
//! this file and calls them with the corpus, so that they are compiled and run with every change.

pub mod answers;
pub mod bodies;
pub mod device;
pub mod events;
pub mod json;
pub mod server;
pub mod streams;
pub mod templates;
