//! What this machine can do at the most: the rate of a plain read, and the peak of the byte dot product.
//!
//! Both are measured with the threads that compute the model. The read sums up memory far larger than any
//! cache, in wide vectors: the mapped weights themselves where there are [`READ_BYTES`] of them, so that pages
//! of the page cache are read and not some kinder memory, else a buffer. The peak keeps its operands in
//! registers and runs the instruction that the instruction set's kernels are made of.

use std::hint::black_box;
use std::time::Instant;

use lily_engine::backend::{BackendError, Limits};
use lily_model::weights::{Matrix, Mixer, Weights};

use crate::fast::Machine;
use crate::isa::Isa;
use crate::kernels::simd::{Kernel, Simd, run};
use crate::memory::zeroed;
use crate::pool::{ThreadPool, partition};

/// Bytes that one pass of the read goes over: a hundred times the largest caches.
pub const READ_BYTES: usize = 4 << 30;
/// Where the weights are fewer, the buffer takes no more than this part of the memory that is free.
const FREE_PART: usize = 4;
/// The buffer where the system does not say what is free.
const CAUTIOUS_BYTES: usize = 1 << 30;
/// Passes of which the fastest counts, after one that brings the memory in.
const PASSES: usize = 5;
/// Bytes that one step of the read sums up: eight AVX-512 registers.
const STEP: usize = 512;
/// Rounds of the peak, some tens of milliseconds.
const ROUNDS: usize = 8_000_000;
/// Dot products under way at once: more than the latency of one times those started in a cycle.
const CHAINS: usize = 12;

/// Measures both, reading `weights` where they are large enough.
///
/// # Errors
/// [`BackendError::OutOfMemory`] where there is no room for the buffer.
pub fn measure(machine: &Machine, weights: &Weights) -> Result<Limits, BackendError> {
    let Machine { pool, isa } = machine;
    let mapped = largest_first(weights);
    let read_bytes_per_second = if mapped.iter().map(|bytes| bytes.len()).sum::<usize>() >= READ_BYTES {
        read_rate(pool, *isa, &mapped)
    } else {
        let bytes = free_bytes().map_or(CAUTIOUS_BYTES, |free| READ_BYTES.min(free / FREE_PART));
        let mut buffer = zeroed::<u8>("measuring the memory", bytes)?;
        // Pages that were never written may all be one page of zeros.
        buffer.fill(1);
        read_rate(pool, *isa, &[&buffer])
    };
    Ok(Limits { read_bytes_per_second, matrix_ops_per_second: dot_rate(pool, *isa) })
}

/// Bytes per second that all threads of `pool` read of `regions`, each of which they share.
pub fn read_rate(pool: &ThreadPool, isa: Isa, regions: &[&[u8]]) -> f64 {
    let mut left = READ_BYTES;
    let regions: Vec<&[[u8; STEP]]> = regions
        .iter()
        .map(|region| {
            let taken = &region[..region.len().min(left)];
            left -= taken.len();
            taken.as_chunks::<STEP>().0
        })
        .collect();
    let bytes: usize = regions.iter().map(|steps| steps.len() * STEP).sum();
    let seconds = fastest(|| {
        pool.run(|worker, workers| {
            for steps in &regions {
                black_box(run(isa, Sum { steps: &steps[partition(steps.len(), 1, worker, workers)] }));
            }
        });
    });
    bytes as f64 / seconds
}

/// Byte operations per second of the instruction set's dot product, all threads of `pool` together, operands
/// in registers; `None` for [`Isa::Portable`], which has none. Of [`Isa::Amx`] it is that of the vectors, so that figures
/// compare: scaling, not the matrix product, is what bounds it.
pub fn dot_rate(pool: &ThreadPool, isa: Isa) -> Option<f64> {
    assert!(isa.is_available(), "this machine has no {isa}");
    let (products, spin): (usize, unsafe fn()) = match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => (32, x86::spin_avx2),
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => (32, x86::spin_avx_vnni),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni | Isa::Amx => (64, x86::spin_avx512_vnni),
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDot => (16, arm::spin_dot),
        _ => return None,
    };
    // SAFETY: the instruction set was checked above.
    let seconds = fastest(|| pool.run(|_, _| unsafe { spin() }));
    Some((2 * products * CHAINS * ROUNDS * pool.threads()) as f64 / seconds)
}

