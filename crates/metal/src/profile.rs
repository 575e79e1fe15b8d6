//! A pass in pieces, to see which stage takes how long.
//!
//! Apple's GPUs sample their counters where a pass begins and ends, and not between two dispatches of one. So each
//! dispatch becomes a pass of its own, which waits for the one before it. What the plan lets run side by side runs
//! one after the other then, and every piece pays for being a command buffer: the times say which stage is long,
//! and come to more than a step takes.

use lily_engine::backend::StageTime;
use lily_gpu::stage::Stage;

use crate::backend::PATIENCE;
use crate::device::{Completion, Device, Dispatch, Pass};
use crate::error::DeviceError;

/// Does `pass` dispatch by dispatch, of the stages `stages`, and adds what each took to `times`. Returns its last
/// piece, which is not waited for.
///
/// # Errors
/// Those of the pieces. Where `times` is not empty then, a part was done.
pub fn submit<D: Device>(
    device: &D,
    pass: &Pass<'_, D>,
    stages: &[Stage],
    times: &mut Vec<StageTime>,
) -> Result<D::Completion, DeviceError> {
    if !pass.before.is_empty() {
        let before = Pass { label: pass.label, before: pass.before, dispatches: &[], after: &[] };
        device.submit(&before)?.wait(PATIENCE)?;
    }
    for (dispatch, stage) in pass.dispatches.iter().zip(stages) {
        let alone = [Dispatch { waits_for: Vec::new(), ..dispatch.clone() }];
        let piece = Pass { label: &dispatch.label, before: &[], dispatches: &alone, after: &[] };
        let completion = device.submit(&piece)?;
        // From here on something may have been done.
        add(times, stage.name(), 0, 0.0);
        completion.wait(PATIENCE)?;
        add(times, stage.name(), 1, completion.gpu_time().unwrap_or_default().as_secs_f64());
    }
    device.submit(&Pass { label: pass.label, before: &[], dispatches: &[], after: pass.after })
}

fn add(times: &mut Vec<StageTime>, stage: &'static str, kernels: usize, seconds: f64) {
    match times.iter_mut().find(|time| time.stage == stage) {
        Some(time) => (time.kernels, time.seconds) = (time.kernels + kernels, time.seconds + seconds),
        None => times.push(StageTime { stage, kernels, seconds }),
    }
}
