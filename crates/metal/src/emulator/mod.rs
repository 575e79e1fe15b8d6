//! A GPU that is no GPU: Metal kernels compiled by the system's C++ compiler and run on the host, to be tested.
//!
//! # What it is for
//!
//! It implements [`Device`] where there is no Mac, so that kernels, plan, argument binding and host run in tests as they are.
//! And it watches: a kernel that is wrong in a way that a GPU would answer with garbage, sometimes, fails here
//! with its name, its line and its threads ([`Fault`]).
//!
//! # What flows in and out
//!
//! In goes what every device gets: source with macros, buffers, passes. [`rules`] and [`spaces`] refuse what Metal's
//! compiler would; [`translate`] makes C++ of a source and `compile` a library; the C++ beside this crate (`emulator/`) has the shim of Metal's standard library that
//! kernels include, and the runtime that runs a threadgroup's threads as fibers. Out come bytes in buffers, or faults.
//!
//! # What holds
//!
//! Dispatches run one after the other, in a random order that the edges of their pass allow; so do threadgroups,
//! and the threads of one between barriers, all by [`Options::seed`]. What the plan leaves open is therefore left
//! open here. A pass runs when somebody waits for it and not before, so that a host that looks too early sees it.
//! With [`Options::tracked`] each load and store is checked; without, the same kernels run many times faster, and their
//! threads alternate less often.
//!
//! # What to read first
//!
//! `docs/metal-emulator.md`; then [`pass`], which runs things, and the runtime's `runtime.cpp` and `tracker.cpp`.
//!
//! ```no_run
//! use lily_metal::device::{Argument, Buffer, Completion, Device, Dispatch, Pass, Source, Touch};
//! use lily_metal::emulator::{Emulator, Options};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let gpu = Emulator::new(Options { seed: 1, tracked: true })?;
//! let text = "#include <metal_stdlib>
//!             kernel void twice(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] *= 2; }";
//! let library = gpu.compile(&Source { name: "twice.metal".into(), text: text.into(), macros: vec![] })?;
//! let x = gpu.allocate("x", 256)?;
//! x.write(0, &[0; 256]);
//! let dispatch = Dispatch::<Emulator> {
//!     label: "twice".into(),
//!     pipeline: gpu.pipeline(&library, "twice")?,
//!     arguments: vec![Argument::Buffer { buffer: x.clone(), offset: 0 }],
//!     threadgroup_memory: vec![],
//!     grid: [2, 1, 1],
//!     threads: 32,
//!     waits_for: vec![],
//!     touches: vec![Touch { buffer: x.clone(), range: 0..256, reads: true, writes: true }],
//! };
//! let pass = Pass { label: "example", before: &[], dispatches: &[dispatch], after: &[] };
//! gpu.submit(&pass)?.wait(std::time::Duration::MAX)?;
//! # Ok(())
//! # }
//! ```

mod compile;
mod fault;
mod ffi;
mod memory;
pub mod pass;
pub mod rules;
pub mod spaces;
pub mod tokens;
pub mod translate;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use lily_model::weights::Blob;

use crate::device::{self, Device, DeviceInfo, Pass, Source};
use crate::error::DeviceError;

pub use fault::{Fault, FaultKind};
pub use memory::Memory;
pub use pass::Submitted;

/// Threads of a threadgroup at the most, on all of Apple's GPUs.
const MAX_THREADS: u32 = 1024;
/// Bytes of threadgroup memory, on all of Apple's GPUs.
const THREADGROUP_MEMORY: u32 = 32 * 1024;
/// Bytes of a page of the host, and what mapped memory is aligned to.
const PAGE_BYTES: usize = 4096;
/// What is said of memory. Tests have little, and the host's own is not asked for.
const MEMORY: u64 = 16 << 30;

/// How an emulator runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Decides every order that is left open. Equal seeds give equal runs.
    pub seed: u64,
    /// Whether loads and stores are checked.
    pub tracked: bool,
}

/// An emulated GPU.
#[derive(Clone, Debug)]
pub struct Emulator(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    info: DeviceInfo,
    options: Options,
    allocated: AtomicU64,
    queue: Mutex<pass::Queue>,
}

