//! `y[t, r] = W[r, :] . x[t, :]`: the projections, which are nearly all of a model's work.
//!
//! # The two forms
//!
//! [`matmul_rows`] multiplies an affine 4- or 8-bit matrix by int8 activations; [`matmul_rows_f32`] takes any
//! format with f32 activations. Both are called inside a pool task with the task's range of weight rows and a
//! list of tokens, so that a stage can group an expert's tokens; [`matmul`] and [`matmul_f32`] are the
//! convenience for one matrix and all tokens.
//!
//! # Order of sums
//!
//! int8: group after group of 64 inputs, `acc = fma(dot, w_scale * x_scale, acc)`, then
//! `acc = fma(w_bias, x_sum, acc)`, where `dot` is an exact integer and `x_sum` the scaled sum of the
//! quantized activations. f32: sixteen sums, input `i` into sum `i % 16` by fused multiply-add, then halves
//! onto halves ([`Simd::sum`]); affine weights are first expanded as `fma(scale, q, bias)`. Neither depends on
//! the rows, the tokens or the instruction set beside it.
//!
//! # Work and memory of the int8 form
//!
//! *Prefill.* A tile of 32 rows by eight or sixteen groups is unpacked once into the L1 cache, rows in lanes (see
//! [`tile`](super::tile)), and meets every token of the list, six at a time, whose sums fill the registers. The
//! next rows are asked for between dot products ([`Upcoming`]), since an expert's few tokens leave little time.
//! The floor is one dot-product instruction per 64 products; the rest is unpacking, scaling and loads. Where there are
//! matrix instructions, a product has a form of its own (`amx.rs`).
//!
//! *Decode.* For a few tokens the tile between memory and the dot product costs more than it saves, so sixteen
//! rows are multiplied where they lie and their sums brought into lanes by a tree that adds and transposes at
//! once. Weights, scales and biases are asked for ahead, one line for each line read, across the end of the
//! call where the caller says what comes next. The floor is the weights' bytes over the memory's bandwidth. One token against
//! rows of the model's widths has a form of its own ([`Strip`], `avx512/strip.rs`) where the processor is better at asking
//! into its first cache.
//!
//! Zen 5 with AVX-512 VNNI at 4 GHz: decode reads 36 to 38 GB/s of 4-bit weights on one core where a plain read gets
//! 41, and 74 on two where that gets 82; prefill makes 0.57 TOP/s with 16 tokens and weights in memory and 0.71 with 64, where
//! the bare instruction makes 1.04. `cargo run --release -p lily-cpu --example gemv` measures both on all threads;
//! `docs/lab/cpu.md` has what was tried.

use std::mem::MaybeUninit;
use std::ops::Range;

use half::{bf16, f16};
use lily_model::weights::{Format, GROUP_SIZE, MatrixView};

use super::OutRows;
use super::activations::QuantizedRows;
use super::simd::{Kernel, LANES, Simd, prefetch, run};
use super::tile::{
    Activation, Ahead, GROUP_BYTES, MAX_TOKENS, PANEL_BYTES, PANEL_ROWS, PANELS, SCALE_GROUPS, Source, Strip,
    TILE_ROWS, Upcoming,
};
use crate::isa::{Isa, asks_second_cache};
use crate::memory::Buffer;
use crate::pool::{ThreadPool, partition};

/// Rows that a worker's share is cut at: see [`partition`].
pub const ROW_BLOCK: usize = TILE_ROWS;
/// How far ahead of its reads the direct form asks the cache for weights. Measured on a Zen 5 core: 12 and 24 KiB
/// are each 10 % slower.
const AHEAD_BYTES: usize = 16 << 10;
/// The same for scales and biases, in rows. They are few bytes, but each panel begins with them: without asking
/// ahead a Zen 5 core reached 23 GB/s instead of 31.
const SCALE_ROWS_AHEAD: usize = 2 * PANEL_ROWS;
/// The same in strips, one of which is 0.5 microseconds of reading.
const SCALE_STRIPS_AHEAD: usize = 2;
/// Tokens that meet a tile before the next one is unpacked; their running sums stay in the L2 cache.
const TOKEN_BLOCK: usize = 32 * MAX_TOKENS;

/// Rows `rows` of `w` times `tokens`, indices of rows of `x`: element `(i, r)` of `out` becomes
/// `W[r, :] . x[tokens[i], :]`. Runs on the calling thread.
///
/// Panics where `w` is not affine, where sizes disagree, or where a row, a token or the output is outside.
///
/// # Safety
/// No other thread touches columns `rows` of the first `tokens.len()` rows of `out` meanwhile.
pub unsafe fn matmul_rows(
    isa: Isa,
    w: MatrixView<'_>,
    rows: Range<usize>,
    x: &QuantizedRows,
    tokens: &[u32],
    out: OutRows<'_>,
) {
    // SAFETY: by contract.
    unsafe { matmul_rows_then(isa, w, rows, x, tokens, out, Next::UNKNOWN) }
}

