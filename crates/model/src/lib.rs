//! What the model is.

pub mod geometry;
pub mod weights;
