//! Sequences, snapshots and refusals of the backend.

mod common;

use common::{NUMERICS, Random, backend, backend_with_context, extend, random_weights, small_geometry};
use lily_cpu::{CpuBackend, CpuOptions, Numerics};
use lily_engine::backend::{Backend, BackendError, DecodeStep, Input, SequenceId, Want};

fn greedy(sequence: SequenceId, input: Input) -> DecodeStep {
    DecodeStep { sequence, input, want: Want::Token }
}

#[test]
fn a_snapshot_continues_as_the_sequence_it_was_taken_from() {
    let weights = random_weights(&small_geometry(), 11);
    let tokens = Random::new(12).tokens(200, weights.geometry.vocab);
    for numerics in NUMERICS {
        let mut backend = backend(&weights, numerics, 2);
        let original = backend.open(None).unwrap();
        // 100 is inside a KV page, so that the page is shared and must be copied before it is written.
        extend(&mut backend, original, &tokens[..100], Want::Nothing);
        let snapshot = backend.snapshot(original).unwrap();
        let expected = extend(&mut backend, original, &tokens[100..], Want::Logits).logits;
        extend(&mut backend, original, &tokens[..5], Want::Nothing);
        backend.close(original);

        for _ in 0..2 {
            let resumed = backend.open(Some(snapshot)).unwrap();
            assert_eq!(backend.length(resumed).unwrap(), 100);
            let other = backend.open(Some(snapshot)).unwrap();
            extend(&mut backend, other, &tokens[3..40], Want::Nothing);
            assert!(extend(&mut backend, resumed, &tokens[100..], Want::Logits).logits == expected);
        }
    }
}

#[test]
fn a_step_can_consume_the_token_just_sampled() {
    let weights = random_weights(&small_geometry(), 13);
    let tokens = Random::new(14).tokens(10, weights.geometry.vocab);
    let mut backend = backend(&weights, Numerics::Int8, 2);
    let (named, implied) = (backend.open(None).unwrap(), backend.open(None).unwrap());
    let mut token = extend(&mut backend, named, &tokens, Want::Token).token.unwrap();
    extend(&mut backend, implied, &tokens, Want::Token);
    for _ in 0..8 {
        let steps = [greedy(named, Input::Token(token)), greedy(implied, Input::LastSampled)];
        let ticket = backend.decode(&steps).unwrap();
        let outputs = backend.collect(ticket).unwrap();
        assert_eq!(outputs[0].token, outputs[1].token);
        token = outputs[0].token.unwrap();
    }
}

#[test]
fn a_full_context_is_an_error_that_leaves_the_sequence_usable() {
    let weights = random_weights(&small_geometry(), 15);
    let tokens = Random::new(16).tokens(100, weights.geometry.vocab);
    let mut small = backend_with_context(&weights, Numerics::Int8, 2, 100);
    let sequence = small.open(None).unwrap();
    extend(&mut small, sequence, &tokens[..90], Want::Nothing);
    let error = small.extend(sequence, &tokens[..11], Want::Token).unwrap_err();
    assert!(matches!(error, BackendError::ContextFull { needed: 101, limit: 100 }), "{error}");
    let logits = extend(&mut small, sequence, &tokens[90..], Want::Logits).logits;
    let error = small.decode(&[greedy(sequence, Input::Token(1))]).unwrap_err();
    assert!(matches!(error, BackendError::ContextFull { needed: 101, limit: 100 }), "{error}");
    assert_eq!(small.length(sequence).unwrap(), 100);

    let mut large = backend(&weights, Numerics::Int8, 2);
    assert!(common::logits_of(&mut large, &tokens) == logits);
}

