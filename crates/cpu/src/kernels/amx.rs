//! AMX: a group of sixteen weight rows and sixteen tokens multiplied by one instruction.
//!
//! Each of the eight tile registers holds sixteen rows of 64 bytes. One `tdpbusd` multiplies sixteen weight rows by
//! sixteen tokens over the 64 elements of a group in 16 cycles, an eighth of the time that VNNI needs for it, and
//! leaves exact i32 sums: the same bits. What is left to the vector units is the scaling, group
//! after group in the order of [`TileOps::multiply`](super::tile::TileOps::multiply).
//!
//! # Layout
//!
//! Weights are the first operand, so that a row of a register is a group of a weight row as it lies in memory, low
//! nibbles before high ones ([`QuantizedRows`] has the same order): unpacking moves nothing across lanes. The
//! second operand wants, for each four elements of a group, those of all sixteen tokens side by side; a call transposes its
//! tokens once. Sums have tokens in lanes, and a panel's are transposed when they are done.
//!
//! # Work
//!
//! A panel of sixteen rows goes through all groups with its sums in sixteen registers. For each group: sixteen rows
//! unpacked (three instructions and a store each, for the first sixteen tokens only), two tile loads, a product and a tile store
//! of 1 KiB, and per row a conversion, a multiplication and two multiply-adds of sixteen tokens. Stores and scaling, not the
//! products, are the floor: `docs/lab/cpu.md` has what was measured. Meanwhile the second cache is asked, a line after every
//! other row, for the panel that is [`AHEAD_BYTES`] further on: a first cache has too few places for lines on
//! their way, and requests in a burst hold up the reads behind them. Where weights are unpacked already, the first cache is asked in the same
//! way for the tokens that come after these.

use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use lily_model::weights::{Format, GROUP_SIZE};

use super::activations::QuantizedRows;
use super::avx512::{ask_after, first_lanes, transpose};
use super::matmul::Int8;
use super::simd::LANES;
use super::tile::{GROUP_BYTES, LINE, PANEL_ROWS};

/// Tokens of a product: columns of a tile register.
const TOKENS: usize = 16;
/// Tokens that are packed at a time: at 4,096 inputs they take half of a second cache of 2 MiB.
const PACKED_TOKENS: usize = 16 * TOKENS;
/// How far ahead of its reads a panel asks for weights, at the least.
const AHEAD_BYTES: usize = 32 << 10;
/// Bytes of a row of a tile register.
const ROW_BYTES: usize = 64;
/// Bytes of a scale or a bias.
const BF16_BYTES: usize = 2;
/// Groups whose scales of a row lie together: the distance from row to row is then a constant.
const SPAN: usize = 2 * LANES;
/// f32 of the scales and biases of a panel and a span.
const SPAN_AFFINE: usize = 2 * PANEL_ROWS * SPAN;
/// Groups that go through the loop together, each with registers of its own.
const PAIR: usize = 2;
/// Bytes of the dot products of a group.
const DOTS_BYTES: usize = PANEL_ROWS * TOKENS * size_of::<i32>();
/// Unpacked groups that are kept: a pair that is multiplied and two ahead of it, or what many tokens meet before the next.
const RING: usize = 4 * PAIR;
/// Panels that many tokens meet in turn, so that tokens come from the second cache once for both.
const PANELS: usize = 2;
/// Lines of tokens that each group of a panel asks the first cache for: together the panels ask for all that they meet next.
const NEXT_LINES: usize = GROUP_BYTES / PANELS / LINE;

const _: () = assert!(GROUP_SIZE == ROW_BYTES && GROUP_BYTES == PANEL_ROWS * ROW_BYTES && LINE == ROW_BYTES);
const _: () = assert!(PAGE == 2 * PAIR * DOTS_BYTES && DOTS_BYTES == GROUP_BYTES);
const _: () = assert!(PANEL_ROWS == LANES && TOKENS == LANES && TOKENS * size_of::<i32>() == ROW_BYTES);

