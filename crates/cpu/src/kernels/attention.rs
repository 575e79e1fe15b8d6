//! Attention of one KV head and the query heads that share it, over pages of the cache.
//!
//! # Order
//!
//! A page's scores are dot products ([`Simd::sum`]'s sixteen sums) times `scale`; softmax over the page takes
//! its own largest score; its values are summed position after position; then the page is merged into the
//! pages before it,
//!
//! ```text
//! m' = max(m, m_page)    a = exp(m - m')    b = exp(m_page - m')
//! l' = fma(l_page, b, l * a)    o' = fma(o_page, b, o * a)
//! ```
//!
//! Where rows of the cache have scales ([`KvElement::SCALED`]), a key's is multiplied into `scale` and a value's into
//! its weight, after the weights were summed: the elements meet as the integers that they are.
//!
//! Pages begin at multiples of their length, so the result of a query depends on nothing but the keys and
//! values up to its position: not on how a prompt was cut, not on the queries beside it. Pages are merged in
//! spans of [`SPAN_POSITIONS`], and spans in order, so that threads can share one query's context
//! ([`attend_span`], [`merge_spans`]) and get the same bits as [`attend`].
//!
//! # Work and memory
//!
//! Query rows (token and head) are taken `ROWS` at a time, so a page is read once for all query heads of a
//! decode step, and once for some tokens of a prompt. Elements are widened as they are used, which
//! costs less than reading twice the bytes. Decode's floor is the cache's bytes over the
//! memory's bandwidth; prefill's is two multiply-adds per query row, position and element. A Zen 5 core with AVX-512 reads
//! 22 GB/s of an f16 cache for eight heads of 256 in decode, and makes 160 of 260 GFLOP/s in prefill.

use half::{bf16, f16};

use super::OutRows;
use super::delta::Strided;
use super::simd::{Kernel, LANES, Simd, prefetch, run};
use super::tile::LINE;
use crate::isa::Isa;
use crate::memory::Buffer;

/// Positions that are merged on their own before they join the rest. A multiple of every page length.
pub const SPAN_POSITIONS: usize = 1024;
/// Query rows that go over a page together.
const ROWS: usize = 32;
/// Rows, positions or vectors of a register block: four by four sums.
const BLOCK: usize = 4;

/// An element type of the cache.
pub trait KvElement: Copy + Send + Sync + 'static {
    /// Whether a key or a value is its elements times a scale of its own.
    const SCALED: bool = false;

    /// Sixteen of them, widened.
    ///
    /// # Safety
    /// Sixteen elements are readable, and the instruction set is there.
    unsafe fn load<S: Simd>(from: *const Self) -> S::F;
}

impl KvElement for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const f32) -> S::F {
        // SAFETY: by contract.
        unsafe { S::load(from) }
    }
}

impl KvElement for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const f16) -> S::F {
        // SAFETY: by contract.
        unsafe { S::load_f16(from) }
    }
}

impl KvElement for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const bf16) -> S::F {
        // SAFETY: by contract.
        unsafe { S::load_bf16(from) }
    }
}

impl KvElement for i8 {
    const SCALED: bool = true;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const i8) -> S::F {
        // SAFETY: by contract.
        unsafe { S::load_i8(from) }
    }
}

/// Largest magnitude of an element of an i8 cache.
const I8_MAX: f32 = 127.0;

/// A key or a value as integers from -127 to 127, in `to`, and their scale: each is off by half the scale at the most.
/// NaN becomes 0, and infinity what it is beside the largest f32.
pub fn quantize_row(row: &[f32], to: &mut [i8]) -> f32 {
    let largest = row.iter().fold(0.0, |largest, v| v.abs().max(largest)).min(f32::MAX);
    for (to, v) in to.iter_mut().zip(row) {
        // In a row of zeros this is NaN, too, which becomes 0.
        let steps = v / largest * I8_MAX;
        *to = steps.round_ties_even().clamp(-I8_MAX, I8_MAX) as i8;
    }
    largest / I8_MAX
}

/// The keys or the values of a page.
#[derive(Clone, Copy, Debug)]
pub struct KvRows<'a, T> {
    /// `[page_positions, head_dim]`.
    pub elements: &'a [T],
    /// What the elements of each position are multiplied with, `[page_positions]`, where [`KvElement::SCALED`].
    pub scales: &'a [f32],
}

