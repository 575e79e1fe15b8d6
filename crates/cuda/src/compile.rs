//! Sources to machine code: NVIDIA's run-time compiler, loaded when it is first needed.

use std::ffi::{CStr, CString, c_char};
use std::ptr;
use std::thread;

use cudarc::nvrtc::sys;
use lily_gpu::layout::KvFormat;
use lily_model::geometry::Geometry;

use crate::cache::Cache;
use crate::error::CudaError;
use crate::sources::{self, Chip, FILES, File};

/// Machine code of one file's kernels.
pub struct Cubin {
    /// The file's name.
    pub file: &'static str,
    /// A file for the driver's loader.
    pub bytes: Vec<u8>,
}

/// Compiles all files of kernels for keys and values as `kv`, those that `cache` does not have. `machine` names what the code depends on beside
/// sources and flags: driver and card.
pub fn all_files(
    geometry: &Geometry,
    kv: KvFormat,
    chip: &Chip,
    machine: &str,
    cache: &Cache,
) -> Result<Vec<Cubin>, CudaError> {
    let flags = sources::flags(geometry, kv, chip);
    // Files are compiled beside each other: the compiler takes seconds for the larger ones.
    thread::scope(|scope| {
        let compiling: Vec<_> = FILES
            .map(|file| {
                let flags = &flags;
                scope.spawn(move || {
                    let headers = sources::HEADERS.iter().flat_map(|(name, text)| [*name, *text]);
                    let parts = headers.chain([file.text, machine]).chain(flags.iter().map(String::as_str));
                    let key = Cache::key(parts);
                    if let Some(bytes) = cache.get(file.name, &key) {
                        return Ok(Cubin { file: file.name, bytes });
                    }
                    let (bytes, _) = compile(file, &chip.architecture, flags)?;
                    cache.put(file.name, &key, &bytes);
                    Ok(Cubin { file: file.name, bytes })
                })
            })
            .into_iter()
            .collect();
        compiling.into_iter().map(|thread| thread.join().expect("a compilation does not panic")).collect()
    })
}

/// Compiles one file of kernels. Beside the code comes what the compiler had to say.
///
/// # Errors
/// No compiler, or its own words.
pub fn compile(
    file: File,
    architecture: &str,
    flags: &[String],
) -> Result<(Vec<u8>, Option<String>), CudaError> {
    // SAFETY: the library is opened, and closed again, and nothing of it is used.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoCompiler);
    }
    let program = Program::new(file)?;
    let flags: Vec<CString> = flags.iter().map(|flag| terminated(flag)).collect();
    let flags: Vec<*const c_char> = flags.iter().map(|flag| flag.as_ptr()).collect();
    let refused = |message: String| CudaError::Compile {
        file: file.name,
        architecture: architecture.to_owned(),
        message,
    };
    // SAFETY: the program lives; the flags are pointers to strings that end with a zero and outlive the call.
    let result = unsafe { sys::nvrtcCompileProgram(program.0, flags.len() as i32, flags.as_ptr()) };
    if result != sys::nvrtcResult::NVRTC_SUCCESS {
        return Err(refused(program.log().unwrap_or_else(|| words(result))));
    }
    let mut size = 0;
    // SAFETY: the pointer is to a local.
    ok(unsafe { sys::nvrtcGetCUBINSize(program.0, &mut size) }).map_err(refused)?;
    let mut cubin = vec![0u8; size];
    // SAFETY: the buffer has the size that was asked for.
    ok(unsafe { sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()) }).map_err(refused)?;
    Ok((cubin, program.log()))
}

/// The compiler's version, major and minor.
pub fn version() -> Option<(i32, i32)> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is there; the pointers are to locals.
    unsafe {
        (sys::is_culib_present() && ok(sys::nvrtcVersion(&mut major, &mut minor)).is_ok())
            .then_some((major, minor))
    }
}

/// A program that is being compiled.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(file: File) -> Result<Program, CudaError> {
        let source = terminated(file.text);
        let name = terminated(&format!("{}.cu", file.name));
        let headers = sources::HEADERS.map(|(_, text)| terminated(text));
        let names = sources::HEADERS.map(|(name, _)| terminated(name));
        let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (headers, names) = (pointers(&headers), pointers(&names));
        let mut program = ptr::null_mut();
        // SAFETY: all pointers are to strings that end with a zero and outlive the call, which copies them.
        let result = unsafe {
            sys::nvrtcCreateProgram(
                &mut program,
                source.as_ptr(),
                name.as_ptr(),
                headers.len() as i32,
                headers.as_ptr(),
                names.as_ptr(),
            )
        };
        ok(result).map_err(|message| CudaError::Compile {
            file: file.name,
            architecture: "any".to_owned(),
            message,
        })?;
        Ok(Program(program))
    }

    fn log(&self) -> Option<String> {
        let mut size = 0;
        // SAFETY: the program lives and the pointer is to a local.
        ok(unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut size) }).ok()?;
        let mut text = vec![0u8; size];
        // SAFETY: the buffer has the size that was asked for.
        ok(unsafe { sys::nvrtcGetProgramLog(self.0, text.as_mut_ptr().cast()) }).ok()?;
        let text = CStr::from_bytes_until_nul(&text).ok()?.to_string_lossy().trim().to_owned();
        (!text.is_empty()).then_some(text)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program is this one's, destroyed once.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

fn terminated(text: &str) -> CString {
    CString::new(text).expect("sources, names and flags have no zeros")
}

fn ok(result: sys::nvrtcResult) -> Result<(), String> {
    if result == sys::nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(words(result)) }
}

fn words(result: sys::nvrtcResult) -> String {
    // SAFETY: the compiler's strings are constant and end with a zero.
    unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(result)) }.to_string_lossy().into_owned()
}
