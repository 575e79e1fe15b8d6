//! Kernels through the system's C++ compiler, and the libraries that come of it.
//!
//! A library is compiled once and kept beside the running program, in the build's own folder, under a name made
//! of all that went into it: source, flags, compiler, and the emulator's own files.

use std::collections::HashMap;
use std::ffi::{OsStr, c_void};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::{env, fs, io};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use xxhash_rust::xxh3::xxh3_128;

use super::ffi::{Entry, RawVariable, Runtime};
use super::translate::{self, Translation};
use super::{rules, spaces, tokens};
use crate::device::Source;
use crate::error::DeviceError;

/// The emulator's C++, in the source tree: it is built where that is.
const FILES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/emulator");

/// Flags of everything. Nothing is contracted or reordered, so that a result is the same on every host.
const FLAGS: [&str; 10] = [
    "-std=c++17",
    "-O2",
    "-g1",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fno-tree-loop-distribute-patterns",
];

/// Flags of kernels that are tracked: a call before every access, and checks of indices, shifts and divisors.
const TRACKED: [&str; 3] =
    ["-DLILY_TRACKED", "-fsanitize=thread", "-fsanitize=bounds,shift-exponent,integer-divide-by-zero"];

/// What the shim of tensors needs beyond: in Metal, too, a structure is an argument of a template there.
const TENSORS: &str = "-std=c++20";

/// Flags of kernels that are not: they run whole models.
const UNTRACKED: [&str; 1] = ["-O3"];

/// Compiled kernels of one source.
#[derive(Debug)]
pub struct Kernels {
    entries: HashMap<String, Kernel>,
    /// Whether they are compiled to be tracked.
    pub tracked: bool,
    /// Whether their source has tensors.
    pub tensors: bool,
    /// Where the library lies in memory.
    pub image: (*const u8, usize),
    /// The library's file, which has the lines of its instructions.
    pub path: PathBuf,
    _library: Library,
}

// SAFETY: the library's functions may be called from any thread, and its image is only read.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

/// A kernel in a library.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// What runs one thread of it.
    pub entry: Entry,
    /// Bit i: it has `[[buffer(i)]]`.
    pub buffers: u64,
    /// Bytes of its threadgroup variables.
    pub threadgroup_bytes: u32,
}

impl Kernels {
    /// A kernel by the name that the host knows.
    pub fn get(&self, name: &str) -> Option<Kernel> {
        self.entries.get(name).copied()
    }

    /// All names, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.entries.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }
}

/// The compiler and the runtime, made ready once in a process.
pub struct Toolchain {
    compiler: Vec<String>,
    folder: PathBuf,
    /// What every name of a library depends on.
    salt: String,
    /// The emulator's runtime.
    pub runtime: Runtime,
    /// What was compiled or is being, by the hash of all that goes into it: nothing twice, and different ones side by side.
    libraries: Mutex<HashMap<u128, Arc<Slot>>>,
    /// Held while a library is loaded: it tells the runtime of its variables, and is asked next.
    loading: Mutex<()>,
}

/// Where a library is once it is there.
type Slot = Mutex<Option<Arc<Kernels>>>;

/// The toolchain, or in one sentence why there is none.
pub fn toolchain() -> Result<&'static Toolchain, String> {
    static TOOLCHAIN: LazyLock<Result<Toolchain, String>> = LazyLock::new(Toolchain::prepare);
    TOOLCHAIN.as_ref().map_err(Clone::clone)
}

impl Toolchain {
    fn prepare() -> Result<Toolchain, String> {
        let compiler = compiler()?;
        let folder = folder().map_err(|e| format!("no folder for compiled kernels: {e}"))?;
        let mut salt = format!("{compiler:?} {FLAGS:?} {TRACKED:?} {UNTRACKED:?} {}", version(&compiler)?);
        let mut sources = files(Path::new(FILES)).map_err(|e| format!("{FILES} cannot be read: {e}"))?;
        sources.sort();
        for path in &sources {
            salt.push_str(
                &fs::read_to_string(path).map_err(|e| format!("{} cannot be read: {e}", path.display()))?,
            );
        }
        let path = folder.join(format!("runtime-{:032x}.so", xxh3_128(salt.as_bytes())));
        if !path.exists() {
            let parts: Vec<PathBuf> =
                sources.into_iter().filter(|p| p.extension() == Some(OsStr::new("cpp"))).collect();
            build(&compiler, &path, |command| {
                command.arg("-shared").args(["-Wall", "-Wextra"]).args(&parts);
            })?;
        }
        let runtime = Runtime::load(&path).map_err(|e| format!("the emulator cannot be loaded: {e}"))?;
        let (libraries, loading) = (Mutex::new(HashMap::new()), Mutex::new(()));
        Ok(Toolchain { compiler, folder, salt, runtime, libraries, loading })
    }