/// The keys and values of one KV head.
#[derive(Clone, Copy)]
pub struct KvPages<'a, T> {
    /// Number of pages.
    pub pages: usize,
    /// Keys of a page.
    pub keys: &'a (dyn Fn(usize) -> KvRows<'a, T> + Sync),
    /// Values of a page.
    pub values: &'a (dyn Fn(usize) -> KvRows<'a, T> + Sync),
    /// Positions of a page; divides [`SPAN_POSITIONS`], and sixteen divides it.
    pub page_positions: usize,
    /// Elements of a key and of a value; sixteen divides it.
    pub head_dim: usize,
}

/// Queries of consecutive tokens for the heads that share a KV head.
#[derive(Clone, Copy, Debug)]
pub struct Queries<'a> {
    /// Row t: the `heads` queries of token t, `[heads, head_dim]`.
    pub data: Strided<'a>,
    /// Number of tokens.
    pub tokens: usize,
    /// Query heads of this KV head.
    pub heads: usize,
    /// Position of token 0; token t sees positions `0..=first_position + t`.
    pub first_position: usize,
    /// What scores are multiplied with, usually `head_dim^-1/2`.
    pub scale: f32,
}

/// Attention of all queries. Row t of `out` gets token t's `[heads, head_dim]` from column `first_col` on.
///
/// Panics where pages or queries are too short for the positions asked for.
///
/// # Safety
/// No other thread touches those columns of `out` meanwhile.
pub unsafe fn attend<T: KvElement>(
    isa: Isa,
    kv: &KvPages<'_, T>,
    queries: &Queries<'_>,
    out: OutRows<'_>,
    first_col: usize,
) {
    check(kv, queries);
    let mut scratch = SCRATCH.take();
    let rows = queries.tokens * queries.heads;
    for first in (0..rows).step_by(ROWS) {
        let count = ROWS.min(rows - first);
        let positions = queries.first_position + (first + count - 1) / queries.heads + 1;
        let total = &mut scratch.total;
        total.reset(count, kv.head_dim);
        for span in 0..positions.div_ceil(SPAN_POSITIONS) {
            scratch.span.reset(count, kv.head_dim);
            run(
                isa,
                Span { kv, queries, first, count, span, scores: &mut scratch.scores, to: &mut scratch.span },
            );
            run(isa, Merge { from: &scratch.span, to: total });
        }
        run(isa, Divide { from: total });
        for i in 0..count {
            let (token, head) = ((first + i) / queries.heads, (first + i) % queries.heads);
            let col = first_col + head * kv.head_dim;
            // SAFETY: by contract.
            let to = unsafe { out.row(token, col..col + kv.head_dim) };
            to.copy_from_slice(&total.out[i * kv.head_dim..(i + 1) * kv.head_dim]);
        }
    }
    SCRATCH.set(scratch);
}

/// Spans that a query at `position` looks at.
pub fn span_count(position: usize) -> usize {
    position / SPAN_POSITIONS + 1
}

/// One token's attention within one span, to be merged with the others' by [`merge_spans`].
///
/// Panics where `queries` has not one token, or as [`attend`].
pub fn attend_span<T: KvElement>(
    isa: Isa,
    kv: &KvPages<'_, T>,
    queries: &Queries<'_>,
    span: usize,
    to: &mut Partial,
) {
    check(kv, queries);
    assert!(queries.tokens == 1 && queries.heads <= ROWS, "spans are for one token of at most {ROWS} heads");
    let mut scratch = SCRATCH.take();
    to.reset(queries.heads, kv.head_dim);
    run(isa, Span { kv, queries, first: 0, count: queries.heads, span, scores: &mut scratch.scores, to });
    SCRATCH.set(scratch);
}

/// Merges a token's spans, in order, and writes `[heads, head_dim]` to `out`.
pub fn merge_spans(isa: Isa, spans: &[Partial], out: &mut [f32]) {
    let mut scratch = SCRATCH.take();
    let rows = spans[0].rows;
    scratch.total.reset(rows, out.len() / rows);
    for span in spans {
        run(isa, Merge { from: span, to: &mut scratch.total });
    }
    run(isa, Divide { from: &mut scratch.total });
    out.copy_from_slice(&scratch.total.out);
    SCRATCH.set(scratch);
}

