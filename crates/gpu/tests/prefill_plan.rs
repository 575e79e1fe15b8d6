//! The plan of a prompt reads what decode's plan reads, and nothing before it is there.

use std::collections::{HashMap, HashSet};

use lily_gpu::decode::{self, Shape};
use lily_gpu::layout::KvFormat;
use lily_gpu::plan::{Plan, Role};
use lily_gpu::prefill::{cuda, metal};
use lily_gpu::target::Target;
use lily_model::geometry::Geometry;
use lily_model::weights::Weights;

const HOPPER_Q8: Target = Target::Cuda { cores: 132, kv: KvFormat::Q8 };
const TARGETS: [Target; 3] = [Target::HOPPER, HOPPER_Q8, Target::APPLE_MAX];

fn plan(weights: &Weights, target: Target, rows: usize) -> Plan {
    let shape = Shape { rows, context: weights.geometry.max_context, sampled: false };
    match target {
        Target::Cuda { .. } => cuda::record(weights, target, shape),
        Target::Metal { .. } => metal::record(weights, target, shape),
    }
}

fn weight_bytes(plan: &Plan) -> HashMap<&str, u64> {
    let buffers = plan.buffers.iter().filter(|buffer| buffer.role == Role::Weights);
    buffers.map(|buffer| (buffer.name.as_str(), buffer.bytes)).collect()
}

#[test]
fn its_weights_are_those_of_decode() {
    let weights = Weights::outline(&Geometry::qwen3_6_35b_a3b());
    for target in TARGETS {
        let step = decode::record(&weights, target, Shape { rows: 1, context: 4096, sampled: false });
        let prompt = plan(&weights, target, 2048);
        let (found, mut expected) = (weight_bytes(&prompt), weight_bytes(&step));
        if matches!(target, Target::Cuda { .. }) {
            // There the last token goes through decode.
            assert!(expected.remove("head").is_some() && expected.remove("norm").is_some());
        }
        assert_eq!(found, expected, "{target}");
    }
}

#[test]
fn nothing_is_read_that_no_kernel_before_has_written() {
    let weights = Weights::outline(&Geometry::qwen3_6_35b_a3b());
    for target in TARGETS {
        let plan = plan(&weights, target, 512);
        let mut written = HashSet::new();
        for dispatch in &plan.dispatches {
            let activations = dispatch
                .accesses
                .iter()
                .filter(|access| plan.buffers[access.buffer.0].role == Role::Activations);
            for access in activations.clone().filter(|access| access.mode.reads()) {
                let name = &plan.buffers[access.buffer.0].name;
                assert!(written.contains(&access.buffer), "{target}: {} reads {name}", dispatch.kernel);
            }
            written.extend(activations.filter(|access| access.mode.writes()).map(|access| access.buffer));
        }
    }
}

#[test]
fn thousands_of_tokens_hand_each_other_less_than_a_gigabyte() {
    let weights = Weights::outline(&Geometry::qwen3_6_35b_a3b());
    let bytes = |target, rows| -> u64 {
        let plan = plan(&weights, target, rows);
        plan.buffers.iter().filter(|b| b.role == Role::Activations).map(|b| b.bytes).sum()
    };
    for (target, rows, most) in [
        (Target::HOPPER, 4096, 1_000_000_000),
        // Of which 52 MB are room for spans of a long context, and 21 MB for places that experts leave empty.
        (Target::HOPPER, 64, 90_000_000),
        // And 537 MB for a layer's pages of the whole context in halves.
        (HOPPER_Q8, 64, 640_000_000),
        (Target::APPLE_MAX, 2048, 500_000_000),
        (Target::APPLE_MAX, 32, 50_000_000),
    ] {
        let bytes = bytes(target, rows);
        assert!(bytes < most, "{target}, {rows} tokens: {bytes}");
    }
}

/// The last rows go through the head on the device itself, and nothing before it waits for the host.
#[test]
fn a_prompt_of_the_full_model_takes_at_most_440_kernels_on_metal() {
    let weights = Weights::outline(&Geometry::qwen3_6_35b_a3b());
    let plan = plan(&weights, Target::APPLE_MAX, 2048);
    assert!(plan.dispatches.len() <= 440, "{}", plan.dispatches.len());
    assert_eq!(plan.dispatches.last().map(|dispatch| dispatch.kernel), Some("sample"));
    for dispatch in &plan.dispatches {
        assert!(!dispatch.grid.contains(&0), "{}", dispatch.kernel);
    }
}