fn fastest(mut pass: impl FnMut()) -> f64 {
    pass();
    let times = (0..PASSES).map(|_| {
        let start = Instant::now();
        pass();
        start.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}

/// The sum of the 64-bit words of `steps`: cheap beside the loads, and the compiler makes of it the widest
/// additions that the instruction set has.
struct Sum<'a> {
    steps: &'a [[u8; STEP]],
}

impl Kernel for Sum<'_> {
    type Output = u64;

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) -> u64 {
        let mut sums = [0u64; STEP / 8];
        for step in self.steps {
            for (sum, word) in sums.iter_mut().zip(step.as_chunks::<8>().0) {
                *sum = sum.wrapping_add(u64::from_le_bytes(*word));
            }
        }
        sums.into_iter().fold(0, u64::wrapping_add)
    }
}

/// The elements of the matrices that every decode step reads some of, the largest first.
fn largest_first(weights: &Weights) -> Vec<&[u8]> {
    let mut regions: Vec<&[u8]> = vec![&weights.lm_head.data];
    for layer in &weights.layers {
        let moe = &layer.moe;
        let mixer: [&Matrix; 2] = match &layer.mixer {
            Mixer::Delta(w) => [&w.in_proj_qkv, &w.out_proj],
            Mixer::Attention(w) => [&w.q_proj, &w.o_proj],
        };
        for matrix in [&moe.gate_proj, &moe.up_proj, &moe.down_proj].into_iter().chain(mixer) {
            regions.push(&matrix.data);
        }
    }
    regions.sort_by_key(|region| std::cmp::Reverse(region.len()));
    regions
}

/// Memory that programs can have without others losing theirs, where the system says.
pub fn free_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok().map(|kib| kib << 10)
}

/// Products that depend on nothing but the sum that they are added to.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::{
        __m256i, _mm256_dpbusd_avx_epi32, _mm256_set1_epi8, _mm256_setzero_si256, _mm512_dpbusd_epi32,
        _mm512_set1_epi8, _mm512_setzero_si512,
    };
    use std::hint::black_box;

    use super::{CHAINS, ROUNDS};

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub fn spin_avx512_vnni() {
        let (w, x) = (black_box(_mm512_set1_epi8(3)), black_box(_mm512_set1_epi8(5)));
        let mut sums = [_mm512_setzero_si512(); CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, w, x);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx2,avxvnni")]
    pub fn spin_avx_vnni() {
        let (w, x) = (black_box(_mm256_set1_epi8(3)), black_box(_mm256_set1_epi8(5)));
        let mut sums = [_mm256_setzero_si256(); CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm256_dpbusd_avx_epi32(*sum, w, x);
            }
        }
        black_box(sums);
    }

    /// Without a dot product: pairs of byte products as 16-bit sums, added up.
    #[target_feature(enable = "avx2")]
    pub fn spin_avx2() {
        let (w, x) = (black_box(_mm256_set1_epi8(3)), black_box(_mm256_set1_epi8(5)));
        let mut sums = [_mm256_setzero_si256(); CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                // SAFETY: AVX2 instructions on registers. In assembly, because the compiler would see that
                // the product is the same in every round.
                unsafe {
                    asm!(
                        "vpmaddubsw {pairs}, {w}, {x}",
                        "vpaddw {sum}, {sum}, {pairs}",
                        pairs = out(ymm_reg) _,
                        sum = inout(ymm_reg) *sum => *sum,
                        w = in(ymm_reg) w,
                        x = in(ymm_reg) x,
                        options(pure, nomem, nostack, preserves_flags)
                    );
                }
            }
        }
        black_box::<[__m256i; CHAINS]>(sums);
    }
}

/// Products that depend on nothing but the sum that they are added to.
#[cfg(target_arch = "aarch64")]
mod arm {
    use std::arch::aarch64::{vdupq_n_s8, vdupq_n_s32};
    use std::arch::asm;
    use std::hint::black_box;

    use super::{CHAINS, ROUNDS};

    #[target_feature(enable = "neon,dotprod")]
    pub fn spin_dot() {
        let (w, x) = (black_box(vdupq_n_s8(3)), black_box(vdupq_n_s8(5)));
        let mut sums = [vdupq_n_s32(0); CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                // SAFETY: an instruction of this function's features, on registers.
                unsafe {
                    asm!(
                        "sdot {sum:v}.4s, {w:v}.16b, {x:v}.16b",
                        sum = inout(vreg) *sum => *sum,
                        w = in(vreg) w,
                        x = in(vreg) x,
                        options(pure, nomem, nostack, preserves_flags)
                    );
                }
            }
        }
        black_box(sums);
    }
}
