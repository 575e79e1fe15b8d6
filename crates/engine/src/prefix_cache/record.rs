//! One snapshot in a file.
//!
//! ```text
//! magic, 8 bytes               LILYKV and the format's version
//! length of the kind, u32      then the kind itself: model, layout and program, as text
//! tokens, u64                  then each of them, u32
//! payload                      what the backend's export wrote, up to the sum
//! sum, 16 bytes                XXH3-128 of all that stands before
//! ```
//!
//! Numbers are little-endian. A file is used only where kind and tokens are the ones expected and the sum is
//! right. Nothing is allocated on the word of a file: what it says of itself is compared with what is expected,
//! and the payload is as long as the file's true length leaves it.

use std::io::{self, Read, Write};

use xxhash_rust::xxh3::Xxh3;

const MAGIC: &[u8; 8] = b"LILYKV\x00\x01";
const SUM_BYTES: usize = size_of::<u128>();
/// Bytes read and added to the sum at once.
const BLOCK: usize = 1 << 16;

/// Why a file is not the record that was looked for.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// It is another file than its name says.
    #[error("its {0} is not what its name says")]
    Other(&'static str),
    /// Its bytes are not those that were written.
    #[error("its checksum is wrong")]
    Damaged,
    /// It is larger than memory.
    #[error("there is no memory for its {0} bytes")]
    TooLarge(u64),
}

/// Writes the record of `tokens`, whose state `export` writes.
pub fn write(
    out: &mut dyn Write,
    kind: &str,
    tokens: &[u32],
    export: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let mut out = Summed { inner: out, sum: Xxh3::new() };
    out.write_all(&header(kind, tokens))?;
    export(&mut out)?;
    let sum = out.sum.digest128();
    out.inner.write_all(&sum.to_le_bytes())
}

/// Reads the payload of the record of `tokens` from a file of `length` bytes.
pub fn read(from: impl Read, length: u64, kind: &str, tokens: &[u32]) -> Result<Vec<u8>, RecordError> {
    let mut from = Summed { inner: from, sum: Xxh3::new() };
    let expected = header(kind, tokens);
    let payload =
        length.checked_sub((expected.len() + SUM_BYTES) as u64).ok_or(RecordError::Other("length"))?;
    let mut found = vec![0; expected.len()];
    from.read_exact(&mut found)?;
    if found != expected {
        return Err(RecordError::Other("beginning"));
    }
    let too_large = || RecordError::TooLarge(payload);
    let size = usize::try_from(payload).map_err(|_| too_large())?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(size).map_err(|_| too_large())?;
    while bytes.len() < size {
        let start = bytes.len();
        bytes.resize(size.min(start + BLOCK), 0);
        from.read_exact(&mut bytes[start..])?;
    }
    let sum = from.sum.digest128();
    let mut written = [0; SUM_BYTES];
    from.inner.read_exact(&mut written)?;
    if sum != u128::from_le_bytes(written) {
        return Err(RecordError::Damaged);
    }
    Ok(bytes)
}

fn header(kind: &str, tokens: &[u32]) -> Vec<u8> {
    let mut header = MAGIC.to_vec();
    header.extend((kind.len() as u32).to_le_bytes());
    header.extend(kind.as_bytes());
    header.extend((tokens.len() as u64).to_le_bytes());
    header.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    header
}

/// Adds up what passes.
struct Summed<T> {
    inner: T,
    sum: Xxh3,
}

impl Write for Summed<&mut dyn Write> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.sum.update(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<R: Read> Read for Summed<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(bytes)?;
        self.sum.update(&bytes[..count]);
        Ok(count)
    }
}
