//! A checkpoint's files become a geometry and weights, or an error that says what is wrong with them.

mod affine;
mod config;
mod convert;
mod demo;
mod files;
mod hostile;
mod inspect;
mod loader;
mod synth;
