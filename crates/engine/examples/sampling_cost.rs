//! What choosing one token costs at the real vocabulary: `cargo run --release -p lily-engine --example
//! sampling_cost`.

use std::time::Instant;

use lily_engine::sampler::{Sampler, SamplingParams};

const VOCAB: usize = 248_320;
const ROUNDS: usize = 200;

fn main() {
    // Bell-shaped logits of a trained model's spread, with a few clear favourites.
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let mut row: Vec<f32> =
        (0..VOCAB).map(|_| (0..12).map(|_| uniform()).sum::<f32>() * 2.5 - 15.0).collect();
    for favourite in 0..20 {
        row[favourite * 12_347] = 18.0 - favourite as f32 * 0.5;
    }

    let base = SamplingParams { seed: Some(1), ..SamplingParams::default() };
    let warm = SamplingParams { temperature: 1.0, ..base.clone() };
    let cases = [
        ("greedy", base.clone()),
        ("greedy, top 20 logprobs", SamplingParams { logprobs: Some(20), ..base.clone() }),
        ("temperature", warm.clone()),
        ("temperature, top_k 20, top_p 0.95", SamplingParams { top_k: 20, top_p: 0.95, ..warm.clone() }),
        ("temperature, top_p 0.95", SamplingParams { top_p: 0.95, ..warm.clone() }),
        ("temperature 2, top_p 0.99", SamplingParams { temperature: 2.0, top_p: 0.99, ..warm.clone() }),
        ("temperature, min_p 0.05", SamplingParams { min_p: 0.05, ..warm.clone() }),
    ];
    let prompt: Vec<u32> = (0..4_000).map(|i| i * 61 % VOCAB as u32).collect();
    for (name, params) in cases {
        for repetition_penalty in [1.0, 1.1] {
            let params = SamplingParams { repetition_penalty, ..params.clone() };
            let mut sampler = Sampler::new(params, &prompt);
            let mut rows = vec![row.clone(); ROUNDS];
            let begin = Instant::now();
            for row in &mut rows {
                sampler.sample(row).expect("a finite row");
            }
            let micros = begin.elapsed().as_secs_f64() * 1e6 / ROUNDS as f64;
            println!("{micros:8.0} us  {name}, repetition penalty {repetition_penalty}");
        }
    }
}