#[test]
fn a_refused_step_changes_no_sequence_of_its_batch() {
    let weights = random_weights(&small_geometry(), 17);
    let vocab = weights.geometry.vocab;
    let tokens = Random::new(18).tokens(30, vocab);
    let mut backend = backend(&weights, Numerics::Int8, 2);
    let (good, bad) = (backend.open(None).unwrap(), backend.open(None).unwrap());
    extend(&mut backend, good, &tokens[..20], Want::Nothing);
    let held = backend.state_bytes();

    let refused = [
        vec![greedy(good, Input::Token(1)), greedy(bad, Input::Token(vocab as u32))],
        vec![greedy(good, Input::Token(1)), greedy(bad, Input::LastSampled)],
        vec![greedy(good, Input::Token(1)), greedy(good, Input::Token(1))],
        vec![greedy(good, Input::Token(1)), greedy(SequenceId(999), Input::Token(1))],
    ];
    for steps in refused {
        assert!(backend.decode(&steps).is_err(), "{steps:?}");
    }
    assert!(backend.extend(good, &[vocab as u32], Want::Nothing).is_err());
    assert!(backend.extend(good, &[], Want::Nothing).is_err());

    assert_eq!((backend.length(good).unwrap(), backend.length(bad).unwrap()), (20, 0));
    assert_eq!(backend.state_bytes(), held);
    let after = extend(&mut backend, good, &tokens[20..], Want::Logits).logits;
    assert!(common::logits_of(&mut backend, &tokens) == after);
}

#[test]
fn memory_grows_by_pages_is_shared_by_snapshots_and_comes_back() {
    let geometry = small_geometry();
    let weights = random_weights(&geometry, 19);
    let mut backend = backend(&weights, Numerics::Int8, 2);
    let attention_layers = 2;
    let page = 2
        * lily_cpu::kv_cache::PAGE_TOKENS
        * geometry.attention.kv_heads
        * geometry.attention.head_dim
        * size_of::<half::f16>();
    let recurrent =
        2 * (geometry.delta.state_elements() + geometry.delta.conv_tail_elements()) * size_of::<f32>();

    let sequence = backend.open(None).unwrap();
    assert_eq!(backend.state_bytes(), recurrent);
    extend(&mut backend, sequence, &[1; 64], Want::Nothing);
    assert_eq!(backend.state_bytes(), recurrent + attention_layers * page);
    extend(&mut backend, sequence, &[1], Want::Nothing);
    assert_eq!(backend.state_bytes(), recurrent + 2 * attention_layers * page);

    let snapshot = backend.snapshot(sequence).unwrap();
    assert_eq!(backend.state_bytes(), 2 * recurrent + 2 * attention_layers * page);
    // The partly filled page is shared, and so is copied before it is written.
    extend(&mut backend, sequence, &[1], Want::Nothing);
    assert_eq!(backend.state_bytes(), 2 * recurrent + 3 * attention_layers * page);

    backend.close(sequence);
    backend.discard(snapshot);
    assert_eq!(backend.state_bytes(), 0);
    assert!(backend.length(sequence).is_err());
    assert!(backend.open(Some(snapshot)).is_err());
}

#[test]
fn what_comes_back_is_what_was_wanted() {
    let weights = random_weights(&small_geometry(), 21);
    let vocab = weights.geometry.vocab;
    let tokens = Random::new(22).tokens(9, vocab);
    let mut backend = backend(&weights, Numerics::Int8, 2);
    let mut run = |want| {
        let sequence = backend.open(None).unwrap();
        extend(&mut backend, sequence, &tokens, want)
    };
    let all = run(Want::AllLogits);
    let last = run(Want::Logits);
    assert_eq!(all.logits.len(), tokens.len() * vocab);
    assert!(all.logits[(tokens.len() - 1) * vocab..] == last.logits);
    let best = (0..vocab).rev().max_by(|&a, &b| last.logits[a].total_cmp(&last.logits[b])).unwrap();
    let token = run(Want::Token);
    assert_eq!((token.token, token.logits.len()), (Some(best as u32), 0));
    let nothing = run(Want::Nothing);
    assert_eq!((nothing.token, nothing.logits.len()), (None, 0));
}

