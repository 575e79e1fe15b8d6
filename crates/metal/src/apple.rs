//! [`Device`] on Apple's driver.
//!
//! # Choices
//!
//! - **Memory.** Buffers are shared and tracked: the driver keeps the order between passes and between transfers and
//!   dispatches by itself, and within the one compute encoder of a pass, which is concurrent, there are barriers
//!   where the plan has an edge and nowhere else. From macOS 15 on all buffers are in one residency set of
//!   the queue and asked for as they come, so no command buffer spends time on making 20 GB resident.
//! - **Compiling.** From source, when the program starts, in the "safe" math mode with precise functions: sums keep
//!   their order, so a row has the same bits in every batch. The system itself caches compiled sources between
//!   starts (by their text and options), so no binary archive is kept.
//! - **Tensors.** Sources with Metal 4's tensors are compiled as Metal 4.0, and their pipelines made by an `MTL4Compiler` with the
//!   threads of a threadgroup fixed, which Metal asks for where a pipeline uses cooperative tensors.
//! - **Following.** Each pass signals the next value of one shared event; waiting is for that value, and for the
//!   command buffer's status, as a pass that fails signals nothing.
//! - **Times** are those of a pass's command buffer. A profile submits each dispatch as a pass of its own.

mod features;
mod pass;

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use block2::RcBlock;
use lily_model::weights::Blob;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::{AnyObject, ProtocolObject};
use objc2::{available, msg_send};
use objc2_foundation::{NSDictionary, NSError, NSObject, NSString};
use objc2_metal::{
    MTL4Compiler, MTL4CompilerDescriptor, MTL4ComputePipelineDescriptor, MTL4LibraryFunctionDescriptor,
    MTLAllocation, MTLBuffer, MTLCommandQueue, MTLCompileOptions, MTLComputePipelineState, MTLCopyAllDevices,
    MTLDevice, MTLLanguageVersion, MTLLibrary, MTLMathFloatingPointFunctions, MTLMathMode, MTLResidencySet,
    MTLResidencySetDescriptor, MTLResource, MTLResourceOptions, MTLSharedEvent, MTLSize,
};

use crate::device::{Buffer, Device, DeviceInfo, Pass, Pipeline, Source};
use crate::error::DeviceError;

pub use pass::AppleCompletion;

/// A Mac's GPU.
#[derive(Clone)]
pub struct AppleDevice(Arc<Shared>);

/// What all handles of a GPU share.
struct Shared {
    info: DeviceInfo,
    device: Retained<ProtocolObject<dyn MTLDevice>>,
    queue: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    event: Retained<ProtocolObject<dyn MTLSharedEvent>>,
    /// The last value that a pass was told to signal.
    signalled: AtomicU64,
    residency: Option<Residency>,
}

/// The buffers that stay resident; not to be changed by two threads at once.
struct Residency(Mutex<Retained<ProtocolObject<dyn MTLResidencySet>>>);

// SAFETY: a residency set has no thread of its own, and the mutex lets one thread at a time use it.
unsafe impl Send for Residency {}
// SAFETY: as above.
unsafe impl Sync for Residency {}

impl Residency {
    /// Changes the set and makes the change known.
    fn change(&self, change: impl FnOnce(&ProtocolObject<dyn MTLResidencySet>)) {
        let set = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(&set);
        set.commit();
    }

    /// Makes resident what is not yet.
    fn ask(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).requestResidency();
    }
}

/// How many GPUs that Lily can use there are.
pub fn count() -> usize {
    autoreleasepool(|_| MTLCopyAllDevices().iter().filter(|device| features::is_usable(device)).count())
}