/// Whether the processor has AMX for bytes and the system lets this process use it, for which it is asked here:
/// Linux grants the registers' 8 KiB per thread on request only.
#[cfg(target_os = "linux")]
pub(crate) fn is_usable() -> bool {
    /// Bits of leaf 7.
    const AMX_TILE: u32 = 1 << 24;
    const AMX_INT8: u32 = 1 << 25;
    /// Of leaf 1: the system manages extended states.
    const OSXSAVE: u32 = 1 << 27;
    /// The states' numbers: configuration and registers.
    const TILE_CONFIG: u64 = 17;
    const TILE_DATA: u64 = 18;
    /// `ARCH_REQ_XCOMP_PERM` of `arch_prctl`.
    const REQUEST_PERMISSION: libc::c_ulong = 0x1023;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 || __cpuid_count(7, 0).edx & AMX_TILE == 0 {
        return false;
    }
    let (low, high): (u32, u32);
    // SAFETY: the instruction is there where OSXSAVE is; register 0 is the mask of states.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack)) };
    let states = u64::from(high) << 32 | u64::from(low);
    __cpuid_count(7, 0).edx & AMX_INT8 != 0
        && states >> TILE_CONFIG & 1 != 0
        && states >> TILE_DATA & 1 != 0
        // SAFETY: two numbers; what is granted is the larger state of threads that use it.
        && unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) } == 0
}

/// Other systems are not asked.
#[cfg(not(target_os = "linux"))]
pub(crate) fn is_usable() -> bool {
    false
}

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// tmm0 to tmm5 whole: sums, weights and tokens, twice.
static SHAPES: Shapes = {
    let mut shapes =
        Shapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut i = 0;
    while i < 3 * PAIR {
        shapes.row_bytes[i] = ROW_BYTES as u16;
        shapes.rows[i] = PANEL_ROWS as u8;
        i += 1;
    }
    shapes
};

/// Gives this thread's tile registers their shapes.
///
/// # Safety
/// [`is_usable`].
#[inline(always)]
unsafe fn configure() {
    // SAFETY: reads the 64 bytes of a valid configuration.
    unsafe { asm!("ldtilecfg [{shapes}]", shapes = in(reg) &raw const SHAPES, options(nostack, readonly)) };
}

/// Gives the registers up, so that no one has to save them.
///
/// # Safety
/// [`is_usable`].
#[inline(always)]
unsafe fn release() {
    // SAFETY: touches nothing else.
    unsafe { asm!("tilerelease", options(nomem, nostack)) };
}

/// Bytes after which addresses look alike to a core that asks whether a load waits for a store before it.
const PAGE: usize = 4096;

