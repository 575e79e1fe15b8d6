//! The CUDA driver, as far as Lily uses it, behind types that own what they name.
//!
//! Everything here is loaded at run time: the program starts where there is no driver, and [`Gpu::open`] says so
//! in an error. All work goes to one stream, in the order in which it is enqueued, so memory that is freed on it
//! is not used again before the kernels that read it are done.

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys;

use crate::error::CudaError;
use crate::sources::Chip;

/// The least version that the driver must support: the functions below, and programmatic dependent launch in
/// captured graphs.
const NEEDED_VERSION: c_int = 12_080;
const NEEDED: &str = "12.8";
/// The least compute capability: `cp.async`, and the tensor cores' integer products.
const NEEDED_CAPABILITY: (i32, i32) = (8, 0);
/// The capability from which kernels may begin before their predecessors end.
const DEPENDENT_LAUNCH_FROM: (i32, i32) = (9, 0);
/// Longest name of a card.
const NAME_BYTES: usize = 256;

/// What is known of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// The driver's name for it.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory that one block may have.
    pub shared_bytes: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// CUDA version that the driver supports, as 1000 times the major and 10 times the minor number.
    pub driver: i32,
}

impl Card {
    /// What kernels are compiled for: the architecture with the features that only it has.
    pub fn chip(&self) -> Chip {
        let (major, minor) = self.capability;
        // Only Hopper's own instructions are used.
        let suffix = if (major, minor) == (9, 0) { "a" } else { "" };
        Chip {
            architecture: format!("sm_{major}{minor}{suffix}"),
            multiprocessors: self.multiprocessors,
            shared_bytes: self.shared_bytes,
        }
    }
}

/// A card with a context and a stream.
#[derive(Debug)]
pub struct Gpu {
    /// What it is.
    pub card: Card,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
}

// SAFETY: the driver's handles may be used from any thread; each call binds the context to its thread first.
unsafe impl Send for Gpu {}
// SAFETY: the driver locks what its calls share.
unsafe impl Sync for Gpu {}

/// An error for anything but success.
fn check(call: &'static str, result: sys::CUresult) -> Result<(), CudaError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = ptr::null();
    // SAFETY: `text` is written with a pointer to a constant string, or left null.
    unsafe { sys::cuGetErrorString(result, &mut text) };
    let message = if text.is_null() {
        format!("error {}", result as u32)
    } else {
        // SAFETY: the driver's strings are constant and end with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Err(CudaError::Driver { call, message })
}

/// As [`check`], for calls that allocate `bytes` for `what`.
fn check_memory(
    call: &'static str,
    result: sys::CUresult,
    what: &'static str,
    bytes: usize,
) -> Result<(), CudaError> {
    if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return Err(CudaError::OutOfMemory { what, bytes });
    }
    check(call, result)
}

/// Calls a driver function by its name and checks what it returns.
macro_rules! driver {
    ($function:ident($($argument:expr),* $(,)?)) => {
        check(stringify!($function), sys::$function($($argument),*))
    };
}

/// How many cards the driver sees.
///
/// # Errors
/// Where there is no driver, or one that is too old.
pub fn count() -> Result<usize, CudaError> {
    // SAFETY: the library is opened, and closed again, and nothing of it is used.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    let (mut version, mut count) = (0, 0);
    // SAFETY: the pointers are to locals of the right type.
    unsafe {
        driver!(cuDriverGetVersion(&mut version))?;
        if version < NEEDED_VERSION {
            let found = format!("{}.{}", version / 1000, version % 1000 / 10);
            return Err(CudaError::DriverTooOld { found, needed: NEEDED });
        }
        // A driver whose kernel module does not run has no devices either.
        driver!(cuInit(0)).map_err(|_| CudaError::NoDriver)?;
        driver!(cuDeviceGetCount(&mut count))?;
    }
    Ok(usize::try_from(count).unwrap_or(0))
}