/// What a thread is going to multiply after a call, so that the call can ask the memory for its first rows:
/// without, every call begins with a microsecond of waiting.
#[derive(Clone, Copy, Debug)]
pub struct Next {
    data: *const u8,
    scales: *const u8,
    biases: *const u8,
}

impl Next {
    /// Not known.
    pub const UNKNOWN: Next =
        Next { data: std::ptr::null(), scales: std::ptr::null(), biases: std::ptr::null() };

    /// Where weights, scales and biases begin `rows` rows further on, a row taking so many bytes of each.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn past(&self, rows: usize, row_bytes: usize, affine_bytes: usize) -> Option<[*const u8; 3]> {
        let starts = [(self.data, row_bytes), (self.scales, affine_bytes), (self.biases, affine_bytes)];
        (!self.data.is_null()).then(|| starts.map(|(start, stride)| start.wrapping_add(rows * stride)))
    }

    /// The rows of `w` from `row` on. Panics where there is no such row.
    pub fn rows(w: &MatrixView<'_>, row: usize) -> Next {
        assert!(row < w.rows, "row {row} of a matrix of {}", w.rows);
        let groups = if w.format.is_affine() { w.cols / GROUP_SIZE * 2 } else { 0 };
        Next {
            data: w.data[row * w.format.row_bytes(w.cols)..].as_ptr(),
            scales: w.scales[row * groups..].as_ptr(),
            biases: w.biases[row * groups..].as_ptr(),
        }
    }
}

/// As [`matmul_rows`] on a thread that goes on with `next`.
///
/// # Safety
/// As [`matmul_rows`].
pub unsafe fn matmul_rows_then(
    isa: Isa,
    w: MatrixView<'_>,
    rows: Range<usize>,
    x: &QuantizedRows,
    tokens: &[u32],
    out: OutRows<'_>,
    next: Next,
) {
    if let Some(product) = Int8::checked(w, rows, x, tokens, out, next) {
        run(isa, product);
    }
}

/// The same rows of two matrices of equal width, one after the other: what is done once for a call's tokens is done once for both.
///
/// # Safety
/// As [`matmul_rows`], for both outputs.
pub unsafe fn matmul_rows_of_two(
    isa: Isa,
    w: [MatrixView<'_>; 2],
    rows: Range<usize>,
    x: &QuantizedRows,
    tokens: &[u32],
    out: [OutRows<'_>; 2],
    next: Next,
) {
    let second_begins = if rows.is_empty() { Next::UNKNOWN } else { Next::rows(&w[1], rows.start) };
    let first = Int8::checked(w[0], rows.clone(), x, tokens, out[0], second_begins);
    let second = Int8::checked(w[1], rows, x, tokens, out[1], next);
    if let (Some(first), Some(second)) = (first, second) {
        run(isa, Two([first, second]));
    }
}

/// As [`matmul_rows`] with f32 activations `x`, `[any, cols]`, and a matrix of any format.
///
/// # Safety
/// As [`matmul_rows`].
pub unsafe fn matmul_rows_f32(
    isa: Isa,
    w: MatrixView<'_>,
    rows: Range<usize>,
    x: &[f32],
    tokens: &[u32],
    out: OutRows<'_>,
) {
    check(&w, &rows, x.len() / w.cols, tokens, &out);
    if !rows.is_empty() {
        run(isa, F32 { w, rows, x, tokens, out });
    }
}

/// `out[t, r] = W[r, :] . x[t, :]` for all rows and tokens, on all threads. `out` is `[x.rows(), w.rows]`.
pub fn matmul(pool: &ThreadPool, isa: Isa, w: MatrixView<'_>, x: &QuantizedRows, out: &mut [f32]) {
    let out = OutRows::new(out, w.rows);
    pool.run(|worker, workers| {
        let rows = partition(w.rows, ROW_BLOCK, worker, workers);
        // SAFETY: shares of the rows are disjoint.
        unsafe { matmul_rows(isa, w, rows, x, x.all(), out) };
    });
}

/// As [`matmul`] with f32 activations, `[tokens, cols]`, and a matrix of any format.
pub fn matmul_f32(pool: &ThreadPool, isa: Isa, w: MatrixView<'_>, x: &[f32], out: &mut [f32]) {
    let tokens: Vec<u32> = (0..(x.len() / w.cols) as u32).collect();
    let out = OutRows::new(out, w.rows);
    pool.run(|worker, workers| {
        let rows = partition(w.rows, F32_ROWS, worker, workers);
        // SAFETY: shares of the rows are disjoint.
        unsafe { matmul_rows_f32(isa, w, rows, x, &tokens, out) };
    });
}

/// What must hold for the kernels' pointers to stay inside.
fn check(w: &MatrixView<'_>, rows: &Range<usize>, x_rows: usize, tokens: &[u32], out: &OutRows<'_>) {
    assert!(w.data.len() >= w.rows * w.format.row_bytes(w.cols), "the matrix is shorter than its shape");
    if w.format.is_affine() {
        let affine_bytes = w.rows * (w.cols / GROUP_SIZE) * 2;
        assert!(
            w.scales.len() >= affine_bytes && w.biases.len() >= affine_bytes,
            "scales or biases are missing"
        );
    }
    assert!(rows.start <= rows.end && rows.end <= w.rows, "rows {rows:?} of a matrix of {}", w.rows);
    assert!(rows.end <= out.cols() && tokens.len() <= out.rows(), "the product does not fit its output");
    assert!(tokens.iter().all(|&token| (token as usize) < x_rows), "a token outside the activations");
}

/// The arguments of [`matmul_rows_then`].
pub struct Int8<'a> {
    pub(super) w: MatrixView<'a>,
    pub(super) rows: Range<usize>,
    pub(super) x: &'a QuantizedRows,
    pub(super) tokens: &'a [u32],
    pub(super) out: OutRows<'a>,
    pub(super) next: Next,
}

/// A tile and what goes with it. Never zeroed: each part is written before it is read.
#[repr(C, align(64))]
struct Scratch {
    weights: [MaybeUninit<[u8; PANEL_BYTES]>; PANELS],
    scales: [MaybeUninit<[f32; SCALE_GROUPS * PANEL_ROWS]>; PANELS],
    biases: [MaybeUninit<[f32; SCALE_GROUPS * PANEL_ROWS]>; PANELS],
    acc: MaybeUninit<[f32; TOKEN_BLOCK * TILE_ROWS]>,
}

/// Two products of the same tokens.
struct Two<'a>([Int8<'a>; 2]);

