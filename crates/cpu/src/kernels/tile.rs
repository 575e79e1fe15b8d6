//! Weight tiles: what stands between a matrix in the checkpoint's layout and the integer dot product.
//!
//! A tile is [`PANELS`] panels of [`PANEL_ROWS`] weight rows by as many groups as [`PANEL_BYTES`] hold, its weights
//! unpacked to bytes with **rows in lanes**: unit `u` of a group holds, for each of the sixteen rows in turn,
//! the four weights that meet four activations. One dot-product instruction then multiplies a unit by four
//! activations that are broadcast, and leaves a running sum per row, so nothing is ever summed across lanes.
//!
//! Unit `2j` of a group holds the even and unit `2j + 1` the odd ones of weights `8j..8j + 8`: the order in
//! which the low and the high nibbles of a packed u32 come out, and the order of
//! [`QuantizedRows`](super::activations::QuantizedRows).
//!
//! An instruction set may order the bytes of a group differently (`neon/i8mm.rs`), or leave two units of
//! 4-bit weights packed in one (`avx512.rs`): only its own `multiply` reads them.

use lily_model::weights::GROUP_SIZE;

use super::matmul::Int8;
use super::simd::prefetch;

/// Weight rows of a panel: the lanes of a vector.
pub const PANEL_ROWS: usize = 16;
/// Panels of a tile: an activation that was broadcast is used for so many rows of sixteen.
pub const PANELS: usize = 2;
/// Weight rows of a tile.
pub const TILE_ROWS: usize = PANEL_ROWS * PANELS;
/// Bytes of a panel in a tile: both together, 16 KiB, stay in the L1 cache with the activations they meet.
pub const PANEL_BYTES: usize = 8 * GROUP_BYTES;
/// Groups whose scales are unpacked at a time: 32 bf16 are one cache line.
pub const SCALE_GROUPS: usize = 32;
/// Weights that meet one broadcast.
const UNIT: usize = 4;
/// Units of a group.
pub const GROUP_UNITS: usize = GROUP_SIZE / UNIT;
/// Bytes of a unit: four for each row of a panel.
pub const UNIT_BYTES: usize = PANEL_ROWS * UNIT;
/// Bytes of a group of a panel.
pub const GROUP_BYTES: usize = GROUP_UNITS * UNIT_BYTES;
/// Bytes of a cache line.
pub const LINE: usize = 64;
/// Groups of 4-bit weights in a cache line.
pub const LINE_GROUPS: usize = 2 * LINE / GROUP_SIZE;
/// Most tokens that one pass over a tile takes: their sums fill the vector registers of AVX-512.
pub const MAX_TOKENS: usize = 6;

/// Sixteen rows of a matrix as they lie in memory.
#[derive(Clone, Copy)]
pub struct Source {
    /// First byte wanted of row 0.
    pub data: *const u8,
    /// Bytes from one row to the next.
    pub stride: usize,
    /// Rows that exist, 1 to [`PANEL_ROWS`]; the lanes of the others get the last one's values.
    pub rows: usize,
}

impl Source {
    /// First byte wanted of `row`.
    ///
    /// # Safety
    /// The rows that exist are readable.
    #[inline(always)]
    pub unsafe fn row(&self, row: usize) -> *const u8 {
        // SAFETY: clamped to the rows that exist.
        unsafe { self.data.add(row.min(self.rows - 1) * self.stride) }
    }

    /// First byte wanted of each row.
    ///
    /// # Safety
    /// The rows that exist are readable.
    #[inline(always)]
    pub unsafe fn row_starts(&self) -> [*const u8; PANEL_ROWS] {
        let mut starts = [self.data; PANEL_ROWS];
        for (row, start) in starts.iter_mut().enumerate() {
            // SAFETY: by contract.
            *start = unsafe { self.row(row) };
        }
        starts
    }
}