impl Gpu {
    /// Card `index`, counted as the driver does.
    ///
    /// # Errors
    /// No driver, no such card, or one that is too old.
    pub fn open(index: usize) -> Result<Arc<Gpu>, CudaError> {
        let count = count()?;
        if index >= count {
            return Err(CudaError::NoDevice { asked: index, count });
        }
        let (mut device, mut context, mut stream) = (0, ptr::null_mut(), ptr::null_mut());
        let mut name = [0; NAME_BYTES];
        let (mut memory, mut version) = (0, 0);
        // SAFETY: the pointers are to locals of the right type and size.
        unsafe {
            driver!(cuDeviceGet(&mut device, index as c_int))?;
            driver!(cuDeviceGetName(name.as_mut_ptr(), NAME_BYTES as c_int, device))?;
            driver!(cuDeviceTotalMem_v2(&mut memory, device))?;
            driver!(cuDriverGetVersion(&mut version))?;
        }
        use sys::CUdevice_attribute as Attribute;
        let attribute = |attribute: Attribute| {
            let mut value = 0;
            // SAFETY: as above.
            unsafe { driver!(cuDeviceGetAttribute(&mut value, attribute, device)) }.map(|()| value)
        };
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let card = Card {
            // SAFETY: the driver ends the name with a zero.
            name: unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned(),
            capability,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32,
            memory: memory as u64,
            driver: version,
        };
        if capability < NEEDED_CAPABILITY {
            let found = format!("{}.{}", capability.0, capability.1);
            return Err(CudaError::CardTooOld { card: card.name, found });
        }
        // SAFETY: as above; the pool is the device's own and lives as long as it.
        unsafe {
            driver!(cuDevicePrimaryCtxRetain(&mut context, device))?;
            driver!(cuCtxSetCurrent(context))?;
            driver!(cuStreamCreate(&mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32))?;
            // What sequences free stays with the process, so that the next one has it at once.
            let mut pool = ptr::null_mut();
            driver!(cuDeviceGetDefaultMemPool(&mut pool, device))?;
            let mut keep = u64::MAX;
            let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            driver!(cuMemPoolSetAttribute(pool, threshold, (&raw mut keep).cast()))?;
        }
        Ok(Arc::new(Gpu { card, device, context, stream }))
    }

    /// Whether kernels may begin before their predecessors end.
    pub fn has_dependent_launch(&self) -> bool {
        self.card.capability >= DEPENDENT_LAUNCH_FROM
    }

