//! A pass as one command buffer, and what becomes of it.

use std::fmt;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSError, NSRange, NSString};
use objc2_metal::{
    MTLBarrierScope, MTLBlitCommandEncoder, MTLCommandBuffer, MTLCommandBufferError, MTLCommandBufferStatus,
    MTLCommandEncoder, MTLCommandQueue, MTLComputeCommandEncoder, MTLDispatchType, MTLEvent, MTLSharedEvent,
    MTLSize,
};

use super::{AppleBuffer, AppleDevice};
use crate::device::{Argument, Completion, Dispatch, Pass, Transfer};
use crate::error::DeviceError;

/// How long to wait for the event before looking at the command buffer's status again.
const LOOK: Duration = Duration::from_millis(50);

/// A command buffer that was committed.
pub struct AppleCompletion {
    label: String,
    commands: Retained<ProtocolObject<dyn MTLCommandBuffer>>,
    event: Retained<ProtocolObject<dyn MTLSharedEvent>>,
    /// What the event is set to when the pass is done.
    value: u64,
}

// SAFETY: a committed command buffer is only asked for its status, error and times, which any thread may do.
unsafe impl Send for AppleCompletion {}
// SAFETY: as above.
unsafe impl Sync for AppleCompletion {}

/// Encodes and commits `pass`, which sets `event` to `value` when it is done.
pub fn submit(
    queue: &ProtocolObject<dyn MTLCommandQueue>,
    event: &Retained<ProtocolObject<dyn MTLSharedEvent>>,
    value: u64,
    pass: &Pass<'_, AppleDevice>,
) -> Result<AppleCompletion, DeviceError> {
    let failed = |what: &str| DeviceError::Failed {
        pass: pass.label.to_owned(),
        reason: format!("the Metal driver does not make {what}"),
    };
    let commands = queue.commandBuffer().ok_or_else(|| failed("a command buffer"))?;
    commands.setLabel(Some(&NSString::from_str(pass.label)));
    let transfers = |transfers: &[Transfer<AppleBuffer>]| {
        if !transfers.is_empty() {
            let encoder = commands.blitCommandEncoder().ok_or_else(|| failed("a blit encoder"))?;
            transfers.iter().for_each(|transfer| encode_transfer(&encoder, transfer));
            encoder.endEncoding();
        }
        Ok(())
    };
    transfers(pass.before)?;
    if !pass.dispatches.is_empty() {
        let encoder = commands.computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent);
        let encoder = encoder.ok_or_else(|| failed("a compute encoder"))?;
        // Dispatches before this one are behind a barrier.
        let mut open = 0;
        for (index, dispatch) in pass.dispatches.iter().enumerate() {
            if dispatch.waits_for.last().is_some_and(|&last| last >= open) {
                encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
                open = index;
            }
            encode_dispatch(&encoder, dispatch);
        }
        encoder.endEncoding();
    }
    transfers(pass.after)?;
    let signal: &ProtocolObject<dyn MTLEvent> = ProtocolObject::from_ref(&**event);
    commands.encodeSignalEvent_value(signal, value);
    commands.commit();
    Ok(AppleCompletion { label: pass.label.to_owned(), commands, event: event.clone(), value })
}

fn encode_transfer(encoder: &ProtocolObject<dyn MTLBlitCommandEncoder>, transfer: &Transfer<AppleBuffer>) {
    match transfer {
        Transfer::Copy { from, from_offset, to, to_offset, bytes } => {
            let (source, target) = (from.at(*from_offset, *bytes), to.at(*to_offset, *bytes));
            debug_assert_ne!(source, target);
            // SAFETY: both ranges are within their buffers, as `at` has seen.
            unsafe {
                encoder.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size(
                    from.metal(),
                    *from_offset,
                    to.metal(),
                    *to_offset,
                    *bytes,
                );
            }
        }
        Transfer::Zero { buffer, range } => {
            buffer.at(range.start, range.len());
            let range = NSRange::new(range.start, range.len());
            encoder.fillBuffer_range_value(buffer.metal(), range, 0);
        }
    }
}