impl Kernel for Two<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        // SAFETY: by contract.
        unsafe {
            if S::MATRIX && !self.0.iter().any(Int8::is_direct::<S>) {
                return S::multiply_matrix(&self.0);
            }
            for product in self.0 {
                product.compute::<S>();
            }
        }
    }
}

impl Kernel for Int8<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        if self.is_direct::<S>() {
            // SAFETY: by contract.
            return unsafe { self.compute_direct::<S>() };
        }
        if S::MATRIX {
            // SAFETY: by contract.
            return unsafe { S::multiply_matrix(std::slice::from_ref(&self)) };
        }
        let Int8 { w, rows, x, tokens, out, next } = self;
        let groups = w.cols / GROUP_SIZE;
        let row_bytes = w.format.row_bytes(w.cols);
        let wide = w.format == Format::Affine8;
        let group_bytes = if wide { GROUP_BYTES } else { S::GROUP_BYTES_4 };
        let tile_groups = PANEL_BYTES / group_bytes;
        let mut scratch = MaybeUninit::<Scratch>::uninit();
        let scratch = scratch.as_mut_ptr();
        // SAFETY: field addresses of an allocation that lives to the end; nothing is read before it is written.
        let (weights, scales, biases, acc) = unsafe {
            (
                std::array::from_fn::<_, PANELS, _>(|p| (&raw mut (*scratch).weights[p]).cast::<u8>()),
                std::array::from_fn::<_, PANELS, _>(|p| (&raw mut (*scratch).scales[p]).cast::<f32>()),
                std::array::from_fn::<_, PANELS, _>(|p| (&raw mut (*scratch).biases[p]).cast::<f32>()),
                (&raw mut (*scratch).acc).cast::<f32>(),
            )
        };
        for first in rows.clone().step_by(TILE_ROWS) {
            let here = TILE_ROWS.min(rows.end - first);
            // From a row of this block to the same row of the block that comes after it, which may be another matrix.
            let last = rows.end - first <= TILE_ROWS;
            let to_next = |of: &[u8], after: *const u8, stride: usize| match (last, after.is_null()) {
                (false, _) => TILE_ROWS * stride,
                (true, false) => after.addr().wrapping_sub(of.as_ptr().addr() + first * stride),
                (true, true) => 0,
            };
            let scales_ahead = to_next(w.scales, next.scales, groups * 2);
            let biases_ahead = to_next(w.biases, next.biases, groups * 2);
            let ahead = to_next(w.data, next.data, row_bytes);
            let source = |data: &[u8], stride: usize, panel: usize, byte: usize| {
                // A panel without rows repeats the tile's last row, and no one reads its sums.
                let row = (first + panel * PANEL_ROWS).min(rows.end - 1);
                let rows = PANEL_ROWS.min(rows.end - row);
                // SAFETY: the row exists, and `byte` lies inside it.
                Source { data: unsafe { data.as_ptr().add(row * stride + byte) }, stride, rows }
            };
            for (block, block_tokens) in tokens.chunks(TOKEN_BLOCK).enumerate() {
                // SAFETY: the block's sums are inside the scratch.
                unsafe { std::ptr::write_bytes(acc, 0, block_tokens.len() * TILE_ROWS) };
                for scale_start in (0..groups).step_by(SCALE_GROUPS) {
                    let scale_end = groups.min(scale_start + SCALE_GROUPS);
                    for p in 0..PANELS {
                        let count = scale_end - scale_start;
                        // SAFETY: `count` scales and biases of each row follow; the scratch has room.
                        unsafe {
                            let (of_scales, of_biases) = (
                                source(w.scales, groups * 2, p, scale_start * 2),
                                source(w.biases, groups * 2, p, scale_start * 2),
                            );
                            S::unpack_scales(of_scales, count, scales_ahead, scales[p]);
                            S::unpack_scales(of_biases, count, biases_ahead, biases[p]);
                        }
                    }
                    for start in (scale_start..scale_end).step_by(tile_groups) {
                        let count = tile_groups.min(scale_end - start);
                        for p in 0..PANELS {
                            let byte = w.format.row_bytes(start * GROUP_SIZE);
                            let from = source(w.data, row_bytes, p, byte);
                            // SAFETY: `count` groups of each row follow; the scratch has room.
                            unsafe {
                                if wide {
                                    S::unpack_8(from, count, ahead, weights[p]);
                                } else {
                                    S::unpack_4(from, count, weights[p]);
                                }
                            }
                        }
                        let lane = (start - scale_start) * PANEL_ROWS;
                        // SAFETY: inside what was just unpacked.
                        let tile = unsafe {
                            Tile {
                                weights: weights.map(<*mut u8>::cast_const),
                                scales: scales.map(|s| s.add(lane).cast_const()),
                                biases: biases.map(|b| b.add(lane).cast_const()),
                                start,
                                count,
                                wide,
                            }
                        };
                        let offset = first * row_bytes + w.format.row_bytes(start * GROUP_SIZE);
                        // Further blocks of tokens find their tiles in the cache.
                        let upcoming = (block == 0 && ahead != 0 && !wide)
                            .then(|| w.data.as_ptr().wrapping_add(offset).wrapping_add(ahead));
                        // SAFETY: tokens and groups were checked to be inside `x`; sums are in the scratch.
                        unsafe { tile.multiply_all::<S>(x, block_tokens, acc, upcoming, row_bytes) };
                    }
                }
                for i in 0..block_tokens.len() {
                    // SAFETY: these elements are this call's alone by contract; the sums were written above.
                    unsafe {
                        let to = out.row(block * TOKEN_BLOCK + i, first..first + here);
                        let from = acc.add(i * TILE_ROWS);
                        if here == TILE_ROWS {
                            // A length that the compiler knows is two stores; another is a call.
                            std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), TILE_ROWS);
                        } else {
                            std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), here);
                        }
                    }
                }
            }
        }
    }
}

