//! The prefix cache over the real pages and states of the CPU backend: ten thousand random operations on a tree
//! of prompts, with what must hold after every one.

mod common;

use common::{Random, backend, extend, random_weights, small_geometry};
use lily_cpu::{CpuBackend, Numerics};
use lily_engine::backend::{Backend, SequenceId, Want};
use lily_engine::prefix_cache::{Hit, PrefixCache};
use lily_model::geometry::{Geometry, LayerKind};

const OPERATIONS: usize = 10_000;
/// Every so many operations an answer is compared with the one without a cache.
const COLD: usize = 50;
/// Prompts are no longer than some pages, so that pages are shared, copied and filled.
const LONGEST: usize = 140;

/// A request under way.
struct Running {
    sequence: SequenceId,
    tokens: Vec<u32>,
    began: Option<Hit>,
}

/// Opens a sequence for a prompt of the random tree: some beginning of an earlier one, and some tokens more.
fn begin(
    random: &mut Random,
    backend: &mut CpuBackend,
    cache: &mut PrefixCache,
    known: &[Vec<u32>],
) -> (Running, Vec<f32>) {
    let mut prompt = known[random.next() as usize % known.len()].clone();
    if random.next().is_multiple_of(3) {
        prompt.truncate(prompt.len() - (random.next() as usize % 12).min(prompt.len()));
    }
    let more = 1 + random.next() as usize % 6;
    prompt.extend(random.tokens(more, backend.geometry().vocab));
    if prompt.len() > LONGEST {
        prompt.truncate(1 + random.next() as usize % 20);
    }
    let began = cache.find(&prompt).1;
    if let Some(hit) = began {
        cache.hold(hit.entry);
    }
    let sequence = backend.open(began.map(|hit| hit.snapshot)).unwrap();
    let length = began.map_or(0, |hit| hit.length);
    assert_eq!(backend.length(sequence).unwrap(), length);
    let logits = extend(backend, sequence, &prompt[length..], Want::Logits).logits;
    (Running { sequence, tokens: prompt, began }, logits)
}

fn end(backend: &mut CpuBackend, cache: &mut PrefixCache, running: Running) {
    backend.close(running.sequence);
    if let Some(hit) = running.began {
        cache.release(hit.entry);
    }
}

#[test]
fn ten_thousand_operations_keep_every_count_and_every_bit() {
    let layers = vec![LayerKind::Delta, LayerKind::Attention];
    let weights = random_weights(&Geometry { layers, ..small_geometry() }, 31);
    let mut random = Random::new(32);
    let mut warm = backend(&weights, Numerics::Int8, 1);
    let mut cold = backend(&weights, Numerics::Int8, 1);
    let snapshot_bytes = warm.sequence_bytes(LONGEST);
    let (mut budget, mut cache) = (20 * snapshot_bytes, PrefixCache::new(20 * snapshot_bytes));
    let mut known: Vec<Vec<u32>> = vec![random.tokens(20, weights.geometry.vocab)];
    let mut running: Vec<Running> = Vec::new();
    let (mut begun, mut hits, mut saved) = (0, 0, 0);
    for operation in 0..OPERATIONS {
        match random.next() % 10 {
            0..=4 => {
                let (began, logits) = begin(&mut random, &mut warm, &mut cache, &known);
                begun += 1;
                hits += usize::from(began.began.is_some());
                saved += began.began.map_or(0, |hit| hit.length);
                if operation.is_multiple_of(COLD) {
                    assert!(common::logits_of(&mut cold, &began.tokens) == logits, "operation {operation}");
                }
                running.push(began);
                if running.len() > 4 {
                    end(&mut warm, &mut cache, running.remove(0));
                }
            }
            5..=7 if !running.is_empty() => {
                // Goes on a little and is snapshotted there.
                let index = random.next() as usize % running.len();
                let active = &mut running[index];
                if active.tokens.len() < LONGEST {
                    let more = random.tokens(1, weights.geometry.vocab);
                    extend(&mut warm, active.sequence, &more, Want::Nothing);
                    active.tokens.extend(more);
                }
                let snapshot = warm.snapshot(active.sequence).unwrap();
                cache.insert(&mut warm, &active.tokens, snapshot);
                known.push(active.tokens.clone());
                if known.len() > 40 {
                    known.remove(random.next() as usize % 20);
                }
            }
            8 => _ = cache.evict(&mut warm),
            9 if !running.is_empty() => {
                let index = random.next() as usize % running.len();
                end(&mut warm, &mut cache, running.swap_remove(index));
            }
            _ => {}
        }
        let memory = warm.memory();
        cache.tree().check().unwrap();
        assert_eq!(memory.used, warm.state_bytes() as u64);
        let held = running.iter().filter(|running| running.began.is_some()).count() as u64;
        // Beyond the budget is only what a running request holds.
        assert!(memory.snapshots <= budget + held * snapshot_bytes, "operation {operation}");
        for hit in running.iter().filter_map(|running| running.began) {
            assert_eq!(cache.tree().value(hit.entry), Some(&hit.snapshot), "a held snapshot went");
        }
        if operation % 500 == 499 {
            // With nothing open, two independent counts have to agree: bytes allocated and bytes held.
            running.drain(..).for_each(|running| end(&mut warm, &mut cache, running));
            let memory = warm.memory();
            assert_eq!(memory.used, memory.snapshots);
            if operation % 1000 == 999 {
                // Another budget, from nothing at all to plenty.
                while cache.evict(&mut warm) {}
                assert_eq!((warm.memory().used, cache.tree().len()), (0, 0));
                budget = snapshot_bytes * [2, 5, 10, 30][operation / 1000 % 4];
                cache = PrefixCache::new(budget);
            }
        }
    }
    println!("{hits} of {begun} prompts began from a snapshot, {saved} tokens in");
    assert!(hits > begun / 4, "the test is to find things: {hits} hits of {begun}");
}
