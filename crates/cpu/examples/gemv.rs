//! How near the matmul kernels come to the machine's limits.
//!
//! `cargo run --release -p lily-cpu --example gemv [-- THREADS [ISA]]` prints, for each instruction set that the
//! machine has, or one: decode (one to six tokens over 2 GiB of random 4-bit weights, each byte read once) against a
//! plain read of the same memory by the same threads, prefill (a matrix that stays in the cache, many
//! tokens) against the rate at which it executes the instruction set's byte dot products on registers, and experts (the first
//! memory again, 512 rows at a time as a call of its own, a few tokens) against both.

use std::time::Instant;

use lily_cpu::isa::Isa;
use lily_cpu::kernels::OutRows;
use lily_cpu::kernels::activations::QuantizedRows;
use lily_cpu::kernels::matmul::{Next, ROW_BLOCK, matmul_rows, matmul_rows_then};
use lily_cpu::limits::{dot_rate, read_rate};
use lily_cpu::pool::{ThreadPool, partition, physical_cores};
use lily_model::weights::{Format, GROUP_SIZE, MatrixView};

/// The width of the residual stream of Qwen3.6-35B-A3B.
const COLS: usize = 2048;
/// 2 GiB of packed weights.
const DECODE_ROWS: usize = (2 << 30) / (COLS / 2);
const PREFILL_ROWS: usize = 4096;
/// Rows of an expert's gate projection.
const EXPERT_ROWS: usize = 512;
/// Runs of which the median counts.
const RUNS: usize = 5;

struct Weights {
    rows: usize,
    data: Vec<u8>,
    scales: Vec<u8>,
    biases: Vec<u8>,
}

impl Weights {
    fn new(rows: usize) -> Weights {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let data = (0..rows * COLS / 16).flat_map(|_| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            state.to_le_bytes()
        });
        let affine = || vec![0x3c; rows * COLS / GROUP_SIZE * 2];
        Weights { rows, data: data.collect(), scales: affine(), biases: affine() }
    }

    fn view(&self) -> MatrixView<'_> {
        MatrixView {
            rows: self.rows,
            cols: COLS,
            format: Format::Affine4,
            data: &self.data,
            scales: &self.scales,
            biases: &self.biases,
        }
    }

    fn bytes(&self) -> usize {
        self.data.len() + self.scales.len() + self.biases.len()
    }
}

/// Median seconds of a few runs, after one to warm up.
fn seconds(mut body: impl FnMut()) -> f64 {
    body();
    let mut times: Vec<f64> = (0..RUNS)
        .map(|_| {
            let start = Instant::now();
            body();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[RUNS / 2]
}

fn multiply(pool: &ThreadPool, isa: Isa, w: MatrixView<'_>, x: &QuantizedRows, out: &mut [f32]) {
    let out = OutRows::new(out, w.rows);
    pool.run(|worker, workers| {
        let rows = partition(w.rows, ROW_BLOCK, worker, workers);
        // SAFETY: shares of the rows are disjoint.
        unsafe { matmul_rows(isa, w, rows, x, x.all(), out) };
    });
}

fn multiply_experts(pool: &ThreadPool, isa: Isa, w: MatrixView<'_>, x: &QuantizedRows, out: &mut [f32]) {
    let out = OutRows::new(out, w.rows);
    pool.for_each_in_runs(w.rows / EXPERT_ROWS, |expert, next| {
        let first = expert * EXPERT_ROWS;
        let next = next.map_or(Next::UNKNOWN, |next| Next::rows(&w, next * EXPERT_ROWS));
        // SAFETY: an expert's rows are one task's.
        unsafe { matmul_rows_then(isa, w, first..first + EXPERT_ROWS, x, x.all(), out, next) };
    });
}

fn main() {
    let mut args = std::env::args().skip(1);
    let threads = args.next().and_then(|n| n.parse().ok()).unwrap_or_else(physical_cores);
    let chosen = args.next().and_then(|name| Isa::parse(&name));
    let pool = ThreadPool::new(threads);
    let big = Weights::new(DECODE_ROWS);
    let small = Weights::new(PREFILL_ROWS);
    let rows = |count: usize| {
        let x: Vec<f32> = (0..count * COLS).map(|i| ((i * 7919) % 1013) as f32 / 500.0 - 1.0).collect();
        let mut q = QuantizedRows::new();
        q.quantize(Isa::detect(), &x, COLS);
        q
    };

    let bandwidth = read_rate(&pool, Isa::detect(), &[&big.data]);
    println!("{threads} threads; plain read {:.1} GB/s", bandwidth / 1e9);
    for isa in Isa::available().into_iter().filter(|isa| chosen.is_none_or(|chosen| *isa == chosen)) {
        let peak = dot_rate(&pool, isa);
        match peak {
            Some(peak) => println!("{isa}; byte dot products on registers {:.0} GOP/s", peak / 1e9),
            None => println!("{isa}"),
        }
        for tokens in [1, 2, 4, 6] {
            if isa == Isa::Portable && tokens > 1 {
                continue;
            }
            let x = rows(tokens);
            let mut out = vec![0.0; tokens * big.rows];
            let rate = big.bytes() as f64 / seconds(|| multiply(&pool, isa, big.view(), &x, &mut out));
            println!(
                "  decode, {tokens} tokens: {:.1} GB/s, {:.0} % of the read",
                rate / 1e9,
                100.0 * rate / bandwidth
            );
        }
        for tokens in [16, 64, 512] {
            let x = rows(tokens);
            let mut out = vec![0.0; tokens * small.rows];
            let time = seconds(|| multiply(&pool, isa, small.view(), &x, &mut out));
            let rate = (2 * tokens * small.rows * COLS) as f64 / time;
            let part =
                peak.map_or(String::new(), |peak| format!(", {:.0} % of the peak", 100.0 * rate / peak));
            println!("  prefill, {tokens} tokens: {:.0} GOP/s{part}", rate / 1e9);
        }
        for tokens in [2, 3, 4, 8, 16, 32] {
            if isa == Isa::Portable {
                continue;
            }
            let x = rows(tokens);
            let mut out = vec![0.0; tokens * big.rows];
            let time = seconds(|| multiply_experts(&pool, isa, big.view(), &x, &mut out));
            println!(
                "  experts, {tokens} tokens: {:.0} GOP/s, {:.1} GB/s, {:.0} % of the read",
                (2 * tokens * big.rows * COLS) as f64 / time / 1e9,
                big.bytes() as f64 / time / 1e9,
                100.0 * big.bytes() as f64 / time / bandwidth
            );
        }
    }
}