impl<'a> Int8<'a> {
    /// A product, or nothing where there are no rows. Panics as [`matmul_rows`] does.
    fn checked(
        w: MatrixView<'a>,
        rows: Range<usize>,
        x: &'a QuantizedRows,
        tokens: &'a [u32],
        out: OutRows<'a>,
        next: Next,
    ) -> Option<Int8<'a>> {
        assert!(w.format.is_affine(), "int8 activations meet affine weights only");
        assert_eq!(w.cols, x.cols(), "the matrix and its activations differ in width");
        check(&w, &rows, x.rows(), tokens, &out);
        (!rows.is_empty()).then_some(Int8 { w, rows, x, tokens, out, next })
    }

    /// Whether weights are multiplied where they lie.
    #[inline(always)]
    fn is_direct<S: Simd>(&self) -> bool {
        self.w.format == Format::Affine4 && self.tokens.len() <= S::DIRECT_TOKENS
    }

    /// The form for few tokens on instruction sets that have [`TileOps::multiply_rows`](super::tile::TileOps).
    ///
    /// # Safety
    /// The machine has the instruction set of `S`.
    #[inline(always)]
    unsafe fn compute_direct<S: Simd>(self) {
        const HALF_ROWS: usize = PANEL_ROWS / 2;
        const GROUPS: usize = Strip::GROUPS / PANEL_ROWS;
        const HALF_ROWS_GROUPS: usize = Strip::GROUPS / HALF_ROWS;
        let second_cache = asks_second_cache();
        let strips = S::STRIPS && !second_cache && self.tokens.len() == 1;
        // SAFETY: by contract.
        unsafe {
            match self.w.cols / GROUP_SIZE {
                GROUPS if strips && self.rows.len().is_multiple_of(PANEL_ROWS) => {
                    return self.compute_strips::<S, PANEL_ROWS>();
                }
                HALF_ROWS_GROUPS if strips && self.rows.len().is_multiple_of(HALF_ROWS) => {
                    return self.compute_strips::<S, HALF_ROWS>();
                }
                _ => {}
            }
        }
        let Int8 { w, rows, x, tokens, out, next: after } = self;
        let groups = w.cols / GROUP_SIZE;
        let row_bytes = w.format.row_bytes(w.cols);
        let end = w.data[..rows.end * row_bytes].as_ptr_range().end;
        let mut scales = MaybeUninit::<[f32; SCALE_GROUPS * PANEL_ROWS]>::uninit();
        let mut biases = MaybeUninit::<[f32; SCALE_GROUPS * PANEL_ROWS]>::uninit();
        let (scales, biases) = (scales.as_mut_ptr().cast::<f32>(), biases.as_mut_ptr().cast::<f32>());
        for first in rows.clone().step_by(PANEL_ROWS) {
            let here = PANEL_ROWS.min(rows.end - first);
            let source = |data: &[u8], stride: usize, byte: usize| Source {
                data: data[first * stride + byte..].as_ptr(),
                stride,
                rows: here,
            };
            let mut acc = [[0.0f32; PANEL_ROWS]; MAX_TOKENS];
            for start in (0..groups).step_by(SCALE_GROUPS) {
                let count = SCALE_GROUPS.min(groups - start);
                let byte = w.format.row_bytes(start * GROUP_SIZE);
                let from = source(w.data, row_bytes, byte);
                // SAFETY: `count` groups of each row follow; the scratch has room.
                unsafe {
                    for (of, after, to) in
                        [(w.scales, after.scales, scales), (w.biases, after.biases, biases)]
                    {
                        let from = source(of, groups * 2, start * 2);
                        let left = rows.end - first;
                        let ahead = if left > SCALE_ROWS_AHEAD {
                            SCALE_ROWS_AHEAD * groups * 2
                        } else if after.is_null() {
                            0
                        } else {
                            // A distance that leads to the next matrix, be it before or behind this one.
                            let past = SCALE_ROWS_AHEAD - left.next_multiple_of(PANEL_ROWS);
                            after.addr().wrapping_add(past * groups * 2).wrapping_sub(from.data.addr())
                        };
                        S::unpack_scales(from, count, ahead, to);
                    }
                }
                for (i, (&token, acc)) in tokens.iter().zip(&mut acc).enumerate() {
                    let row = token as usize;
                    let token = Activation {
                        q: x.q(row)[start * GROUP_SIZE..].as_ptr(),
                        scales: x.scales(row)[start..].as_ptr(),
                        sums: x.sums(row)[start..].as_ptr(),
                        acc: acc.as_mut_ptr(),
                    };
                    let next =
                        first * row_bytes + PANEL_ROWS * byte + AHEAD_BYTES.max(PANEL_ROWS * row_bytes);
                    let next = w.data.as_ptr().wrapping_add(next);
                    let (turn, turns) = (i, tokens.len());
                    let ahead = Ahead { next, end, then: after.data, turn, turns, second_cache };
                    // SAFETY: as above; `acc` has a panel's sums.
                    unsafe { S::multiply_rows(from, scales, biases, count, ahead, &token) };
                }
            }
            for (i, acc) in acc.iter().take(tokens.len()).enumerate() {
                // SAFETY: these elements are this call's alone by contract.
                let to = unsafe { out.row(i, first..first + here) };
                to.copy_from_slice(&acc[..here]);
            }
        }
    }

    /// [`Int8::compute_direct`] for one token and rows of [`Strip::GROUPS`]` / ROWS` groups, a whole number of strips.
    ///
    /// # Safety
    /// The machine has the instruction set of `S`.
    #[inline(always)]
    unsafe fn compute_strips<S: Simd, const ROWS: usize>(self) {
        let Int8 { w, rows, x, tokens, out, next: after } = self;
        debug_assert!(w.cols / GROUP_SIZE * ROWS == Strip::GROUPS && rows.len().is_multiple_of(ROWS));
        let row_bytes = w.format.row_bytes(w.cols);
        let affine_bytes = w.cols / GROUP_SIZE * 2;
        let row = tokens[0] as usize;
        let (q, scales, sums) = (x.q(row).as_ptr(), x.scales(row).as_ptr(), x.sums(row).as_ptr());
        for first in rows.clone().step_by(ROWS) {
            let strip = Strip {
                data: w.data[first * row_bytes..].as_ptr(),
                scales: w.scales[first * affine_bytes..].as_ptr(),
                biases: w.biases[first * affine_bytes..].as_ptr(),
            };
            // The same place `ahead` rows further on, be it of this matrix or the next; where nothing is known, here.
            let past = |here: *const u8, then: *const u8, stride: usize, ahead: usize| {
                let left = rows.end - first;
                if ahead < left {
                    here.wrapping_add(ahead * stride)
                } else if then.is_null() {
                    here
                } else {
                    then.wrapping_add((ahead - left) * stride)
                }
            };
            let ask = Strip {
                data: past(strip.data, after.data, row_bytes, ROWS),
                scales: past(strip.scales, after.scales, affine_bytes, SCALE_STRIPS_AHEAD * ROWS),
                biases: past(strip.biases, after.biases, affine_bytes, SCALE_STRIPS_AHEAD * ROWS),
            };
            let mut acc = [0.0f32; ROWS];
            let token = Activation { q, scales, sums, acc: acc.as_mut_ptr() };
            // SAFETY: so many rows follow, the token has as many groups as a row, and these elements are this call's alone.
            unsafe {
                S::multiply_strip::<ROWS>(strip, ask, &token);
                out.row(0, first..first + ROWS).copy_from_slice(&acc);
            }
        }
    }
}

