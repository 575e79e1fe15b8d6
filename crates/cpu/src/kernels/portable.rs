//! Plain Rust: runs everywhere, and says in the fewest words what the other instruction sets do.

use half::{bf16, f16};

use super::simd::{LANES, Simd};
use super::tile::{
    Activation, Ahead, GROUP_BYTES, GROUP_UNITS, PANEL_ROWS, PANELS, Source, TileOps, UNIT_BYTES, Upcoming,
};
use lily_model::weights::GROUP_SIZE;

/// Sixteen f32 in an array.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

/// Applies `op` lane by lane.
macro_rules! lanes {
    (|$lane:ident| $value:expr) => {{
        let mut out = [0.0f32; LANES];
        for ($lane, out) in out.iter_mut().enumerate() {
            *out = $value;
        }
        out
    }};
}

// SAFETY of the blocks below: each reads or writes the sixteen elements that the trait's contract names.
impl Simd for Portable {
    type F = [f32; LANES];

    const ROWS: usize = 4;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        [value; LANES]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        // SAFETY: sixteen elements are readable by contract.
        unsafe { from.cast::<[f32; LANES]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::F) {
        // SAFETY: sixteen elements are writable by contract.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(v) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self::F {
        // SAFETY: sixteen elements are readable by contract.
        let v = unsafe { from.cast::<[f16; LANES]>().read_unaligned() };
        lanes!(|i| v[i].to_f32())
    }

    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self::F {
        // SAFETY: sixteen elements are readable by contract.
        let v = unsafe { from.cast::<[u8; LANES]>().read_unaligned() };
        lanes!(|i| f32::from(v[i]))
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self::F {
        // SAFETY: sixteen elements are readable by contract.
        let v = unsafe { from.cast::<[i8; LANES]>().read_unaligned() };
        lanes!(|i| f32::from(v[i]))
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self::F {
        // SAFETY: sixteen elements are readable by contract.
        let v = unsafe { from.cast::<[bf16; LANES]>().read_unaligned() };
        lanes!(|i| v[i].to_f32())
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        lanes!(|i| a[i] + b[i])
    }

    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        lanes!(|i| a[i] - b[i])
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        lanes!(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        lanes!(|i| a[i] / b[i])
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        lanes!(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        lanes!(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        lanes!(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn round(a: Self::F) -> Self::F {
        lanes!(|i| a[i].round_ties_even())
    }

    #[inline(always)]
    unsafe fn exp2_int(n: Self::F) -> Self::F {
        lanes!(|i| f32::from_bits(((n[i] as i32 + 127) << 23) as u32))
    }

    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, v: Self::F) {
        // SAFETY: sixteen elements are writable by contract.
        let to = unsafe { std::slice::from_raw_parts_mut(to, LANES) };
        for (to, v) in to.iter_mut().zip(v) {
            *to = v as i8;
        }
    }

    #[inline(always)]
    unsafe fn keep_from(x: Self::F, limit: f32, v: Self::F) -> Self::F {
        lanes!(|i| if x[i] >= limit { v[i] } else { 0.0 })
    }
}

impl TileOps for Portable {
    const TOKENS: usize = 1;
    const DIRECT_TOKENS: usize = 0;

    #[inline(always)]
    unsafe fn multiply_rows(
        _from: Source,
        _scales: *const f32,
        _biases: *const f32,
        _groups: usize,
        _ahead: Ahead,
        _token: &Activation,
    ) {
        unreachable!("not faster than a tile")
    }

    #[inline(always)]
    unsafe fn unpack_4(from: Source, groups: usize, to: *mut u8) {
        for row in 0..PANEL_ROWS {
            for word in 0..groups * GROUP_SIZE / 8 {
                // SAFETY: the row's groups are readable and the units they fill writable, by contract.
                unsafe {
                    let packed = u32::from_le(from.row(row).add(word * 4).cast::<u32>().read_unaligned());
                    let unit = to.add(2 * word * UNIT_BYTES + row * 4);
                    unit.cast::<u32>().write_unaligned((packed & 0x0f0f_0f0f).to_le());
                    unit.add(UNIT_BYTES).cast::<u32>().write_unaligned(((packed >> 4) & 0x0f0f_0f0f).to_le());
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn unpack_8(from: Source, groups: usize, _ahead: usize, to: *mut u8) {
        for row in 0..PANEL_ROWS {
            for pair in 0..groups * GROUP_SIZE / 8 {
                // SAFETY: the row's groups are readable and the units they fill writable, by contract.
                unsafe {
                    let w = from.row(row).add(pair * 8).cast::<[u8; 8]>().read_unaligned();
                    let unit = to.add(2 * pair * UNIT_BYTES + row * 4);
                    unit.cast::<[u8; 4]>().write_unaligned([w[0], w[2], w[4], w[6]]);
                    unit.add(UNIT_BYTES).cast::<[u8; 4]>().write_unaligned([w[1], w[3], w[5], w[7]]);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn unpack_scales(from: Source, groups: usize, _ahead: usize, to: *mut f32) {
        for row in 0..PANEL_ROWS {
            for group in 0..groups {
                // SAFETY: the row's scales are readable and the lanes they fill writable, by contract.
                unsafe {
                    let bits = from.row(row).add(group * 2).cast::<u16>().read_unaligned();
                    *to.add(group * PANEL_ROWS + row) = f32::from_bits(u32::from(u16::from_le(bits)) << 16);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn multiply<const N: usize>(
        weights: [*const u8; PANELS],
        scales: [*const f32; PANELS],
        biases: [*const f32; PANELS],
        groups: usize,
        _wide: bool,
        tokens: &[Activation; N],
        _upcoming: Upcoming,
    ) {
        for token in tokens {
            for (p, weights) in weights.into_iter().enumerate() {
                for group in 0..groups {
                    let mut dots = [0i32; PANEL_ROWS];
                    // SAFETY: a group of unpacked weights is readable by contract.
                    let weights =
                        unsafe { std::slice::from_raw_parts(weights.add(group * GROUP_BYTES), GROUP_BYTES) };
                    for (unit, weights) in weights.chunks_exact(UNIT_BYTES).enumerate() {
                        // SAFETY: a group's elements are readable by contract.
                        let x = unsafe { unit_activations(token.q.add(group * GROUP_SIZE), unit) };
                        let x = x.map(i32::from);
                        for (dot, w) in dots.iter_mut().zip(weights.as_chunks::<4>().0) {
                            let [a, b, c, d] = w.map(i32::from);
                            *dot += a * x[0] + b * x[1] + c * x[2] + d * x[3];
                        }
                    }
                    for (row, dot) in dots.into_iter().enumerate() {
                        // SAFETY: the group's scales, biases and sums are readable, and the sums writable.
                        unsafe {
                            let lane = group * PANEL_ROWS + row;
                            let acc = token.acc.add(p * PANEL_ROWS + row);
                            let scale = *scales[p].add(lane) * *token.scales.add(group);
                            let sum = (dot as f32).mul_add(scale, *acc);
                            *acc = (*biases[p].add(lane)).mul_add(*token.sums.add(group), sum);
                        }
                    }
                }
            }
        }
    }
}

/// The four activations that meet unit `unit` of a group whose elements start at `q`: evens lie in the first
/// half, odds in the second.
///
/// # Safety
/// `GROUP_SIZE` elements from `q` are readable.
#[inline(always)]
pub(crate) unsafe fn unit_activations(q: *const i8, unit: usize) -> [i8; 4] {
    // SAFETY: inside the group, by contract.
    unsafe { q.add(unit_offset(unit)).cast::<[i8; 4]>().read_unaligned() }
}

/// Where in a group of activations the four that meet unit `unit` lie.
#[inline(always)]
pub(crate) const fn unit_offset(unit: usize) -> usize {
    debug_assert!(unit < GROUP_UNITS);
    (unit % 2) * (GROUP_SIZE / 2) + (unit / 2) * 4
}
