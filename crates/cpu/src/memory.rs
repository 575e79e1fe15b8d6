//! Allocating without dying, and where lines of the cache begin.

use std::fmt::{Debug, Formatter};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use half::f16;
use lily_engine::backend::BackendError;

use crate::kernels::tile::LINE;

/// `elements` default values, or an error that names `what` they were for.
pub fn zeroed<T: Clone + Default>(what: &'static str, elements: usize) -> Result<Vec<T>, BackendError> {
    let mut values = Vec::new();
    grow(what, &mut values, elements)?;
    Ok(values)
}

/// Lengthens `values` to at least `elements`; what it holds stays.
pub fn grow<T: Clone + Default>(
    what: &'static str,
    values: &mut Vec<T>,
    elements: usize,
) -> Result<(), BackendError> {
    if elements > values.len() {
        values.try_reserve_exact(elements - values.len()).map_err(|_| BackendError::OutOfMemory {
            what,
            bytes: elements.saturating_mul(size_of::<T>()),
        })?;
        values.resize(elements, T::default());
    }
    Ok(())
}

/// Numbers of which zero is all bits zero.
///
/// # Safety
/// Every pattern of bits is a number, and [`LINE`] is a multiple of its size and of its alignment.
pub unsafe trait Number: Copy {}

// SAFETY: four bytes, any of them.
unsafe impl Number for f32 {}
// SAFETY: two bytes, any of them.
unsafe impl Number for f16 {}
// SAFETY: one byte, any.
unsafe impl Number for i8 {}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

const _: () = assert!(align_of::<Line>() == LINE);

impl Default for Line {
    fn default() -> Line {
        Line([0; LINE])
    }
}

/// A growing slice of numbers that begins with a line of the cache. The allocator begins large ones sixteen bytes into a line, and then each
/// vector of 64 bytes lies in two lines: loads and stores take twice as long (`docs/lab/cpu.md`).
#[derive(Clone)]
pub struct Buffer<T> {
    lines: Vec<Line>,
    /// Numbers.
    len: usize,
    numbers: PhantomData<T>,
}

impl<T> Buffer<T> {
    /// Empty.
    pub const fn new() -> Buffer<T> {
        Buffer { lines: Vec::new(), len: 0, numbers: PhantomData }
    }
}

impl<T: Number> Buffer<T> {
    /// `len` zeros, or an error that names `what` they were for.
    pub fn zeroed(what: &'static str, len: usize) -> Result<Buffer<T>, BackendError> {
        let mut buffer = Buffer::new();
        buffer.grow(what, len)?;
        Ok(buffer)
    }

    /// Lengthens it to at least `len`; what it holds stays, and the rest is as [`Buffer::resize`] leaves it.
    pub fn grow(&mut self, what: &'static str, len: usize) -> Result<(), BackendError> {
        grow(what, &mut self.lines, lines::<T>(len))?;
        self.len = self.len.max(len);
        Ok(())
    }

    /// Makes it `len` numbers long. Those that it did not have before are zero or what was once there.
    pub fn resize(&mut self, len: usize) {
        if lines::<T>(len) > self.lines.len() {
            self.lines.resize(lines::<T>(len), Line::default());
        }
        self.len = len;
    }
}

/// Lines of `len` numbers.
fn lines<T>(len: usize) -> usize {
    len.div_ceil(LINE / size_of::<T>())
}

impl<T> Default for Buffer<T> {
    fn default() -> Buffer<T> {
        Buffer::new()
    }
}

impl<T: Number> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the lines have room for so many numbers, begin where one may, and are initialized.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl<T: Number> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

impl<T: Number + Debug> Debug for Buffer<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        self.deref().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_begins_with_a_line_and_keeps_what_it_holds() {
        let mut buffer = Buffer::<f16>::new();
        assert!(buffer.is_empty());
        for len in [1, 31, 32, 33, 5000] {
            buffer.grow("a test", len).unwrap();
            assert_eq!((buffer.len(), buffer.as_ptr().addr() % LINE), (len, 0));
            assert!(buffer[len - 1] == f16::ZERO, "the last of {len}");
            buffer[len - 1] = f16::from_f32(len as f32);
        }
        buffer.grow("a test", 33).unwrap();
        assert_eq!(buffer.len(), 5000);
        buffer.resize(33);
        assert_eq!([0, 30, 31, 32].map(|i| buffer[i].to_f32()), [1.0, 31.0, 32.0, 33.0]);
        assert_eq!(*buffer.clone(), *buffer);
    }

    #[test]
    fn a_buffer_that_finds_no_room_says_what_it_was_for() {
        let error = Buffer::<f32>::zeroed("a test", usize::MAX / 8).unwrap_err();
        assert!(error.to_string().contains("a test"), "{error}");
    }
}