fn encode_dispatch(encoder: &ProtocolObject<dyn MTLComputeCommandEncoder>, dispatch: &Dispatch<AppleDevice>) {
    encoder.pushDebugGroup(&NSString::from_str(&dispatch.label));
    encoder.setComputePipelineState(&dispatch.pipeline.0);
    for (index, argument) in dispatch.arguments.iter().enumerate() {
        match argument {
            // SAFETY: the offset is within the buffer; the kernel stays within what the plan says of it.
            Argument::Buffer { buffer, offset } => unsafe {
                buffer.at(*offset, 0);
                encoder.setBuffer_offset_atIndex(Some(buffer.metal()), *offset, index);
            },
            // SAFETY: the pointer is to so many bytes, which are copied at once.
            Argument::Bytes(bytes) => unsafe {
                encoder.setBytes_length_atIndex(NonNull::from(&bytes[..]).cast(), bytes.len(), index);
            },
        }
    }
    for (index, &bytes) in dispatch.threadgroup_memory.iter().enumerate() {
        // SAFETY: the kernel has an argument of that index.
        unsafe { encoder.setThreadgroupMemoryLength_atIndex(bytes as usize, index) };
    }
    let [width, height, depth] = dispatch.grid.map(|groups| groups as usize);
    let threads = MTLSize { width: dispatch.threads as usize, height: 1, depth: 1 };
    encoder.dispatchThreadgroups_threadsPerThreadgroup(MTLSize { width, height, depth }, threads);
    encoder.popDebugGroup();
}

impl AppleCompletion {
    /// What a command buffer that ended has to say.
    fn outcome(&self) -> Result<(), DeviceError> {
        match self.commands.error() {
            Some(error) => Err(typed(&self.label, &error)),
            None => Ok(()),
        }
    }
}

/// The driver's error by kind.
fn typed(label: &str, error: &NSError) -> DeviceError {
    let (pass, reason) = (label.to_owned(), error.localizedDescription().to_string());
    match usize::try_from(error.code()).map(MTLCommandBufferError) {
        Ok(MTLCommandBufferError::OutOfMemory) => DeviceError::OutOfMemory { what: pass, bytes: 0 },
        // The system ends what keeps the GPU busy for seconds.
        Ok(MTLCommandBufferError::Timeout) => DeviceError::Timeout { pass, after: Duration::ZERO },
        Ok(MTLCommandBufferError::DeviceRemoved | MTLCommandBufferError::AccessRevoked) => {
            DeviceError::Lost { pass, reason }
        }
        _ => DeviceError::Failed { pass, reason },
    }
}

impl fmt::Debug for AppleCompletion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AppleCompletion({}, event {})", self.label, self.value)
    }
}

impl Completion for AppleCompletion {
    fn is_done(&self) -> bool {
        self.event.signaledValue() >= self.value || self.commands.status() == MTLCommandBufferStatus::Error
    }

    fn wait(&self, timeout: Duration) -> Result<(), DeviceError> {
        let start = Instant::now();
        loop {
            if self.event.waitUntilSignaledValue_timeoutMS(self.value, LOOK.as_millis() as u64) {
                return Ok(());
            }
            if self.commands.status() == MTLCommandBufferStatus::Error {
                return self.outcome();
            }
            if start.elapsed() >= timeout {
                return Err(DeviceError::Timeout { pass: self.label.clone(), after: timeout });
            }
        }
    }

    fn gpu_time(&self) -> Option<Duration> {
        if !self.is_done() {
            return None;
        }
        // The event comes just before the buffer is done, and the times just after.
        self.commands.waitUntilCompleted();
        let seconds = self.commands.GPUEndTime() - self.commands.GPUStartTime();
        Duration::try_from_secs_f64(seconds).ok()
    }
}
