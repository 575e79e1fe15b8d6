//! Activations as int8, quantized once and then met by every matrix that reads them.
//!
//! Each group of [`GROUP_SIZE`] elements, the same groups that weights have, gets one scale: the largest
//! magnitude over 127. Elements are rounded to the nearest step, halves to even. Since the scale comes from
//! the group alone, the same row quantizes to the same bytes wherever it stands. What comes of NaN and infinity is unspecified.
//!
//! The product with an affine row is then, with `w = s q + b` and `x = sx qx`,
//!
//! ```text
//! sum_g  s_g * sx_g * dot_g  +  b_g * (sx_g * sum_g),      dot_g = sum q qx,  sum_g = sum qx
//! ```
//!
//! so besides scales the row keeps `sx_g * sum_g`. The sum is of the quantized elements: with the sum of the
//! exact ones the rounding errors of both terms would no longer cancel around the middle of the weights' range.
//!
//! # Order
//!
//! Within a group the 32 even elements come first, then the 32 odd ones: low nibbles of packed weights meet
//! the first half, high nibbles the second.

use lily_model::weights::GROUP_SIZE;

use super::simd::{Kernel, LANES, Simd, run};
use crate::isa::Isa;
use crate::memory::Buffer;

/// Largest magnitude of a quantized element.
const Q_MAX: f32 = 127.0;

/// Rows of int8 activations.
#[derive(Clone, Debug, Default)]
pub struct QuantizedRows {
    rows: usize,
    cols: usize,
    q: Buffer<i8>,
    scales: Buffer<f32>,
    sums: Buffer<f32>,
    all: Vec<u32>,
}

impl QuantizedRows {
    /// No rows; [`QuantizedRows::resize`] makes room.
    pub fn new() -> QuantizedRows {
        QuantizedRows::default()
    }

    /// Bytes that `rows` rows of `cols` elements take.
    pub fn bytes(rows: usize, cols: usize) -> usize {
        let group = size_of::<f32>() * 2;
        rows * (cols + cols / GROUP_SIZE * group + size_of::<u32>())
    }

    /// Makes room for `rows` rows of `cols` elements and keeps the allocation of before where it suffices.
    /// What rows hold before they are written is unspecified. Panics unless groups divide `cols`.
    pub fn resize(&mut self, rows: usize, cols: usize) {
        assert!(cols.is_multiple_of(GROUP_SIZE), "{cols} activations are no whole number of groups");
        (self.rows, self.cols) = (rows, cols);
        self.q.resize(rows * cols);
        self.scales.resize(rows * cols / GROUP_SIZE);
        self.sums.resize(rows * cols / GROUP_SIZE);
        let known = self.all.len();
        if rows > known {
            self.all.extend(known as u32..rows as u32);
        }
    }

    /// Quantizes `x`, `[rows, cols]`, on the calling thread.
    pub fn quantize(&mut self, isa: Isa, x: &[f32], cols: usize) {
        self.resize(x.len() / cols, cols);
        let writer = self.writer();
        for (row, x) in x.chunks_exact(cols).enumerate() {
            // SAFETY: one row after the other on one thread.
            unsafe { writer.quantize_row(isa, row, x) };
        }
    }

    /// For threads that quantize each their own rows, after [`QuantizedRows::resize`].
    pub fn writer(&mut self) -> RowWriter<'_> {
        RowWriter {
            rows: self.rows,
            cols: self.cols,
            q: self.q.as_mut_ptr(),
            scales: self.scales.as_mut_ptr(),
            sums: self.sums.as_mut_ptr(),
            owner: std::marker::PhantomData,
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The indices of all rows: what to pass as `tokens` where every row is wanted.
    pub fn all(&self) -> &[u32] {
        &self.all[..self.rows]
    }

    /// Quantized elements of a row, `[groups, (32 even, 32 odd)]`.
    pub fn q(&self, row: usize) -> &[i8] {
        &self.q[row * self.cols..(row + 1) * self.cols]
    }

    /// One scale for each group of a row.
    pub fn scales(&self, row: usize) -> &[f32] {
        let groups = self.cols / GROUP_SIZE;
        &self.scales[row * groups..(row + 1) * groups]
    }

    /// Scale times the sum of the quantized elements, for each group of a row.
    pub fn sums(&self, row: usize) -> &[f32] {
        let groups = self.cols / GROUP_SIZE;
        &self.sums[row * groups..(row + 1) * groups]
    }
}

/// Access to all rows of a [`QuantizedRows`] for several threads.
#[derive(Clone, Copy, Debug)]
pub struct RowWriter<'a> {
    rows: usize,
    cols: usize,
    q: *mut i8,
    scales: *mut f32,
    sums: *mut f32,
    owner: std::marker::PhantomData<&'a mut QuantizedRows>,
}