/// Where some rows of 4-bit weights begin that follow each other: [`TileOps::multiply_strip`].
#[derive(Clone, Copy)]
pub struct Strip {
    /// Packed weights of the first row.
    pub data: *const u8,
    /// Its scales.
    pub scales: *const u8,
    /// Its biases.
    pub biases: *const u8,
}

impl Strip {
    /// Groups of all its rows together: as many as a panel has whose scales are unpacked at a time.
    pub const GROUPS: usize = PANEL_ROWS * SCALE_GROUPS;
}

/// What to ask the cache for while weights are read: the lines from `next` up to `end`, and then as many as are
/// still wanted from `then` on. Where several tokens pass over the same rows, they take turns.
#[derive(Clone, Copy)]
pub struct Ahead {
    /// The first line.
    pub next: *const u8,
    /// Where to stop.
    pub end: *const u8,
    /// Where to go on after `end`; null where nothing is known.
    pub then: *const u8,
    /// Whose pass this is,
    pub turn: usize,
    /// of how many.
    pub turns: usize,
    /// Ask for them into the second cache: see [`asks_second_cache`](crate::isa::asks_second_cache).
    pub second_cache: bool,
}

impl Ahead {
    /// The first line to ask for in step `step` of a pass, of `count` lines in each, and how far the others
    /// are apart. Where there is nothing to ask for it is `held`, again and again, which costs less than a
    /// branch for each line.
    #[inline(always)]
    pub fn lines(&self, step: usize, count: usize, held: *const u8) -> (*const u8, usize) {
        let next = self.next.wrapping_add(step * count * LINE);
        let past = next.addr().wrapping_sub(self.end.addr());
        // A division costs as much as a row.
        if self.turns > 1 && step % self.turns != self.turn {
            (held, 0)
        } else if next < self.end {
            (next, LINE)
        } else if self.then.is_null() {
            (held, 0)
        } else {
            (self.then.wrapping_add(past), LINE)
        }
    }
}

/// The tile that is unpacked after the present one: what [`TileOps::multiply`] asks the cache for, a line or two at
/// a time. In a burst, such as while a tile is unpacked, requests hold up the reads behind them.
#[derive(Clone, Copy)]
pub struct Upcoming {
    /// The first byte of each half of its rows that this pass asks for; the same twice where it asks for one half.
    pub halves: [*const u8; 2],
    /// Bytes from one row to the next; 0 where there is nothing to ask for and the same line is asked for again and
    /// again, which costs less than a branch.
    pub stride: usize,
}

impl Upcoming {
    /// Steps of a group.
    pub const STEPS: usize = PANEL_ROWS / LINE_GROUPS;

    /// Asks for what belongs to step `step` of group `group`: all steps of all groups together ask for everything.
    #[inline(always)]
    pub fn ask(&self, group: usize, step: usize) {
        let row = group % LINE_GROUPS * Upcoming::STEPS + step;
        let at = row * self.stride + if self.stride > 0 { group / LINE_GROUPS * LINE } else { 0 };
        prefetch(self.halves[0].wrapping_add(at));
        prefetch(self.halves[1].wrapping_add(at));
    }

    /// [`Upcoming::ask`] for all steps of a group.
    #[inline(always)]
    pub fn ask_all(&self, group: usize) {
        for step in 0..Upcoming::STEPS {
            self.ask(group, step);
        }
    }
}

/// What one token brings to a tile.
#[derive(Clone, Copy)]
pub struct Activation {
    /// Quantized elements of the tile's groups.
    pub q: *const i8,
    /// One scale per group.
    pub scales: *const f32,
    /// Scale times sum of the quantized elements, per group.
    pub sums: *const f32,
    /// `[TILE_ROWS]` running f32 sums.
    pub acc: *mut f32,
}

impl Activation {
    /// To be overwritten.
    pub(crate) const NONE: Activation = Activation {
        q: std::ptr::null(),
        scales: std::ptr::null(),
        sums: std::ptr::null(),
        acc: std::ptr::null_mut(),
    };
}

