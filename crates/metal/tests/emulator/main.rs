//! The emulator runs right kernels right, and finds what is wrong with wrong ones.
#![cfg(target_os = "linux")]

mod faults;
mod functions;
mod gemm;
mod kernels;
mod order;
mod refusals;
mod support;
mod tensors;
