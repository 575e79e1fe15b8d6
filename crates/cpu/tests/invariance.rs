//! The bits of an answer do not depend on how a prompt was cut, on threads, or on company in a batch.

mod common;

use common::{NUMERICS, Random, backend, extend, logits_of, random_weights, small_geometry};
use lily_cpu::Numerics;
use lily_engine::backend::{Backend, DecodeStep, Input, Want};
use proptest::prelude::*;

/// Longer than a KV page and than any block that a kernel works in.
const PROMPT: usize = 150;

#[test]
fn one_token_at_a_time_is_the_whole_prompt_at_once() {
    let weights = random_weights(&small_geometry(), 1);
    let tokens = Random::new(2).tokens(PROMPT, weights.geometry.vocab);
    for numerics in NUMERICS {
        let mut backend = backend(&weights, numerics, 2);
        let whole = backend.open(None).unwrap();
        let at_once = extend(&mut backend, whole, &tokens, Want::AllLogits).logits;
        let single = backend.open(None).unwrap();
        let one_by_one: Vec<f32> =
            tokens.iter().flat_map(|&t| extend(&mut backend, single, &[t], Want::Logits).logits).collect();
        assert!(at_once == one_by_one, "{numerics:?}: some row differs");
    }
}

#[test]
fn a_prompt_longer_than_the_internal_chunk_is_cut_without_a_trace() {
    let weights = random_weights(&small_geometry(), 3);
    let tokens = Random::new(4).tokens(1100, weights.geometry.vocab);
    for numerics in [Numerics::Int8, Numerics::Int8KvQ8] {
        let mut backend = backend(&weights, numerics, 2);
        let at_once = logits_of(&mut backend, &tokens);
        let sequence = backend.open(None).unwrap();
        extend(&mut backend, sequence, &tokens[..700], Want::Nothing);
        extend(&mut backend, sequence, &tokens[700..1099], Want::Nothing);
        // One token: its context is longer than a span of attention, so that threads share it.
        let in_three = extend(&mut backend, sequence, &tokens[1099..], Want::Logits).logits;
        assert!(at_once == in_three, "{numerics:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_cuts_and_any_threads_give_the_same_bits(
        seed in 0u64..1000,
        cuts in proptest::collection::vec(1usize..PROMPT, 0..6),
        threads in 1usize..5,
    ) {
        let weights = random_weights(&small_geometry(), seed);
        let tokens = Random::new(seed).tokens(PROMPT, weights.geometry.vocab);
        let mut cuts: Vec<usize> = cuts.into_iter().chain([0, PROMPT]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        for numerics in NUMERICS {
            let whole = logits_of(&mut backend(&weights, numerics, 1), &tokens);
            let mut backend = backend(&weights, numerics, threads);
            let sequence = backend.open(None).unwrap();
            let mut last = Vec::new();
            for piece in cuts.windows(2) {
                last = extend(&mut backend, sequence, &tokens[piece[0]..piece[1]], Want::Logits).logits;
            }
            prop_assert!(whole == last, "{numerics:?}, pieces {cuts:?}");
        }
    }
}

#[test]
fn company_in_a_decode_batch_changes_nothing() {
    let weights = random_weights(&small_geometry(), 5);
    let vocab = weights.geometry.vocab;
    for numerics in NUMERICS {
        let mut backend = backend(&weights, numerics, 2);
        let prompts: Vec<Vec<u32>> =
            [3, 64, 90, 129, 7].iter().map(|&len| Random::new(len as u64).tokens(len, vocab)).collect();
        let alone: Vec<Vec<f32>> = prompts.iter().map(|prompt| logits_of(&mut backend, prompt)).collect();

        let sequences: Vec<_> = prompts.iter().map(|_| backend.open(None).unwrap()).collect();
        for (&sequence, prompt) in sequences.iter().zip(&prompts) {
            extend(&mut backend, sequence, &prompt[..prompt.len() - 1], Want::Nothing);
        }
        let steps: Vec<DecodeStep> = sequences
            .iter()
            .zip(&prompts)
            .map(|(&sequence, prompt)| DecodeStep {
                sequence,
                input: Input::Token(*prompt.last().unwrap()),
                want: Want::Logits,
            })
            .collect();
        let ticket = backend.decode(&steps).unwrap();
        let together = backend.collect(ticket).unwrap();
        for (output, alone) in together.iter().zip(&alone) {
            assert!(output.logits == *alone, "{numerics:?}: sequence {:?}", output.sequence);
        }
    }
}
