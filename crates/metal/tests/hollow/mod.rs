//! A device that allocates, copies and counts but runs no kernel, and that fails when it is told to: for what
//! the host does around a pass.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lily_metal::device::{Buffer, Completion, Device, DeviceInfo, Pass, Pipeline, Source, Transfer};
use lily_metal::error::DeviceError;
use lily_model::weights::Blob;

/// A handle of the device.
#[derive(Clone, Debug)]
pub struct Hollow(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    info: DeviceInfo,
    allocated: Arc<AtomicU64>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What the next allocations, and the next passes when they are submitted or waited for, come to; `None` is well.
    allocations: VecDeque<Option<DeviceError>>,
    submissions: VecDeque<Option<DeviceError>>,
    outcomes: VecDeque<Option<DeviceError>>,
    /// Passes that nobody has waited for, with the steps that they read.
    under_way: Vec<u64>,
    most_under_way: usize,
    passes: u64,
    mapped: Vec<Blob>,
}

impl Hollow {
    /// A device of so much memory whose buffers have at most `max_buffer` bytes.
    pub fn new(working_set: u64, max_buffer: u64) -> Hollow {
        let info = DeviceInfo {
            name: "Hollow".into(),
            family: 9,
            has_metal4: false,
            cores: 10,
            memory: working_set,
            working_set,
            max_buffer,
            has_unified_memory: true,
            threadgroup_memory: 32 << 10,
            simd_width: 32,
            page_bytes: 4096,
        };
        Hollow(Arc::new(Inner { info, allocated: Arc::default(), state: Mutex::default() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap()
    }

    /// Lets the allocation after `well` others fail.
    pub fn fail_allocation(&self, well: usize, error: DeviceError) {
        fail(&mut self.state().allocations, well, error);
    }

    /// Refuses the pass that is submitted after `well` others.
    pub fn fail_submission(&self, well: usize, error: DeviceError) {
        fail(&mut self.state().submissions, well, error);
    }

    /// Lets the pass that is submitted after `well` others end with `error`.
    pub fn fail_pass(&self, well: usize, error: DeviceError) {
        fail(&mut self.state().outcomes, well, error);
    }

    /// The most passes that were under way at once.
    pub fn most_under_way(&self) -> usize {
        self.state().most_under_way
    }

    /// Passes that were submitted.
    pub fn passes(&self) -> u64 {
        self.state().passes
    }

    /// What was mapped.
    pub fn mapped(&self) -> Vec<Blob> {
        self.state().mapped.clone()
    }
}

fn fail(queue: &mut VecDeque<Option<DeviceError>>, well: usize, error: DeviceError) {
    queue.resize(queue.len().max(well), None);
    queue.push_back(Some(error));
}

/// Bytes of the host.
#[derive(Clone, Debug)]
pub struct Bytes {
    bytes: Arc<Mutex<Vec<u8>>>,
    _count: Arc<Count>,
}

#[derive(Debug)]
struct Count(Arc<AtomicU64>, u64);

impl Drop for Count {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl Bytes {
    fn get(&self, range: Range<usize>) -> Vec<u8> {
        self.bytes.lock().unwrap()[range].to_vec()
    }
}

impl PartialEq for Bytes {
    fn eq(&self, other: &Bytes) -> bool {
        Arc::ptr_eq(&self.bytes, &other.bytes)
    }
}

impl Buffer for Bytes {
    fn bytes(&self) -> usize {
        self.bytes.lock().unwrap().len()
    }

    fn read(&self, offset: usize, to: &mut [u8]) {
        to.copy_from_slice(&self.get(offset..offset + to.len()));
    }

    fn write(&self, offset: usize, from: &[u8]) {
        self.bytes.lock().unwrap()[offset..offset + from.len()].copy_from_slice(from);
    }
}

/// A kernel that does nothing.
#[derive(Clone, Debug)]
pub struct Nothing;

impl Pipeline for Nothing {
    fn max_threads(&self) -> u32 {
        1024
    }

    fn threadgroup_memory(&self) -> u32 {
        0
    }
}

/// A pass that is done once it is waited for.
#[derive(Debug)]
pub struct Waited {
    device: Hollow,
    number: u64,
    outcome: Option<DeviceError>,
}

impl Completion for Waited {
    fn is_done(&self) -> bool {
        !self.device.state().under_way.contains(&self.number)
    }

    fn wait(&self, _: Duration) -> Result<(), DeviceError> {
        self.device.state().under_way.retain(|&number| number > self.number);
        self.outcome.clone().map_or(Ok(()), Err)
    }

    fn gpu_time(&self) -> Option<Duration> {
        None
    }
}

impl Device for Hollow {
    type Library = ();
    type Pipeline = Nothing;
    type Buffer = Bytes;
    type Completion = Waited;

    fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    fn allocated(&self) -> u64 {
        self.0.allocated.load(Ordering::Relaxed)
    }

    fn compile(&self, source: &Source) -> Result<(), DeviceError> {
        assert!(!source.text.contains("#include \""), "{} includes what nobody has", source.name);
        Ok(())
    }

    fn pipeline(&self, _: &(), _: &str) -> Result<Nothing, DeviceError> {
        Ok(Nothing)
    }

    fn tensor_pipeline(&self, _: &(), _: &str, _: u32) -> Result<Nothing, DeviceError> {
        Ok(Nothing)
    }

    fn allocate(&self, _: &str, bytes: usize) -> Result<Bytes, DeviceError> {
        if let Some(Some(error)) = self.state().allocations.pop_front() {
            return Err(error);
        }
        assert!(bytes > 0 && bytes as u64 <= self.0.info.max_buffer);
        let allocated = &self.0.allocated;
        allocated.fetch_add(bytes as u64, Ordering::Relaxed);
        let _count = Arc::new(Count(Arc::clone(allocated), bytes as u64));
        Ok(Bytes { bytes: Arc::new(Mutex::new(vec![0; bytes])), _count })
    }

    fn map(&self, _: &str, bytes: &Blob) -> Result<Bytes, DeviceError> {
        assert!((bytes.as_ptr() as usize).is_multiple_of(self.0.info.page_bytes));
        assert!(bytes.len() as u64 <= self.0.info.max_buffer);
        self.state().mapped.push(bytes.clone());
        let _count = Arc::new(Count(Arc::clone(&self.0.allocated), 0));
        Ok(Bytes { bytes: Arc::new(Mutex::new(bytes.to_vec())), _count })
    }

    fn submit(&self, pass: &Pass<'_, Self>) -> Result<Waited, DeviceError> {
        let mut state = self.state();
        if let Some(Some(error)) = state.submissions.pop_front() {
            return Err(error);
        }
        for dispatch in pass.dispatches {
            assert!(dispatch.waits_for.is_sorted() && !dispatch.grid.contains(&0), "{}", dispatch.label);
        }
        for transfer in pass.before.iter().chain(pass.after) {
            match transfer {
                Transfer::Copy { from, from_offset, to, to_offset, bytes } => {
                    to.write(*to_offset, &from.get(*from_offset..from_offset + bytes));
                }
                Transfer::Zero { buffer, range } => buffer.write(range.start, &vec![0; range.len()]),
            }
        }
        state.passes += 1;
        let number = state.passes;
        state.under_way.push(number);
        state.most_under_way = state.most_under_way.max(state.under_way.len());
        let outcome = state.outcomes.pop_front().flatten();
        Ok(Waited { device: self.clone(), number, outcome })
    }
}