impl AppleDevice {
    /// GPU `index` of those that Lily can use.
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`], with what there is instead.
    pub fn open(index: usize) -> Result<AppleDevice, DeviceError> {
        autoreleasepool(|_| {
            let all = MTLCopyAllDevices();
            let device = all.iter().filter(|device| features::is_usable(device)).nth(index);
            let device = device.ok_or_else(|| {
                let names: Vec<String> = all.iter().map(|device| device.name().to_string()).collect();
                let found = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
                DeviceError::NoDevice(format!(
                    "Lily needs an Apple GPU of the M1 or later, and the one counted {index} from 0 is not there \
                     (found: {found})"
                ))
            })?;
            let queue = device.newCommandQueue().ok_or_else(|| refused("make a command queue"))?;
            queue.setLabel(Some(&NSString::from_str("lily")));
            let event = device.newSharedEvent().ok_or_else(|| refused("make a shared event"))?;
            let residency = residency(&device, &queue);
            let info = features::info(&device);
            let signalled = AtomicU64::new(event.signaledValue());
            Ok(AppleDevice(Arc::new(Shared { info, device, queue, event, signalled, residency })))
        })
    }

    /// Makes a buffer resident and known.
    fn keep(&self, label: &str, buffer: Retained<ProtocolObject<dyn MTLBuffer>>) -> AppleBuffer {
        buffer.setLabel(Some(&NSString::from_str(label)));
        if let Some(residency) = &self.0.residency {
            residency.change(|set| set.addAllocation(as_allocation(&buffer)));
            residency.ask();
        }
        AppleBuffer(Arc::new(Held { bytes: buffer.length(), buffer, device: Arc::clone(&self.0) }))
    }
}

/// The set of all buffers, where the system has such sets.
fn residency(
    device: &ProtocolObject<dyn MTLDevice>,
    queue: &ProtocolObject<dyn MTLCommandQueue>,
) -> Option<Residency> {
    if !available!(macos = 15.0) {
        return None;
    }
    let descriptor = MTLResidencySetDescriptor::new();
    descriptor.setLabel(Some(&NSString::from_str("lily")));
    // Without a set every command buffer makes resident what it binds: slower, and as right.
    let set = device.newResidencySetWithDescriptor_error(&descriptor).ok()?;
    queue.addResidencySet(&set);
    Some(Residency(Mutex::new(set)))
}

fn as_allocation(buffer: &ProtocolObject<dyn MTLBuffer>) -> &ProtocolObject<dyn MTLAllocation> {
    ProtocolObject::from_ref(buffer)
}

fn refused(what: &str) -> DeviceError {
    DeviceError::NoDevice(format!("the Metal driver does not {what}"))
}

fn out_of_memory(label: &str, bytes: usize) -> DeviceError {
    DeviceError::OutOfMemory { what: label.to_owned(), bytes: bytes as u64 }
}

impl fmt::Debug for AppleDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AppleDevice({})", self.0.info.name)
    }
}

impl Device for AppleDevice {
    const WATCHES: bool = false;
    type Library = AppleLibrary;
    type Pipeline = ApplePipeline;
    type Buffer = AppleBuffer;
    type Completion = AppleCompletion;

    fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    fn allocated(&self) -> u64 {
        self.0.device.currentAllocatedSize() as u64
    }

    fn compile(&self, source: &Source) -> Result<AppleLibrary, DeviceError> {
        autoreleasepool(|_| {
            let text = NSString::from_str(&source.text);
            let tensors = source.has_tensors();
            if tensors && !self.0.info.has_metal4 {
                let log = "tensors are of Metal 4, which this GPU or this system does not have".to_owned();
                return Err(DeviceError::Compile { source_name: source.name.clone(), log });
            }
            let options = compile_options(&source.macros, tensors);
            let library = self.0.device.newLibraryWithSource_options_error(&text, Some(&options));
            let library = library.map_err(|error| DeviceError::Compile {
                source_name: source.name.clone(),
                log: error.localizedDescription().to_string(),
            })?;
            library.setLabel(Some(&NSString::from_str(&source.name)));
            Ok(AppleLibrary { library, tensors })
        })
    }

    fn pipeline(&self, library: &AppleLibrary, name: &str) -> Result<ApplePipeline, DeviceError> {
        autoreleasepool(|_| {
            let failed = |reason: String| DeviceError::Kernel { kernel: name.to_owned(), reason };
            if library.tensors {
                return Err(failed("its source has tensors, so its threads must be fixed".to_owned()));
            }
            let function = library.library.newFunctionWithName(&NSString::from_str(name));
            let function = function.ok_or_else(|| failed("its source does not have it".to_owned()))?;
            let state = self.0.device.newComputePipelineStateWithFunction_error(&function);
            state.map(ApplePipeline).map_err(|error| failed(error.localizedDescription().to_string()))
        })
    }

    fn tensor_pipeline(
        &self,
        library: &AppleLibrary,
        name: &str,
        threads: u32,
    ) -> Result<ApplePipeline, DeviceError> {
        autoreleasepool(|_| {
            let failed = |reason: String| DeviceError::Kernel { kernel: name.to_owned(), reason };
            let said = |error: Retained<NSError>| failed(error.localizedDescription().to_string());
            if !library.tensors || !available!(macos = 26.0) {
                return Err(failed("its source, or this system, has no tensors".to_owned()));
            }
            let compiler = self.0.device.newCompilerWithDescriptor_error(&MTL4CompilerDescriptor::new());
            let compiler = compiler.map_err(said)?;
            let function = MTL4LibraryFunctionDescriptor::new();
            function.setName(Some(&NSString::from_str(name)));
            function.setLibrary(Some(&library.library));
            let descriptor = MTL4ComputePipelineDescriptor::new();
            descriptor.setComputeFunctionDescriptor(Some(&function));
            let size = MTLSize { width: threads as usize, height: 1, depth: 1 };
            descriptor.setRequiredThreadsPerThreadgroup(size);
            let state =
                compiler.newComputePipelineStateWithDescriptor_compilerTaskOptions_error(&descriptor, None);
            state.map(ApplePipeline).map_err(said)
        })
    }

    fn allocate(&self, label: &str, bytes: usize) -> Result<AppleBuffer, DeviceError> {
        autoreleasepool(|_| {
            if bytes as u64 > self.0.info.max_buffer {
                return Err(out_of_memory(label, bytes));
            }
            // New memory of the system is zero.
            let buffer =
                self.0.device.newBufferWithLength_options(bytes, MTLResourceOptions::StorageModeShared);
            Ok(self.keep(label, buffer.ok_or_else(|| out_of_memory(label, bytes))?))
        })
    }

    fn map(&self, label: &str, bytes: &Blob) -> Result<AppleBuffer, DeviceError> {
        autoreleasepool(|_| {
            let start = NonNull::from(&**bytes).cast();
            let length = bytes.len().next_multiple_of(self.0.info.page_bytes);
            // The mapping lives as long as the buffer: it goes with the block that the driver calls last.
            let owner = bytes.clone();
            let release = RcBlock::new(move |_: NonNull<std::ffi::c_void>, _: usize| {
                let _ = &owner;
            });
            // SAFETY: the pages are mapped as long as `owner` lives, whatever is left of the last one with them
            // (the caller's promise), and the kernels only read them. `Blob` may be dropped on any thread.
            let buffer = unsafe {
                self.0.device.newBufferWithBytesNoCopy_length_options_deallocator(
                    start,
                    length,
                    MTLResourceOptions::StorageModeShared,
                    Some(&release),
                )
            };
            Ok(self.keep(label, buffer.ok_or_else(|| out_of_memory(label, length))?))
        })
    }

    fn submit(&self, pass: &Pass<'_, Self>) -> Result<AppleCompletion, DeviceError> {
        autoreleasepool(|_| {
            let value = self.0.signalled.fetch_add(1, Ordering::Relaxed) + 1;
            pass::submit(&self.0.queue, &self.0.event, value, pass)
        })
    }
}

/// The geometry as macros, and arithmetic that keeps its order.
fn compile_options(macros: &[(String, String)], tensors: bool) -> Retained<MTLCompileOptions> {
    let options = MTLCompileOptions::new();
    let names: Vec<Retained<NSString>> = macros.iter().map(|(name, _)| NSString::from_str(name)).collect();
    let values: Vec<Retained<NSObject>> =
        macros.iter().map(|(_, value)| Retained::into_super(NSString::from_str(value))).collect();
    let names: Vec<&NSString> = names.iter().map(|name| &**name).collect();
    let dictionary = NSDictionary::from_retained_objects(&names, &values);
    // SAFETY: names and values are strings.
    unsafe { options.setPreprocessorMacros(Some(&dictionary)) };
    if tensors {
        // Metal 4 is there, or nobody asks for them. Where it is not named, the compiler does not find their headers.
        options.setLanguageVersion(MTLLanguageVersion::Version4_0);
    } else if available!(macos = 14.0) {
        options.setLanguageVersion(MTLLanguageVersion::Version3_1);
    }
    if available!(macos = 15.0) {
        options.setMathMode(MTLMathMode::Safe);
        options.setMathFloatingPointFunctions(MTLMathFloatingPointFunctions::Precise);
    } else {
        let object: &AnyObject = &options;
        // SAFETY: the setter of `fastMathEnabled`, which is what there was before; it takes a BOOL.
        unsafe { msg_send![object, setFastMathEnabled: false] }
    }
    options
}

/// A compiled file of kernels.
#[derive(Debug)]
pub struct AppleLibrary {
    library: Retained<ProtocolObject<dyn MTLLibrary>>,
    /// Whether its source has tensors.
    tensors: bool,
}

/// A kernel.
#[derive(Clone, Debug)]
pub struct ApplePipeline(Retained<ProtocolObject<dyn MTLComputePipelineState>>);

impl Pipeline for ApplePipeline {
    fn max_threads(&self) -> u32 {
        u32::try_from(self.0.maxTotalThreadsPerThreadgroup()).unwrap_or(u32::MAX)
    }

    fn threadgroup_memory(&self) -> u32 {
        u32::try_from(self.0.staticThreadgroupMemoryLength()).unwrap_or(u32::MAX)
    }
}

/// Shared memory.
#[derive(Clone)]
pub struct AppleBuffer(Arc<Held>);

struct Held {
    buffer: Retained<ProtocolObject<dyn MTLBuffer>>,
    bytes: usize,
    device: Arc<Shared>,
}

// SAFETY: a buffer may be used from any thread; who touches its bytes when is the caller's to keep
// (`crate::device`).
unsafe impl Send for Held {}
// SAFETY: as above.
unsafe impl Sync for Held {}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(residency) = &self.device.residency {
            residency.change(|set| set.removeAllocation(as_allocation(&self.buffer)));
        }
    }
}

impl AppleBuffer {
    fn metal(&self) -> &ProtocolObject<dyn MTLBuffer> {
        &self.0.buffer
    }

    /// Where `length` bytes from `offset` on are.
    fn at(&self, offset: usize, length: usize) -> *mut u8 {
        assert!(
            offset.checked_add(length).is_some_and(|end| end <= self.0.bytes),
            "{length} bytes at {offset} of {self:?}"
        );
        // SAFETY: the offset is within the buffer.
        unsafe { self.0.buffer.contents().as_ptr().cast::<u8>().add(offset) }
    }
}

impl fmt::Debug for AppleBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let label = self.0.buffer.label().map_or_else(String::new, |label| label.to_string());
        write!(f, "AppleBuffer({label}, {} bytes)", self.0.bytes)
    }
}

impl PartialEq for AppleBuffer {
    fn eq(&self, other: &AppleBuffer) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Buffer for AppleBuffer {
    fn bytes(&self) -> usize {
        self.0.bytes
    }

    fn read(&self, offset: usize, to: &mut [u8]) {
        // SAFETY: the range is within the buffer, and nobody else writes it now (the trait's rule).
        unsafe { self.at(offset, to.len()).copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) }
    }

    fn write(&self, offset: usize, from: &[u8]) {
        // SAFETY: the range is within the buffer, and nobody else touches it now (the trait's rule).
        unsafe { self.at(offset, from.len()).copy_from_nonoverlapping(from.as_ptr(), from.len()) }
    }
}