#[derive(Clone, Copy)]
#[repr(align(4096))]
struct Page(#[allow(dead_code, reason = "written and read through pointers")] [u8; PAGE]);

impl Page {
    const ZERO: Page = Page([0; PAGE]);
}

/// What a thread keeps from call to call.
#[derive(Default)]
struct Scratch {
    /// Of [`PACKED_TOKENS`] at the most, sixteen tokens after sixteen tokens: elements `[groups, GROUP_SIZE / 4, TOKENS, 4]`,
    q: Vec<Page>,
    /// scales, and scales times sums, `[2, groups, TOKENS]`, groups rounded up to sixteen.
    scales: Vec<Page>,
    /// Of each panel weights, `[RING, PANEL_ROWS, GROUP_SIZE]`,
    weights: Vec<Page>,
    /// scales and biases of its rows as f32, `[groups / SPAN, 2, PANEL_ROWS, SPAN]`,
    affine: Vec<Page>,
    /// and sums with each sixteen tokens, `[PANEL_ROWS, TOKENS]`.
    sums: Vec<Page>,
    /// Dot products of two pairs of groups, `[2 * PAIR, PANEL_ROWS, TOKENS]`.
    dots: Vec<Page>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// f32 of the scales of sixteen tokens, and of their sums.
fn scale_floats(groups: usize) -> usize {
    groups.next_multiple_of(LANES) * TOKENS
}

/// f32 of the scales and biases of a panel.
fn affine_floats(groups: usize) -> usize {
    groups.div_ceil(SPAN) * SPAN_AFFINE
}

impl Scratch {
    /// Bytes of each part, in the order of the fields.
    fn parts(tokens: usize, groups: usize) -> [usize; 6] {
        let blocks = tokens.min(PACKED_TOKENS).div_ceil(TOKENS);
        [
            blocks * groups * GROUP_BYTES,
            blocks * 2 * scale_floats(groups) * size_of::<f32>(),
            PANELS * RING * GROUP_BYTES,
            PANELS * affine_floats(groups) * size_of::<f32>(),
            PANELS * blocks * DOTS_BYTES,
            2 * PAIR * DOTS_BYTES,
        ]
    }

    /// Makes room for products of so many groups with so many tokens.
    fn reserve(&mut self, tokens: usize, groups: usize) -> Parts {
        let parts = [
            &mut self.q,
            &mut self.scales,
            &mut self.weights,
            &mut self.affine,
            &mut self.sums,
            &mut self.dots,
        ];
        for (part, bytes) in parts.into_iter().zip(Scratch::parts(tokens, groups)) {
            part.resize(part.len().max(bytes.div_ceil(PAGE)), Page::ZERO);
        }
        Parts {
            q: self.q.as_mut_ptr().cast(),
            scales: self.scales.as_mut_ptr().cast(),
            weights: self.weights.as_mut_ptr().cast(),
            affine: self.affine.as_mut_ptr().cast(),
            sums: self.sums.as_mut_ptr().cast(),
            dots: self.dots.as_mut_ptr().cast(),
        }
    }
}

/// Where the parts of a [`Scratch`] begin.
#[derive(Clone, Copy)]
struct Parts {
    q: *mut i8,
    scales: *mut f32,
    weights: *mut u8,
    affine: *mut f32,
    sums: *mut f32,
    dots: *mut i32,
}

/// Bytes that a thread keeps after products of `cols` inputs with `tokens` tokens.
pub(super) fn scratch_bytes(tokens: usize, cols: usize) -> usize {
    Scratch::parts(tokens, cols / GROUP_SIZE).into_iter().map(|bytes| bytes.next_multiple_of(PAGE)).sum()
}

/// [`TileOps::multiply_matrix`](super::tile::TileOps::multiply_matrix).
///
/// # Safety
/// As there, and [`is_usable`].
#[inline(always)]
pub(super) unsafe fn multiply(products: &[Int8<'_>]) {
    let Int8 { w, x, tokens, .. } = products[0];
    let groups = w.cols / GROUP_SIZE;
    let mut scratch = SCRATCH.take();
    let parts = scratch.reserve(tokens.len(), groups);
    // SAFETY: by contract; the scratch has room.
    unsafe {
        configure();
        for (part, tokens) in tokens.chunks(PACKED_TOKENS).enumerate() {
            for (block, tokens) in tokens.chunks(TOKENS).enumerate() {
                pack(x, tokens, Tokens::of(parts, block, groups));
            }
            for product in products {
                if product.w.format == Format::Affine8 {
                    multiply_part::<true>(product, parts, part);
                } else {
                    multiply_part::<false>(product, parts, part);
                }
            }
        }
        release();
    }
    SCRATCH.set(scratch);
}

/// Sixteen tokens of a [`Scratch`].
#[derive(Clone, Copy)]
struct Tokens {
    q: *mut i8,
    scales: *mut f32,
    sums: *mut f32,
}

impl Tokens {
    /// Block `block`.
    ///
    /// # Safety
    /// Room for so many was reserved.
    #[inline(always)]
    unsafe fn of(parts: Parts, block: usize, groups: usize) -> Tokens {
        let floats = scale_floats(groups);
        // SAFETY: by contract.
        unsafe {
            let scales = parts.scales.add(block * 2 * floats);
            Tokens { q: parts.q.add(block * groups * GROUP_BYTES), scales, sums: scales.add(floats) }
        }
    }
}

/// Transposes rows `tokens` of `x`, one to sixteen, into `to`. In place of those that are not there the first comes again, whose sums no one reads:
/// with sixteen of them the rows stay in registers.
///
/// # Safety
/// AVX-512 is there, and `to` has room for the groups of `x`.
#[inline(always)]
unsafe fn pack(x: &QuantizedRows, tokens: &[u32], to: Tokens) {
    let groups = x.cols() / GROUP_SIZE;
    let token = |i: usize| *tokens.get(i).unwrap_or(&tokens[0]) as usize;
    let q: [*const i8; TOKENS] = std::array::from_fn(|i| x.q(token(i)).as_ptr());
    let scales: [*const f32; TOKENS] = std::array::from_fn(|i| x.scales(token(i)).as_ptr());
    let sums: [*const f32; TOKENS] = std::array::from_fn(|i| x.sums(token(i)).as_ptr());
    // SAFETY: rows have `groups` groups; masked lanes are not touched; `to` has room for groups rounded up to sixteen.
    unsafe {
        for group in 0..groups {
            let mut rows = [_mm512_setzero_si512(); TOKENS];
            for (row, from) in rows.iter_mut().zip(q) {
                *row = _mm512_loadu_si512(from.add(group * GROUP_SIZE).cast());
            }
            for (i, column) in transpose(&rows).into_iter().enumerate() {
                _mm512_store_si512(to.q.add((group * TOKENS + i) * ROW_BYTES).cast(), column);
            }
        }
        for first in (0..groups).step_by(LANES) {
            let here = first_lanes(groups - first);
            let mut rows = [_mm512_setzero_si512(); TOKENS];
            for (row, from) in rows.iter_mut().zip(scales) {
                *row = _mm512_maskz_loadu_epi32(here, from.add(first).cast());
            }
            for (i, column) in transpose(&rows).into_iter().enumerate() {
                _mm512_store_si512(to.scales.add((first + i) * TOKENS).cast(), column);
            }
            for (row, from) in rows.iter_mut().zip(sums) {
                *row = _mm512_maskz_loadu_epi32(here, from.add(first).cast());
            }
            for (i, column) in transpose(&rows).into_iter().enumerate() {
                _mm512_store_si512(to.sums.add((first + i) * TOKENS).cast(), column);
            }
        }
    }
}

/// The sixteen rows of a matrix that a panel has, and what to ask the second cache for meanwhile.
#[derive(Clone, Copy)]
struct Panel {
    /// The first byte of its first row,
    data: *const u8,
    /// from one row to the next,
    row_bytes: usize,
    /// and how many there are.
    rows: usize,
    /// Unpacked weights: group `g` is at `g % RING`.
    weights: *mut u8,
    /// Scales and biases of its rows as f32.
    affine: *mut f32,
    /// Dot products.
    dots: *mut i32,
    /// Where the lines of the panel begin that is asked for: weights, scales, biases.
    ahead: [*const u8; 3],
}

impl Panel {
    /// The panel that begins at row `first` of a product's matrix, with part `p` of the scratch; it asks for another where `ask`: otherwise
    /// its rows are in the cache.
    ///
    /// # Safety
    /// The row is one of the product's, and the scratch has such a part.
    #[inline(always)]
    unsafe fn new(product: &Int8<'_>, parts: Parts, first: usize, p: usize, ask: bool) -> Panel {
        let Int8 { w, rows, next, .. } = product;
        let groups = w.cols / GROUP_SIZE;
        let (row_bytes, affine_bytes) = (w.format.row_bytes(w.cols), groups * BF16_BYTES);
        let at = |row: usize| {
            [(w.data, row_bytes), (w.scales, affine_bytes), (w.biases, affine_bytes)]
                .map(|(of, stride)| of.as_ptr().wrapping_add(row * stride))
        };
        // Where nothing is to be asked for, the panel asks for itself, which costs less than a branch for each line.
        let ahead = match first + AHEAD_BYTES.div_ceil(row_bytes).next_multiple_of(PANEL_ROWS) {
            _ if !ask => at(first),
            row if row < rows.end => at(row),
            row => next.past(row - rows.end, row_bytes, affine_bytes).unwrap_or(at(first)),
        };
        // SAFETY: by contract.
        unsafe {
            Panel {
                data: w.data.as_ptr().add(first * row_bytes),
                row_bytes,
                rows: PANEL_ROWS.min(rows.end - first),
                weights: parts.weights.add(p * RING * GROUP_BYTES),
                affine: parts.affine.add(p * affine_floats(groups)),
                dots: parts.dots,
                ahead,
            }
        }
    }

    /// Makes f32 of the scales and biases of its rows.
    ///
    /// # Safety
    /// As [`Panel::new`], of the same product.
    #[inline(always)]
    unsafe fn widen(&self, scales: *const u8, biases: *const u8, groups: usize) {
        // All but the last of a row's sixteens are whole: what belongs to a mask is reckoned once.
        let whole = groups / LANES * LANES;
        let rest = first_lanes(groups - whole);
        // SAFETY: rows have so many groups; masked lanes are not touched.
        unsafe {
            let widen = |halves: __m256i, to: *mut f32, first: usize| {
                let floats = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves));
                _mm512_store_si512(to.add(first / SPAN * SPAN_AFFINE + first % SPAN).cast(), floats);
            };
            for (which, from) in [scales, biases].into_iter().enumerate() {
                for row in 0..self.rows {
                    let to = self.affine.add((which * PANEL_ROWS + row) * SPAN);
                    let from = from.add(row * groups * BF16_BYTES);
                    for first in (0..whole).step_by(LANES) {
                        widen(_mm256_loadu_si256(from.add(first * BF16_BYTES).cast()), to, first);
                    }
                    if whole < groups {
                        widen(_mm256_maskz_loadu_epi16(rest, from.add(whole * BF16_BYTES).cast()), to, whole);
                    }
                }
            }
        }
    }

    /// Where the dot products of a group are, `[PANEL_ROWS, TOKENS]`: half a page from where its weights and tokens are in theirs. While
    /// a pair is scaled, all loads are then in one half of a page and all stores in the other, and none waits for one that
    /// it only resembles.
    ///
    /// # Safety
    /// Room was reserved.
    #[inline(always)]
    unsafe fn dots(&self, group: usize) -> *mut i32 {
        // SAFETY: by contract.
        unsafe { self.dots.byte_add((group + PAIR) % (2 * PAIR) * DOTS_BYTES) }
    }
}

/// Multiplies part `part` of the tokens, which was packed, by all rows.
///
/// With sixteen tokens or fewer a panel goes through all groups at once. With more, two panels and as many groups as are kept stay
/// in the first cache while all tokens meet them.
///
/// # Safety
/// As [`multiply`], after [`configure`].
#[inline(always)]
unsafe fn multiply_part<const WIDE: bool>(product: &Int8<'_>, parts: Parts, part: usize) {
    let groups = product.w.cols / GROUP_SIZE;
    let first_token = part * PACKED_TOKENS;
    let here = PACKED_TOKENS.min(product.tokens.len() - first_token);
    let blocks = here.div_ceil(TOKENS);
    let (panels, span) = if blocks == 1 { (1, groups) } else { (PANELS, RING) };
    for first in product.rows.clone().step_by(panels * PANEL_ROWS) {
        let left = product.rows.end - first;
        let panels = panels.min(left.div_ceil(PANEL_ROWS));
        // SAFETY: rows and groups are those of the matrix; the scratch has room for panels and their sums; the sums of tokens
        // that are there go to their rows, which are this call's.
        unsafe {
            let panel = |p: usize| Panel::new(product, parts, first + p * PANEL_ROWS, p, part == 0);
            let all = [panel(0), panel(panels - 1)];
            let sums = |p: usize, block: usize| parts.sums.add((p * blocks + block) * PANEL_ROWS * TOKENS);
            for (p, panel) in all.iter().enumerate().take(panels) {
                let at = (first + p * PANEL_ROWS) * groups * BF16_BYTES;
                panel.widen(product.w.scales.as_ptr().add(at), product.w.biases.as_ptr().add(at), groups);
            }
            for start in (0..groups).step_by(span) {
                let span = start..groups.min(start + span);
                for block in 0..blocks {
                    let tokens = Tokens::of(parts, block, groups);
                    // The next tokens with the same groups, or the first ones with the next groups.
                    let (next_block, next_start) = match block + 1 < blocks {
                        true => (block + 1, start),
                        false => (0, span.end % groups),
                    };
                    let next = Tokens::of(parts, next_block, groups).q.add(next_start * GROUP_BYTES);
                    for (p, panel) in all.iter().enumerate().take(panels) {
                        if block == 0 {
                            panel_sums::<true, WIDE>(panel, tokens, span.clone(), sums(p, block), next);
                        } else {
                            let next = next.wrapping_add(p * (RING / PANELS) * GROUP_BYTES);
                            panel_sums::<false, WIDE>(panel, tokens, span.clone(), sums(p, block), next);
                        }
                    }
                }
            }
            for block in 0..blocks {
                let mut columns = [[_mm512_setzero_si512(); TOKENS]; PANELS];
                for (p, columns) in columns.iter_mut().enumerate().take(panels) {
                    let mut rows = [_mm512_setzero_si512(); PANEL_ROWS];
                    for (i, row) in rows.iter_mut().enumerate() {
                        *row = _mm512_load_si512(sums(p, block).add(i * TOKENS).cast());
                    }
                    *columns = transpose(&rows);
                }
                // A token's sums with all panels one after the other: each token's row is a page of its own.
                for i in 0..TOKENS.min(here - block * TOKENS) {
                    let token = first_token + block * TOKENS + i;
                    let to =
                        product.out.row(token, first..first + left.min(panels * PANEL_ROWS)).as_mut_ptr();
                    for (p, panel) in all.iter().enumerate().take(panels) {
                        let (to, sums) = (to.add(p * PANEL_ROWS), _mm512_castsi512_ps(columns[p][i]));
                        if panel.rows == PANEL_ROWS {
                            _mm512_storeu_ps(to, sums);
                        } else {
                            _mm512_mask_storeu_ps(to, first_lanes(panel.rows), sums);
                        }
                    }
                }
            }
        }
    }
}

/// Adds the products of some groups of a panel with sixteen tokens to `sums`, `[PANEL_ROWS, TOKENS]`, which begin with the first group.
/// With `UNPACK` the weights are unpacked meanwhile; without they were, and the cache is asked for elements of tokens from `next` on. A
/// function of its own, so that the compiler has all registers for it.
///
/// # Safety
/// As [`multiply_part`]; scales and biases of the panel were widened.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn panel_sums<const UNPACK: bool, const WIDE: bool>(
    panel: &Panel,
    tokens: Tokens,
    groups: Range<usize>,
    sums: *mut f32,
    next: *const i8,
) {
    let Range { start, end } = groups;
    // SAFETY: all pointers are good for these groups, by contract; dot products are written before they are read.
    unsafe {
        if UNPACK {
            for group in start..end.min(start + 2 * PAIR) {
                unpack::<WIDE>(panel, group);
            }
        }
        pair_dots(panel, tokens, start, end);
        let mut acc = [_mm512_setzero_ps(); PANEL_ROWS];
        if start > 0 {
            for (row, acc) in acc.iter_mut().enumerate() {
                *acc = _mm512_load_ps(sums.add(row * TOKENS));
            }
        }
        for first in (start..end).step_by(PAIR) {
            if UNPACK {
                for group in first + 2 * PAIR..end.min(first + 3 * PAIR) {
                    unpack::<WIDE>(panel, group);
                }
            }
            // The next products and their way through memory go on beside the scaling of these.
            pair_dots(panel, tokens, first + PAIR, end);
            let next = next.wrapping_add((first - start) * NEXT_LINES * LINE).cast();
            scale::<UNPACK, WIDE>(panel, tokens, first, &mut acc, next);
            if first + 1 < end {
                scale::<UNPACK, WIDE>(
                    panel,
                    tokens,
                    first + 1,
                    &mut acc,
                    next.wrapping_add(NEXT_LINES * LINE),
                );
            }
        }
        for (row, acc) in acc.iter().enumerate() {
            _mm512_store_ps(sums.add(row * TOKENS), *acc);
        }
    }
}