    /// Makes the context this thread's.
    fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { driver!(cuCtxSetCurrent(self.context)) }
    }

    /// Bytes of memory that are free now.
    pub fn free_memory(&self) -> Result<u64, CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are to locals of the right type.
        unsafe { driver!(cuMemGetInfo_v2(&mut free, &mut total))? };
        Ok(free as u64)
    }

    /// `bytes` of memory for `what`, zeroed, in the order of the stream.
    pub fn allocate(self: &Arc<Gpu>, what: &'static str, bytes: usize) -> Result<Memory, CudaError> {
        self.bind()?;
        let mut address = 0;
        // SAFETY: the pointer is to a local; the stream lives as long as `self`.
        unsafe {
            let result = sys::cuMemAllocAsync(&mut address, bytes, self.stream);
            check_memory("cuMemAllocAsync", result, what, bytes)?;
        }
        let memory = Memory { gpu: Arc::clone(self), address, bytes };
        // SAFETY: the memory was allocated above, of this size.
        unsafe { driver!(cuMemsetD8Async(address, 0, bytes, self.stream))? };
        Ok(memory)
    }

    /// `bytes` of the host's memory that the card reads and writes by itself.
    pub fn pinned(self: &Arc<Gpu>, bytes: usize) -> Result<Pinned, CudaError> {
        self.bind()?;
        let mut start = ptr::null_mut();
        // SAFETY: the pointer is to a local. The memory is filled with zeros, so it is never read uninitialised.
        unsafe {
            let result = sys::cuMemHostAlloc(&mut start, bytes, 0);
            check_memory("cuMemHostAlloc", result, "a staging buffer", bytes)?;
            ptr::write_bytes(start.cast::<u8>(), 0, bytes);
        }
        Ok(Pinned { gpu: Arc::clone(self), start: start.cast(), bytes })
    }

    /// A second stream, whose work may overlap that of the first.
    pub fn stream(self: &Arc<Gpu>) -> Result<Stream, CudaError> {
        self.bind()?;
        let mut stream = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        unsafe { driver!(cuStreamCreate(&mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32))? };
        Ok(Stream { gpu: Arc::clone(self), stream })
    }

    /// Copies `from[start..]` to `to` (address), all of `bytes`, on the main stream.
    pub fn upload(&self, to: u64, from: &Pinned, start: usize, bytes: usize) -> Result<(), CudaError> {
        self.bind()?;
        upload(self.stream, to, from, start, bytes)
    }

    /// Copies `bytes` from the address `from` to `to[start..]`, on the main stream. They are there once an
    /// [`Event`] recorded afterwards has passed.
    pub fn download(&self, to: &Pinned, start: usize, from: u64, bytes: usize) -> Result<(), CudaError> {
        assert!(start + bytes <= to.bytes, "a copy beyond its buffer");
        self.bind()?;
        // SAFETY: the range lies in the buffer, which its owner keeps until the copy is done.
        unsafe { driver!(cuMemcpyDtoHAsync_v2(to.start.add(start).cast(), from, bytes, self.stream)) }
    }

    /// Copies a few bytes to the card; `from` may change as soon as this returns.
    pub fn upload_now(&self, to: u64, from: &[u8]) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the driver takes ordinary memory aside before it returns.
        unsafe { driver!(cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), self.stream)) }
    }

    /// Copies `bytes` within the card, on the main stream.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: both ranges are of memory that is freed on the same stream, so after the copy.
        unsafe { driver!(cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream)) }
    }

    /// A mark in the main stream, behind everything that was enqueued.
    pub fn mark(self: &Arc<Gpu>) -> Result<Event, CudaError> {
        let event = Event::new(self)?;
        // SAFETY: both live.
        unsafe { driver!(cuEventRecord(event.event, self.stream))? };
        Ok(event)
    }

    /// Whether everything that was enqueued on the main stream is done.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        self.bind()?;
        // SAFETY: the stream lives.
        let result = unsafe { sys::cuStreamQuery(self.stream) };
        if result == sys::CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        check("cuStreamQuery", result).map(|()| true)
    }

    /// Waits for everything that was enqueued on the main stream.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the stream lives.
        unsafe { driver!(cuStreamSynchronize(self.stream)) }
    }

    /// Loads machine code.
    pub fn load(self: &Arc<Gpu>, cubin: &[u8]) -> Result<Module, CudaError> {
        self.bind()?;
        let mut module = ptr::null_mut();
        // SAFETY: the image is a whole cubin, whose header has its length.
        unsafe { driver!(cuModuleLoadData(&mut module, cubin.as_ptr().cast()))? };
        Ok(Module { gpu: Arc::clone(self), module })
    }

    /// Records what `launches` does on the main stream, which must be launches of kernels only, as a graph.
    pub fn capture(
        self: &Arc<Gpu>,
        launches: impl FnOnce(&Gpu) -> Result<(), CudaError>,
    ) -> Result<Graph, CudaError> {
        self.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives; the capture ends below in any case.
        unsafe { driver!(cuStreamBeginCapture_v2(self.stream, mode))? };
        let launched = launches(self);
        let (mut graph, mut executable) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the pointers are to locals; the graph is not used after it is destroyed.
        unsafe {
            let ended = driver!(cuStreamEndCapture(self.stream, &mut graph));
            launched?;
            ended?;
            let instantiated = driver!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
            driver!(cuGraphDestroy(graph))?;
            instantiated?;
        }
        Ok(Graph { gpu: Arc::clone(self), executable })
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: nothing that uses the context is left, as everything else holds an `Arc` of it.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            let _ = sys::cuStreamDestroy_v2(self.stream);
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

fn upload(
    stream: sys::CUstream,
    to: u64,
    from: &Pinned,
    start: usize,
    bytes: usize,
) -> Result<(), CudaError> {
    assert!(start + bytes <= from.bytes, "a copy beyond its buffer");
    // SAFETY: the range lies in the buffer, which its owner keeps until the copy is done.
    unsafe { driver!(cuMemcpyHtoDAsync_v2(to, from.start.add(start).cast(), bytes, stream)) }
}

/// Memory of the card, freed in the order of the main stream.
#[derive(Debug)]
pub struct Memory {
    gpu: Arc<Gpu>,
    address: u64,
    bytes: usize,
}

impl Memory {
    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: the address is this allocation's, freed once.
            let _ = unsafe { sys::cuMemFreeAsync(self.address, self.gpu.stream) };
        }
    }
}