fn check<T>(kv: &KvPages<'_, T>, queries: &Queries<'_>) {
    let KvPages { page_positions, head_dim, .. } = *kv;
    assert!(page_positions > 0 && page_positions.is_multiple_of(LANES) && page_positions <= MAX_PAGE);
    assert!(SPAN_POSITIONS.is_multiple_of(page_positions) && head_dim > 0 && head_dim.is_multiple_of(LANES));
    let pages = (queries.first_position + queries.tokens).div_ceil(page_positions);
    assert!(kv.pages >= pages, "the cache is shorter than the queries' positions");
    let last = queries.tokens.saturating_sub(1) * queries.data.stride + queries.heads * head_dim;
    assert!(queries.tokens == 0 || queries.data.data.len() >= last, "queries are missing");
}

/// Longest page.
const MAX_PAGE: usize = 256;

/// A softmax-weighted sum of values that is not yet divided by its weights' sum.
#[derive(Clone, Debug, Default)]
pub struct Partial {
    rows: usize,
    /// Largest score of each row.
    max: Vec<f32>,
    /// Sum of `exp(score - max)` of each row.
    sum: Vec<f32>,
    /// `[rows, head_dim]`.
    out: Buffer<f32>,
}

impl Partial {
    /// Empty; [`attend_span`] makes room.
    pub fn new() -> Partial {
        Partial::default()
    }

    fn reset(&mut self, rows: usize, head_dim: usize) {
        self.rows = rows;
        self.max.clear();
        self.max.resize(ROWS, f32::NEG_INFINITY);
        self.sum.clear();
        self.sum.resize(ROWS, 0.0);
        self.out.resize(rows * head_dim);
        self.out.fill(0.0);
    }
}

#[derive(Default)]
struct Scratch {
    /// A page's, `[ROWS, page_positions]`.
    scores: Buffer<f32>,
    span: Partial,
    total: Partial,
}

thread_local! {
    static SCRATCH: std::cell::RefCell<Scratch> = const {
        std::cell::RefCell::new(Scratch {
            scores: Buffer::new(),
            span: Partial { rows: 0, max: Vec::new(), sum: Vec::new(), out: Buffer::new() },
            total: Partial { rows: 0, max: Vec::new(), sum: Vec::new(), out: Buffer::new() },
        })
    };
}

/// Query rows `first..first + count` against one span.
struct Span<'a, 'kv, T> {
    kv: &'a KvPages<'kv, T>,
    queries: &'a Queries<'a>,
    first: usize,
    count: usize,
    span: usize,
    scores: &'a mut Buffer<f32>,
    to: &'a mut Partial,
}

impl<T: KvElement> Kernel for Span<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        let Span { kv, queries, first, count, span, scores, to } = self;
        let (positions, dim) = (kv.page_positions, kv.head_dim);
        let row_positions =
            |i: usize| queries.first_position + (first + i.min(count - 1)) / queries.heads + 1;
        // Missing rows of a block repeat the last one, and no one reads what comes out for them.
        let mut rows = [std::ptr::null(); ROWS];
        for (i, row) in rows.iter_mut().enumerate() {
            let at = first + i.min(count - 1);
            let token = queries.data.row(at / queries.heads, queries.heads * dim);
            *row = token[at % queries.heads * dim..][..dim].as_ptr();
        }
        scores.resize(ROWS * MAX_PAGE);
        let per_span = SPAN_POSITIONS / positions;
        let end = row_positions(count - 1).div_ceil(positions).min((span + 1) * per_span);
        for page in span * per_span..end {
            let start = page * positions;
            // How many of the page's positions row `i` sees.
            let seen = |i: usize| row_positions(i).saturating_sub(start).min(positions);
            let (keys, values) = ((kv.keys)(page), (kv.values)(page));
            for rows in [keys, values] {
                assert!(rows.elements.len() >= positions * dim, "a page is too short");
                assert!(!T::SCALED || rows.scales.len() >= positions, "a page has too few scales");
            }
            let most = seen(count - 1);
            let next = if page + 1 < end { (kv.keys)(page + 1) } else { keys };
            let upcoming = Upcoming { keys: next.elements, values: values.elements };
            // SAFETY: rows, pages and scratch have the sizes that are read and written.
            unsafe {
                page_scores::<S, T>(&rows, count, keys, most, dim, queries.scale, scores, upcoming);
                page_softmax_and_values::<S, T>(count, seen, positions, values, dim, scores, to);
            }
        }
    }
}

/// What is asked of the cache while the first rows read a page's keys: the keys of the next page, and this page's
/// values. Each page begins somewhere new, which the machine does not foresee.
#[derive(Clone, Copy)]
struct Upcoming<'a, T> {
    keys: &'a [T],
    values: &'a [T],
}