/// Adds the products of one group to the sums. With `ASK` the cache is asked for the panel ahead, without for what begins at `next`.
///
/// # Safety
/// As [`panel_sums`], after the group's [`pair_dots`].
#[inline(always)]
unsafe fn scale<const ASK: bool, const WIDE: bool>(
    panel: &Panel,
    tokens: Tokens,
    group: usize,
    sums: &mut [__m512; PANEL_ROWS],
    next: *const u8,
) {
    let lines = PANEL_ROWS * GROUP_SIZE / if WIDE { 1 } else { 2 } / LINE;
    // SAFETY: by contract; the cache is only asked.
    unsafe {
        let dots = panel.dots(group);
        let affine = panel.affine.add(group / SPAN * SPAN_AFFINE + group % SPAN);
        let x_scales = _mm512_load_ps(tokens.scales.add(group * TOKENS));
        let x_sums = _mm512_load_ps(tokens.sums.add(group * TOKENS));
        let [data, scales, biases] = panel.ahead;
        let ahead = data.wrapping_add(group * lines * LINE);
        // A loop with requests in it is not unrolled, and then sums are in memory instead of registers.
        macro_rules! rows {
            ($($row:literal)*) => { $(
                let products = _mm512_cvtepi32_ps(_mm512_load_si512(dots.add($row * TOKENS).cast()));
                let scale = _mm512_set1_ps(*affine.add($row * SPAN));
                let bias = _mm512_set1_ps(*affine.add((PANEL_ROWS + $row) * SPAN));
                let sum = _mm512_fmadd_ps(products, _mm512_mul_ps(scale, x_scales), sums[$row]);
                let sum = _mm512_fmadd_ps(bias, x_sums, sum);
                sums[$row] = if ASK && $row % (PANEL_ROWS / lines) == 0 {
                    ask_after_sum::<true>(ahead.wrapping_add($row * lines / PANEL_ROWS * LINE), sum)
                } else if !ASK && $row % (PANEL_ROWS / NEXT_LINES) == 0 {
                    ask_after_sum::<false>(next.wrapping_add($row * NEXT_LINES / PANEL_ROWS * LINE), sum)
                } else {
                    sum
                };
            )* };
        }
        rows!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
        if ASK {
            // Scales and biases of sixteen rows and two groups are a line each.
            let affine = if group.is_multiple_of(2) { scales } else { biases };
            sums[0] = ask_after_sum::<true>(affine.wrapping_add(group / 2 * LINE), sums[0]);
        }
    }
}

