//! Numbers as little-endian bytes, for exports.

use std::io::{self, Read, Write};

use half::f16;

/// Bytes that are converted at once: enough to make a call worth it, few enough to stay in the cache.
const BLOCK: usize = 16 * 1024;

/// A number with a fixed form in bytes.
pub trait Number: Copy {
    /// Bytes of one.
    const BYTES: usize = size_of::<Self>();

    /// Writes it to the front of `to`.
    fn put(self, to: &mut [u8]);

    /// Reads it from the front of `from`.
    fn get(from: &[u8]) -> Self;
}

macro_rules! number {
    ($kind:ty) => {
        impl Number for $kind {
            fn put(self, to: &mut [u8]) {
                to.copy_from_slice(&self.to_le_bytes());
            }

            fn get(from: &[u8]) -> $kind {
                let mut bytes = [0; size_of::<$kind>()];
                bytes.copy_from_slice(from);
                <$kind>::from_le_bytes(bytes)
            }
        }
    };
}

number!(f32);
number!(f16);
number!(i8);

/// Writes `numbers`.
pub fn write<T: Number>(out: &mut dyn Write, numbers: &[T]) -> io::Result<()> {
    let mut block = [0; BLOCK];
    for part in numbers.chunks(BLOCK / T::BYTES) {
        let bytes = &mut block[..part.len() * T::BYTES];
        for (number, bytes) in part.iter().zip(bytes.chunks_exact_mut(T::BYTES)) {
            number.put(bytes);
        }
        out.write_all(bytes)?;
    }
    Ok(())
}

/// Fills `numbers`.
pub fn read<T: Number>(from: &mut dyn Read, numbers: &mut [T]) -> io::Result<()> {
    let mut block = [0; BLOCK];
    for part in numbers.chunks_mut(BLOCK / T::BYTES) {
        let bytes = &mut block[..part.len() * T::BYTES];
        from.read_exact(bytes)?;
        for (number, bytes) in part.iter_mut().zip(bytes.chunks_exact(T::BYTES)) {
            *number = T::get(bytes);
        }
    }
    Ok(())
}