/// An unpacked tile.
struct Tile {
    weights: [*const u8; PANELS],
    scales: [*const f32; PANELS],
    biases: [*const f32; PANELS],
    /// Its first group within the row.
    start: usize,
    /// Its groups.
    count: usize,
    wide: bool,
}

impl Tile {
    /// Adds the tile's products with `tokens` to `acc`, `[tokens, TILE_ROWS]`, in passes of equal size: a last
    /// one of one or two tokens would leave registers empty. `upcoming` is where the tile begins that is wanted
    /// next, whose rows are `stride` apart.
    ///
    /// # Safety
    /// As [`TileOps::multiply`](super::tile::TileOps::multiply); `tokens` are rows of `x`, which has the groups.
    #[inline(always)]
    unsafe fn multiply_all<S: Simd>(
        &self,
        x: &QuantizedRows,
        tokens: &[u32],
        acc: *mut f32,
        upcoming: Option<*const u8>,
        stride: usize,
    ) {
        // A single pass over a tile is too short to bring in the next one: two of three tokens are faster than one of
        // six where weights come from memory.
        let fewest = if upcoming.is_some() { 2.min(tokens.len()) } else { 1 };
        let passes = tokens.len().div_ceil(S::TOKENS).max(fewest);
        for pass in 0..passes {
            // Half of the upcoming rows in each of two passes, or all in the only one.
            let halves = match (passes, pass) {
                (1, _) => Some([0, 1]),
                (_, 0 | 1) => Some([pass; 2]),
                _ => None,
            };
            let upcoming = self.upcoming(upcoming, halves, stride);
            let (from, to) = (tokens.len() * pass / passes, tokens.len() * (pass + 1) / passes);
            let batch = &tokens[from..to];
            // SAFETY: by contract.
            unsafe {
                let acc = acc.add(from * TILE_ROWS);
                match batch.len() {
                    1 => self.multiply::<S, 1>(x, batch, acc, upcoming),
                    2 => self.multiply::<S, 2>(x, batch, acc, upcoming),
                    3 => self.multiply::<S, 3>(x, batch, acc, upcoming),
                    4 => self.multiply::<S, 4>(x, batch, acc, upcoming),
                    5 => self.multiply::<S, 5>(x, batch, acc, upcoming),
                    _ => self.multiply::<S, 6>(x, batch, acc, upcoming),
                }
            }
        }
    }

