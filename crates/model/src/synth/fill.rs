//! What random tensors hold, computable from any position on.
//!
//! Everything comes from one function of a stream and an index, the output function of SplitMix64 (Steele, Lea
//! and Flood, "Fast splittable pseudorandom number generators", 2014), so bytes do not depend on the order or
//! the size of the pieces in which they are made.

use half::bf16;

/// Word `index` of stream `stream`.
pub fn word(stream: u64, index: u64) -> u64 {
    let mut z = stream.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Value `index` of stream `stream`, uniform in 0..1.
fn unit(stream: u64, index: u64) -> f64 {
    const MANTISSA_BITS: u32 = 53;
    (word(stream, index) >> (u64::BITS - MANTISSA_BITS)) as f64 / (1u64 << MANTISSA_BITS) as f64
}

/// Half the width of the band around 1 in which scales and norms lie, relative.
const SPREAD: f64 = 0.1;
/// Range of `exp(A_log)`, as Mamba 2 initialises it (Dao and Gu, 2024; `state-spaces/mamba`, `mamba2.py`).
const A_RANGE: (f64, f64) = (1.0, 16.0);
/// Range of `softplus(dt_bias)`, log-uniform, from the same source.
const DT_RANGE: (f64, f64) = (1e-3, 1e-1);

/// The contents of one tensor.
#[derive(Clone, Copy, Debug)]
pub enum Fill {
    /// Uniform quantized elements.
    Packed { stream: u64 },
    /// bf16 scales around `typical`.
    Scales { stream: u64, typical: f64 },
    /// bf16 biases that centre elements of 0 to `max` under the scales of the same stream.
    Biases { stream: u64, typical: f64, max: f64 },
    /// bf16 norm weights around 1.
    Norm { stream: u64 },
    /// bf16 values, uniform in `-bound..bound`.
    Uniform { stream: u64, bound: f64 },
    /// f32 logarithms of decay rates.
    ALog { stream: u64 },
    /// bf16 biases of the decay's step.
    DtBias { stream: u64 },
}

impl Fill {
    /// The tensor's bytes from `start` on; `start` is a multiple of eight bytes.
    pub fn bytes(&self, start: u64, out: &mut [u8]) {
        let around = |stream, i| 1.0 - SPREAD + 2.0 * SPREAD * unit(stream, i);
        match *self {
            Fill::Packed { stream } => {
                let first = start / size_of::<u64>() as u64;
                for (i, bytes) in (first..).zip(out.chunks_mut(size_of::<u64>())) {
                    bytes.copy_from_slice(&word(stream, i).to_le_bytes()[..bytes.len()]);
                }
            }
            Fill::Scales { stream, typical } => bf16s(start, out, |i| typical * around(stream, i)),
            Fill::Biases { stream, typical, max } => bf16s(start, out, |i| {
                let scale = bf16::from_f64(typical * around(stream, i)).to_f64();
                -0.5 * max * scale
            }),
            Fill::Norm { stream } => bf16s(start, out, |i| around(stream, i)),
            Fill::Uniform { stream, bound } => bf16s(start, out, |i| bound * (2.0 * unit(stream, i) - 1.0)),
            Fill::DtBias { stream } => bf16s(start, out, |i| {
                let (low, high) = DT_RANGE;
                let dt = low * (high / low).powf(unit(stream, i));
                // The inverse of softplus.
                dt.exp_m1().ln()
            }),
            Fill::ALog { stream } => {
                let first = start / size_of::<f32>() as u64;
                for (i, bytes) in (first..).zip(out.chunks_mut(size_of::<f32>())) {
                    let (low, high) = A_RANGE;
                    let a = low + (high - low) * unit(stream, i);
                    bytes.copy_from_slice(&(a.ln() as f32).to_le_bytes()[..bytes.len()]);
                }
            }
        }
    }
}

fn bf16s(start: u64, out: &mut [u8], value: impl Fn(u64) -> f64) {
    let first = start / size_of::<bf16>() as u64;
    for (i, bytes) in (first..).zip(out.chunks_mut(size_of::<bf16>())) {
        bytes.copy_from_slice(&bf16::from_f64(value(i)).to_le_bytes()[..bytes.len()]);
    }
}