/// Memory of the host that the card copies from and to without a detour.
#[derive(Debug)]
pub struct Pinned {
    gpu: Arc<Gpu>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: it is plain memory with one owner.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Its bytes. What the card is still writing must be waited for first.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is initialised and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// Its bytes, to be written. What the card is still reading must be waited for first.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this is the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Pinned {
    /// Where the card finds it: the same address as the host's.
    pub fn address(&self) -> u64 {
        self.start as u64
    }

    /// The number at `index` of its u64, which the card may be writing: what it wrote before is there too.
    pub fn watch(&self, index: usize) -> u64 {
        assert!((index + 1) * size_of::<u64>() <= self.bytes, "a number beyond its buffer");
        // SAFETY: the number lies in the buffer, whose start is aligned to a page; the card writes it as a whole.
        unsafe { AtomicU64::from_ptr(self.start.cast::<u64>().add(index)) }.load(Ordering::Acquire)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: the memory is this allocation's, freed once.
            let _ = unsafe { sys::cuMemFreeHost(self.start.cast()) };
        }
    }
}

/// A mark in a stream.
#[derive(Debug)]
pub struct Event {
    gpu: Arc<Gpu>,
    event: sys::CUevent,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    fn new(gpu: &Arc<Gpu>) -> Result<Event, CudaError> {
        gpu.bind()?;
        let mut event = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        unsafe { driver!(cuEventCreate(&mut event, 0))? };
        Ok(Event { gpu: Arc::clone(gpu), event })
    }

    /// Waits until the stream has come here.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.gpu.bind()?;
        // SAFETY: the event lives.
        unsafe { driver!(cuEventSynchronize(self.event)) }
    }

    /// Milliseconds between this mark and a `later` one, both passed.
    pub fn milliseconds_to(&self, later: &Event) -> Result<f32, CudaError> {
        self.gpu.bind()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events live, and the pointer is to a local.
        unsafe { driver!(cuEventElapsedTime_v2(&mut milliseconds, self.event, later.event))? };
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: the event is this one's, destroyed once.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}

/// A stream beside the main one.
#[derive(Debug)]
pub struct Stream {
    gpu: Arc<Gpu>,
    stream: sys::CUstream,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Stream {}

impl Stream {
    /// As [`Gpu::upload`], on this stream.
    pub fn upload(&self, to: u64, from: &Pinned, start: usize, bytes: usize) -> Result<(), CudaError> {
        self.gpu.bind()?;
        upload(self.stream, to, from, start, bytes)
    }

    /// Copies from the address `from` into `to` and waits for it.
    pub fn download_now(&self, to: &mut [u8], from: u64) -> Result<(), CudaError> {
        self.gpu.bind()?;
        // SAFETY: the range is all of `to`, and the copy is waited for.
        unsafe {
            driver!(cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), self.stream))?;
            driver!(cuStreamSynchronize(self.stream))
        }
    }

    /// A mark behind everything that was enqueued here.
    pub fn mark(&self) -> Result<Event, CudaError> {
        let event = Event::new(&self.gpu)?;
        // SAFETY: both live.
        unsafe { driver!(cuEventRecord(event.event, self.stream))? };
        Ok(event)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: the stream is this one's, destroyed once; the driver finishes what is on it.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

/// Loaded machine code.
#[derive(Debug)]
pub struct Module {
    gpu: Arc<Gpu>,
    module: sys::CUmodule,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Module {}

impl Module {
    /// The kernel of that name, which lives as long as the module.
    pub fn kernel(&self, name: &str) -> Result<Kernel, CudaError> {
        self.gpu.bind()?;
        let terminated = CString::new(name).expect("kernels have plain names");
        let mut function = ptr::null_mut();
        // SAFETY: the pointers are to a local and to a string that ends with a zero.
        unsafe { driver!(cuModuleGetFunction(&mut function, self.module, terminated.as_ptr()))? };
        Ok(Kernel { function })
    }
}

impl Module {
    /// Address of the variable of that name.
    pub fn variable(&self, name: &str) -> Result<u64, CudaError> {
        self.gpu.bind()?;
        let terminated = CString::new(name).expect("variables have plain names");
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: the pointers are to locals and to a string that ends with a zero.
        unsafe { driver!(cuModuleGetGlobal_v2(&mut address, &mut bytes, self.module, terminated.as_ptr()))? };
        Ok(address)
    }

    /// The words of a variable of that name and size, where the module has one.
    pub fn words<const COUNT: usize>(&self, name: &str) -> Result<Option<[u32; COUNT]>, CudaError> {
        self.gpu.bind()?;
        let terminated = CString::new(name).expect("variables have plain names");
        let (mut address, mut bytes, mut words) = (0, 0, [0u32; COUNT]);
        // SAFETY: the pointers are to locals and to a string that ends with a zero; the variable is as large as
        // what is copied of it.
        unsafe {
            let found = sys::cuModuleGetGlobal_v2(&mut address, &mut bytes, self.module, terminated.as_ptr());
            if found == sys::CUresult::CUDA_ERROR_NOT_FOUND || bytes != size_of_val(&words) {
                return Ok(None);
            }
            check("cuModuleGetGlobal_v2", found)?;
            driver!(cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), address, bytes))?;
        }
        Ok(Some(words))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: the module is this one's, unloaded once; its kernels are not used any more.
            let _ = unsafe { sys::cuModuleUnload(self.module) };
        }
    }
}

