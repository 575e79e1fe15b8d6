//! The edges of a plan order every pair of dispatches that touch the same bytes, and none is superfluous.

use lily_gpu::dependencies::{Dependencies, derive};
use lily_gpu::plan::{Access, BufferId, Dispatch, Mode};
use lily_gpu::stage::Stage;
use proptest::prelude::*;

/// Small enough that most plans have conflicts of every kind and pairs without one.
const BUFFERS: usize = 3;
const BYTES: u64 = 12;

fn access() -> impl Strategy<Value = Access> {
    let mode = prop_oneof![Just(Mode::Read), Just(Mode::Write), Just(Mode::Update)];
    (0..BUFFERS, 0..BYTES, 0..BYTES, mode).prop_map(|(buffer, a, b, mode)| Access {
        buffer: BufferId(buffer),
        range: a.min(b)..a.max(b),
        mode,
        traffic: 0,
    })
}

fn dispatch() -> impl Strategy<Value = Dispatch> {
    prop::collection::vec(access(), 0..4).prop_map(|accesses| Dispatch {
        kernel: "any",
        stage: Stage::Embed,
        layer: None,
        grid: [1; 3],
        threads: 1,
        shared_bytes: 0,
        args: Vec::new(),
        accesses,
    })
}

/// Whether two dispatches touch the same byte and one writes it, byte by byte.
fn conflict(a: &Dispatch, b: &Dispatch) -> bool {
    let touched = |dispatch: &Dispatch, buffer, byte, writes: bool| {
        dispatch.accesses.iter().any(|access| {
            access.buffer == BufferId(buffer)
                && access.range.contains(&byte)
                && (!writes || access.mode != Mode::Read)
        })
    };
    (0..BUFFERS).any(|buffer| {
        (0..BYTES).any(|byte| {
            (touched(a, buffer, byte, true) && touched(b, buffer, byte, false))
                || (touched(a, buffer, byte, false) && touched(b, buffer, byte, true))
        })
    })
}

/// `reach[b][a]`: whether edges lead from `a` to `b`, `skip` left out.
fn reachable(dependencies: &Dependencies, skip: Option<(usize, usize)>) -> Vec<Vec<bool>> {
    let count = dependencies.waits_for.len();
    let mut reach = vec![vec![false; count]; count];
    for b in 0..count {
        for &a in dependencies.waits_for[b].iter().filter(|&&a| skip != Some((a, b))) {
            assert!(a < b);
            reach[b][a] = true;
            let earlier = reach[a].clone();
            reach[b].iter_mut().zip(earlier).for_each(|(known, more)| *known |= more);
        }
    }
    reach
}

proptest! {
    #[test]
    fn every_conflict_is_ordered_and_no_edge_is_superfluous(dispatches in prop::collection::vec(dispatch(), 0..14)) {
        let dependencies = derive(&dispatches);
        let reach = reachable(&dependencies, None);
        for b in 0..dispatches.len() {
            for a in 0..b {
                if conflict(&dispatches[a], &dispatches[b]) {
                    prop_assert!(reach[b][a], "{a} and {b} may overlap");
                }
            }
            for &a in &dependencies.waits_for[b] {
                prop_assert!(conflict(&dispatches[a], &dispatches[b]), "{b} waits for {a} without need");
                prop_assert!(!reachable(&dependencies, Some((a, b)))[b][a], "{a} to {b} is implied by others");
            }
        }
    }

    #[test]
    fn the_longest_chain_is_a_chain_and_none_is_longer(dispatches in prop::collection::vec(dispatch(), 0..14)) {
        let dependencies = derive(&dispatches);
        let chain = dependencies.longest_chain();
        for pair in chain.windows(2) {
            prop_assert!(dependencies.waits_for[pair[1]].contains(&pair[0]));
        }
        let reach = reachable(&dependencies, None);
        let mut longest = vec![0; dispatches.len()];
        for b in 0..dispatches.len() {
            longest[b] = 1 + (0..b).filter(|&a| reach[b][a]).map(|a| longest[a]).max().unwrap_or(0);
        }
        prop_assert_eq!(chain.len(), longest.into_iter().max().unwrap_or(0));
    }
}
