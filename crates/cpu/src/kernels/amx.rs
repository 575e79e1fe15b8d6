//! AMX: a group of sixteen weight rows and sixteen tokens multiplied by one instruction.
//!
//! Each of the eight tile registers holds sixteen rows of 64 bytes. One `tdpbsud` multiplies sixteen tokens by
//! sixteen weight rows over the 64 elements of a group in 16 cycles, an eighth of the time that VNNI needs for it, and
//! leaves exact i32 sums: the same bits. What is left to the vector units is the scaling, group
//! after group in the order of [`TileOps::multiply`](super::tile::TileOps::multiply).
//!
//! # Layout
//!
//! The instruction wants row `k` of the weights to hold, for each of the sixteen rows of the panel, the four
//! weights that meet activations `4k..4k + 4`. So a group's units of even weights come first and then the odd ones,
//! as in [`QuantizedRows`], not in turn as for vectors. Tokens are anywhere in memory, or at strides that share few
//! sets of the cache: a call first copies them together, sixteen by sixteen, group after group.
//!
//! # Work
//!
//! For each group of a panel: two tile loads and a tile store of 1 KiB, one product, and per token a conversion, a
//! multiplication and two multiply-adds of sixteen lanes, 32 cycles for sixteen tokens on the two ports that 512 bits
//! have. That, not the products, is the floor. In the cache a loop of nothing else takes 18 ns for a group of a panel
//! and sixteen tokens where VNNI takes 69; a whole call takes 38 with 192 tokens and 57 with 16, where unpacking the tile
//! is a third. From memory the next tile is asked for into the second cache, since the first has too few places for
//! lines on their way. `docs/lab/cpu.md` has what was measured.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use lily_model::weights::GROUP_SIZE;

use super::activations::QuantizedRows;
use super::tile::{
    GROUP_BYTES, GROUP_UNITS, PANEL_BYTES, PANEL_ROWS, PANELS, Packed, SCALE_GROUPS, TILE_ROWS, UNIT_BYTES,
    Upcoming,
};

/// Rows of a tile register: tokens of a pass.
pub(super) const TOKENS: usize = 16;
/// Tokens of a pass over the registers for short lists.
const HALF_TOKENS: usize = TOKENS / 2;
/// Bytes of a row of a tile register.
const ROW_BYTES: usize = 64;
/// Groups of a tile, whose scales of one token lie together.
pub(super) const SPAN: usize = PANEL_BYTES / GROUP_BYTES;

const _: () = assert!(GROUP_SIZE == ROW_BYTES && UNIT_BYTES == ROW_BYTES && GROUP_UNITS <= TOKENS);
const _: () =
    assert!(PANEL_ROWS * size_of::<i32>() == ROW_BYTES && SPAN == 8 && SCALE_GROUPS.is_multiple_of(SPAN));

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

/// tmm0 to tmm2: sums, activations and weights of a whole pass; tmm3 and tmm4: sums and activations of half a one.
static SHAPES: Shapes = {
    let (whole, half) = (TOKENS as u8, HALF_TOKENS as u8);
    let bytes = ROW_BYTES as u16;
    let mut shapes =
        Shapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let registers = [whole, whole, GROUP_UNITS as u8, half, half];
    let mut i = 0;
    while i < registers.len() {
        shapes.row_bytes[i] = bytes;
        shapes.rows[i] = registers[i];
        i += 1;
    }
    shapes
};

/// Gives this thread's tile registers their shapes.
///
/// # Safety
/// [`is_usable`].
#[inline(always)]
pub(super) unsafe fn configure() {
    // SAFETY: reads the 64 bytes of a valid configuration.
    unsafe { asm!("ldtilecfg [{shapes}]", shapes = in(reg) &raw const SHAPES, options(nostack, readonly)) };
}

/// Gives the registers up, so that no one has to save them.
///
/// # Safety
/// [`is_usable`].
#[inline(always)]
pub(super) unsafe fn release() {
    // SAFETY: touches nothing else.
    unsafe { asm!("tilerelease", options(nomem, nostack)) };
}

/// [`TileOps::pack`](super::tile::TileOps::pack): elements `[groups, N, ROW_BYTES]`, where `N` is [`rows`] of the tokens'
/// count, and scales and sums `[groups / SPAN, TOKENS, SPAN]`. What belongs to tokens that are not there stays as it was.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn pack(x: &QuantizedRows, tokens: &[u32], to: Packed) {
    let groups = x.cols() / GROUP_SIZE;
    let rows = rows(tokens.len());
    for (t, &token) in tokens.iter().enumerate() {
        let (q, scales, sums) = (x.q(token as usize), x.scales(token as usize), x.sums(token as usize));
        // SAFETY: the row has `groups` groups, and the target room for as many, rounded up to a span.
        unsafe {
            for group in 0..groups {
                let line = _mm512_loadu_si512(q.as_ptr().add(group * GROUP_SIZE).cast());
                _mm512_store_si512(to.q.add((group * rows + t) * ROW_BYTES).cast(), line);
            }
            for group in (0..groups).step_by(SPAN) {
                let here = ((1u16 << SPAN.min(groups - group)) - 1) as __mmask8;
                let at = group * TOKENS + t * SPAN;
                _mm256_storeu_ps(to.scales.add(at), _mm256_maskz_loadu_ps(here, scales.as_ptr().add(group)));
                _mm256_storeu_ps(to.sums.add(at), _mm256_maskz_loadu_ps(here, sums.as_ptr().add(group)));
            }
        }
    }
}

