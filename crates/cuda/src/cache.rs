//! Compiled kernels on disk, so that only the first start compiles.
//!
//! One file a stage, named after what the code depends on. A file is written under another name and renamed when
//! it is whole, and carries a checksum: what a crash or a full disk leaves is not used, and neither is anything
//! else that is wrong with the cache an error. It is written anew.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// First bytes of a file.
const MAGIC: &[u8; 8] = b"lilycub1";
/// Bytes before the code: the magic number and the checksum.
const HEADER: usize = MAGIC.len() + size_of::<u64>();

/// A directory of compiled kernels.
#[derive(Clone, Debug)]
pub struct Cache {
    /// Where there is no place for one, nothing is kept.
    dir: Option<PathBuf>,
}

impl Cache {
    /// The user's own.
    pub fn of_user() -> Cache {
        let from = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let base = if cfg!(windows) {
            from("LOCALAPPDATA")
        } else {
            from("XDG_CACHE_HOME").or_else(|| from("HOME").map(|home| home.join(".cache")))
        };
        Cache { dir: base.map(|base| base.join("lily").join("cuda")) }
    }

    /// One in `dir`.
    pub fn within(dir: &Path) -> Cache {
        Cache { dir: Some(dir.to_owned()) }
    }

    /// A name for everything that code depends on.
    pub fn key<'a>(parts: impl Iterator<Item = &'a str>) -> String {
        let mut hash = Xxh3::new();
        for part in parts {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        format!("{:032x}", hash.digest128())
    }

    /// What was kept under `key`, where it is whole.
    pub fn get(&self, stage: &str, key: &str) -> Option<Vec<u8>> {
        let mut bytes = fs::read(self.file(stage, key)?).ok()?;
        let (header, code) = bytes.split_at_checked(HEADER)?;
        let sum = xxh3_64(code).to_le_bytes();
        if header[..MAGIC.len()] != *MAGIC || header[MAGIC.len()..] != sum {
            return None;
        }
        bytes.drain(..HEADER);
        Some(bytes)
    }

    /// Keeps `code` under `key`, if that can be done.
    pub fn put(&self, stage: &str, key: &str, code: &[u8]) {
        let Some(file) = self.file(stage, key) else { return };
        // Two programs that compile at the same time write the same, each its own file.
        let partial = file.with_extension(format!("{}.partial", std::process::id()));
        let written = || -> std::io::Result<()> {
            fs::create_dir_all(file.parent().unwrap_or(Path::new(".")))?;
            let mut out = fs::File::create(&partial)?;
            out.write_all(MAGIC)?;
            out.write_all(&xxh3_64(code).to_le_bytes())?;
            out.write_all(code)?;
            out.sync_all()?;
            fs::rename(&partial, &file)
        };
        if written().is_err() {
            let _ = fs::remove_file(&partial);
        }
    }

    fn file(&self, stage: &str, key: &str) -> Option<PathBuf> {
        Some(self.dir.as_ref()?.join(format!("{stage}-{key}.cubin")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_comes_back_and_what_is_damaged_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::within(&dir.path().join("made").join("when needed"));
        let key = Cache::key(["source", "flags"].into_iter());
        assert_ne!(key, Cache::key(["sourceflags", ""].into_iter()));
        assert_eq!(cache.get("head", &key), None);
        cache.put("head", &key, b"code");
        assert_eq!(cache.get("head", &key).as_deref(), Some(&b"code"[..]));
        assert_eq!(cache.get("embed", &key), None);

        let file = cache.file("head", &key).unwrap();
        for damaged in [&b""[..], b"lily", b"lilycub1\0\0\0\0\0\0\0\0code"] {
            fs::write(&file, damaged).unwrap();
            assert_eq!(cache.get("head", &key), None);
        }
        cache.put("head", &key, b"new");
        assert_eq!(cache.get("head", &key).as_deref(), Some(&b"new"[..]));
        // Nothing is left over beside the file.
        assert_eq!(fs::read_dir(file.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn without_a_place_nothing_is_kept_and_nothing_fails() {
        let cache = Cache { dir: None };
        cache.put("head", "key", b"code");
        assert_eq!(cache.get("head", "key"), None);
        let file = tempfile::NamedTempFile::new().unwrap();
        Cache::within(file.path()).put("head", "key", b"code");
    }
}