/// [`ask_after`] of the second cache, for a sum.
///
/// # Safety
/// AVX-512 is there.
#[inline(always)]
unsafe fn ask_after_sum<const SECOND: bool>(place: *const u8, sum: __m512) -> __m512 {
    // SAFETY: by contract.
    unsafe { _mm512_castsi512_ps(ask_after::<SECOND>(place, _mm512_castps_si512(sum))) }
}

/// Unpacks a group of a panel.
///
/// # Safety
/// Its rows have the group, and the scratch has room.
#[inline(always)]
unsafe fn unpack<const WIDE: bool>(panel: &Panel, group: usize) {
    // SAFETY: by contract.
    unsafe {
        let to = panel.weights.add((group % RING) * GROUP_BYTES);
        let from = panel.data.add(group * GROUP_SIZE / if WIDE { 1 } else { 2 });
        if panel.rows == PANEL_ROWS {
            for row in 0..PANEL_ROWS {
                unpack_row::<WIDE>(from.add(row * panel.row_bytes), to.add(row * ROW_BYTES));
            }
        } else {
            // What other rows held before stays, and no one reads its sums.
            for row in 0..panel.rows {
                unpack_row::<WIDE>(from.add(row * panel.row_bytes), to.add(row * ROW_BYTES));
            }
        }
    }
}

