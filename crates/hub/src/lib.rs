//! Models from the Hugging Face hub onto this machine's disk.
//!
//! # What it is for
//!
//! Twenty gigabytes over a line that breaks. What was fetched is never fetched again: a file that is not whole stays
//! beside its place and is gone on with, after a lost connection, a full disk or `kill -9` alike; a file that is whole was
//! compared with the hub's hash of it. It knows neither tensors nor the terminal: which files to take is the caller's
//! choice, and what happens is told through [`Event`]s.
//!
//! # What flows in and out
//!
//! In: a [`Repo`] and [`Settings`] (`HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and their kin). Out: a directory of the hub's own
//! cache layout ([`cache`]), which `hf download` and every Hugging Face library share; each goes on with what the other
//! left.
//!
//! # Why not the crate `hf-hub`
//!
//! Its version 1.0.0 begins a file that broke off again from its first byte, compares no hash, and is 235 crates on Linux.
//! The hub's routes are three ([`client`]).
//!
//! # What to read first
//!
//! [`download`], which is where files grow; then [`client`] and [`cache`].

pub mod cache;
pub mod client;
pub mod download;
pub mod error;
pub mod hash;
pub mod repo;
pub mod settings;

pub use client::{Listing, RemoteFile};
pub use download::{Event, Hub, Patience};
pub use error::HubError;
pub use repo::Repo;
pub use settings::Settings;
