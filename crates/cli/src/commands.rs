//! What the programs do, one module a command.

pub mod bench;
pub mod chat;
pub mod completions;
pub mod convert;
pub mod doctor;
pub mod eval;
pub mod inspect;
pub mod man;
pub mod plan;
pub mod pull;
pub mod score;
pub mod serve;
pub mod synth;
