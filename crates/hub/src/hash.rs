//! The hub's hashes: SHA-256 of large files, and git's SHA-1 of small ones.

use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::repo::is_hex;

const SHA256_DIGITS: usize = 64;
const SHA1_DIGITS: usize = 40;

/// A hash that is being computed.
pub enum Hasher {
    /// Of a large file.
    Sha256(Sha256),
    /// Of a small file, as git names it: its kind and length go before its bytes.
    Git(Sha1),
    /// The hub has none for the file; its length is all there is to compare.
    None,
}

impl Hasher {
    /// The one that makes etags like `etag`, for a file of `bytes` bytes.
    pub fn for_etag(etag: &str, bytes: u64) -> Hasher {
        match etag.len() {
            SHA256_DIGITS if is_hex(etag) => Hasher::Sha256(Sha256::new()),
            SHA1_DIGITS if is_hex(etag) => Hasher::Git(Sha1::new_with_prefix(format!("blob {bytes}\0"))),
            _ => Hasher::None,
        }
    }

    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(hash) => hash.update(bytes),
            Hasher::Git(hash) => hash.update(bytes),
            Hasher::None => {}
        }
    }

    /// The hash in hexadecimal digits; `None` where there is nothing to compare.
    pub fn finish(self) -> Option<String> {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Hasher::Sha256(hash) => Some(hex(&hash.finalize())),
            Hasher::Git(hash) => Some(hex(&hash.finalize())),
            Hasher::None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(etag: &str, bytes: &[u8]) -> Option<String> {
        let mut hasher = Hasher::for_etag(etag, bytes.len() as u64);
        let (first, second) = bytes.split_at(bytes.len() / 2);
        hasher.update(first);
        hasher.update(second);
        hasher.finish()
    }

    #[test]
    fn hashes_are_those_of_sha256sum_and_of_git_hash_object() {
        let sha256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        let git = "ce013625030ba8dba906f756967f9e9ca394464a";
        assert_eq!(hash(sha256, b"hello\n").as_deref(), Some(sha256));
        assert_eq!(hash(git, b"hello\n").as_deref(), Some(git));
        assert_eq!(hash("some-etag", b"hello\n"), None);
    }
}