/// A group of a weight row: even weights, then odd ones.
///
/// # Safety
/// Both are good for a group; `to` is a line.
#[inline(always)]
unsafe fn unpack_row<const WIDE: bool>(from: *const u8, to: *mut u8) {
    // SAFETY: by contract.
    unsafe {
        if WIDE {
            let pairs = _mm512_loadu_si512(from.cast());
            let odd = _mm512_srli_epi16::<8>(pairs);
            _mm256_store_si256(to.cast(), _mm512_cvtepi16_epi8(pairs));
            _mm256_store_si256(to.add(GROUP_SIZE / 2).cast(), _mm512_cvtepi16_epi8(odd));
        } else {
            let nibbles = _mm512_broadcast_i64x4(_mm256_loadu_si256(from.cast()));
            let shifts = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
            let apart = _mm512_and_si512(_mm512_srlv_epi64(nibbles, shifts), _mm512_set1_epi8(15));
            _mm512_store_si512(to.cast(), apart);
        }
    }
}

/// The dot products of two groups of a panel with sixteen tokens, as far as there are such groups.
///
/// # Safety
/// After [`configure`]; weights and tokens have the groups.
#[inline(always)]
unsafe fn pair_dots(panel: &Panel, tokens: Tokens, first: usize, end: usize) {
    macro_rules! product {
        ($group:expr, $sums:tt, $weights:tt, $tokens:tt) => {
            asm!(
                concat!("tilezero ", $sums),
                concat!("tileloadd ", $weights, ", [{weights} + {row}]"),
                concat!("tileloadd ", $tokens, ", [{tokens} + {row}]"),
                concat!("tdpbusd ", $sums, ", ", $weights, ", ", $tokens),
                concat!("tilestored [{to} + {row}], ", $sums),
                weights = in(reg) panel.weights.add(($group % RING) * GROUP_BYTES),
                tokens = in(reg) tokens.q.add($group * GROUP_BYTES),
                to = in(reg) panel.dots($group),
                row = in(reg) ROW_BYTES,
                out($sums) _, out($weights) _, out($tokens) _,
                options(nostack, preserves_flags),
            )
        };
    }
    // SAFETY: by contract.
    unsafe {
        if first < end {
            product!(first, "tmm0", "tmm1", "tmm2");
        }
        if first + 1 < end {
            product!(first + 1, "tmm3", "tmm4", "tmm5");
        }
    }
}
