//! How fast this card moves memory: the base of the floors that speeds are quoted against.

use std::sync::Arc;

use lily_engine::backend::Limits;

use crate::driver::Gpu;
use crate::error::CudaError;

/// Bytes that one pass copies: many times any cache.
const BYTES: usize = 1 << 30;
/// Copies of which the fastest counts, after one that is not counted.
const PASSES: usize = 5;

/// Times copies within the card. A copy's bytes count twice, once read and once written, which comes within some
/// percent of a plain read.
///
/// # Errors
/// No room for the two buffers.
pub fn measure(gpu: &Arc<Gpu>) -> Result<Limits, CudaError> {
    const WHAT: &str = "measuring the memory";
    let (from, to) = (gpu.allocate(WHAT, BYTES)?, gpu.allocate(WHAT, BYTES)?);
    let mut fastest = f32::INFINITY;
    for pass in 0..=PASSES {
        let before = gpu.mark()?;
        gpu.copy(to.address(), from.address(), BYTES)?;
        let after = gpu.mark()?;
        after.wait()?;
        if pass > 0 {
            fastest = fastest.min(before.milliseconds_to(&after)?);
        }
    }
    let read_bytes_per_second = 2.0 * BYTES as f64 / (f64::from(fastest) * 1e-3);
    Ok(Limits { read_bytes_per_second, matrix_ops_per_second: None })
}