    /// Kernels of `source`, compiled or from before.
    ///
    /// # Errors
    /// [`DeviceError::Compile`] with the translator's or the compiler's words.
    pub fn kernels(&self, source: &Source, tracked: bool) -> Result<Arc<Kernels>, DeviceError> {
        let refuse = |log: String| DeviceError::Compile { source_name: source.name.clone(), log };
        let tokens = tokens::tokens(&source.name, &source.text);
        let translation = translate::translate(&tokens).map_err(|refused| refuse(refused.to_string()))?;
        rules::check(&tokens).map_err(|refused| refuse(refused.to_string()))?;
        // Sources that differ in their address spaces alone are translated alike, and are not the same.
        let checked = spaces::spaces(&source.name, &tokens);
        let (salt, macros, text) = (&self.salt, &source.macros, &translation.text);
        let name = format!("{salt} {tracked} {macros:?} {} {text} {checked}", source.name);
        let hash = xxh3_128(name.as_bytes());
        let slot = Arc::clone(lock(&self.libraries).entry(hash).or_default());
        let mut slot = lock(&slot);
        if let Some(kernels) = &*slot {
            return Ok(Arc::clone(kernels));
        }
        let stem: String = source
            .name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' })
            .collect();
        let path = self.folder.join(format!("{stem}-{hash:032x}.so"));
        if !path.exists() {
            self.check_spaces(source, &checked).map_err(refuse)?;
            self.build(source, &translation, tracked, &path).map_err(refuse)?;
        }
        let kernels = Arc::new(self.load(source, &path, &translation, tracked).map_err(refuse)?);
        *slot = Some(Arc::clone(&kernels));
        Ok(kernels)
    }

    /// A compile for the errors alone, of what has address spaces as types.
    fn check_spaces(&self, source: &Source, text: &str) -> Result<(), String> {
        let passed = self.folder.join(format!(
            "spaces-{:032x}",
            xxh3_128(format!("{} {:?} {text}", self.salt, source.macros).as_bytes())
        ));
        if passed.exists() {
            return Ok(());
        }
        let file = scratch(&passed, "cpp");
        fs::write(&file, text).map_err(|e| format!("{} cannot be written: {e}", file.display()))?;
        let result = build(&self.compiler, &passed, |command| {
            command
                .args(["-c", "-O0", "-DLILY_SPACES", "-DLILY_TRACKED", "-Wcast-qual", "-Werror=cast-qual"])
                .arg(format!("-I{FILES}/shim"));
            // What the source includes stands in a namespace there, so it comes before.
            if source.has_tensors() {
                command.args([TENSORS, "-include", "metal_tensor"]);
            }
            command.args(source.macros.iter().map(|(name, value)| format!("-D{name}={value}"))).arg(&file);
        });
        let _ = fs::remove_file(&file);
        result
    }

    fn build(
        &self,
        source: &Source,
        translation: &Translation,
        tracked: bool,
        path: &Path,
    ) -> Result<(), String> {
        let (text, object) = (scratch(path, "cpp"), scratch(path, "o"));
        let whole = format!("#include <metal_stdlib>\n#line 1 \"{}\"\n{}", source.name, translation.text);
        fs::write(&text, whole).map_err(|e| format!("{} cannot be written: {e}", text.display()))?;
        // Linked in a step of its own: the calls that are put into kernels are to find the runtime, not the library that
        // the compiler would add for them.
        let compiled = build(&self.compiler, &object, |command| {
            command.args(["-c", "-w"]).arg(format!("-I{FILES}/shim"));
            command.args(source.macros.iter().map(|(name, value)| format!("-D{name}={value}")));
            command.args(if tracked { TRACKED.as_slice() } else { UNTRACKED.as_slice() });
            command.args(source.has_tensors().then_some(TENSORS));
            command.arg(&text);
        })
        .and_then(|()| {
            build(&self.compiler, path, |command| {
                command.arg("-shared").arg(&object);
            })
        });
        // The library has all that is needed of them.
        let _ = fs::remove_file(&object);
        let _ = fs::remove_file(&text);
        compiled
    }

