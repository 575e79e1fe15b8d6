//! A disk that becomes full: a file system in memory, of a size of its own.
//!
//! It is mounted where nobody sees it but processes of a namespace of its own, which needs no rights on most systems.
//! Where a system does not allow that there is none, which `LILY_EXPECT_SMALL_DISK` in the environment makes a failure.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// What is written at once to fill it.
const PIECE: usize = 64 << 10;

/// The disk; it goes with this value.
pub struct SmallDisk {
    /// Keeps the namespace, until its standard input ends.
    holder: Child,
    /// Where it is mounted.
    dir: PathBuf,
}

impl SmallDisk {
    /// One of so many `bytes`, mounted at `dir`, where this system allows it.
    pub fn mount(dir: &Path, bytes: u64) -> Option<SmallDisk> {
        let disk = SmallDisk::try_mount(dir, bytes);
        let expected = std::env::var_os("LILY_EXPECT_SMALL_DISK").is_some();
        assert!(disk.is_some() || !expected, "no file system could be mounted in a namespace");
        disk
    }

    fn try_mount(dir: &Path, bytes: u64) -> Option<SmallDisk> {
        let script = "mount -t tmpfs -o size=$1 tmpfs \"$0\" && echo mounted && read -r _";
        let mut command = Command::new("unshare");
        command
            .args(["--user", "--map-root-user", "--mount", "sh", "-c", script])
            .arg(dir)
            .arg(bytes.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut holder = command.spawn().ok()?;
        let mut line = String::new();
        let output = holder.stdout.take().expect("it is piped");
        BufReader::new(output).read_line(&mut line).expect("it is read");
        if line.trim_end() == "mounted" {
            return Some(SmallDisk { holder, dir: dir.to_owned() });
        }
        holder.wait().expect("it ends");
        None
    }

    /// A command that sees it.
    pub fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        let target = self.holder.id().to_string();
        command.args(["--target", &target, "--user", "--mount", "--preserve-credentials", "--", program]);
        command.args(args).stdin(Stdio::null());
        command
    }

    /// Where this process, which is outside, finds what is in it.
    pub fn seen(&self) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.holder.id()));
        root.join(self.dir.strip_prefix("/").expect("it is an absolute path"))
    }

    /// Fills it with something else, but for so many bytes.
    pub fn fill(&self, free: u64) {
        let mut file = File::create(self.filler()).expect("there is room for a name");
        let mut written = 0;
        while let Ok(more @ 1..) = file.write(&[0; PIECE]) {
            written += more as u64;
        }
        file.set_len(written.checked_sub(free).expect("there was more room")).expect("it can be cut");
    }

    /// Makes room again.
    pub fn empty(&self) {
        fs::remove_file(self.filler()).expect("it was filled");
    }

    fn filler(&self) -> PathBuf {
        self.seen().join("something-else")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}
