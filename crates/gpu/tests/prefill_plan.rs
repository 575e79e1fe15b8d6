//! The plan of a prompt reads what decode's plan reads, and nothing before it is there.

use std::collections::{HashMap, HashSet};

use lily_gpu::decode::{self, Shape};
use lily_gpu::plan::{Plan, Role};
use lily_gpu::prefill;
use lily_gpu::target::Target;
use lily_model::geometry::Geometry;
use lily_model::weights::Weights;

fn plan(weights: &Weights, rows: usize) -> Plan {
    prefill::record(weights, Shape { rows, context: weights.geometry.max_context, sampled: false })
}

fn weight_bytes(plan: &Plan) -> HashMap<&str, u64> {
    let buffers = plan.buffers.iter().filter(|buffer| buffer.role == Role::Weights);
    buffers.map(|buffer| (buffer.name.as_str(), buffer.bytes)).collect()
}

#[test]
fn its_weights_are_those_of_decode_but_for_the_head() {
    let weights = Weights::outline(&Geometry::qwen3_6_35b_a3b());
    let (prompt, step) = (
        plan(&weights, 4096),
        decode::record(&weights, Target::HOPPER, Shape { rows: 1, context: 4096, sampled: false }),
    );
    let (found, mut expected) = (weight_bytes(&prompt), weight_bytes(&step));
    assert!(expected.remove("head").is_some() && expected.remove("norm").is_some());
    assert_eq!(found, expected);
}

#[test]
fn nothing_is_read_that_no_kernel_before_has_written() {
    let weights = Weights::outline(&Geometry::qwen3_6_35b_a3b());
    let plan = plan(&weights, 512);
    let mut written = HashSet::new();
    for dispatch in &plan.dispatches {
        let activations =
            dispatch.accesses.iter().filter(|access| plan.buffers[access.buffer.0].role == Role::Activations);
        for access in activations.clone().filter(|access| access.mode.reads()) {
            let name = &plan.buffers[access.buffer.0].name;
            assert!(written.contains(&access.buffer), "{} reads {name}", dispatch.kernel);
        }
        written.extend(activations.filter(|access| access.mode.writes()).map(|access| access.buffer));
    }
}

#[test]
fn four_thousand_tokens_hand_each_other_less_than_a_gigabyte() {
    let weights = Weights::outline(&Geometry::qwen3_6_35b_a3b());
    let bytes = |rows| -> u64 {
        let plan = plan(&weights, rows);
        plan.buffers.iter().filter(|b| b.role == Role::Activations).map(|b| b.bytes).sum()
    };
    assert!(bytes(4096) < 1_000_000_000, "{}", bytes(4096));
    assert!(bytes(64) < 17_000_000, "{}", bytes(64));
}