#[test]
fn what_snapshots_hold_is_counted_once_and_within_the_limit() {
    let geometry = small_geometry();
    let weights = random_weights(&geometry, 23);
    let mut backend = backend(&weights, Numerics::Int8, 2);
    let state = backend.sequence_bytes(0);
    let page = backend.sequence_bytes(1) - state;
    assert_eq!(backend.sequence_bytes(65), state + 2 * page);

    let sequence = backend.open(None).unwrap();
    extend(&mut backend, sequence, &[1; 100], Want::Nothing);
    assert_eq!(backend.memory().used, backend.sequence_bytes(100));
    assert_eq!(backend.memory().snapshots, 0);
    let first = backend.snapshot(sequence).unwrap();
    assert_eq!(backend.memory().snapshots, state + 2 * page);
    extend(&mut backend, sequence, &[1; 100], Want::Nothing);
    let second = backend.snapshot(sequence).unwrap();
    // Of the first's two pages the full one is shared; the other was copied before it was filled.
    assert_eq!(backend.memory().snapshots, 2 * state + 5 * page);
    let export = backend.export(first).unwrap();
    backend.discard(first);
    assert_eq!(backend.memory().snapshots, state + 4 * page);
    assert_eq!(backend.memory().used, 3 * state + 5 * page, "the export keeps what it will write");
    drop(export);
    backend.discard(second);
    assert_eq!(backend.memory().snapshots, 0);
    assert_eq!(backend.memory().used, backend.sequence_bytes(200));
}

#[test]
fn the_limit_of_state_refuses_and_changes_nothing() {
    let weights = random_weights(&small_geometry(), 25);
    let room = backend(&weights, Numerics::Int8, 2).sequence_bytes(128) as usize;
    let options = CpuOptions { threads: Some(2), state_bytes: room, ..CpuOptions::default() };
    let mut backend = CpuBackend::new(weights, options).unwrap();
    let sequence = backend.open(None).unwrap();
    let refused = |result| matches!(result, Err(BackendError::OutOfMemory { .. }));
    assert!(refused(backend.extend(sequence, &[1; 129], Want::Token).map(drop)));
    extend(&mut backend, sequence, &[1; 128], Want::Token);
    assert!(refused(backend.decode(&[greedy(sequence, Input::LastSampled)]).map(drop)));
    assert!(refused(backend.snapshot(sequence).map(drop)));
    assert!(refused(backend.open(None).map(drop)));
    assert_eq!((backend.length(sequence).unwrap(), backend.memory().used), (128, room as u64));
}

#[test]
fn an_exported_snapshot_continues_in_another_backend() {
    let weights = random_weights(&small_geometry(), 27);
    let tokens = Random::new(28).tokens(200, weights.geometry.vocab);
    for numerics in NUMERICS {
        let mut first = backend(&weights, numerics, 2);
        let sequence = first.open(None).unwrap();
        extend(&mut first, sequence, &tokens[..100], Want::Nothing);
        let snapshot = first.snapshot(sequence).unwrap();
        let mut saved = Vec::new();
        first.export(snapshot).unwrap()(&mut saved).unwrap();
        let expected = extend(&mut first, sequence, &tokens[100..], Want::Logits).logits;

        let mut second = backend(&weights, numerics, 1);
        assert_eq!(first.layout(), second.layout());
        for wrong in [99, 101, 0, usize::MAX] {
            assert!(second.import(wrong, &mut saved.as_slice()).is_err());
        }
        assert!(second.import(100, &mut &saved[..saved.len() - 1]).is_err());
        assert_eq!(second.state_bytes(), 0);
        let snapshot = second.import(100, &mut saved.as_slice()).unwrap();
        let sequence = second.open(Some(snapshot)).unwrap();
        assert!(extend(&mut second, sequence, &tokens[100..], Want::Logits).logits == expected);
    }
}

#[test]
fn what_is_saved_is_named_by_its_numbers_and_not_read_as_others() {
    let weights = random_weights(&small_geometry(), 29);
    let tokens = Random::new(30).tokens(100, weights.geometry.vocab);
    for (index, numerics) in NUMERICS.into_iter().enumerate() {
        let mut first = backend(&weights, numerics, 2);
        let sequence = first.open(None).unwrap();
        extend(&mut first, sequence, &tokens, Want::Nothing);
        let snapshot = first.snapshot(sequence).unwrap();
        let mut saved = Vec::new();
        first.export(snapshot).unwrap()(&mut saved).unwrap();
        for other in NUMERICS.into_iter().skip(index + 1) {
            let mut second = backend(&weights, other, 2);
            assert_ne!(first.layout(), second.layout());
            assert!(second.import(100, &mut saved.as_slice()).is_err(), "{numerics:?} as {other:?}");
        }
    }
}