    fn load(
        &self,
        source: &Source,
        path: &Path,
        translation: &Translation,
        tracked: bool,
    ) -> Result<Kernels, String> {
        let _loading = lock(&self.loading);
        let failed = |e: libloading::Error| format!("the compiled kernels cannot be loaded: {e}");
        // SAFETY: what runs when it is loaded are the shim's declarations of threadgroup variables.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(failed)?;
        let mut declared = vec![RawVariable::default(); 4096];
        // SAFETY: there is room for as many as is said.
        let count = unsafe { (self.runtime.take_declared)(declared.as_mut_ptr(), declared.len()) };
        declared.truncate(count);
        let mut entries = HashMap::new();
        let mut image = (std::ptr::null(), 0);
        for entry in &translation.entries {
            // SAFETY: the translator wrote this function and this number with these types.
            let (run, buffers) = unsafe {
                let run = library.get::<Entry>(format!("lily_entry_{}", entry.name)).map_err(failed)?;
                let buffers =
                    library.get::<*const u64>(format!("lily_buffers_{}", entry.name)).map_err(failed)?;
                (*run, **buffers)
            };
            let threadgroup_bytes = entry
                .sites
                .iter()
                .map(|site| {
                    declared.iter().filter(|v| v.site == *site).map(|v| v.bytes).max().unwrap_or(0) as u32
                })
                .sum();
            // SAFETY: both results are written.
            unsafe { (self.runtime.image)(run as *const c_void, &mut image.0, &mut image.1) };
            entries.insert(entry.name.clone(), Kernel { entry: run, buffers, threadgroup_bytes });
        }
        let tensors = source.has_tensors();
        Ok(Kernels { entries, tracked, tensors, image, path: path.to_owned(), _library: library })
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The system's C++ compiler with the arguments that it needs to make code for this machine.
fn compiler() -> Result<Vec<String>, String> {
    let target = format!("{}-unknown-linux-gnu", env::consts::ARCH);
    let tool = cc::Build::new()
        .cpp(true)
        .target(&target)
        .host(&target)
        .opt_level(2)
        .debug(false)
        .warnings(false)
        .no_default_flags(true)
        .cargo_metadata(false)
        .try_get_compiler()
        .map_err(|e| format!("there is no C++ compiler, which the emulator needs: {e}"))?;
    let mut all = vec![tool.path().to_string_lossy().into_owned()];
    // A warning is what says that a cast changes the address space.
    all.extend(tool.args().iter().map(|a| a.to_string_lossy().into_owned()).filter(|a| a != "-w"));
    all.extend(
        FLAGS
            .iter()
            .filter(|flag| !flag.starts_with("-fno-tree") || !tool.is_like_clang())
            .map(|f| f.to_string()),
    );
    #[cfg(target_arch = "x86_64")]
    for (has, flag) in [
        (is_x86_feature_detected!("avx2"), "-mavx2"),
        (is_x86_feature_detected!("fma"), "-mfma"),
        (is_x86_feature_detected!("f16c"), "-mf16c"),
    ] {
        if has {
            all.push(flag.into());
        }
    }
    Ok(all)
}

fn version(compiler: &[String]) -> Result<String, String> {
    let output = Command::new(&compiler[0]).arg("--version").output();
    let output = output.map_err(|e| format!("the C++ compiler {} does not run: {e}", compiler[0]))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs the compiler such that `path` appears whole or not at all.
fn build(compiler: &[String], path: &Path, add: impl FnOnce(&mut Command)) -> Result<(), String> {
    let partial = scratch(path, "partial");
    let mut command = Command::new(&compiler[0]);
    command.args(&compiler[1..]).stdin(Stdio::null());
    add(&mut command);
    let output = command
        .arg("-o")
        .arg(&partial)
        .output()
        .map_err(|e| format!("the C++ compiler does not run: {e}"))?;
    if !output.status.success() {
        let _ = fs::remove_file(&partial);
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    fs::rename(&partial, path).map_err(|e| format!("{} cannot be written: {e}", path.display()))
}

/// A file beside `path` that nobody else writes, in this process or another.
fn scratch(path: &Path, extension: &str) -> PathBuf {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let number = LAST.fetch_add(1, Ordering::Relaxed);
    path.with_extension(format!("{}-{number}.{extension}", std::process::id()))
}

/// A folder beside the running program, which a build made and a clean build removes.
fn folder() -> io::Result<PathBuf> {
    let program = env::current_exe()?;
    let folder = program.parent().unwrap_or(Path::new(".")).join("lily-metal-emulator");
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        match path.is_dir() {
            true => all.extend(files(&path)?),
            false => all.push(path),
        }
    }
    Ok(all)
}