/// A kernel of a loaded [`Module`].
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    function: sys::CUfunction,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Kernel {}

impl Kernel {
    /// How many parameters it has.
    pub fn parameters(&self, gpu: &Gpu) -> Result<usize, CudaError> {
        gpu.bind()?;
        let (mut offset, mut size, mut count) = (0, 0, 0);
        // SAFETY: the pointers are to locals; an index beyond the last is an error and writes nothing.
        while unsafe { sys::cuFuncGetParamInfo(self.function, count, &mut offset, &mut size) }
            == sys::CUresult::CUDA_SUCCESS
        {
            count += 1;
        }
        Ok(count)
    }

    /// Lets its blocks have `bytes` of shared memory beside what it declares.
    pub fn allow_shared(&self, gpu: &Gpu, bytes: u32) -> Result<(), CudaError> {
        gpu.bind()?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the kernel's module is loaded.
        unsafe { driver!(cuFuncSetAttribute(self.function, attribute, bytes as c_int)) }
    }

    /// Launches it on the main stream. With `early` its blocks may come onto the card before the kernel before it is
    /// done, where the card can do that; the kernel then waits itself.
    ///
    /// # Safety
    /// `arguments` must be as many as the kernel has parameters, each a pointer to a value of that parameter's
    /// type, and what the kernel does with them must stay within memory that lives until the stream has come
    /// past it.
    pub unsafe fn launch(
        &self,
        gpu: &Gpu,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: u32,
        early: bool,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: Default::default(),
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: gpu.stream,
            attrs: &mut attribute,
            numAttrs: u32::from(early && gpu.has_dependent_launch()),
        };
        // SAFETY: the configuration is complete and its pointers live; the rest is the caller's promise.
        unsafe { driver!(cuLaunchKernelEx(&config, self.function, arguments.as_mut_ptr(), ptr::null_mut())) }
    }
}

/// A captured sequence of launches.
#[derive(Debug)]
pub struct Graph {
    gpu: Arc<Gpu>,
    executable: sys::CUgraphExec,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Enqueues it on the main stream.
    ///
    /// # Safety
    /// The memory that the captured launches name, and what they find through it, must live until the stream has
    /// come past it.
    pub unsafe fn launch(&self) -> Result<(), CudaError> {
        self.gpu.bind()?;
        // SAFETY: the graph lives; the rest is the caller's promise.
        unsafe { driver!(cuGraphLaunch(self.executable, self.gpu.stream)) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: the graph is this one's, destroyed once.
            let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
    }
}
