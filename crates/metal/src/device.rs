//! What Lily asks of a GPU, in Metal's terms and no more than that.
//!
//! Two things implement [`Device`]: Apple's driver, on macOS, and an emulator, everywhere. What stands above
//! never knows which.
//!
//! # Memory
//!
//! The GPU shares the machine's memory, so a [`Buffer`] is bytes that both sides see. Who may touch them when is
//! the caller's to keep: between the [`Device::submit`] of a pass and its completion the host neither writes bytes that
//! the pass touches nor reads bytes that it writes.
//!
//! # Order
//!
//! Passes run in the order in which they are submitted, and each sees all that those before it wrote. Within a
//! pass, first come the transfers [`Pass::before`], one after the other; then the dispatches, of which
//! each waits for those that [`Dispatch::waits_for`] names *and for no others*: two of them that no chain of such
//! edges connects may run at the same time, in any order; last the transfers [`Pass::after`].
//!
//! # Declared and touched
//!
//! [`Dispatch::touches`] says which bytes a dispatch reads and writes. Apple's driver never looks at it. The
//! emulator holds every load and store of a kernel against it, so a plan that declares less than
//! its kernels touch, and therefore has too few edges, does not pass a test.

use std::fmt::Debug;
use std::ops::Range;
use std::time::Duration;

use lily_model::weights::Blob;

use crate::error::DeviceError;

/// What is known of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name for people: `Apple M4 Max`.
    pub name: String,
    /// The newest Apple family that it belongs to: 7 for M1, 8 for M2, 9 for M3 and M4; 0 where it is none.
    pub family: u32,
    /// Whether it has Metal 4 with its tensor operations.
    pub has_metal4: bool,
    /// GPU cores.
    pub cores: u32,
    /// Bytes of the machine's memory.
    pub memory: u64,
    /// Bytes that the system lets a process keep resident for the GPU (`recommendedMaxWorkingSetSize`).
    pub working_set: u64,
    /// The longest buffer.
    pub max_buffer: u64,
    /// Whether host and GPU share one memory.
    pub has_unified_memory: bool,
    /// Bytes of threadgroup memory that one threadgroup may have.
    pub threadgroup_memory: u32,
    /// Threads of a SIMD-group.
    pub simd_width: u32,
    /// Bytes of a page of the system's memory: [`Device::map`] takes whole ones.
    pub page_bytes: usize,
}

/// A file of kernels, complete: what it includes of Lily's own is in the text already, `#include`s of
/// `<metal_…>` are the compiler's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The file's name, for messages. `#line` in the text names the files that it was put together from.
    pub name: String,
    /// Metal Shading Language.
    pub text: String,
    /// Macros, names and values.
    pub macros: Vec<(String, String)>,
}

/// The macro that a source has where its kernels may use Metal 4's tensors (`kernels/gemm.h`).
const TENSORS: &str = "TENSOR_PRODUCTS";

impl Source {
    /// The same for a GPU with [`DeviceInfo::has_metal4`]: blocks of 64 rows are multiplied with tensors.
    #[must_use]
    pub fn with_tensors(mut self) -> Source {
        if !self.has_tensors() {
            self.macros.push((TENSORS.to_owned(), "1".to_owned()));
        }
        self
    }

    /// Whether its kernels may use tensors.
    pub fn has_tensors(&self) -> bool {
        self.macros.iter().any(|(name, _)| name == TENSORS)
    }
}

/// A buffer bound to a kernel's argument `[[buffer(index)]]`, or a few bytes that are copied when the dispatch
/// is encoded.
#[derive(Clone, Debug)]
pub enum Argument<B> {
    /// From `offset` on. It is a multiple of what the kernel loads at once from there, at most 16 bytes.
    Buffer {
        /// The buffer.
        buffer: B,
        /// Bytes from its start.
        offset: usize,
    },
    /// A `constant` argument of at most 4 KiB.
    Bytes(Vec<u8>),
}

/// Bytes of a buffer that a dispatch may touch.
#[derive(Clone, Debug)]
pub struct Touch<B> {
    /// The buffer.
    pub buffer: B,
    /// In bytes from its start.
    pub range: Range<usize>,
    /// Whether they are read.
    pub reads: bool,
    /// Whether they are written.
    pub writes: bool,
}

/// One launch of one kernel.
#[derive(Clone, Debug)]
pub struct Dispatch<D: Device> {
    /// The kernel and the layer it works for, for captures and messages.
    pub label: String,
    /// The kernel.
    pub pipeline: D::Pipeline,
    /// Arguments by index: `arguments[i]` is `[[buffer(i)]]`.
    pub arguments: Vec<Argument<D::Buffer>>,
    /// Bytes of each `[[threadgroup(i)]]`, multiples of 16.
    pub threadgroup_memory: Vec<u32>,
    /// Threadgroups along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a threadgroup, along x.
    pub threads: u32,
    /// Dispatches of the same pass that must be done first, by index, ascending; each is less than this one's.
    pub waits_for: Vec<usize>,
    /// All that it touches, of arguments and of nothing else.
    pub touches: Vec<Touch<D::Buffer>>,
}

