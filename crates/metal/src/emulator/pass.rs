//! Passes: what is asked of them before they run, and how they run.
//!
//! A pass waits in the queue until somebody waits for it or a later one, or asks often enough whether it is done. Until
//! then the host must not touch what it touches; a pass that finds that it did fails.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::fault::Scene;
use super::ffi::{RawBuffer, RawDispatch, RawFault, RawTouch};
use super::{Emulator, Fault, MAX_THREADS, Memory, THREADGROUP_MEMORY, compile};
use crate::device::{Argument, Buffer, Completion, Dispatch, Pass, Touch, Transfer};
use crate::error::DeviceError;

/// The longest argument that is passed by value.
const MAX_VALUE: usize = 4096;
/// What an argument's offset is a multiple of at most, and values are aligned to.
const ALIGNMENT: usize = 16;
/// One question in so many whether a pass is done finds that it is.
const PATIENCE: u64 = 4;

/// How a pass ended.
#[derive(Debug)]
struct Outcome {
    result: Result<(), DeviceError>,
    fault: Option<Fault>,
    time: Duration,
}

/// A submitted pass.
#[derive(Clone, Debug)]
pub struct Submitted {
    device: Emulator,
    number: u64,
    outcome: Arc<OnceLock<Outcome>>,
}

impl Submitted {
    /// What a kernel of it did wrong, once it has ended.
    pub fn fault(&self) -> Option<&Fault> {
        self.outcome.get()?.fault.as_ref()
    }
}

impl Completion for Submitted {
    fn is_done(&self) -> bool {
        if self.outcome.get().is_none() {
            let mut queue = self.device.queue();
            if queue.random(PATIENCE) == 0 {
                queue.run_until(self.number);
            }
        }
        self.outcome.get().is_some()
    }

    fn wait(&self, _: Duration) -> Result<(), DeviceError> {
        self.device.queue().run_until(self.number);
        self.outcome.get().map_or(Ok(()), |outcome| outcome.result.clone())
    }

    fn gpu_time(&self) -> Option<Duration> {
        Some(self.outcome.get()?.time)
    }
}

/// A pass that has not run yet.
#[derive(Debug)]
struct Waiting {
    number: u64,
    label: String,
    before: Vec<Transfer<Memory>>,
    dispatches: Vec<Dispatch<Emulator>>,
    after: Vec<Transfer<Memory>>,
    outcome: Arc<OnceLock<Outcome>>,
    /// What the host did meanwhile that it must not do.
    host: Option<String>,
}

/// Passes in the order of their submission.
#[derive(Debug)]
pub(super) struct Queue {
    waiting: VecDeque<Waiting>,
    submitted: u64,
    seed: u64,
}

impl Queue {
    pub fn new(seed: u64) -> Queue {
        Queue { waiting: VecDeque::new(), submitted: 0, seed }
    }

    pub fn push(&mut self, device: &Emulator, pass: &Pass<'_, Emulator>) -> Submitted {
        self.submitted += 1;
        let outcome = Arc::new(OnceLock::new());
        self.waiting.push_back(Waiting {
            number: self.submitted,
            label: pass.label.into(),
            before: pass.before.to_vec(),
            dispatches: pass.dispatches.to_vec(),
            after: pass.after.to_vec(),
            outcome: Arc::clone(&outcome),
            host: None,
        });
        Submitted { device: device.clone(), number: self.submitted, outcome }
    }

