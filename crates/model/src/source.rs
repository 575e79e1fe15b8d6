//! Where the files of a checkpoint come from: a directory on disk, or the binary itself.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use crate::error::ModelError;
use crate::weights::Blob;

/// A flat set of named files.
#[derive(Clone, Debug)]
pub enum Source {
    /// Files of a directory, mapped into memory when asked for.
    Directory(PathBuf),
    /// Files that the binary holds.
    Embedded {
        /// What error messages call the set.
        name: &'static str,
        /// Names and contents.
        files: &'static [(&'static str, &'static [u8])],
    },
}

impl Source {
    /// The files of the directory `dir`.
    ///
    /// # Errors
    /// [`ModelError`] where there is no such directory.
    pub fn directory(dir: &Path) -> Result<Source, ModelError> {
        let meta = fs::metadata(dir).map_err(|reason| io_error(dir, reason))?;
        if !meta.is_dir() {
            return Err(ModelError::file(
                dir.display().to_string(),
                "this is not a directory; name the directory that holds config.json",
            ));
        }
        Ok(Source::Directory(dir.to_owned()))
    }

    /// The bytes of the file `name`, or `None` where there is none. `name` is a bare file name: a separator or
    /// a name such as `..` is refused, so that no index can lead outside the directory. Symbolic links are
    /// followed, as download caches are made of them.
    ///
    /// # Errors
    /// [`ModelError`] where the file is there and cannot be mapped.
    pub fn open(&self, name: &str) -> Result<Option<Blob>, ModelError> {
        if !is_bare(name) {
            return Err(ModelError::file(
                self.path(name),
                "this name leads outside the checkpoint's directory; file names may not contain a path",
            ));
        }
        match self {
            Source::Directory(dir) => open_file(&dir.join(name)),
            Source::Embedded { files, .. } => {
                let file = files.iter().find(|(n, _)| *n == name);
                Ok(file.map(|(_, bytes)| Blob::new(Arc::new(*bytes))))
            }
        }
    }

    /// As [`Source::open`], for a file that must be there.
    ///
    /// # Errors
    /// Also where there is no such file.
    pub fn require(&self, name: &str) -> Result<Blob, ModelError> {
        self.open(name)?.ok_or_else(|| ModelError::file(self.path(name), "there is no such file"))
    }

    /// What messages call the whole set.
    pub fn place(&self) -> String {
        match self {
            Source::Directory(dir) => dir.display().to_string(),
            Source::Embedded { name, .. } => (*name).to_owned(),
        }
    }

    /// What messages call the file `name`.
    pub fn path(&self, name: &str) -> String {
        match self {
            Source::Directory(dir) => dir.join(name).display().to_string(),
            Source::Embedded { name: set, .. } => format!("{set}/{name}"),
        }
    }
}

fn is_bare(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0', ':'])
}

fn open_file(path: &Path) -> Result<Option<Blob>, ModelError> {
    // Asked before opening, because opening a pipe would wait for a writer.
    let meta = match fs::metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound && fs::symlink_metadata(path).is_err() => {
            return Ok(None);
        }
        Err(e) => return Err(io_error(path, e)),
    };
    if !meta.is_file() {
        let what = if meta.is_dir() { "a directory" } else { "not a regular file" };
        return Err(ModelError::file(path.display().to_string(), format!("this is {what}; expected a file")));
    }
    if meta.len() == 0 {
        return Ok(Some(Blob::new(Arc::new([]))));
    }
    let file = File::open(path).map_err(|e| io_error(path, e))?;
    // SAFETY: the mapping is read-only and its bytes are only ever read as bytes. As with every program that
    // maps its weights, a file truncated by someone else while it is mapped ends the process with a bus error;
    // checkpoints are written once and replaced by renaming, which leaves a mapping intact.
    let map = unsafe { Mmap::map(&file) }.map_err(|e| io_error(path, e))?;
    // Weights are read from end to end for every token: with 4 KiB pages the page table itself, 38 MB for the full
    // model, no longer fits the caches. A hint that takes effect where the file is not in the page cache yet and the
    // file system keeps large folios; elsewhere it changes nothing, so a refusal is no error.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    Ok(Some(Blob::new(Arc::new(map))))
}

fn io_error(path: &Path, reason: io::Error) -> ModelError {
    ModelError::Io { file: path.display().to_string(), reason }
}
