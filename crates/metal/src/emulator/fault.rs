//! What a kernel did that it must not do, in words.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::path::Path;
use std::process::Command;

use super::ffi::RawFault;

/// The kinds of faults that are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// Two threads touched the same byte, one of them wrote, and no barrier came between.
    Race,
    /// An access outside of every buffer and every threadgroup allocation.
    OutOfBounds,
    /// Bytes were read that neither the host nor a kernel ever wrote.
    Unwritten,
    /// Some threads wait at a barrier that others do not come to.
    DivergentBarrier,
    /// Some lanes wait at a SIMD-group function that others do not come to.
    DivergentCollective,
    /// An access to bytes of a buffer that the dispatch does not say it touches, or not in that way.
    Undeclared,
    /// A write to weights or to bytes that were passed by value.
    ReadOnly,
    /// An address that is not a multiple of what is loaded or stored there.
    Misaligned,
    /// More threadgroup memory than there is.
    ThreadgroupMemory,
    /// The value of a lane that takes no part was asked for.
    InactiveLane,
    /// An index outside of an array of known length.
    ArrayIndex,
    /// A division by zero, a shift by too much.
    Undefined,
    /// A function of Metal's is used as it must not be.
    Misuse,
}

impl FaultKind {
    fn of(kind: u32) -> FaultKind {
        match kind {
            1 => FaultKind::Race,
            2 => FaultKind::OutOfBounds,
            3 => FaultKind::Unwritten,
            4 => FaultKind::DivergentBarrier,
            5 => FaultKind::DivergentCollective,
            6 => FaultKind::Undeclared,
            7 => FaultKind::ReadOnly,
            8 => FaultKind::Misaligned,
            9 => FaultKind::ThreadgroupMemory,
            10 => FaultKind::InactiveLane,
            11 => FaultKind::ArrayIndex,
            13 => FaultKind::Misuse,
            _ => FaultKind::Undefined,
        }
    }
}

/// A fault: who, where, what. Its [`Display`](fmt::Display) is one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What kind it is.
    pub kind: FaultKind,
    /// The kernel.
    pub kernel: String,
    /// File and line of the kernel's source, `attn_core.metal:31`, where they are known.
    pub line: Option<String>,
    /// Threadgroup of the thread.
    pub group: [u32; 3],
    /// The thread, by its index in the threadgroup.
    pub thread: u32,
    /// The thread that it is at odds with, where one is known.
    pub other_thread: Option<u32>,
    /// What happened.
    pub what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.group;
        let line = self.line.as_deref().unwrap_or("an unknown line");
        write!(
            f,
            "{} at {line}, thread {} of threadgroup ({x}, {y}, {z}): {}",
            self.kernel, self.thread, self.what
        )
    }
}

impl std::error::Error for Fault {}

/// What the words need beside the numbers.
pub(super) struct Scene<'a> {
    pub kernel: &'a str,
    pub source: &'a str,
    pub library: &'a Path,
    pub image: *const u8,
    /// Name of the buffer that the fault is in.
    pub buffer: Option<String>,
}

impl Fault {
    pub(super) fn of(raw: &RawFault, scene: &Scene) -> Fault {
        let kind = FaultKind::of(raw.kind);
        let line = if raw.line != 0 {
            let file = text(&raw.file);
            Some(format!("{}:{}", if file.is_empty() { scene.source } else { &file }, raw.line))
        } else {
            scene.line_of(raw.pc)
        };
        let other_line = if raw.other_line != 0 {
            Some(format!("{}:{}", scene.source, raw.other_line))
        } else {
            scene.line_of(raw.other_pc)
        };
        let other_thread = (raw.other_thread != u32::MAX).then_some(raw.other_thread);
        let place = match (&scene.buffer, raw.space) {
            (Some(name), _) => format!("byte {} of {name}", raw.offset),
            (None, 2) => format!("byte {} of threadgroup memory", raw.offset),
            _ => format!("address {:?}", raw.address),
        };
        let does = if raw.writes != 0 { "writes" } else { "reads" };
        let bytes = raw.bytes;
        let name = text(&raw.name);
        let at = |line: &Option<String>| line.as_ref().map(|l| format!(" at {l}")).unwrap_or_default();
        let who = |one: &str| match other_thread {
            Some(other) if raw.same_group != 0 || kind != FaultKind::Race => format!("thread {other}"),
            Some(other) => format!("thread {other} of another threadgroup"),
            None => one.to_owned(),
        };
        let what = match kind {
            FaultKind::Race => format!(
                "it {does} {bytes} bytes at {place} that {} {}{}, with no barrier between",
                who("another thread"),
                if raw.other_writes != 0 { "wrote" } else { "read" },
                at(&other_line)
            ),
            FaultKind::OutOfBounds => {
                format!("it {does} {bytes} bytes at {place}, of which there are {}", raw.size)
            }
            FaultKind::Unwritten => format!("it reads {bytes} bytes at {place} that nobody wrote"),
            FaultKind::DivergentBarrier | FaultKind::DivergentCollective => {
                let of = if name.is_empty() { "threadgroup_barrier" } else { &name };
                let elsewhere = match (other_thread, &other_line) {
                    (Some(other), Some(line)) => format!("thread {other} waits at {line}"),
                    (Some(other), None) => format!("thread {other} has returned"),
                    (None, _) => "others do not".to_owned(),
                };
                format!("it waits at {of}, but {elsewhere}")
            }
            FaultKind::Undeclared => {
                format!("it {does} {bytes} bytes at {place}, which its dispatch does not declare")
            }
            FaultKind::ReadOnly => format!("it writes {bytes} bytes at {place}, which are only to be read"),
            FaultKind::Misaligned => {
                format!("it {does} {bytes} bytes at {place}, which is no multiple of {}", raw.size)
            }
            FaultKind::ThreadgroupMemory => {
                format!("it has {} bytes of threadgroup memory, and there are {}", raw.size, raw.bytes)
            }
            FaultKind::InactiveLane => {
                format!(
                    "{name} takes the value of {}, which takes no part",
                    who("a lane outside of the SIMD-group")
                )
            }
            FaultKind::ArrayIndex => format!("the index {} is outside of its array", raw.offset as i64),
            FaultKind::Undefined => format!("{name} ({})", raw.offset as i64),
            FaultKind::Misuse => name,
        };
        Fault {
            kind,
            kernel: scene.kernel.into(),
            line,
            group: raw.group,
            thread: raw.thread,
            other_thread,
            what,
        }
    }
}

impl Scene<'_> {
    /// The line of the kernel's own source that an instruction came from: of the functions that were merged
    /// there the innermost that is not of the shim.
    fn line_of(&self, pc: *const u8) -> Option<String> {
        // What is known is where the call returns to.
        let offset = (pc as usize).checked_sub(self.image as usize)?.checked_sub(1)?;
        let output = Command::new("addr2line")
            .args(["-i", "-e"])
            .arg(self.library)
            .arg(format!("{offset:#x}"))
            .output()
            .ok()?;
        let lines = String::from_utf8_lossy(&output.stdout).into_owned();
        let own = lines.lines().find(|l| !l.contains("/emulator/shim/") && !l.starts_with('?'))?;
        let own = own.split(" (discriminator").next().unwrap_or(own);
        // The debugger's format puts the compiler's folder before relative names.
        Some(own.rsplit('/').next().unwrap_or(own).to_owned())
    }
}

fn text(bytes: &[c_char]) -> String {
    // SAFETY: the runtime ends these with a zero byte.
    unsafe { CStr::from_ptr(bytes.as_ptr()) }.to_string_lossy().into_owned()
}