    /// A number below `end`.
    fn random(&mut self, end: u64) -> u64 {
        // splitmix64
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.seed ^ self.seed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ z >> 31) * u128::from(end)) >> 64) as u64
    }

    /// The host is about to touch bytes. Passes that wait and touch them too will fail for it.
    pub fn host_touches(&mut self, buffer: &Memory, range: Range<usize>, writes: bool) {
        for pass in &mut self.waiting {
            if pass.touches(buffer, &range, writes) {
                let does = if writes { "writes" } else { "reads" };
                let what = format!("the host {does} {} {range:?} before this pass has ended", buffer.label());
                pass.host.get_or_insert(what);
            }
        }
    }

    /// Runs passes up to that of this number.
    fn run_until(&mut self, number: u64) {
        while self.waiting.front().is_some_and(|pass| pass.number <= number) {
            let Some(pass) = self.waiting.pop_front() else { return };
            let start = Instant::now();
            let fault = self.run(&pass);
            let reason = pass.host.clone().or(fault.as_ref().map(Fault::to_string));
            let result =
                reason.map_or(Ok(()), |reason| Err(DeviceError::Failed { pass: pass.label.clone(), reason }));
            // Nobody else sets it.
            let _ = pass.outcome.set(Outcome { result, fault, time: start.elapsed() });
        }
    }

    fn run(&mut self, pass: &Waiting) -> Option<Fault> {
        for transfer in &pass.before {
            run_transfer(transfer);
        }
        let dispatches = &pass.dispatches;
        let mut missing: Vec<usize> = dispatches.iter().map(|d| d.waits_for.len()).collect();
        let mut ready: Vec<usize> = (0..dispatches.len()).filter(|&i| missing[i] == 0).collect();
        while !ready.is_empty() {
            let at = self.random(ready.len() as u64) as usize;
            let index = ready.swap_remove(at);
            let seed = self.random(u64::MAX);
            if let Err(fault) = run_dispatch(&dispatches[index], seed) {
                return Some(fault);
            }
            for (later, dispatch) in dispatches.iter().enumerate().skip(index + 1) {
                if dispatch.waits_for.contains(&index) {
                    missing[later] -= 1;
                    if missing[later] == 0 {
                        ready.push(later);
                    }
                }
            }
        }
        for transfer in &pass.after {
            run_transfer(transfer);
        }
        None
    }
}

