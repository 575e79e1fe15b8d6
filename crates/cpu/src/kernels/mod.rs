//! The fast kernels: int8 against 4-bit matrices, vector f32 arithmetic, the delta rule, attention.
//!
//! # What a caller needs
//!
//! | module | gives |
//! |---|---|
//! | [`activations`] | [`QuantizedRows`](activations::QuantizedRows): f32 rows as int8, once per stage |
//! | [`matmul`] | `W x` for any format, any token list, a range of rows: call it inside a pool task |
//! | [`f32_ops`] | dot, axpy, RMS norm, SiLU, exp, softmax on f32 slices |
//! | [`delta`] | the gated delta rule for one head over consecutive tokens |
//! | [`attention`] | attention of one KV head and its query heads over pages of the cache |
//!
//! Kernels start no threads: a stage forks once with [`ThreadPool::run`](crate::pool::ThreadPool::run) and
//! calls them for its share. Results go through [`OutRows`], because several threads write one buffer.
//!
//! # The promise
//!
//! A number has the same bits whatever is computed beside it: any row range, token list, chunk of a prompt,
//! thread count and instruction set. Integer sums are exact; every f32 sum has one order, stated at its
//! kernel; multiply-add is always fused. [`simd`] is the little vector language that makes it hold: kernels
//! are written once over [`Simd`](simd::Simd) and compiled once per instruction set.

// Kernels index arrays whose elements are registers; an iterator over them says less, not more.
#![allow(clippy::needless_range_loop)]

pub mod activations;
#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
pub mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod delta;
pub mod f32_ops;
pub mod matmul;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
pub mod simd;
pub mod tile;

use std::marker::PhantomData;

/// A matrix that several threads write, each its own elements; of f32 where nothing else is said.
#[derive(Clone, Copy, Debug)]
pub struct OutRows<'a, T = f32> {
    data: *mut T,
    rows: usize,
    cols: usize,
    stride: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a pointer with bounds; writing through it is `unsafe` and asks for disjoint elements.
unsafe impl<T: Send> Send for OutRows<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for OutRows<'_, T> {}

impl<'a, T: Copy> OutRows<'a, T> {
    /// `data` as rows of `cols` elements, one after the other. Panics where `data` is no whole number of rows.
    pub fn new(data: &'a mut [T], cols: usize) -> OutRows<'a, T> {
        OutRows::with_stride(data, cols, cols)
    }

    /// `data` as rows of `cols` elements, `stride` apart: columns of a wider matrix. `data` starts at the
    /// first element wanted and ends no earlier than the last. Panics where `cols > stride` or `cols` is 0.
    pub fn with_stride(data: &'a mut [T], cols: usize, stride: usize) -> OutRows<'a, T> {
        assert!(cols > 0 && cols <= stride, "rows of {cols} elements cannot lie {stride} apart");
        let rows = if data.len() < cols { 0 } else { (data.len() - cols) / stride + 1 };
        OutRows { data: data.as_mut_ptr(), rows, cols, stride, lifetime: PhantomData }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The rows from `row` on. Panics where there are fewer.
    pub fn from_row(&self, row: usize) -> OutRows<'a, T> {
        assert!(row <= self.rows, "outside the output matrix");
        // SAFETY: at most one past the last row that `self` covers.
        let data = unsafe { self.data.add(row.min(self.rows.saturating_sub(1)) * self.stride) };
        let rows = self.rows - row;
        OutRows { data, rows, ..*self }
    }

    /// Row `row`, writable.
    ///
    /// # Safety
    /// No one else may touch `cols` of this row while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn row(&self, row: usize, cols: std::ops::Range<usize>) -> &'a mut [T] {
        assert!(
            row < self.rows && cols.start <= cols.end && cols.end <= self.cols,
            "outside the output matrix"
        );
        // SAFETY: inside the slice that `self` was made of, by the check above; exclusive by contract.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.stride + cols.start), cols.len()) }
    }
}
