//! The emulator's runtime, compiled and loaded, as Rust sees it. Structures mirror `emulator/runtime/runtime.h`.

use std::ffi::{c_char, c_int, c_void};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};

/// What `LilyThread` is to entry points; Rust only passes functions that take it.
pub type Entry = unsafe extern "C" fn(*const c_void);

/// Memory of a device buffer, and what is known about its bytes.
#[repr(C)]
pub struct RawBuffer {
    _opaque: [u8; 0],
}

/// `LilyTouch`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawTouch {
    pub buffer: *mut RawBuffer,
    pub begin: *const u8,
    pub end: *const u8,
    pub reads: u32,
    pub writes: u32,
}

/// `LilyVariable`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RawVariable {
    pub site: u32,
    pub bytes: u64,
}

/// `LilyFault`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawFault {
    pub kind: u32,
    pub group: [u32; 3],
    pub thread: u32,
    pub other_thread: u32,
    pub same_group: u32,
    pub writes: u32,
    pub other_writes: u32,
    pub line: u32,
    pub other_line: u32,
    pub pc: *const u8,
    pub other_pc: *const u8,
    pub address: *const u8,
    pub bytes: u32,
    pub space: u32,
    pub buffer: *mut RawBuffer,
    pub offset: u64,
    pub size: u64,
    pub name: [c_char; 64],
    pub file: [c_char; 256],
}

/// `LilyDispatch`.
#[repr(C)]
#[derive(Debug)]
pub struct RawDispatch {
    pub entry: Entry,
    pub buffers: *const *mut c_void,
    pub threadgroup_bytes: *const u32,
    pub threadgroup_count: u32,
    pub threads: [u32; 3],
    pub groups: [u32; 3],
    pub touches: *const RawTouch,
    pub touch_count: usize,
    pub bound: *const *mut RawBuffer,
    pub bound_count: usize,
    pub image: *const u8,
    pub image_bytes: usize,
    pub seed: u64,
    pub threadgroup_limit: u32,
    pub tracked: u32,
}

type New = unsafe extern "C" fn(*mut u8, usize, c_int, c_int) -> *mut RawBuffer;
type Free = unsafe extern "C" fn(*mut RawBuffer);
type Written = unsafe extern "C" fn(*mut RawBuffer, usize, usize);
type Copied = unsafe extern "C" fn(*mut RawBuffer, usize, *const RawBuffer, usize, usize);
type Run = unsafe extern "C" fn(*const RawDispatch, *mut RawFault) -> c_int;
type Image = unsafe extern "C" fn(*const c_void, *mut *const u8, *mut usize) -> c_int;
type Take = unsafe extern "C" fn(*mut RawVariable, usize) -> usize;

/// The runtime's functions. The library stays loaded for the life of the process.
#[derive(Debug)]
pub struct Runtime {
    pub buffer_new: Symbol<New>,
    pub buffer_free: Symbol<Free>,
    pub buffer_written: Symbol<Written>,
    pub buffer_copied: Symbol<Copied>,
    pub dispatch: Symbol<Run>,
    pub take_declared: Symbol<Take>,
    pub image: Symbol<Image>,
    _library: Library,
}

impl Runtime {
    /// Loads the library at `path` such that kernels that are loaded later find its functions.
    ///
    /// # Errors
    /// What the system's loader says.
    pub fn load(path: &std::path::Path) -> Result<Runtime, libloading::Error> {
        // SAFETY: the library is our own and runs nothing when it is loaded; the signatures are those of its header.
        unsafe {
            let library = Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL)?;
            Ok(Runtime {
                buffer_new: library.get("lily_buffer_new")?,
                buffer_free: library.get("lily_buffer_free")?,
                buffer_written: library.get("lily_buffer_written")?,
                buffer_copied: library.get("lily_buffer_copied")?,
                dispatch: library.get("lily_dispatch")?,
                take_declared: library.get("lily_take_declared")?,
                image: library.get("lily_image")?,
                _library: library,
            })
        }
    }
}
