//! Snapshots in a directory, for the next start of the program.
//!
//! Each is a file of its own, named `KIND-LENGTH-TOKENS.lily`: a hash of all that makes records comparable
//! (model, layout, program), the number of tokens, and a hash of them. So the names are the index, and whoever
//! lists the directory knows what is in it; the hashes only find a record, which is then compared token by
//! token (see [`record`]).
//!
//! A file is written under another name in the same directory, locked, flushed to the disk and then renamed. So
//! a record exists whole or not at all, whenever the process or the machine dies, and several servers can share
//! a directory: what one removes the other finds missing, which is no error, and a temporary file whose lock is
//! free belongs to a process that is gone.
//!
//! All records count towards the budget, those of other models too; the one that was used longest ago, by its
//! time of modification, goes first. Records hold the tokens of conversations, so on Unix directory and files
//! are their owner's alone.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::record::{self, RecordError};
use crate::backend::Export;

const SUFFIX: &str = "lily";
const TEMPORARY: &str = "tmp";
/// Bytes between the program and the system in one call.
const BUFFER: usize = 1 << 20;

/// Where snapshots are kept beyond the end of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// The directory; made where it does not exist.
    pub dir: PathBuf,
    /// Bytes that its records may take.
    pub bytes: u64,
    /// Names the weights: see [`fingerprint`](super::fingerprint::fingerprint).
    pub model: String,
}

/// A record of this kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Tokens.
    pub length: usize,
    hash: u128,
}

/// A directory of records. See the module's page.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    bytes: u64,
    kind: String,
    kind_hash: u64,
    /// Hashes of the records of this kind by length, as of the last look into the directory and kept up since.
    known: Mutex<BTreeMap<usize, Vec<u128>>>,
    temporaries: AtomicU64,
}

/// A record of any kind in the directory.
struct Found {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
    /// `None` where it is another model's, version's or layout's.
    key: Option<Key>,
}

impl Store {
    /// Opens or makes the directory. `layout` is the backend's.
    pub fn open(options: &DiskOptions, layout: &str) -> io::Result<Store> {
        make_private_dir(&options.dir)?;
        let kind = format!("{}\n{layout}\nlily {}", options.model, env!("CARGO_PKG_VERSION"));
        let store = Store {
            dir: options.dir.clone(),
            bytes: options.bytes,
            kind_hash: xxh3_64(kind.as_bytes()),
            kind,
            known: Mutex::default(),
            temporaries: AtomicU64::new(0),
        };
        let found = store.look()?;
        let foreign = found.iter().filter(|record| record.key.is_none()).count();
        if foreign > 0 {
            tracing::warn!(
                records = foreign,
                dir = %store.dir.display(),
                "the cache directory holds records of another model, version or backend, which are ignored"
            );
        }
        Ok(store)
    }

    /// The longest record that is a beginning of `tokens`, of at least `least` tokens and fewer than there are.
    pub fn find(&self, tokens: &[u32], least: usize) -> Option<Key> {
        let known = self.lock();
        let mut hash = Xxh3::new();
        let (mut hashed, mut best) = (0, None);
        for (&length, hashes) in known.range(least..tokens.len().max(least)) {
            update(&mut hash, &tokens[hashed..length]);
            hashed = length;
            let hash = hash.digest128();
            if hashes.contains(&hash) {
                best = Some(Key { length, hash });
            }
        }
        best
    }

    /// The record of exactly `tokens`.
    pub fn at(&self, tokens: &[u32]) -> Option<Key> {
        let key = key(tokens);
        self.lock().get(&key.length).is_some_and(|hashes| hashes.contains(&key.hash)).then_some(key)
    }

    /// Counts a record as used now.
    pub fn touch(&self, key: Key) {
        // One that is gone needs no time of use.
        let _ =
            File::options().write(true).open(self.path(key)).and_then(|f| f.set_modified(SystemTime::now()));
    }

    /// What the export of `key`, a beginning of `tokens`, wrote. A record that is not what it should be is
    /// removed, with a line in the log; one that is gone is forgotten.
    pub fn load(&self, key: Key, tokens: &[u32]) -> Option<Vec<u8>> {
        let path = self.path(key);
        match self.read(&path, tokens.get(..key.length)?) {
            Ok(state) => Some(state),
            Err(RecordError::Read(error)) if error.kind() == io::ErrorKind::NotFound => {
                self.forget(key);
                None
            }
            Err(error) => {
                self.refuse(key, &error.to_string());
                None
            }
        }
    }

    /// Removes a record that turned out to be of no use.
    pub fn refuse(&self, key: Key, reason: &str) {
        let path = self.path(key);
        tracing::warn!(reason, path = %path.display(), "a record of the cache directory is unusable and is removed");
        self.forget(key);
        // It may be gone already, or not ours to remove; it is not looked at again either way.
        let _ = fs::remove_file(path);
    }

    fn read(&self, path: &Path, tokens: &[u32]) -> Result<Vec<u8>, RecordError> {
        // Opening a pipe would wait for its other end.
        if !fs::symlink_metadata(path)?.is_file() {
            return Err(RecordError::Other("type"));
        }
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        // Its last use decides what goes first; a directory that does not let itself be written still serves.
        let _ = file.set_modified(SystemTime::now());
        record::read(BufReader::with_capacity(BUFFER, file), length, &self.kind, tokens)
    }

