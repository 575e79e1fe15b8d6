//! The hub's cache layout, which all Hugging Face tools share.
//!
//! ```text
//! CACHE/models--OWNER--NAME/
//!   blobs/ETAG                a whole file, under the hub's hash of it
//!   blobs/ETAG.incomplete     its beginning, as far as it came
//!   refs/REVISION             the commit that a branch or tag stands for
//!   snapshots/COMMIT/FILE     a link to ../../blobs/ETAG
//! CACHE/.locks/models--OWNER--NAME/ETAG.lock
//! ```
//!
//! The reference is written last, so a snapshot that a reference leads to was whole when it was written.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use crate::error::HubError;
use crate::repo::{Repo, is_commit};

/// Longest etag: a file must be able to have its name.
const MOST_ETAG: usize = 128;

/// What is locked while a reference is written.
const REFERENCES: &str = "refs";

/// The folder of a repository.
#[derive(Clone, Debug)]
pub struct Cache {
    dir: PathBuf,
    locks: PathBuf,
}

impl Cache {
    /// That of `repo` in the cache `root`. Nothing is made yet.
    pub fn new(root: &Path, repo: &Repo) -> Cache {
        let name = format!("models--{}", repo.name().replace('/', "--"));
        Cache { dir: root.join(&name), locks: root.join(".locks").join(name) }
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The snapshot that a revision stood for when it was last asked for; it may lack files.
    pub fn snapshot_of(&self, repo: &Repo) -> Option<PathBuf> {
        let commit = if repo.is_commit() {
            repo.revision().to_owned()
        } else {
            let text = fs::read_to_string(self.reference(repo)).ok()?;
            Some(text.trim().to_owned()).filter(|text| is_commit(text))?
        };
        Some(self.snapshot(&commit)).filter(|dir| dir.is_dir())
    }

    /// Bytes of the repository's files that are here, whole or not.
    pub fn bytes(&self) -> u64 {
        let entries = fs::read_dir(self.dir.join("blobs")).into_iter().flatten().flatten();
        entries.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum()
    }

    /// The directory of a commit's files.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.dir.join("snapshots").join(commit)
    }

    /// Where the whole file of an etag lies.
    pub fn blob(&self, etag: &str) -> PathBuf {
        self.dir.join("blobs").join(etag)
    }

    /// Where its beginning grows.
    pub fn incomplete(&self, etag: &str) -> PathBuf {
        self.dir.join("blobs").join(format!("{etag}.incomplete"))
    }

    fn reference(&self, repo: &Repo) -> PathBuf {
        self.dir.join("refs").join(repo.revision())
    }

    /// Makes the folder of blobs.
    pub(crate) fn prepare(&self) -> Result<(), HubError> {
        make(&self.dir.join("blobs"))?;
        make(&self.locks)
    }

    /// Keeps other programs from the blob of `etag` until what is returned is dropped. `wait` is called where another has
    /// it, before it is waited for.
    pub(crate) fn lock(&self, etag: &str, wait: impl FnOnce()) -> Result<File, HubError> {
        let path = self.locks.join(format!("{etag}.lock"));
        let file = File::options().create(true).append(true).open(&path).map_err(HubError::io(&path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                wait();
                file.lock().map_err(HubError::io(&path))?;
            }
            Err(TryLockError::Error(reason)) => return Err(HubError::Io { path, reason }),
        }
        Ok(file)
    }

    /// Lets `name` of the commit's snapshot be the whole file of `etag`.
    pub(crate) fn link(&self, commit: &str, name: &str, etag: &str) -> Result<(), HubError> {
        let snapshot = self.snapshot(commit);
        make(&snapshot)?;
        let (path, blob) = (snapshot.join(name), self.blob(etag));
        if same(&path, &blob) {
            return Ok(());
        }
        // A link to something else, or to nothing.
        if fs::symlink_metadata(&path).is_ok() {
            fs::remove_file(&path).map_err(HubError::io(&path))?;
        }
        let made = make_link(&blob, etag, &path);
        // Another program that fetches the same repository may have been faster.
        if made.is_err() && same(&path, &blob) { Ok(()) } else { made.map_err(HubError::io(&path)) }
    }

    /// Writes down that the revision stands for `commit`.
    pub(crate) fn refer(&self, repo: &Repo, commit: &str) -> Result<(), HubError> {
        if repo.is_commit() {
            return Ok(());
        }
        let path = self.reference(repo);
        path.parent().map_or(Ok(()), make)?;
        // One at a time: what they write has the same name before it is moved.
        let _lock = self.lock(REFERENCES, || {})?;
        let written = path.with_extension("incomplete");
        fs::write(&written, commit).map_err(HubError::io(&written))?;
        fs::rename(&written, &path).map_err(HubError::io(&path))
    }
}

#[cfg(unix)]
fn make_link(_: &Path, etag: &str, path: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(Path::new("../../blobs").join(etag), path)
}

#[cfg(not(unix))]
fn make_link(blob: &Path, _: &str, path: &Path) -> std::io::Result<()> {
    fs::hard_link(blob, path)
}

/// Whether both lead to the same file.
fn same(path: &Path, blob: &Path) -> bool {
    match (path.canonicalize(), blob.canonicalize()) {
        (Ok(path), Ok(blob)) => path == blob,
        _ => false,
    }
}

fn make(dir: &Path) -> Result<(), HubError> {
    fs::create_dir_all(dir).map_err(HubError::io(dir))
}

/// Whether `etag` can be a file's name; what a server says is not trusted to be.
pub(crate) fn is_etag(etag: &str) -> bool {
    (1..=MOST_ETAG).contains(&etag.len())
        && etag.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}
