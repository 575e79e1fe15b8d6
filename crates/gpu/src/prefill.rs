//! Prefill, recorded: many consecutive tokens of one sequence through all layers.
//!
//! The program of a prompt over the stages of [`crate::decode`]: matrices meet matrices, so every product is one kernel that
//! unpacks weights next to the matrix units. Rows stand for tokens. The tokens of each expert are sorted on the device;
//! nothing of a pass is known to the host but how many tokens there are. Grids count what there is to do at the most.
//!
//! The two devices share no dispatch: [`cuda`] rounds activations before products and leaves the head to decode; [`metal`]
//! folds all that into the products, and has a head of its own.

pub mod cuda;
pub mod metal;
