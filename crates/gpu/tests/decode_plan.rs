//! The decode plan of the full model keeps what the design promises of it.

use std::collections::BTreeMap;

use lily_gpu::decode::{self, MAX_ROWS, Shape};
use lily_gpu::layout::{KvFormat, KvLayout};
use lily_gpu::plan::{Plan, Role};
use lily_gpu::stage::Stage;
use lily_gpu::target::Target;
use lily_model::checkpoint::Checkpoint;
use lily_model::cost::Cost;
use lily_model::geometry::Geometry;
use lily_model::weights::Weights;

/// Kernels that a decoded token may take, and how many of them may wait for each other (issue 6).
const MOST_KERNELS: usize = 330;
const MOST_STAGES: usize = 260;
/// How far the bytes may be from what the model itself asks for.
const BYTES_OVER_FLOOR: f64 = 0.03;
/// The same for a batch: the parts of attention are written and read once more for each sequence.
const BATCH_BYTES_OVER_FLOOR: f64 = 0.08;

fn targets() -> [Target; 2] {
    [Target::HOPPER, Target::APPLE_MAX]
}

fn full_model() -> Weights {
    Weights::outline(&Geometry::qwen3_6_35b_a3b())
}

#[test]
fn a_token_of_the_full_model_takes_at_most_330_kernels_in_260_dependent_stages() {
    let weights = full_model();
    for target in targets() {
        let plan = decode::record(&weights, target, Shape { rows: 1, context: 256, sampled: false });
        let chain = plan.dependencies.longest_chain();
        let (kernels, stages) = (plan.dispatches.len(), chain.len());
        assert!(kernels <= MOST_KERNELS && stages <= MOST_STAGES, "{target}: {kernels}, {stages}");
        assert!(chain.is_sorted());
    }
}

#[test]
fn tokens_as_requests_ask_take_four_kernels_more_behind_the_others() {
    let weights = full_model();
    let shape = Shape { rows: 1, context: 256, sampled: false };
    let [greedy, sampled] =
        [false, true].map(|sampled| decode::record(&weights, Target::APPLE_MAX, Shape { sampled, ..shape }));
    let count = greedy.dispatches.len();
    let kernels: Vec<&str> = sampled.dispatches[count..].iter().map(|dispatch| dispatch.kernel).collect();
    assert_eq!(kernels, ["sample_largest", "sample_weigh", "sample_list", "sample_choose"]);
    let same = greedy.dispatches.iter().zip(&sampled.dispatches);
    assert!(same.into_iter().all(|(a, b)| (a.kernel, a.grid, a.threads) == (b.kernel, b.grid, b.threads)));
    // The greedy token is chosen beside them.
    let longer = sampled.dependencies.longest_chain().len() - greedy.dependencies.longest_chain().len();
    assert_eq!(longer, 3);
    assert!(
        sampled.dispatches.len() <= MOST_KERNELS && sampled.dependencies.longest_chain().len() <= MOST_STAGES
    );
    // CUDA launches them by itself.
    let [greedy, sampled] =
        [false, true].map(|sampled| decode::record(&weights, Target::HOPPER, Shape { sampled, ..shape }));
    assert_eq!(greedy.dispatches.len(), sampled.dispatches.len());
}

#[test]
fn its_bytes_are_those_that_the_model_asks_for() {
    let weights = full_model();
    let cost = Cost::of(&weights);
    let q8 = targets().map(|target| target.with_kv(KvFormat::Q8));
    for target in targets().into_iter().chain(q8) {
        let kv = KvLayout::new(&weights.geometry, target.kv()).token_bytes() as u64;
        for (rows, context) in [(1, 256), (1, 4096), (1, 131_072), (8, 1024), (32, 1024)] {
            let plan = decode::record(&weights, target, Shape { rows, context, sampled: false });
            let moved = plan.traffic(None, None).total() as f64;
            let floor = cost.batch_bytes(rows, context, kv) as f64;
            let over = moved / floor - 1.0;
            let most = if rows == 1 { BYTES_OVER_FLOOR } else { BATCH_BYTES_OVER_FLOOR };
            assert!(over.abs() <= most, "{target}, {rows} at {context}: {over:.4}");
        }
    }
}

#[test]
fn all_weights_state_and_cache_are_used_once_and_nothing_else_is_large() {
    let weights = full_model();
    let plan = decode::record(&weights, Target::HOPPER, Shape { rows: 1, context: 4096, sampled: false });
    let (state, kv) = (plan.traffic(None, Some(Role::State)), plan.traffic(None, Some(Role::Kv)));
    let buffer = |role| plan.buffers.iter().filter(|b| b.role == role).map(|b| b.bytes).sum::<u64>();
    assert_eq!((state.read, state.written), (buffer(Role::State), buffer(Role::State)));
    assert_eq!((kv.read, kv.written), (buffer(Role::Kv), buffer(Role::Kv) / 4096));
    assert_eq!(plan.traffic(None, Some(Role::Weights)).written, 0);
    assert_eq!(Stage::ALL.map(|stage| plan.kernels(stage)).iter().sum::<usize>(), plan.dispatches.len());
}

#[test]
fn a_stage_waits_for_what_it_reads_and_for_nothing_twice() {
    let weights = Weights::outline(Checkpoint::demo().unwrap().geometry());
    for target in targets() {
        for rows in [1, MAX_ROWS] {
            let plan = decode::record(&weights, target, Shape { rows, context: 1000, sampled: false });
            let mut readers: BTreeMap<&str, usize> = BTreeMap::new();
            for (index, waits) in plan.dependencies.waits_for.iter().enumerate() {
                assert!(
                    index == 0 || !waits.is_empty(),
                    "{} starts by itself",
                    plan.dispatches[index].kernel
                );
                *readers.entry(plan.dispatches[index].kernel).or_default() += 1;
            }
            let layers = weights.layers.len();
            assert_eq!(
                (
                    readers[if rows == 1 { "moe_down" } else { "moe_down_batch" }],
                    readers["embed"],
                    readers["sample"]
                ),
                (layers, 1, 1)
            );
            within_bounds(&plan);
        }
    }
}

fn within_bounds(plan: &Plan) {
    for dispatch in &plan.dispatches {
        for access in &dispatch.accesses {
            let buffer = &plan.buffers[access.buffer.0];
            assert!(access.range.end <= buffer.bytes, "{} of {}", dispatch.kernel, buffer.name);
        }
    }
}