    /// One pass: gathers what `N` tokens bring and multiplies.
    ///
    /// # Safety
    /// As [`Tile::multiply_all`], for exactly `N` tokens.
    #[inline(always)]
    unsafe fn multiply<S: Simd, const N: usize>(
        &self,
        x: &QuantizedRows,
        batch: &[u32],
        acc: *mut f32,
        upcoming: Upcoming,
    ) {
        let mut tokens = [const { Activation::NONE }; N];
        for (i, token) in tokens.iter_mut().enumerate() {
            let row = batch[i] as usize;
            *token = Activation {
                q: x.q(row)[self.start * GROUP_SIZE..].as_ptr(),
                scales: x.scales(row)[self.start..].as_ptr(),
                sums: x.sums(row)[self.start..].as_ptr(),
                // SAFETY: `acc` has the sums of `N` tokens by contract.
                acc: unsafe { acc.add(i * TILE_ROWS) },
            };
        }
        let Tile { weights, scales, biases, count, wide, .. } = *self;
        // SAFETY: by contract.
        unsafe { S::multiply::<N>(weights, scales, biases, count, wide, &tokens, upcoming) };
    }

    /// To ask for those `halves` of the tile at `first` whose rows are `stride` apart, or for nothing.
    #[inline(always)]
    fn upcoming(&self, first: Option<*const u8>, halves: Option<[usize; 2]>, stride: usize) -> Upcoming {
        match first.zip(halves) {
            Some((first, halves)) => {
                let half = |panel: usize| first.wrapping_add(panel * PANEL_ROWS * stride);
                Upcoming { halves: halves.map(half), stride }
            }
            None => Upcoming { halves: [self.weights[0]; 2], stride: 0 },
        }
    }
}

/// Bytes that products of `cols` inputs with `tokens` tokens leave with a thread, where the fastest instruction set
/// keeps some.
pub fn packed_bytes(tokens: usize, cols: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    if Isa::detect() == Isa::Amx {
        return super::amx::scratch_bytes(tokens, cols);
    }
    let _ = (tokens, cols);
    0
}