impl Waiting {
    /// Whether the pass reads or writes what the host is about to write, or writes what it is about to read.
    fn touches(&self, buffer: &Memory, range: &Range<usize>, host_writes: bool) -> bool {
        let hits = |other: &Memory, touched: &Range<usize>, writes: bool| {
            other == buffer && overlap(touched, range) && (writes || host_writes)
        };
        let dispatched = self.dispatches.iter().flat_map(|d| &d.touches);
        let mut transfers = self.before.iter().chain(&self.after);
        dispatched.into_iter().any(|t| hits(&t.buffer, &t.range, t.writes))
            || transfers.any(|transfer| match transfer {
                Transfer::Copy { from, from_offset, to, to_offset, bytes } => {
                    hits(from, &(*from_offset..from_offset + bytes), false)
                        || hits(to, &(*to_offset..to_offset + bytes), true)
                }
                Transfer::Zero { buffer, range } => hits(buffer, range, true),
            })
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

/// Refuses a pass that Metal's own validation would refuse, and one whose edges do not order what its dispatches touch.
pub(super) fn check(pass: &Pass<'_, Emulator>, ordered: bool) -> Result<(), DeviceError> {
    let fail = |what: String| Err(DeviceError::Failed { pass: pass.label.into(), reason: what });
    for transfer in pass.before.iter().chain(pass.after) {
        let inside = |buffer: &Memory, range: Range<usize>| {
            range.start <= range.end
                && range.end <= buffer.bytes()
                && range.start.is_multiple_of(4)
                && range.end.is_multiple_of(4)
        };
        let good = match transfer {
            Transfer::Copy { from, from_offset, to, to_offset, bytes } => {
                let (source, target) = (*from_offset..from_offset + bytes, *to_offset..to_offset + bytes);
                inside(from, source.clone())
                    && inside(to, target.clone())
                    && !(from == to && overlap(&source, &target))
            }
            Transfer::Zero { buffer, range } => inside(buffer, range.clone()),
        };
        if !good {
            return fail(format!(
                "{transfer:?} is outside of its buffers, overlaps, or is not in units of 4 bytes"
            ));
        }
    }
    for (index, dispatch) in pass.dispatches.iter().enumerate() {
        let label = &dispatch.label;
        let groups = dispatch.grid.iter().map(|&n| u64::from(n)).product::<u64>();
        if dispatch.threads == 0
            || dispatch.threads > MAX_THREADS
            || groups == 0
            || groups > u64::from(u32::MAX)
        {
            return fail(format!("{label} has {} threads in {groups} threadgroups", dispatch.threads));
        }
        if let Some(fixed) = dispatch.pipeline.threads.filter(|&fixed| fixed != dispatch.threads) {
            return fail(format!(
                "{label} has {} threads a threadgroup and its pipeline was made for {fixed}",
                dispatch.threads
            ));
        }
        let kernel = &dispatch.pipeline.kernel;
        if let Some(missing) =
            (0..64).find(|&i| kernel.buffers >> i & 1 == 1 && i >= dispatch.arguments.len())
        {
            return fail(format!("{label} has no argument for [[buffer({missing})]]"));
        }
        for (i, argument) in dispatch.arguments.iter().enumerate() {
            let good = match argument {
                Argument::Buffer { buffer, offset } => *offset < buffer.bytes(),
                Argument::Bytes(bytes) => !bytes.is_empty() && bytes.len() <= MAX_VALUE,
            };
            if !good {
                return fail(format!(
                    "argument {i} of {label} begins beyond its buffer, or has no byte or too many"
                ));
            }
        }
        let mut threadgroup = dispatch.threadgroup_memory.iter();
        let asked = threadgroup.clone().sum::<u32>() + kernel.threadgroup_bytes;
        if threadgroup.any(|bytes| bytes % 16 != 0) || asked > THREADGROUP_MEMORY {
            return fail(format!(
                "{label} asks for {asked} bytes of threadgroup memory, or not for multiples of 16"
            ));
        }
        if dispatch.waits_for.iter().any(|&earlier| earlier >= index) {
            return fail(format!("{label} waits for a dispatch that does not come before it"));
        }
        for touch in &dispatch.touches {
            if touch.range.start > touch.range.end || touch.range.end > touch.buffer.bytes() {
                return fail(format!("{label} declares {:?} of {}", touch.range, touch.buffer.label()));
            }
        }
    }
    match ordered.then(|| unordered(pass.dispatches)).flatten() {
        Some((a, b, what)) => fail(format!(
            "{} and {} both touch {what}, one of them writes, and no edge orders them",
            pass.dispatches[a].label, pass.dispatches[b].label
        )),
        None => Ok(()),
    }
}

/// Two dispatches that may overlap in time and touch the same bytes, one of them writing, and the bytes.
fn unordered(dispatches: &[Dispatch<Emulator>]) -> Option<(usize, usize, String)> {
    let mut before: Vec<Vec<bool>> = Vec::new();
    for (index, dispatch) in dispatches.iter().enumerate() {
        let mut ancestors = vec![false; index];
        for &earlier in &dispatch.waits_for {
            ancestors[earlier] = true;
            for (mine, theirs) in ancestors.iter_mut().zip(&before[earlier]) {
                *mine = *mine || *theirs;
            }
        }
        for other in (0..index).filter(|&other| !ancestors[other]) {
            for (a, b) in
                dispatches[other].touches.iter().flat_map(|a| dispatch.touches.iter().map(move |b| (a, b)))
            {
                if a.buffer == b.buffer && overlap(&a.range, &b.range) && (a.writes || b.writes) {
                    let shared = a.range.start.max(b.range.start)..a.range.end.min(b.range.end);
                    return Some((other, index, format!("bytes {shared:?} of {}", a.buffer.label())));
                }
            }
        }
        before.push(ancestors);
    }
    None
}

fn run_transfer(transfer: &Transfer<Memory>) {
    match transfer {
        Transfer::Copy { from, from_offset, to, to_offset, bytes } => {
            from.copy_to(*from_offset, to, *to_offset, *bytes);
        }
        Transfer::Zero { buffer, range } => {
            // SAFETY: the pass was checked: the range is inside.
            unsafe { buffer.data().add(range.start).write_bytes(0, range.len()) };
            buffer.mark_written(range.start, range.len());
        }
    }
}

/// Bytes of an argument, where kernels may load 16 at once.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct Aligned([u8; ALIGNMENT]);

fn run_dispatch(dispatch: &Dispatch<Emulator>, seed: u64) -> Result<(), Fault> {
    let pipeline = &dispatch.pipeline;
    let mut values: Vec<Vec<Aligned>> = Vec::new();
    let mut buffers: Vec<*mut c_void> = Vec::new();
    // Kernels that are not tracked are not held against them.
    let mut touches = if pipeline.kernels.tracked { flattened(&dispatch.touches) } else { Vec::new() };
    let mut bound: Vec<*mut RawBuffer> = Vec::new();
    for argument in &dispatch.arguments {
        match argument {
            Argument::Buffer { buffer, offset } => {
                // SAFETY: the pass was checked: the offset is inside.
                buffers.push(unsafe { buffer.data().add(*offset) }.cast());
                bound.push(buffer.raw());
            }
            Argument::Bytes(bytes) => {
                let mut value = vec![Aligned([0; ALIGNMENT]); bytes.len().div_ceil(ALIGNMENT)];
                let data: *mut u8 = value.as_mut_ptr().cast();
                // SAFETY: there is room, and the end is one past these bytes.
                let end = unsafe {
                    data.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                    data.add(bytes.len())
                };
                touches.push(RawTouch { buffer: ptr::null_mut(), begin: data, end, reads: 1, writes: 0 });
                buffers.push(data.cast());
                values.push(value);
            }
        }
    }
    touches.sort_by_key(|t| t.begin);
    let raw = RawDispatch {
        entry: pipeline.kernel.entry,
        buffers: buffers.as_ptr(),
        threadgroup_bytes: dispatch.threadgroup_memory.as_ptr(),
        threadgroup_count: dispatch.threadgroup_memory.len() as u32,
        threads: [dispatch.threads, 1, 1],
        groups: dispatch.grid,
        touches: touches.as_ptr(),
        touch_count: touches.len(),
        bound: bound.as_ptr(),
        bound_count: bound.len(),
        image: pipeline.kernels.image.0,
        image_bytes: pipeline.kernels.image.1,
        seed,
        threadgroup_limit: THREADGROUP_MEMORY,
        tracked: pipeline.kernels.tracked.into(),
    };
    let Ok(toolchain) = compile::toolchain() else { return Ok(()) };
    // SAFETY: a fault is numbers, texts that zeros end, and pointers that are only compared.
    let mut fault: RawFault = unsafe { std::mem::zeroed() };
    // SAFETY: all that the dispatch points to lives until the call returns; kernels reach beyond it only where they are
    // not tracked and wrong, which a tracked run is there to find.
    if unsafe { (toolchain.runtime.dispatch)(&raw, &mut fault) } == 0 {
        return Ok(());
    }
    let name = |memory: &Memory| (memory.raw() == fault.buffer).then(|| memory.label().to_owned());
    let named = dispatch.arguments.iter().find_map(|argument| match argument {
        Argument::Buffer { buffer, .. } => name(buffer),
        Argument::Bytes(_) => None,
    });
    Err(Fault::of(
        &fault,
        &Scene {
            kernel: &pipeline.name,
            source: &pipeline.source,
            library: &pipeline.kernels.path,
            image: pipeline.kernels.image.0,
            buffer: named,
        },
    ))
}

/// Ranges that may overlap, as ranges that do not, each with all that may be done there.
fn flattened(touches: &[Touch<Memory>]) -> Vec<RawTouch> {
    let mut out: Vec<RawTouch> = Vec::new();
    let mut buffers: Vec<&Memory> = Vec::new();
    for touch in touches {
        if !buffers.contains(&&touch.buffer) {
            buffers.push(&touch.buffer);
        }
    }
    for buffer in buffers {
        let own: Vec<_> = touches.iter().filter(|t| t.buffer == *buffer && !t.range.is_empty()).collect();
        let mut ends: Vec<usize> = own.iter().flat_map(|t| [t.range.start, t.range.end]).collect();
        ends.sort_unstable();
        ends.dedup();
        for pair in ends.windows(2) {
            let covering = own.iter().filter(|t| t.range.start <= pair[0] && pair[1] <= t.range.end);
            let (reads, writes) =
                covering.fold((false, false), |(reads, writes), t| (reads || t.reads, writes || t.writes));
            if reads || writes {
                // SAFETY: the pass was checked: ranges are inside.
                let (begin, end) = unsafe { (buffer.data().add(pair[0]), buffer.data().add(pair[1])) };
                let (reads, writes) = (reads.into(), writes.into());
                out.push(RawTouch { buffer: buffer.raw(), begin, end, reads, writes });
            }
        }
    }
    out
}