    /// Writes a record of `tokens`, of about `estimate` bytes, and makes room for it. False where it exists
    /// already or is larger than the budget.
    pub fn save(&self, tokens: &[u32], estimate: u64, export: Export) -> io::Result<bool> {
        let key = key(tokens);
        let path = self.path(key);
        if estimate > self.bytes || path.exists() {
            return Ok(false);
        }
        self.make_room(estimate)?;
        let (temporary, file) = self.temporary()?;
        // The lock goes with `file`, and so not before the record has its name.
        let written = self.write(&file, tokens, export).and_then(|()| fs::rename(&temporary, &path));
        if let Err(error) = written {
            let _ = fs::remove_file(&temporary);
            return Err(error);
        }
        // The name, too, is to survive a loss of power. Not every file system knows this call.
        let _ = File::open(&self.dir).and_then(|dir| dir.sync_all());
        self.lock().entry(key.length).or_default().push(key.hash);
        Ok(true)
    }

    fn write(&self, file: &File, tokens: &[u32], export: Export) -> io::Result<()> {
        let mut out = BufWriter::with_capacity(BUFFER, file);
        record::write(&mut out, &self.kind, tokens, export)?;
        out.flush()?;
        out.get_ref().sync_all()
    }

    /// A new file with a lock that ends with the process.
    fn temporary(&self) -> io::Result<(PathBuf, File)> {
        loop {
            let number = self.temporaries.fetch_add(1, Ordering::Relaxed);
            let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |t| t.as_nanos());
            let name = format!("{}-{time:x}-{number}.{TEMPORARY}", std::process::id());
            let path = self.dir.join(name);
            match private_file(&path) {
                Ok(file) => {
                    // Where files cannot be locked, nobody takes them for abandoned either.
                    let _ = file.lock();
                    // Another server may have had the lock first and taken the file for a dead one's.
                    if path.exists() {
                        return Ok((path, file));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Removes records until `bytes` more fit, those that were used longest ago first.
    fn make_room(&self, bytes: u64) -> io::Result<()> {
        let mut records = self.look()?;
        records.sort_by_key(|record| record.used);
        let mut sum = records.iter().map(|record| record.bytes).fold(bytes, u64::saturating_add);
        for record in records {
            if sum <= self.bytes {
                break;
            }
            match fs::remove_file(&record.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            record.key.into_iter().for_each(|key| self.forget(key));
            sum -= record.bytes;
        }
        Ok(())
    }

    /// Looks into the directory: what is there, and what of it can be used. Temporary files of processes that
    /// are gone are removed.
    fn look(&self) -> io::Result<Vec<Found>> {
        let mut found = Vec::new();
        let mut known: BTreeMap<usize, Vec<u128>> = BTreeMap::new();
        for entry in fs::read_dir(&self.dir)? {
            // Whatever vanishes while one looks, or cannot be looked at, is not there.
            let Ok(entry) = entry else { continue };
            let path = entry.path();
            let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
            if !metadata.is_file() {
                continue;
            }
            let extension = path.extension().and_then(|extension| extension.to_str());
            if extension == Some(TEMPORARY) {
                remove_if_abandoned(&path);
            } else if extension == Some(SUFFIX) {
                let key = self.parse(&path);
                if let Some(Key { length, hash }) = key {
                    known.entry(length).or_default().push(hash);
                }
                let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                found.push(Found { path, bytes: metadata.len(), used, key });
            }
        }
        *self.lock() = known;
        Ok(found)
    }

    fn path(&self, key: Key) -> PathBuf {
        self.dir.join(format!("{:016x}-{}-{:032x}.{SUFFIX}", self.kind_hash, key.length, key.hash))
    }

    /// The record that a name of this kind stands for.
    fn parse(&self, path: &Path) -> Option<Key> {
        let mut parts = path.file_stem()?.to_str()?.split('-');
        let (kind, length, hash) = (parts.next()?, parts.next()?, parts.next()?);
        let key = Key { length: length.parse().ok()?, hash: u128::from_str_radix(hash, 16).ok()? };
        let is_ours = u64::from_str_radix(kind, 16) == Ok(self.kind_hash);
        // What is named otherwise than this program would name it is not this program's.
        (is_ours && key.length > 0 && self.path(key) == path).then_some(key)
    }

    fn forget(&self, key: Key) {
        let mut known = self.lock();
        if let Some(hashes) = known.get_mut(&key.length) {
            hashes.retain(|&hash| hash != key.hash);
            if hashes.is_empty() {
                known.remove(&key.length);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Vec<u128>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key(tokens: &[u32]) -> Key {
    let mut hash = Xxh3::new();
    update(&mut hash, tokens);
    Key { length: tokens.len(), hash: hash.digest128() }
}

fn update(hash: &mut Xxh3, tokens: &[u32]) {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    hash.update(&bytes);
}

/// Removes a temporary file that no process holds a lock on.
fn remove_if_abandoned(path: &Path) {
    let Ok(file) = File::open(path) else { return };
    if file.try_lock().is_ok() {
        // Another may be doing the same.
        let _ = fs::remove_file(path);
    }
}

fn make_private_dir(dir: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir)
}

fn private_file(path: &Path) -> io::Result<File> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}