// SAFETY: it is a set of pointers with bounds; writing through them is `unsafe` and asks for disjoint rows.
unsafe impl Send for RowWriter<'_> {}
// SAFETY: as above.
unsafe impl Sync for RowWriter<'_> {}

impl RowWriter<'_> {
    /// Quantizes `x` into row `row`. Panics where the row is outside or `x` is not as long as a row.
    ///
    /// # Safety
    /// No other thread touches this row meanwhile.
    pub unsafe fn quantize_row(&self, isa: Isa, row: usize, x: &[f32]) {
        assert_eq!(x.len(), self.cols, "a row of another width");
        // SAFETY: by contract.
        unsafe { self.quantize_part(isa, row, 0, x) };
    }

    /// Quantizes `x` into row `row` from column `first` on. Panics where that is outside or not whole groups.
    ///
    /// # Safety
    /// No other thread touches these columns meanwhile.
    pub unsafe fn quantize_part(&self, isa: Isa, row: usize, first: usize, x: &[f32]) {
        assert!(row < self.rows && first + x.len() <= self.cols, "row {row} of {} does not fit", self.rows);
        assert!(first.is_multiple_of(GROUP_SIZE) && x.len().is_multiple_of(GROUP_SIZE), "a part of a group");
        let group = (row * self.cols + first) / GROUP_SIZE;
        let groups = x.len() / GROUP_SIZE;
        // SAFETY: the part is inside the vectors by the checks above, and this thread's alone by contract.
        let (q, scales, sums) = unsafe {
            (
                std::slice::from_raw_parts_mut(self.q.add(row * self.cols + first), x.len()),
                std::slice::from_raw_parts_mut(self.scales.add(group), groups),
                std::slice::from_raw_parts_mut(self.sums.add(group), groups),
            )
        };
        run(isa, QuantizeRow { x, q, scales, sums });
    }
}

struct QuantizeRow<'a> {
    x: &'a [f32],
    q: &'a mut [i8],
    scales: &'a mut [f32],
    sums: &'a mut [f32],
}

impl Kernel for QuantizeRow<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        let groups = self.x.as_chunks::<GROUP_SIZE>().0.iter().zip(self.q.as_chunks_mut::<GROUP_SIZE>().0);
        for (((x, q), scale), sum) in groups.zip(self.scales).zip(self.sums) {
            let mut rounded = [0i8; GROUP_SIZE];
            // SAFETY: vectors of a group lie inside it and inside `rounded`.
            unsafe {
                let zero = S::splat(0.0);
                let mut largest = zero;
                for at in (0..GROUP_SIZE).step_by(LANES) {
                    let v = S::load(x.as_ptr().add(at));
                    largest = S::max(largest, S::max(v, S::sub(zero, v)));
                }
                let largest = S::max_lane(largest);
                let per_step = S::splat(if largest > 0.0 { Q_MAX / largest } else { 0.0 });
                let mut total = zero;
                for at in (0..GROUP_SIZE).step_by(LANES) {
                    let steps = S::round(S::mul(S::load(x.as_ptr().add(at)), per_step));
                    // The product can exceed the limit by its rounding.
                    let steps = S::max(S::splat(-Q_MAX), S::min(S::splat(Q_MAX), steps));
                    // Small integers: exact in any order.
                    total = S::add(total, steps);
                    S::store_i8(rounded.as_mut_ptr().add(at), steps);
                }
                *scale = largest / Q_MAX;
                *sum = *scale * S::sum(total);
            }
            for (i, pair) in rounded.as_chunks::<2>().0.iter().enumerate() {
                q[i] = pair[0];
                q[GROUP_SIZE / 2 + i] = pair[1];
            }
        }
    }
}
