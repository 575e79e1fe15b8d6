//! Every kernel computes what the plain f32 form of its stage computes, in any order of its threads, and touches nothing
//! that its plan does not name: the emulator's detectors are on.

#![cfg(target_os = "linux")]

mod compare;
mod gpu;
mod routing;

use std::ops::Range;

use gpu::{Gpu, Random};
use lily_gpu::layout::{KvFormat, PAGE_TOKENS};
use lily_metal::emulator::Options;
use lily_model::checkpoint::Checkpoint;
use lily_model::geometry::{Geometry, LayerKind};
use lily_model::synth;
use lily_model::weights::Weights;

/// Tokens that a sequence has seen, and those that the pass adds.
type Seen = (usize, usize);

/// Sequences of a pass: a token alone, several, and prompts among them; positions at both ends of a page.
const CASES: [(&str, &[Seen]); 4] = [
    ("a token in the second page", &[(100, 1)]),
    ("prompts and a sequence", &[(1, 3), (64, 1), (62, 5)]),
    ("a first token", &[(0, 1)]),
    ("five sequences", &[(0, 1), (3, 1), (63, 1), (64, 1), (130, 1)]),
];
/// As far as attention's short layout goes.
const SHORT: usize = 4096;
/// The most positions of a sequence here.
const CONTEXT: usize = 1 << 15;
/// The most tokens before a chunk that starts anywhere: a few pages.
const SEEN: usize = 300;

fn demo() -> Weights {
    Checkpoint::demo().and_then(|demo| demo.weights()).unwrap()
}

/// Two layers with the full model's widths of everything that a kernel divides among lanes and threadgroups.
fn wide() -> (Weights, tempfile::TempDir) {
    let mut geometry = Geometry::qwen3_6_35b_a3b();
    geometry.layers = vec![LayerKind::Delta, LayerKind::Attention];
    geometry.vocab = 4096;
    geometry.moe.experts = 48;
    (geometry.delta.key_heads, geometry.delta.value_heads) = (8, 32);
    let dir = tempfile::tempdir().unwrap();
    synth::write(dir.path(), &geometry, 1, &|_, _| {}).unwrap();
    (Checkpoint::open(dir.path()).and_then(|random| random.weights()).unwrap(), dir)
}

fn token(index: usize, vocab: usize) -> u32 {
    ((index * 7919 + 13) % vocab) as u32
}

/// Tells `gpu` of a pass.
fn begin(gpu: &mut Gpu, weights: &Weights, parts: &[Seen]) {
    let mut random = Random(7);
    let parts = parts.iter().map(|&(seen, more)| {
        let tokens: Vec<u32> = (seen..seen + more).map(|i| token(i, weights.geometry.vocab)).collect();
        gpu.sequence(seen, &tokens, &mut random)
    });
    let parts = parts.collect();
    gpu.begin(parts);
}

fn check(weights: &Weights, seed: u64, short: usize, kv: KvFormat, cases: &[(&str, &[Seen])]) {
    for (case, parts) in cases {
        let mut gpu = Gpu::new(weights, Options { seed, tracked: true }, short, kv, CONTEXT);
        begin(&mut gpu, weights, parts);
        compare::stages(&mut gpu, weights, &format!("{case}, {kv:?}, seed {seed}"), None);
    }
}

#[test]
fn every_stage_of_the_demo_is_the_plain_one_under_three_seeds() {
    for seed in [1, 2, 3] {
        check(&demo(), seed, SHORT, KvFormat::F16, &CASES[..2]);
    }
    check(&demo(), 4, SHORT, KvFormat::F16, &CASES[2..]);
}

#[test]
fn so_is_every_stage_with_the_full_models_widths() {
    let (weights, _dir) = wide();
    let cases: [(&str, &[Seen]); 2] = [("a token", &[(100, 1)]), ("over the end of a page", &[(63, 2)])];
    check(&weights, 5, SHORT, KvFormat::F16, &cases);
}