/// Rows of the registers that take `count` tokens.
#[inline(always)]
fn rows(count: usize) -> usize {
    if count <= HALF_TOKENS { HALF_TOKENS } else { TOKENS }
}

/// [`TileOps::multiply_packed`](super::tile::TileOps::multiply_packed).
///
/// # Safety
/// As there, after [`configure`].
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "one argument per tensor")]
pub(super) unsafe fn multiply(
    weights: [*const u8; PANELS],
    scales: [*const f32; PANELS],
    biases: [*const f32; PANELS],
    groups: usize,
    tokens: Packed,
    start: usize,
    count: usize,
    acc: *mut f32,
    upcoming: Upcoming,
) {
    // SAFETY: by contract.
    unsafe {
        let tokens = Packed {
            q: tokens.q.add(start * rows(count) * ROW_BYTES),
            scales: tokens.scales.add(start * TOKENS),
            sums: tokens.sums.add(start * TOKENS),
        };
        if rows(count) == HALF_TOKENS {
            multiply_rows::<HALF_TOKENS>(weights, scales, biases, groups, tokens, acc, upcoming);
        } else {
            multiply_rows::<TOKENS>(weights, scales, biases, groups, tokens, acc, upcoming);
        }
    }
}

/// Sums of the present group and the next one.
#[repr(C, align(64))]
struct Dots<const N: usize>([[[i32; PANEL_ROWS]; N]; 2]);

/// [`multiply`] over `N` rows, from the tokens' first group that meets the weights.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "one argument per tensor")]
unsafe fn multiply_rows<const N: usize>(
    weights: [*const u8; PANELS],
    scales: [*const f32; PANELS],
    biases: [*const f32; PANELS],
    groups: usize,
    tokens: Packed,
    acc: *mut f32,
    upcoming: Upcoming,
) {
    let mut dots = MaybeUninit::<Dots<N>>::uninit();
    let dots = dots.as_mut_ptr().cast::<i32>();
    // SAFETY: all pointers are good for `groups` groups and the sums of `N` tokens, by contract; dot products are
    // written before they are read, and live to the end.
    unsafe {
        let product = |panel: usize, group: usize, to: *mut i32| {
            let weights = weights[panel].add(group * GROUP_BYTES);
            group_dots::<N>(weights, tokens.q.add(group * N * ROW_BYTES), to);
        };
        let [mut now, mut next] = [dots, dots.add(N * PANEL_ROWS)];
        product(0, 0, now);
        for p in 0..PANELS {
            let mut sums = [_mm512_setzero_ps(); N];
            for (t, sum) in sums.iter_mut().enumerate() {
                *sum = _mm512_loadu_ps(acc.add(t * TILE_ROWS + p * PANEL_ROWS));
            }
            for group in 0..groups {
                // The next product and its way through memory go on beside this one's scaling.
                if group + 1 < groups {
                    product(p, group + 1, next);
                } else if p + 1 < PANELS {
                    product(p + 1, 0, next);
                }
                if upcoming.stride > 0 {
                    upcoming.ask_half_second_cache(group, p);
                }
                let scale = _mm512_loadu_ps(scales[p].add(group * PANEL_ROWS));
                let bias = _mm512_loadu_ps(biases[p].add(group * PANEL_ROWS));
                for (t, sum) in sums.iter_mut().enumerate() {
                    let dot = _mm512_cvtepi32_ps(_mm512_load_si512(now.add(t * PANEL_ROWS).cast()));
                    let x_scale = _mm512_set1_ps(*tokens.scales.add(t * SPAN + group));
                    let x_sum = _mm512_set1_ps(*tokens.sums.add(t * SPAN + group));
                    *sum = _mm512_fmadd_ps(dot, _mm512_mul_ps(scale, x_scale), *sum);
                    *sum = _mm512_fmadd_ps(bias, x_sum, *sum);
                }
                std::mem::swap(&mut now, &mut next);
            }
            for (t, sum) in sums.iter().enumerate() {
                _mm512_storeu_ps(acc.add(t * TILE_ROWS + p * PANEL_ROWS), *sum);
            }
        }
    }
}

/// `to[t, r]`, `[N, PANEL_ROWS]`: the dot products of one group of a panel with one group of `N` tokens.
///
/// # Safety
/// After [`configure`]; `weights` has [`GROUP_BYTES`], `activations` is `[N, ROW_BYTES]`, and `N` is [`TOKENS`] or
/// [`HALF_TOKENS`].
#[inline(always)]
unsafe fn group_dots<const N: usize>(weights: *const u8, activations: *const i8, to: *mut i32) {
    // The registers of a whole pass, or of half a one: see [`SHAPES`].
    macro_rules! product {
        ($sums:tt, $activations:tt) => {
            asm!(
                concat!("tilezero ", $sums),
                concat!("tileloadd ", $activations, ", [{activations} + {row}]"),
                "tileloadd tmm2, [{weights} + {row}]",
                concat!("tdpbsud ", $sums, ", ", $activations, ", tmm2"),
                concat!("tilestored [{to} + {row}], ", $sums),
                activations = in(reg) activations,
                weights = in(reg) weights,
                to = in(reg) to,
                row = in(reg) ROW_BYTES,
                out($sums) _, out($activations) _, out("tmm2") _,
                options(nostack, preserves_flags),
            )
        };
    }
    // SAFETY: by contract.
    unsafe {
        if N == TOKENS {
            product!("tmm0", "tmm1");
        } else {
            product!("tmm3", "tmm4");
        }
    }
}