impl Emulator {
    /// A GPU like Apple's of the ninth family.
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`] where there is no C++ compiler.
    pub fn new(options: Options) -> Result<Emulator, DeviceError> {
        Emulator::of_family(options, 9, false)
    }

    /// One like those of the tenth, which have Metal 4 and its tensors.
    ///
    /// # Errors
    /// As [`Emulator::new`].
    pub fn with_tensors(options: Options) -> Result<Emulator, DeviceError> {
        Emulator::of_family(options, 10, true)
    }

    fn of_family(options: Options, family: u32, has_metal4: bool) -> Result<Emulator, DeviceError> {
        compile::toolchain().map_err(DeviceError::NoDevice)?;
        let info = DeviceInfo {
            name: "emulated Apple GPU".into(),
            family,
            has_metal4,
            cores: 8,
            memory: MEMORY,
            working_set: MEMORY / 4 * 3,
            max_buffer: MEMORY / 2,
            has_unified_memory: true,
            threadgroup_memory: THREADGROUP_MEMORY,
            simd_width: 32,
            page_bytes: PAGE_BYTES,
        };
        let queue = Mutex::new(pass::Queue::new(options.seed));
        Ok(Emulator(Arc::new(Inner { info, options, allocated: AtomicU64::new(0), queue })))
    }

    /// How it runs.
    pub fn options(&self) -> Options {
        self.0.options
    }

    fn queue(&self) -> std::sync::MutexGuard<'_, pass::Queue> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn buffer(&self, label: &str, bytes: usize, contents: Option<Blob>) -> Result<Memory, DeviceError> {
        let total = self.0.allocated.load(Ordering::Relaxed) + bytes as u64;
        if total > self.0.info.working_set || bytes as u64 > self.0.info.max_buffer {
            return Err(DeviceError::OutOfMemory { what: label.into(), bytes: bytes as u64 });
        }
        Memory::new(self.clone(), label, bytes, contents)
            .ok_or_else(|| DeviceError::OutOfMemory { what: label.into(), bytes: bytes as u64 })
    }
}

/// Compiled source.
#[derive(Debug)]
pub struct Library(Arc<compile::Kernels>, String);

impl Library {
    /// Names of its kernels, sorted.
    pub fn kernels(&self) -> Vec<&str> {
        self.0.names()
    }

    /// Its kernel `name`, with threads that are fixed if and only if it has tensors.
    fn pipeline(&self, name: &str, threads: Option<u32>) -> Result<Pipeline, DeviceError> {
        let failed = |reason: String| DeviceError::Kernel { kernel: name.into(), reason };
        let Some(kernel) = self.0.get(name) else {
            return Err(failed(format!("{} has {}", self.1, self.0.names().join(", "))));
        };
        match (self.0.tensors, threads) {
            (true, None) => {
                return Err(failed("its source has tensors, so its threads must be fixed".into()));
            }
            (false, Some(_)) => return Err(failed("its source has no tensors".into())),
            _ => {}
        }
        Ok(Pipeline {
            kernels: Arc::clone(&self.0),
            kernel,
            source: self.1.as_str().into(),
            name: name.into(),
            threads,
        })
    }
}

/// A kernel that is ready to run.
#[derive(Clone, Debug)]
pub struct Pipeline {
    kernels: Arc<compile::Kernels>,
    kernel: compile::Kernel,
    source: Arc<str>,
    name: Arc<str>,
    /// Threads of its threadgroups, where they are fixed.
    threads: Option<u32>,
}

impl Pipeline {
    /// Whether it is one of [`Device::tensor_pipeline`].
    pub fn has_tensors(&self) -> bool {
        self.kernels.tensors
    }
}

impl device::Pipeline for Pipeline {
    fn max_threads(&self) -> u32 {
        MAX_THREADS
    }

    fn threadgroup_memory(&self) -> u32 {
        self.kernel.threadgroup_bytes
    }
}

impl Device for Emulator {
    type Library = Library;
    type Pipeline = Pipeline;
    type Buffer = Memory;
    type Completion = Submitted;

    fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    fn allocated(&self) -> u64 {
        self.0.allocated.load(Ordering::Relaxed)
    }

    fn compile(&self, source: &Source) -> Result<Library, DeviceError> {
        if source.has_tensors() && !self.0.info.has_metal4 {
            let log = "tensors are of Metal 4, which this GPU does not have".to_owned();
            return Err(DeviceError::Compile { source_name: source.name.clone(), log });
        }
        let toolchain = compile::toolchain().map_err(DeviceError::NoDevice)?;
        Ok(Library(toolchain.kernels(source, self.0.options.tracked)?, source.name.clone()))
    }

    fn pipeline(&self, library: &Library, name: &str) -> Result<Pipeline, DeviceError> {
        library.pipeline(name, None)
    }

    fn tensor_pipeline(&self, library: &Library, name: &str, threads: u32) -> Result<Pipeline, DeviceError> {
        library.pipeline(name, Some(threads))
    }

    fn allocate(&self, label: &str, bytes: usize) -> Result<Memory, DeviceError> {
        self.buffer(label, bytes, None)
    }

    fn map(&self, label: &str, bytes: &Blob) -> Result<Memory, DeviceError> {
        if !(bytes.as_ptr() as usize).is_multiple_of(PAGE_BYTES) {
            let reason = format!("{label} does not begin where a page does");
            return Err(DeviceError::Failed { pass: "mapping".into(), reason });
        }
        self.buffer(label, bytes.len(), Some(bytes.clone()))
    }

    fn submit(&self, pass: &Pass<'_, Emulator>) -> Result<Submitted, DeviceError> {
        pass::check(pass, self.0.options.tracked)?;
        Ok(self.queue().push(self, pass))
    }
}
