//! How fast this GPU moves memory: the base of the floors that speeds are quoted against.

use std::time::Duration;

use lily_engine::backend::Limits;

use crate::device::{Completion, Device, Pass, Transfer};
use crate::error::DeviceError;

/// Bytes that one pass copies: many times any cache.
const BYTES: usize = 1 << 30;
/// Copies of which the fastest counts, after one that is not counted.
const PASSES: usize = 5;
/// How long one copy may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Times copies within the memory. A copy's bytes count twice, once read and once written.
///
/// # Errors
/// No room for the two buffers, or a device without a clock.
pub fn measure<D: Device>(device: &D) -> Result<Limits, DeviceError> {
    const LABEL: &str = "measuring the memory";
    let (from, to) = (device.allocate(LABEL, BYTES)?, device.allocate(LABEL, BYTES)?);
    let copy = [Transfer::Copy { from, from_offset: 0, to, to_offset: 0, bytes: BYTES }];
    let mut fastest = Duration::MAX;
    for pass in 0..=PASSES {
        let completion = device.submit(&Pass { label: LABEL, before: &copy, dispatches: &[], after: &[] })?;
        completion.wait(PATIENCE)?;
        let time =
            completion.gpu_time().filter(|time| !time.is_zero()).ok_or_else(|| DeviceError::Failed {
                pass: LABEL.to_owned(),
                reason: "the device does not say how long it took".to_owned(),
            })?;
        if pass > 0 {
            fastest = fastest.min(time);
        }
    }
    let read_bytes_per_second = 2.0 * BYTES as f64 / fastest.as_secs_f64();
    Ok(Limits { read_bytes_per_second, matrix_ops_per_second: None })
}