#[test]
fn attention_over_a_long_context_is_the_plain_one() {
    // Spans of five pages, of which one SIMD-group has two; and of two, beside a context that is short.
    let cases: [(&str, &[Seen]); 2] =
        [("20,001 positions", &[(20_000, 1)]), ("long and short", &[(4160, 2), (70, 1)])];
    check(&demo(), 6, SHORT, KvFormat::F16, &cases);
}

/// Both layouts; stored numbers as the CPU's, sums as of what is stored, and from the rows that were given by no more than their
/// rounding makes of them.
#[test]
fn attention_over_keys_and_values_in_8_bits_is_the_plain_one_under_three_seeds() {
    let weights = two_layers();
    let long: [(&str, &[Seen]); 2] = [("a long one", &[(200, 1)]), ("long and short", &[(128, 2), (9, 1)])];
    check(&weights, 1, SHORT, KvFormat::Q8, &CASES[..2]);
    // The layout for long contexts from a page on.
    check(&weights, 2, PAGE_TOKENS, KvFormat::Q8, &long);
    check(&weights, 3, SHORT, KvFormat::Q8, &CASES[..1]);
}

/// The last position of the model's context but one. Of its 4,096 pages 61 are different ones, so that a page that is not the
/// right one, or not where its keys are, is another; each span has 64 pages.
#[test]
fn at_the_end_of_the_longest_context_attention_reaches_the_right_keys() {
    let mut weights = two_layers();
    weights.geometry.max_context = Geometry::qwen3_6_35b_a3b().max_context;
    let position = weights.geometry.max_context - 2;
    for kv in [KvFormat::F16, KvFormat::Q8] {
        let options = Options { seed: 9, tracked: false };
        let mut gpu = Gpu::new(&weights, options, SHORT, kv, weights.geometry.max_context);
        let seen = 61 * PAGE_TOKENS + position % PAGE_TOKENS;
        let part = gpu.sequence(seen, &[token(seen, weights.geometry.vocab)], &mut Random(7)).far(position);
        gpu.begin(vec![part]);
        compare::stages(&mut gpu, &weights, &format!("position {position}, {kv:?}"), None);
    }
}

/// What a pass leaves, to the bit: logits of all rows, and states of all layers.
fn results(
    weights: &Weights,
    short: usize,
    kv: KvFormat,
    parts: &[Seen],
    seed: u64,
) -> (Vec<f32>, Vec<gpu::State>) {
    let mut gpu = Gpu::new(weights, Options { seed, tracked: true }, short, kv, CONTEXT);
    begin(&mut gpu, weights, parts);
    gpu.until("sample");
    let states = (0..weights.layers.len())
        .filter(|&index| weights.geometry.layers[index] == LayerKind::Delta)
        .flat_map(|index| gpu.states(index))
        .collect();
    (gpu.floats("logits", gpu.rows() * weights.geometry.vocab), states)
}

#[test]
fn a_row_has_the_same_bits_alone_in_a_batch_and_with_either_layout() {
    for (weights, kv) in [(demo(), KvFormat::F16), (two_layers(), KvFormat::Q8)] {
        let weights = &weights;
        let alone = results(weights, SHORT, kv, &[(100, 1)], 6);
        let (logits, states) = results(weights, SHORT, kv, &[(100, 1), (9, 2), (64, 1), (65, 1)], 7);
        assert_eq!(alone.0, logits[..weights.geometry.vocab]);
        assert!(alone.1.iter().zip(states.chunks_exact(4)).all(|(alone, all)| *alone == all[0]));
        // A plan that has the long layout for everything.
        assert_eq!(alone, results(weights, 1, kv, &[(100, 1)], 8));
    }
}