impl<T> Upcoming<'_, T> {
    /// Asks for the part of step `step` of `steps` of the block of positions that begins at element `first`, which
    /// has `elements`.
    #[inline(always)]
    fn ask(&self, first: usize, elements: usize, step: usize, steps: usize) {
        let bytes = elements * size_of::<T>();
        for at in (bytes * step / steps..bytes * (step + 1) / steps).step_by(LINE) {
            prefetch(self.keys.as_ptr().wrapping_add(first).cast::<u8>().wrapping_add(at));
            prefetch(self.values.as_ptr().wrapping_add(first).cast::<u8>().wrapping_add(at));
        }
    }
}

/// `scores[i * MAX_PAGE + p] = scale * (rows[i] . keys[p])` for positions below `most`.
///
/// # Safety
/// Rows have `dim` elements, `keys` has `most` rows, and `scores` has [`ROWS`] rows.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "one argument per tensor")]
unsafe fn page_scores<S: Simd, T: KvElement>(
    rows: &[*const f32; ROWS],
    count: usize,
    keys: KvRows<'_, T>,
    most: usize,
    dim: usize,
    scale: f32,
    scores: &mut [f32],
    upcoming: Upcoming<'_, T>,
) {
    for p in (0..most).step_by(BLOCK) {
        let position = |j: usize| (p + j).min(most - 1);
        let mut factors = [scale; LANES];
        if T::SCALED {
            for (i, factor) in factors.iter_mut().enumerate() {
                *factor *= keys.scales[position(i % BLOCK)];
            }
        }
        for i in (0..count).step_by(BLOCK) {
            // SAFETY: by contract; positions are clamped to those that exist.
            unsafe {
                let mut acc = [S::splat(0.0); BLOCK * BLOCK];
                for at in (0..dim).step_by(LANES) {
                    if i == 0 {
                        upcoming.ask(p * dim, BLOCK * dim, at / LANES, dim / LANES);
                    }
                    let mut k = [S::splat(0.0); BLOCK];
                    for (j, k) in k.iter_mut().enumerate() {
                        *k = T::load::<S>(keys.elements.as_ptr().add(position(j) * dim + at));
                    }
                    for r in 0..BLOCK {
                        let q = S::load(rows[i + r].add(at));
                        for j in 0..BLOCK {
                            acc[r * BLOCK + j] = S::fma(q, k[j], acc[r * BLOCK + j]);
                        }
                    }
                }
                let mut sums = [0.0f32; LANES];
                S::store(sums.as_mut_ptr(), S::mul(S::load(factors.as_ptr()), S::sum_each(&acc)));
                for r in 0..BLOCK {
                    // Positions past the page's last seen one are overwritten by the softmax.
                    scores[(i + r) * MAX_PAGE + p..][..BLOCK]
                        .copy_from_slice(&sums[r * BLOCK..(r + 1) * BLOCK]);
                }
            }
        }
    }
}

