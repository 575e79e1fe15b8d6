//! The 4-bit path scores held-out curriculum text as `mlx-lm` does, and as plain f32 does.
//!
//! `mlx-lm` read the same 4-bit file with f32 activations; Lily's int8 activations must not change what the
//! model knows. All read the same tokens whatever they would have written themselves (teacher forcing).
//!
//! Perplexity is held to its bound where it means something: on answers. The model was never trained on the
//! tokens of a prompt, and gives them a perplexity in the thousands, which any rounding moves.

#[path = "common/golden.rs"]
mod golden;

use std::sync::OnceLock;

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

/// What someone says of the token after a position.
#[derive(Clone, Copy)]
struct Score {
    /// Log-probability of the token that does come next.
    logprob: f64,
    /// The likeliest token.
    best: u32,
}

/// A golden document and what `mlx-lm` says of it.
struct Document {
    tokens: Vec<u32>,
    /// For each position, whether the next token is one that the model was trained to write.
    answer: Vec<bool>,
    mlx: Vec<Score>,
}

impl Document {
    fn answers(&self) -> usize {
        self.answer.iter().filter(|&&answer| answer).count()
    }

    /// Share of answers among its positions.
    fn density(&self) -> f64 {
        self.answers() as f64 / self.answer.len() as f64
    }
}

/// The golden documents, those with the largest share of answers first.
fn documents() -> &'static [Document] {
    static DOCUMENTS: OnceLock<Vec<Document>> = OnceLock::new();
    DOCUMENTS.get_or_init(|| {
        let golden = Golden::open("mlx_teacher_forced.safetensors");
        let (tokens, best) = (golden.ids("tokens"), golden.ids("best"));
        let (logprobs, answer) = (golden.floats("target_logprobs"), golden.flags("answer"));
        let (mut token, mut position) = (0, 0);
        let mut documents = Vec::new();
        for length in golden.ids("lengths") {
            let length = length as usize;
            let positions = position..position + length - 1;
            let score = |i: usize| Score { logprob: logprobs[i].into(), best: best[i] };
            documents.push(Document {
                tokens: tokens[token..token + length].to_vec(),
                answer: answer[positions.clone()].to_vec(),
                mlx: positions.clone().map(score).collect(),
            });
            (token, position) = (token + length, positions.end);
        }
        documents.sort_by(|a, b| b.density().total_cmp(&a.density()));
        documents
    })
}

/// The first documents, with enough answers: what the slow f32 path reads.
fn documents_of_answers() -> &'static [Document] {
    let mut answers = 0;
    let enough = documents().iter().position(|document| {
        answers += document.answers();
        answers >= LEAST_POSITIONS
    });
    &documents()[..=enough.expect("enough answers")]
}

fn score(documents: &[Document], numerics: Numerics) -> Vec<Vec<Score>> {
    let mut backend = backend(Checkpoint::demo().unwrap().weights().unwrap(), numerics);
    documents.iter().map(|document| score_one(&mut backend, &document.tokens)).collect()
}

fn score_one(backend: &mut CpuBackend, tokens: &[u32]) -> Vec<Score> {
    let vocab = backend.geometry().vocab;
    let logits = all_logits(backend, &tokens[..tokens.len() - 1]);
    let rows = logits.chunks_exact(vocab).zip(&tokens[1..]);
    rows.map(|(row, &target)| Score { logprob: logprob(row, target), best: argmax(row) }).collect()
}

/// The fast path's scores of all documents.
fn int8_scores() -> &'static [Vec<Score>] {
    static SCORES: OnceLock<Vec<Vec<Score>>> = OnceLock::new();
    SCORES.get_or_init(|| score(documents(), Numerics::Int8))
}

/// The plain path's scores of [`documents_of_answers`].
fn f32_scores() -> &'static [Vec<Score>] {
    static SCORES: OnceLock<Vec<Vec<Score>>> = OnceLock::new();
    SCORES.get_or_init(|| score(documents_of_answers(), Numerics::F32))
}

fn logprob(logits: &[f32], token: u32) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|&l| f64::from(l - largest).exp()).sum();
    f64::from(logits[token as usize] - largest) - total.ln()
}

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best }) as u32
}

/// Pairs of what the reference and Lily say at the same position.
type Pairs = Vec<(Score, Score)>;

/// Both at all positions of the documents, and at the answers among them.
fn pairs<'a>(reference: impl Iterator<Item = &'a Vec<Score>>, scores: &[Vec<Score>]) -> (Pairs, Pairs) {
    let (mut all, mut answers) = (Vec::new(), Vec::new());
    for ((document, reference), scores) in documents().iter().zip(reference).zip(scores) {
        assert_eq!(reference.len(), scores.len());
        for ((&reference, &score), &answer) in reference.iter().zip(scores).zip(&document.answer) {
            all.push((reference, score));
            if answer {
                answers.push((reference, score));
            }
        }
    }
    (all, answers)
}

/// Relative change of perplexity, and the share of positions with the same best token.
fn compare(name: &str, pairs: &Pairs) -> (f64, f64) {
    let count = pairs.len() as f64;
    let change: f64 = pairs.iter().map(|(reference, score)| reference.logprob - score.logprob).sum();
    let perplexity = (change / count).exp_m1();
    let same = pairs.iter().filter(|(reference, score)| reference.best == score.best).count();
    let agreement = same as f64 / count;
    println!(
        "{name}: {} positions, perplexity {:+.4} %, top-1 agreement {:.3} %",
        pairs.len(),
        perplexity * 100.0,
        agreement * 100.0
    );
    (perplexity.abs(), agreement)
}

/// Holds int8 to its bounds against `reference`.
fn assert_int8_keeps(reference: &str, (all, answers): &(Pairs, Pairs)) {
    assert!(answers.len() >= LEAST_POSITIONS);
    let (_, agreement) = compare(&format!("int8 against {reference}, all text"), all);
    assert!(agreement >= TOP_1_AGREEMENT, "top-1 agreement on all text is {:.3} %", agreement * 100.0);
    let (perplexity, agreement) = compare(&format!("int8 against {reference}, answers"), answers);
    assert!(perplexity <= PERPLEXITY_CHANGE, "perplexity of answers is off by {:.4} %", perplexity * 100.0);
    assert!(agreement >= TOP_1_AGREEMENT, "top-1 agreement on answers is {:.3} %", agreement * 100.0);
}

/// Rounding activations to int8 changes neither what the model answers nor how sure it is.
#[test]
fn int8_keeps_perplexity_and_top_1() {
    assert_int8_keeps("mlx-lm", &pairs(documents().iter().map(|document| &document.mlx), int8_scores()));
}

/// The same with nothing but the rounding between the two: Lily's own plain path on the same weights.
#[test]
fn int8_keeps_perplexity_and_top_1_of_the_f32_path() {
    assert_int8_keeps("f32", &pairs(f32_scores().iter(), int8_scores()));
}

/// Two f32 implementations of one file differ only in the order of their sums.
const F32_PERPLEXITY_CHANGE: f64 = 1e-5;
const F32_TOP_1_AGREEMENT: f64 = 0.999;

#[test]
fn f32_scores_as_mlx_does() {
    let (all, _) = pairs(documents().iter().map(|document| &document.mlx), f32_scores());
    let (perplexity, agreement) = compare("f32 against mlx-lm, all text", &all);
    assert!(perplexity <= F32_PERPLEXITY_CHANGE, "perplexity is off by {:.6} %", perplexity * 100.0);
    assert!(agreement >= F32_TOP_1_AGREEMENT, "top-1 agreement is {:.3} %", agreement * 100.0);
}
