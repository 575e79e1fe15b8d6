//! The directory that a conversion writes to, and the journal in it: whose it is, of what, and that it is not finished.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::ModelError;
use crate::shards::{pretty, write_error};

/// The journal's name. A directory with it is a conversion in progress.
const JOURNAL_FILE: &str = "lily-convert.json";

/// A directory that this process alone converts into, until it is dropped.
pub struct Claim {
    dir: PathBuf,
    /// Locked as long as it is open.
    journal: File,
    /// Whether the directory was made for it.
    made: bool,
}

impl Claim {
    /// Takes the directory `dir` for the conversion that `journal` describes: makes it, or finds it empty or with the same
    /// journal.
    pub fn take(dir: &Path, journal: &Value) -> Result<Claim, ModelError> {
        let place = || dir.display().to_string();
        let path = dir.join(JOURNAL_FILE);
        let mut made = false;
        match fs::metadata(dir) {
            Ok(meta) if !meta.is_dir() => {
                return Err(ModelError::file(
                    place(),
                    "this is a file; name a directory that does not exist",
                ));
            }
            Ok(_) if !path.exists() && !is_empty(dir)? => {
                return Err(ModelError::file(
                    place(),
                    "it is there already and is no conversion in progress; name a directory that does not exist or is \
                     empty",
                ));
            }
            Ok(_) => {}
            Err(_) => {
                fs::create_dir_all(dir).map_err(|e| write_error(dir, e))?;
                made = true;
            }
        }
        let failed = |e| write_error(&path, e);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(ModelError::file(
                    place(),
                    "another program converts into it; wait until it has ended",
                ));
            }
            // A file system without locks: nobody is kept out, and nothing else changes.
            Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(e)) => return Err(failed(e)),
        }
        let mut found = Vec::new();
        file.read_to_end(&mut found).map_err(failed)?;
        let wanted = pretty(journal);
        if is_empty(dir)? {
            // New, or a journal that was not whole when the machine stopped.
            file.set_len(0).map_err(failed)?;
            file.rewind().and_then(|()| file.write_all(&wanted)).map_err(failed)?;
            file.sync_all().map_err(failed)?;
        } else if found != wanted {
            return Err(ModelError::file(
                place(),
                "it holds an unfinished conversion of another checkpoint, of this one before it was changed, or with \
                 other flags; delete it to start anew, or name another directory",
            ));
        }
        Ok(Claim { dir: dir.to_owned(), journal: file, made })
    }

    /// Leaves the directory as it was found, where nothing was written into it yet.
    pub fn give_up(&self) {
        if is_empty(&self.dir).unwrap_or(false) {
            // What cannot be removed is in nobody's way.
            let _ = fs::remove_file(self.dir.join(JOURNAL_FILE));
            if self.made {
                let _ = fs::remove_dir(&self.dir);
            }
        }
    }

    /// The conversion is whole.
    pub fn finish(self) -> Result<(), ModelError> {
        drop(self.journal);
        let path = self.dir.join(JOURNAL_FILE);
        fs::remove_file(&path).map_err(|e| write_error(&path, e))
    }
}

/// Whether nothing is in `dir` but perhaps a journal.
fn is_empty(dir: &Path) -> Result<bool, ModelError> {
    let failed = |reason| ModelError::Io { file: dir.display().to_string(), reason };
    for entry in fs::read_dir(dir).map_err(failed)? {
        if entry.map_err(failed)?.file_name() != JOURNAL_FILE {
            return Ok(false);
        }
    }
    Ok(true)
}
