//! What both GPU backends share: the pass as a recorded plan, and how state lies in a device's memory.
//!
//! # What it is for
//!
//! A GPU runs the forward pass as a list of kernels. Which of them may overlap, how many wait for each other
//! and how many bytes they move decides the speed, and none of it needs a GPU to be known. So the pass is
//! recorded once, as data: a [`Plan`](plan::Plan) of dispatches, each with its kernel, its grid, what it is
//! bound to and the bytes that it reads and writes. A backend turns the plan into what its device wants: CUDA
//! into a graph, Metal into one concurrent pass with barriers. `lily plan` prints it.
//!
//! # What flows in and out
//!
//! In go the shapes and formats of [`Weights`](lily_model::weights::Weights), their bytes never, a
//! [`Shape`](decode::Shape) (how many sequences, how much context) and a [`Target`](target::Target), which has
//! what differs between the devices. Out come plans and the [`layout`] of pages and recurrent states.
//!
//! # What holds
//!
//! Nobody writes a dependency down. Two dispatches depend on each other where their byte ranges overlap and one
//! of them writes ([`dependencies`]), so a kernel that says what it touches is ordered rightly, whatever is
//! recorded around it.
//!
//! # What to read first
//!
//! [`plan`], then [`decode`], which reads like the model, and [`prefill`], the same for prompts; [`report`] prints the
//! figures, and [`roofline`] says what they take at the least.

pub mod chips;
pub mod decode;
pub mod dependencies;
pub mod dot;
pub mod layout;
pub mod macros;
pub mod memory;
pub mod operations;
pub mod packing;
pub mod plan;
pub mod prefill;
pub mod prompt;
pub mod report;
pub mod roofline;
pub mod sampling;
pub mod stage;
pub mod step;
pub mod target;
mod workspace;