/// Softmax of each row's scores over the page, the weighted sum of values, and the merge into `to`.
///
/// # Safety
/// `values` has a row for each position that some row of scores sees and, where there are scales, `positions` of
/// them; `scores` is as in [`page_scores`].
#[inline(always)]
unsafe fn page_softmax_and_values<S: Simd, T: KvElement>(
    count: usize,
    seen: impl Fn(usize) -> usize,
    positions: usize,
    values: KvRows<'_, T>,
    dim: usize,
    scores: &mut [f32],
    to: &mut Partial,
) {
    // How much of what was, and of what comes, goes into the merged row.
    let mut keep = [1.0f32; ROWS];
    let mut join = [0.0f32; ROWS];
    // SAFETY: sixteen divides `positions`; everything lies inside its slice, by contract.
    unsafe {
        for i in 0..count {
            let row = &mut scores[i * MAX_PAGE..][..positions];
            let seen = seen(i);
            if seen == 0 {
                row.fill(0.0);
                continue;
            }
            row[seen..].fill(f32::NEG_INFINITY);
            let mut largest = S::splat(f32::NEG_INFINITY);
            for at in (0..positions).step_by(LANES) {
                largest = S::max(largest, S::load(row.as_ptr().add(at)));
            }
            let largest = S::max_lane(largest);
            let mut sum = S::splat(0.0);
            for at in (0..positions).step_by(LANES) {
                let place = row.as_mut_ptr().add(at);
                let p = S::exp(S::sub(S::load(place), S::splat(largest)));
                sum = S::add(sum, p);
                let weight = if T::SCALED { S::mul(p, S::load(values.scales.as_ptr().add(at))) } else { p };
                S::store(place, weight);
            }
            let merged = largest.max(to.max[i]);
            let factors = [to.max[i] - merged, largest - merged];
            let mut exps = [0.0f32; LANES];
            S::store(exps.as_mut_ptr(), S::exp(S::load_some(factors.as_ptr(), 2, 0.0)));
            (keep[i], join[i]) = (exps[0], exps[1]);
            to.max[i] = merged;
            to.sum[i] = S::sum(sum).mul_add(join[i], to.sum[i] * keep[i]);
        }
        // A column block of a page's values, 32 KiB at a head of 256, stays in the L1 cache while all rows meet it.
        for first in (0..dim).step_by(BLOCK * LANES) {
            let vectors = BLOCK.min((dim - first) / LANES);
            for i in (0..count).step_by(BLOCK) {
                let here = BLOCK.min(count - i);
                let most = seen(i + here - 1);
                let row = |r: usize| i + r.min(here - 1);
                let mut acc = [S::splat(0.0); BLOCK * BLOCK];
                if vectors == BLOCK {
                    for p in 0..most {
                        let mut v = [S::splat(0.0); BLOCK];
                        for (j, v) in v.iter_mut().enumerate() {
                            *v = T::load::<S>(values.elements.as_ptr().add(p * dim + first + j * LANES));
                        }
                        for r in 0..BLOCK {
                            let weight = S::splat(*scores.get_unchecked(row(r) * MAX_PAGE + p));
                            for j in 0..BLOCK {
                                acc[r * BLOCK + j] = S::fma(weight, v[j], acc[r * BLOCK + j]);
                            }
                        }
                    }
                } else {
                    for p in 0..most {
                        for j in 0..vectors {
                            let v = T::load::<S>(values.elements.as_ptr().add(p * dim + first + j * LANES));
                            for r in 0..BLOCK {
                                let weight = S::splat(*scores.get_unchecked(row(r) * MAX_PAGE + p));
                                acc[r * BLOCK + j] = S::fma(weight, v, acc[r * BLOCK + j]);
                            }
                        }
                    }
                }
                for r in 0..here {
                    for j in 0..vectors {
                        let place = to.out.as_mut_ptr().add((i + r) * dim + first + j * LANES);
                        let kept = S::mul(S::load(place), S::splat(keep[i + r]));
                        S::store(place, S::fma(acc[r * BLOCK + j], S::splat(join[i + r]), kept));
                    }
                }
            }
        }
    }
}

/// Joins a span to those before it.
struct Merge<'a> {
    from: &'a Partial,
    to: &'a mut Partial,
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        let Merge { from, to } = self;
        let dim = to.out.len() / to.rows;
        for i in 0..to.rows {
            if from.max[i] == f32::NEG_INFINITY {
                continue;
            }
            let merged = from.max[i].max(to.max[i]);
            let factors = [to.max[i] - merged, from.max[i] - merged];
            let mut exps = [0.0f32; LANES];
            // SAFETY: two factors are loaded and sixteen results stored; rows have `dim` elements.
            unsafe {
                S::store(exps.as_mut_ptr(), S::exp(S::load_some(factors.as_ptr(), 2, 0.0)));
                let [keep, join, ..] = exps;
                to.max[i] = merged;
                to.sum[i] = from.sum[i].mul_add(join, to.sum[i] * keep);
                for at in (i * dim..(i + 1) * dim).step_by(LANES) {
                    let place = to.out.as_mut_ptr().add(at);
                    let kept = S::mul(S::load(place), S::splat(keep));
                    S::store(place, S::fma(S::load(from.out.as_ptr().add(at)), S::splat(join), kept));
                }
            }
        }
    }
}

/// Divides each row by its weights' sum.
struct Divide<'a> {
    from: &'a mut Partial,
}

impl Kernel for Divide<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        let Divide { from } = self;
        let dim = from.out.len() / from.rows;
        for i in 0..from.rows {
            // SAFETY: rows have `dim` elements, which sixteen divides.
            unsafe {
                let divisor = S::splat(from.sum[i]);
                for at in (i * dim..(i + 1) * dim).step_by(LANES) {
                    let place = from.out.as_mut_ptr().add(at);
                    S::store(place, S::div(S::load(place), divisor));
                }
            }
        }
    }
}
