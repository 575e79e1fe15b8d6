//! The 4-bit path scores held-out curriculum text as `mlx-lm` does.
//!
//! `mlx-lm` read the same 4-bit file with f32 activations; Lily's int8 activations must not change what the
//! model knows. Both read the same tokens whatever they would have written themselves (teacher forcing).

#[path = "common/golden.rs"]
mod golden;

use golden::{Golden, all_logits, backend};
use lily_cpu::{CpuBackend, Numerics};
use lily_engine::backend::Backend;
use lily_model::checkpoint::Checkpoint;

/// Relative change of perplexity that rounding activations to int8 may make.
const PERPLEXITY_CHANGE: f64 = 4e-4;
/// Share of positions where the best token must stay the same.
const TOP_1_AGREEMENT: f64 = 0.99;
/// Fewer positions would prove nothing.
const LEAST_POSITIONS: usize = 2000;

/// One position: what `mlx-lm` said and what Lily says.
struct Position {
    /// Whether the next token is one that the model was trained to write.
    answer: bool,
    golden_logprob: f64,
    logprob: f64,
    same_best: bool,
}

/// Scores the golden documents, at most `limit` of them.
fn score(backend: &mut CpuBackend, limit: usize) -> Vec<Position> {
    let golden = Golden::open("mlx_teacher_forced.safetensors");
    let (tokens, best) = (golden.ids("tokens"), golden.ids("best"));
    let (logprobs, answer) = (golden.floats("target_logprobs"), golden.flags("answer"));
    let vocab = backend.geometry().vocab;
    let mut positions = Vec::new();
    let mut start = 0;
    for length in golden.ids("lengths").into_iter().take(limit).map(|length| length as usize) {
        let document = &tokens[start..start + length];
        let logits = all_logits(backend, &document[..length - 1]);
        for (row, &target) in logits.chunks_exact(vocab).zip(&document[1..]) {
            let index = positions.len();
            positions.push(Position {
                answer: answer[index],
                golden_logprob: logprobs[index].into(),
                logprob: logprob(row, target),
                same_best: argmax(row) == best[index],
            });
        }
        start += length;
    }
    positions
}

fn logprob(logits: &[f32], token: u32) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|&l| f64::from(l - largest).exp()).sum();
    f64::from(logits[token as usize] - largest) - total.ln()
}

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best }) as u32
}

/// Relative change of perplexity, and the share of positions with the same best token.
fn compare(name: &str, positions: &[&Position]) -> (f64, f64) {
    let count = positions.len() as f64;
    let change: f64 = positions.iter().map(|p| p.golden_logprob - p.logprob).sum::<f64>() / count;
    let perplexity = change.exp_m1();
    let agreement = positions.iter().filter(|p| p.same_best).count() as f64 / count;
    println!(
        "{name}: {} positions, perplexity {:+.4} %, top-1 agreement {:.3} %",
        positions.len(),
        perplexity * 100.0,
        agreement * 100.0
    );
    (perplexity.abs(), agreement)
}

/// Rounding activations to int8 changes neither what the model answers nor how sure it is.
///
/// Perplexity is held to its bound where it means something: on answers. The model was never trained on the
/// tokens of a prompt, and gives them a perplexity in the thousands, which any rounding moves.
#[test]
fn int8_keeps_perplexity_and_top_1() {
    let mut backend = backend(Checkpoint::demo().unwrap().weights().unwrap(), Numerics::Int8);
    let positions = score(&mut backend, usize::MAX);
    let all: Vec<&Position> = positions.iter().collect();
    let answers: Vec<&Position> = positions.iter().filter(|p| p.answer).collect();
    assert!(answers.len() >= LEAST_POSITIONS);
    let (_, agreement) = compare("int8, all text", &all);
    assert!(agreement >= TOP_1_AGREEMENT, "top-1 agreement on all text is {:.3} %", agreement * 100.0);
    let (perplexity, agreement) = compare("int8, answers", &answers);
    assert!(perplexity <= PERPLEXITY_CHANGE, "perplexity of answers is off by {:.4} %", perplexity * 100.0);
    assert!(agreement >= TOP_1_AGREEMENT, "top-1 agreement on answers is {:.3} %", agreement * 100.0);
}

/// Two f32 implementations of one file differ only in the order of their sums.
const F32_PERPLEXITY_CHANGE: f64 = 1e-5;
const F32_TOP_1_AGREEMENT: f64 = 0.999;
const F32_DOCUMENTS: usize = 15;

#[test]
fn f32_scores_as_mlx_does() {
    let mut backend = backend(Checkpoint::demo().unwrap().weights().unwrap(), Numerics::F32);
    let positions = score(&mut backend, F32_DOCUMENTS);
    let (perplexity, agreement) = compare("f32, all text", &positions.iter().collect::<Vec<_>>());
    assert!(perplexity <= F32_PERPLEXITY_CHANGE, "perplexity is off by {:.6} %", perplexity * 100.0);
    assert!(agreement >= F32_TOP_1_AGREEMENT, "top-1 agreement is {:.3} %", agreement * 100.0);
}