/// Weight rows whose sums the f32 form keeps in registers together.
const F32_ROWS: usize = 4;
/// The same for one token.
const F32_ROWS_OF_ONE: usize = 8;
/// Tokens that the f32 form takes together.
const F32_TOKENS: usize = 4;
/// Weight rows that the f32 form expands at a time for many tokens: 256 KiB at a width of 2048, which stay in the
/// L2 cache while every token meets them.
const F32_EXPANDED: usize = 32;

struct F32<'a> {
    w: MatrixView<'a>,
    rows: Range<usize>,
    x: &'a [f32],
    tokens: &'a [u32],
    out: OutRows<'a>,
}

thread_local! {
    /// Expanded rows of a matrix.
    static EXPANDED: std::cell::RefCell<Buffer<f32>> = const { std::cell::RefCell::new(Buffer::new()) };
}

impl Kernel for F32<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        if self.tokens.len() == 1 && self.w.format.is_affine() {
            // SAFETY: by contract.
            return unsafe { self.compute_one::<S>() };
        }
        let F32 { w, rows, x, tokens, out } = self;
        let mut expanded = EXPANDED.take();
        expanded.resize(expanded.len().max(F32_EXPANDED * w.cols));
        for start in rows.clone().step_by(F32_EXPANDED) {
            let end = rows.end.min(start + F32_EXPANDED);
            // Whole blocks of rows; those that do not exist repeat the last one, and no one reads their sums.
            let blocks = (end - start).div_ceil(F32_ROWS);
            for (i, to) in expanded.chunks_exact_mut(w.cols).take(blocks * F32_ROWS).enumerate() {
                // SAFETY: the row exists, and `to` has its length.
                unsafe { expand_row::<S>(&w, (start + i).min(end - 1), to) };
            }
            for (batch, batch_tokens) in tokens.chunks(F32_TOKENS).enumerate() {
                let token = |i: usize| batch_tokens[i.min(batch_tokens.len() - 1)] as usize;
                let from: [*const f32; F32_TOKENS] =
                    std::array::from_fn(|i| x[token(i) * w.cols..][..w.cols].as_ptr());
                for block in 0..blocks {
                    let first = start + block * F32_ROWS;
                    let here = F32_ROWS.min(end - first);
                    let mut sums = [0.0; LANES];
                    // SAFETY: all rows have `cols` elements.
                    unsafe {
                        let rows = expanded.as_ptr().add(block * F32_ROWS * w.cols);
                        match batch_tokens.len() {
                            1 => dots::<S, 1>(rows, &from, w.cols, &mut sums),
                            _ => dots::<S, F32_TOKENS>(rows, &from, w.cols, &mut sums),
                        }
                    };
                    for i in 0..batch_tokens.len() {
                        // SAFETY: these elements are this call's alone by contract.
                        let to = unsafe { out.row(batch * F32_TOKENS + i, first..first + here) };
                        to.copy_from_slice(&sums[i * F32_ROWS..i * F32_ROWS + here]);
                    }
                }
            }
        }
        EXPANDED.set(expanded);
    }
}

impl F32<'_> {
    /// One token and an affine matrix: weights are expanded in registers.
    ///
    /// # Safety
    /// The machine has the instruction set of `S`.
    #[inline(always)]
    unsafe fn compute_one<S: Simd>(self) {
        let F32 { w, rows, x, tokens, out } = self;
        let groups = w.cols / GROUP_SIZE;
        let row_bytes = w.format.row_bytes(w.cols);
        let wide = w.format == Format::Affine8;
        let x = &x[tokens[0] as usize * w.cols..][..w.cols];
        for first in rows.clone().step_by(F32_ROWS_OF_ONE) {
            let here = F32_ROWS_OF_ONE.min(rows.end - first);
            // SAFETY: rows, groups and vectors lie inside the matrix and the token, by the checks of the caller.
            unsafe {
                // Just the bits: the care that `half` takes of numbers that are none costs as much as the products.
                let affine = |of: &[u8], at: usize| {
                    let bits = u16::from_le(of.as_ptr().cast::<u16>().add(at).read_unaligned());
                    f32::from_bits(u32::from(bits) << 16)
                };
                let mut acc = [S::splat(0.0); LANES];
                for group in 0..groups {
                    for r in 0..F32_ROWS_OF_ONE {
                        // Missing rows repeat the last one, and no one reads their sums.
                        let row = first + r.min(here - 1);
                        let at = row * groups + group;
                        let scale = S::splat(affine(w.scales, at));
                        let bias = S::splat(affine(w.biases, at));
                        let from = w.data.as_ptr().add(row * row_bytes);
                        // The same place of the rows that come after these.
                        let place = F32_ROWS_OF_ONE * row_bytes + w.format.row_bytes(group * GROUP_SIZE);
                        prefetch(from.wrapping_add(place));
                        for at in (group * GROUP_SIZE..(group + 1) * GROUP_SIZE).step_by(LANES) {
                            let q =
                                if wide { S::load_u8(from.add(at)) } else { S::load_u4(from.add(at / 2)) };
                            let v = S::fma(scale, q, bias);
                            acc[r] = S::fma(v, S::load(x.as_ptr().add(at)), acc[r]);
                        }
                    }
                }
                let mut sums = [0.0; LANES];
                S::store(sums.as_mut_ptr(), S::sum_each(&acc));
                // These elements are this call's alone by contract.
                out.row(0, first..first + here).copy_from_slice(&sums[..here]);
            }
        }
    }
}