/// The operations on tiles that are written separately for each instruction set.
///
/// All are `unsafe` because the instruction set must be there and because they go through pointers; what must
/// be readable and writable is said at each.
#[allow(clippy::missing_safety_doc)]
pub trait TileOps: Copy + Send + Sync + 'static {
    /// Tokens that [`TileOps::multiply`] takes best at a time, at most [`MAX_TOKENS`].
    const TOKENS: usize;

    /// Bytes that [`TileOps::unpack_4`] makes of a group of a panel, at most [`GROUP_BYTES`].
    const GROUP_BYTES_4: usize = GROUP_BYTES;

    /// Unpacks `groups` groups of 4-bit weights (`GROUP_SIZE / 2` bytes of each row per group) to
    /// `groups * GROUP_BYTES_4` bytes at `to`.
    unsafe fn unpack_4(from: Source, groups: usize, to: *mut u8);

    /// As [`TileOps::unpack_4`] for 8-bit weights (`GROUP_SIZE` bytes of each row per group, of which it makes
    /// [`GROUP_BYTES`]), and asks the cache for
    /// the bytes `ahead` further on.
    unsafe fn unpack_8(from: Source, groups: usize, ahead: usize, to: *mut u8);

    /// Whether [`TileOps::multiply_rows`] is faster than unpacking a tile for so many tokens.
    const DIRECT_TOKENS: usize;

    /// One token against sixteen rows of 4-bit weights straight from memory: what [`TileOps::unpack_4`] and
    /// [`TileOps::multiply`] do for one panel, without the tile between them. Meanwhile the cache is
    /// asked for what `ahead` says, as many lines as are read here.
    unsafe fn multiply_rows(
        from: Source,
        scales: *const f32,
        biases: *const f32,
        groups: usize,
        ahead: Ahead,
        token: &Activation,
    );

    /// Whether there is [`TileOps::multiply_strip`].
    const STRIPS: bool = false;

    /// One token against `ROWS` whole rows of [`Strip::GROUPS`]` / ROWS` groups, eight or sixteen, everything as it lies in
    /// memory: [`TileOps::multiply_rows`] in one piece. Meanwhile the cache is asked for as many lines as are read here, from
    /// `ask` on. `token.acc` has `ROWS` sums.
    #[inline(always)]
    unsafe fn multiply_strip<const ROWS: usize>(_strip: Strip, _ask: Strip, _token: &Activation) {
        unreachable!("only where STRIPS is set")
    }

    /// Widens `groups` bf16 (at most [`SCALE_GROUPS`]) of each row to f32, `[groups, PANEL_ROWS]` at `to`,
    /// and asks the cache for the bytes `ahead` further on.
    unsafe fn unpack_scales(from: Source, groups: usize, ahead: usize, to: *mut f32);

    /// For each of `N` tokens and each row r of the tile, group after group:
    ///
    /// ```text
    /// acc[r] = fma(dot(weights[g][r], q[g]), scales[g][r] * token.scales[g], acc[r])
    /// acc[r] = fma(biases[g][r], token.sums[g], acc[r])
    /// ```
    ///
    /// where `dot` is exact. This is the one place where that order is made; all results follow from it.
    /// `weights`, `scales` and `biases` point to the first group of each panel. Where not `wide`, no weight is
    /// larger than 15. Meanwhile the cache is asked for `upcoming`.
    unsafe fn multiply<const N: usize>(
        weights: [*const u8; PANELS],
        scales: [*const f32; PANELS],
        biases: [*const f32; PANELS],
        groups: usize,
        wide: bool,
        tokens: &[Activation; N],
        upcoming: Upcoming,
    );

    /// Whether there is a matrix instruction, and so [`TileOps::multiply_matrix`] for more than
    /// [`TileOps::DIRECT_TOKENS`] tokens.
    const MATRIX: bool = false;

    /// Whole products of the same tokens, at least one, with the sums of [`TileOps::multiply`], without tiles of vectors.
    #[inline(always)]
    unsafe fn multiply_matrix(_products: &[Int8<'_>]) {
        unreachable!("only where MATRIX is set")
    }
}