/// A chunk of a prompt, `more` tokens after `seen` others.
fn check_prompt(
    weights: &Weights,
    seed: u64,
    kv: KvFormat,
    (seen, more): Seen,
    router: Option<compare::Router>,
) {
    let mut gpu = Gpu::new(weights, Options { seed, tracked: true }, SHORT, kv, CONTEXT);
    let tokens: Vec<u32> = (seen..seen + more).map(|i| token(i, weights.geometry.vocab)).collect();
    let part = gpu.sequence(seen, &tokens, &mut Random(seed));
    gpu.begin_prompt(part);
    compare::stages(&mut gpu, weights, &format!("{more} tokens after {seen}, {kv:?}, seed {seed}"), router);
}

#[test]
#[ignore = "a minute or more of computing; .ci/run runs it"]
fn every_stage_of_a_prompt_is_the_plain_one_in_all_layers_under_three_seeds() {
    for (seed, seen) in [(1, (0, 33)), (2, (62, 5)), (3, (129, 1))] {
        check_prompt(&demo(), seed, KvFormat::F16, seen, None);
    }
}

#[test]
fn so_is_attention_of_a_prompt_over_keys_and_values_in_8_bits() {
    for (seed, seen) in [(1, (0, 3)), (2, (62, 5)), (3, (129, 1))] {
        check_prompt(&two_layers(), seed, KvFormat::Q8, seen, None);
    }
}

#[test]
fn so_is_every_stage_of_a_prompt_with_the_full_models_widths() {
    let (weights, _dir) = wide();
    check_prompt(&weights, 4, KvFormat::F16, (63, 3), None);
}

/// A layer of each kind of the demo: the same kernels as all eight, in a quarter of the time.
fn two_layers() -> Weights {
    let mut weights = demo();
    let first = weights.geometry.layers.iter().position(|kind| *kind == LayerKind::Attention).unwrap() - 1;
    weights.layers = weights.layers.drain(first..first + 2).collect();
    weights.geometry.layers = vec![LayerKind::Delta, LayerKind::Attention];
    weights
}

/// Chunks of random lengths, one from each of `lengths`, that start anywhere in the first pages, under three seeds; every other one with skewed routing.
fn check_any_chunks(random: u64, lengths: [Range<usize>; 3]) {
    let weights = two_layers();
    let mut random = Random(random);
    for (seed, lengths) in (1..).zip(lengths) {
        let (seen, more) = (random.within(0..SEEN), random.within(lengths));
        let router = if seed % 2 == 1 { Some(skewed as compare::Router) } else { None };
        check_prompt(&weights, seed, KvFormat::F16, (seen, more), router);
    }
}

#[test]
fn every_stage_of_a_chunk_of_any_length_is_the_plain_one_wherever_it_starts() {
    check_any_chunks(21, [1..8, 8..16, 16..24]);
}

#[test]
#[ignore = "a minute or more of computing; .ci/run runs it"]
fn so_is_every_stage_of_a_long_chunk() {
    check_any_chunks(22, [24..100, 100..200, 200..301]);
}

/// What no router of the demo leaves: every row has the same experts, and most experts have no row.
fn skewed(_: usize, expert: usize, logit: f32) -> f32 {
    if expert < 9 { logit + 100.0 - expert as f32 } else { logit }
}

#[test]
fn products_are_right_where_all_tokens_choose_the_same_experts() {
    check_prompt(&demo(), 5, KvFormat::F16, (0, 20), Some(skewed));
}

#[test]
fn tokens_are_sorted_by_expert_however_they_are_distributed() {
    for (seed, rows, block_rows, logits) in [
        (1, 1, 8, routing::none_on_most as routing::Logits),
        (2, 33, 8, routing::all_on_the_same),
        (3, 64, 16, routing::none_on_most),
        (4, 70, 32, routing::no_preference),
    ] {
        routing::check(seed, true, rows, block_rows, logits);
    }
}

#[test]
fn thousands_of_tokens_are_sorted_by_expert() {
    for (seed, logits) in [(1, routing::none_on_most as routing::Logits), (2, routing::all_on_the_same)] {
        routing::check(seed, false, 4096, 64, logits);
    }
}