/// `sums[t * F32_ROWS + r]` of four expanded rows and the first `N` tokens. `N` is a constant so that the sums
/// stay in registers.
///
/// # Safety
/// `rows` has four rows of `cols` elements, and each token points to `cols`.
#[inline(always)]
unsafe fn dots<S: Simd, const N: usize>(
    rows: *const f32,
    tokens: &[*const f32; F32_TOKENS],
    cols: usize,
    sums: &mut [f32; LANES],
) {
    // SAFETY: full vectors end at or before `cols`; the rest is loaded with its length.
    unsafe {
        let mut acc = [S::splat(0.0); F32_ROWS * F32_TOKENS];
        let mut i = 0;
        while i + LANES <= cols {
            for r in 0..F32_ROWS {
                let w = S::load(rows.add(r * cols + i));
                for t in 0..N {
                    acc[t * F32_ROWS + r] = S::fma(w, S::load(tokens[t].add(i)), acc[t * F32_ROWS + r]);
                }
            }
            i += LANES;
        }
        if i < cols {
            for r in 0..F32_ROWS {
                let w = S::load_some(rows.add(r * cols + i), cols - i, 0.0);
                for t in 0..N {
                    let x = S::load_some(tokens[t].add(i), cols - i, 0.0);
                    acc[t * F32_ROWS + r] = S::fma(w, x, acc[t * F32_ROWS + r]);
                }
            }
        }
        S::store(sums.as_mut_ptr(), S::sum_each(&acc));
    }
}

/// One row of a matrix as f32.
///
/// # Safety
/// The row exists and `to` has `w.cols` elements.
#[inline(always)]
unsafe fn expand_row<S: Simd>(w: &MatrixView<'_>, row: usize, to: &mut [f32]) {
    let bytes = w.format.row_bytes(w.cols);
    let data = &w.data[row * bytes..(row + 1) * bytes];
    match w.format {
        Format::F32 => {
            for (to, from) in to.iter_mut().zip(data.as_chunks::<4>().0) {
                *to = f32::from_le_bytes(*from);
            }
        }
        Format::F16 | Format::Bf16 => {
            let half = w.format == Format::F16;
            let (blocks, rest) = to.as_chunks_mut::<LANES>();
            for (i, block) in blocks.iter_mut().enumerate() {
                // SAFETY: sixteen elements follow in the row.
                unsafe {
                    let from = data.as_ptr().add(i * LANES * 2);
                    let v = if half { S::load_f16(from.cast()) } else { S::load_bf16(from.cast()) };
                    S::store(block.as_mut_ptr(), v);
                }
            }
            let done = blocks.len() * LANES * 2;
            for (to, from) in rest.iter_mut().zip(data[done..].as_chunks::<2>().0) {
                *to = if half {
                    f16::from_le_bytes(*from).to_f32()
                } else {
                    bf16::from_le_bytes(*from).to_f32()
                };
            }
        }
        Format::Affine4 | Format::Affine8 => {
            let groups = w.cols / GROUP_SIZE;
            for (group, to) in to.as_chunks_mut::<GROUP_SIZE>().0.iter_mut().enumerate() {
                let value = |of: &[u8]| {
                    let at = (row * groups + group) * 2;
                    bf16::from_le_bytes([of[at], of[at + 1]]).to_f32()
                };
                let (scale, bias) = (value(w.scales), value(w.biases));
                let mut nibbles = [0u8; GROUP_SIZE];
                let q = if w.format == Format::Affine8 {
                    data[group * GROUP_SIZE..][..GROUP_SIZE].as_ptr()
                } else {
                    let packed = &data[group * GROUP_SIZE / 2..][..GROUP_SIZE / 2];
                    for (to, q) in nibbles.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
                        *to = [q & 15, q >> 4];
                    }
                    nibbles.as_ptr()
                };
                for at in (0..GROUP_SIZE).step_by(LANES) {
                    // SAFETY: both have a group's elements.
                    unsafe {
                        let v = S::fma(S::splat(scale), S::load_u8(q.add(at)), S::splat(bias));
                        S::store(to.as_mut_ptr().add(at), v);
                    }
                }
            }
        }
    }
}