/// A copy or a fill between dispatches.
#[derive(Clone, Debug)]
pub enum Transfer<B> {
    /// Copies `bytes` from one place to another that does not overlap it. All numbers are multiples of 4.
    Copy {
        /// Where from.
        from: B,
        /// Bytes from its start.
        from_offset: usize,
        /// Where to.
        to: B,
        /// Bytes from its start.
        to_offset: usize,
        /// How many.
        bytes: usize,
    },
    /// Writes zeros. Both ends are multiples of 4.
    Zero {
        /// Where.
        buffer: B,
        /// Bytes from its start.
        range: Range<usize>,
    },
}

/// Work that is submitted as one thing.
#[derive(Debug)]
pub struct Pass<'a, D: Device> {
    /// What it is, for captures and messages.
    pub label: &'a str,
    /// Done first, in order.
    pub before: &'a [Transfer<D::Buffer>],
    /// As their edges say.
    pub dispatches: &'a [Dispatch<D>],
    /// Done last, in order.
    pub after: &'a [Transfer<D::Buffer>],
}

/// A GPU. A handle: clones are the same device.
pub trait Device: Clone + Debug + Send + Sync + 'static {
    /// Whether it looks at [`Dispatch::touches`]. Where it does not, nobody need say what a step touches of the pools.
    const WATCHES: bool = true;
    /// Compiled source.
    type Library: Debug + Send + Sync;
    /// A kernel that is ready to run. A handle.
    type Pipeline: Pipeline;
    /// Memory. A handle; the memory is freed with the last one, but not before the passes that touch it are done.
    type Buffer: Buffer;
    /// A submitted pass.
    type Completion: Completion;

    /// What it is.
    fn info(&self) -> &DeviceInfo;

    /// Bytes of all buffers that there are now.
    fn allocated(&self) -> u64;

    /// Compiles a file of kernels.
    ///
    /// # Errors
    /// [`DeviceError::Compile`] with the compiler's log.
    fn compile(&self, source: &Source) -> Result<Self::Library, DeviceError>;

    /// The kernel `name` of a library.
    ///
    /// # Errors
    /// [`DeviceError::Kernel`] where there is none, or where the library was compiled from a [`Source`] with tensors.
    fn pipeline(&self, library: &Self::Library, name: &str) -> Result<Self::Pipeline, DeviceError>;

    /// The kernel `name` of a library with tensors, for dispatches of exactly `threads` threads a threadgroup: Metal asks to know them, and runs
    /// such a kernel wrongly without a word where it does not.
    ///
    /// # Errors
    /// [`DeviceError::Kernel`] where there is none, where the library is without tensors, or where the device has none.
    fn tensor_pipeline(
        &self,
        library: &Self::Library,
        name: &str,
        threads: u32,
    ) -> Result<Self::Pipeline, DeviceError>;

    /// `bytes` (at least one) that nobody has written: zeros with Apple's driver, and for the emulator nothing that a kernel
    /// may read.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] with `label`.
    fn allocate(&self, label: &str, bytes: usize) -> Result<Self::Buffer, DeviceError>;

    /// A buffer over the bytes of a mapped file, which are not copied and which the GPU only reads. They begin where a page does, and whatever is
    /// left of their last page can be read too: they lie in a mapping of the system.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] with `label`.
    fn map(&self, label: &str, bytes: &Blob) -> Result<Self::Buffer, DeviceError>;

    /// Hands a pass to the GPU and does not wait for it.
    ///
    /// # Errors
    /// None of its work was done then.
    fn submit(&self, pass: &Pass<'_, Self>) -> Result<Self::Completion, DeviceError>;
}

/// A kernel that is ready to run.
pub trait Pipeline: Clone + Debug + Send + Sync {
    /// The most threads of a threadgroup (`maxTotalThreadsPerThreadgroup`).
    fn max_threads(&self) -> u32;

    /// Bytes of threadgroup memory that the kernel declares itself.
    fn threadgroup_memory(&self) -> u32;
}

/// Memory that host and GPU share. Two handles are equal where they are of the same buffer.
pub trait Buffer: Clone + Debug + PartialEq + Send + Sync {
    /// Its size.
    fn bytes(&self) -> usize;

    /// Copies from it to `to`, from `offset` on. Panics where that is beyond its end.
    fn read(&self, offset: usize, to: &mut [u8]);

    /// Copies `from` into it, from `offset` on. Panics where that is beyond its end.
    fn write(&self, offset: usize, from: &[u8]);
}

/// A submitted pass.
pub trait Completion: Debug + Send + Sync {
    /// Whether it has ended, well or not.
    fn is_done(&self) -> bool;

    /// Waits until it has ended, but no longer than `timeout`.
    ///
    /// # Errors
    /// [`DeviceError::Timeout`] where it takes longer, and what the device says where it failed. What a pass
    /// that failed was to write may hold anything.
    fn wait(&self, timeout: Duration) -> Result<(), DeviceError>;

    /// How long the GPU worked on it, once it has ended.
    fn gpu_time(&self) -> Option<Duration>;
}
