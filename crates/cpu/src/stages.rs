//! The twelve stages of the forward pass, one file each, under the names that every backend uses.
//!
//! Each file holds the plain f32 form, `reference`, which every other backend is judged against, and where it
//! pays a fast form that `Int8` numerics run, prefill and decode side by side. References are pure functions
//! of slices: a test can feed one stage with recorded activations and compare what it writes.
//!
//! In order: [`embed`]; per layer either [`delta_in`], [`delta_core`], [`delta_out`] or [`attn_in`],
//! [`attn_core`], [`attn_out`], then [`moe_route`], [`moe_up`], [`moe_down`]; at the end [`head`] and
//! [`sample`].

pub mod attn_core;
pub mod attn_in;
pub mod attn_out;
pub mod delta_core;
pub mod delta_in;
pub mod delta_out;
pub mod embed;
pub mod head;
pub mod moe_down;
pub mod moe_route;
pub mod moe_up;
pub mod sample;
