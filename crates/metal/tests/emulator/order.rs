//! Whatever a pass leaves open is left open, and what it orders is kept.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use lily_metal::device::{Buffer, Completion, Device, Pass, Transfer};
use lily_metal::emulator::{Emulator, Memory, Options};
use lily_model::weights::Blob;

use crate::support::{all_of, dispatch, emulator, emulators, run, submit, words, written};

/// Puts its turn into its place: who comes first is seen in the buffer.
const TURNS: &str = "kernel void k(device atomic_uint* turn [[buffer(0)]], device uint* at [[buffer(1)]], \
                     uint i [[thread_position_in_grid]]) { at[i] = atomic_fetch_add_explicit(turn, 1u, memory_order_relaxed); }";

fn turns(seed: u64, tracked: bool, groups: u32, threads: u32) -> Vec<u32> {
    let gpu = Emulator::new(Options { seed, tracked }).unwrap();
    let (turn, at) =
        (written(&gpu, "turn", &[0; 4]), gpu.allocate("at", (groups * threads * 4) as usize).unwrap());
    run(&gpu, dispatch(&gpu, TURNS, groups, threads, &[&turn, &at]));
    words(&at)
}

#[test]
fn threads_and_threadgroups_come_in_an_order_that_the_seed_decides() {
    for (groups, threads, tracked) in [(1, 64, true), (1, 64, false), (64, 1, true), (64, 1, false)] {
        let turns = |seed| turns(seed, tracked, groups, threads);
        assert_eq!(turns(1), turns(1));
        assert_ne!(turns(1), turns(2));
        let mut all = turns(3);
        assert_ne!(all, (0..64).collect::<Vec<_>>());
        all.sort_unstable();
        assert_eq!(all, (0..64).collect::<Vec<_>>());
    }
}

#[test]
fn lanes_and_simdgroups_come_in_another_order_after_a_barrier() {
    for barrier in ["threadgroup_barrier", "simdgroup_barrier"] {
        let body = format!(
            "kernel void k(device atomic_uint* turn [[buffer(0)]], device uint* at [[buffer(1)]], uint i [[thread_position_in_grid]]) {{\n\
             for (uint part = 0; part < 4; ++part) {{ at[part * 64 + i] = atomic_fetch_add_explicit(turn, 1u, memory_order_relaxed);\n\
             {barrier}(mem_flags::mem_device); }} }}"
        );
        for gpu in emulators() {
            let (turn, at) = (written(&gpu, "turn", &[0; 4]), gpu.allocate("at", 4 * 64 * 4).unwrap());
            run(&gpu, dispatch(&gpu, &body, 1, 64, &[&turn, &at]));
            let ranks = |part: &[u32]| {
                let mut threads: Vec<usize> = (0..32).collect();
                threads.sort_by_key(|&thread| part[thread]);
                threads
            };
            let orders: HashSet<Vec<usize>> = words(&at).chunks(64).map(ranks).collect();
            assert_eq!(orders.len(), 4, "{barrier}: {orders:?}");
        }
    }
}

/// Adds a digit to the number in its buffer.
fn digit(gpu: &Emulator, memory: &Memory, digit: u32) -> lily_metal::device::Dispatch<Emulator> {
    let body = format!("kernel void k(device uint* a [[buffer(0)]]) {{ a[0] = a[0] * 10 + {digit}; }}");
    dispatch(gpu, &body, 1, 1, &[memory])
}

#[test]
fn dispatches_keep_the_order_of_their_edges() {
    for seed in 0..8 {
        let gpu = emulator(seed);
        let memory = written(&gpu, "digits", &[0; 4]);
        let mut all: Vec<_> = (1..=5).map(|d| digit(&gpu, &memory, d)).collect();
        for (i, dispatch) in all.iter_mut().enumerate().skip(1) {
            dispatch.waits_for = vec![i - 1];
        }
        submit(&gpu, &all).unwrap().wait(Duration::MAX).unwrap();
        assert_eq!(words(&memory), [12345]);
    }
}

#[test]
fn dispatches_without_an_edge_come_in_any_order() {
    // Each takes the next turn. Nothing that they declare conflicts: the counter is not declared as one that they share,
    // which the emulator does not ask of passes that it does not track.
    let orders: HashSet<Vec<u32>> = (0..8)
        .map(|seed| {
            let gpu = Emulator::new(Options { seed, tracked: false }).unwrap();
            let (turn, at) = (written(&gpu, "turn", &[0; 4]), written(&gpu, "at", &[0; 16]));
            let all: Vec<_> = (0..4)
                .map(|i| {
                    let mut one = dispatch(&gpu, TURNS, 1, 1, &[&turn, &at]);
                    if let lily_metal::device::Argument::Buffer { offset, .. } = &mut one.arguments[1] {
                        *offset = 4 * i;
                    }
                    one
                })
                .collect();
            submit(&gpu, &all).unwrap().wait(Duration::MAX).unwrap();
            words(&at)
        })
        .collect();
    assert!(orders.len() > 1, "{orders:?}");
}

#[test]
fn dispatches_that_conflict_and_have_no_edge_are_refused() {
    let gpu = emulator(1);
    let memory = written(&gpu, "digits", &[0; 4]);
    let mut all: Vec<_> = (1..=3).map(|d| digit(&gpu, &memory, d)).collect();
    all[2].waits_for = vec![0, 1];
    let error = submit(&gpu, &all).unwrap_err().to_string();
    assert!(error.contains("bytes 0..4 of digits") && error.contains("no edge orders them"), "{error}");
    // A way over others is an order too.
    all[1].waits_for = vec![0];
    all[2].waits_for = vec![1];
    submit(&gpu, &all).unwrap().wait(Duration::MAX).unwrap();
}

#[test]
fn a_pass_runs_when_it_is_waited_for_and_after_those_before_it() {
    let gpu = emulator(1);
    let memory = written(&gpu, "digits", &[0; 4]);
    let first = submit(&gpu, &[digit(&gpu, &memory, 1)]).unwrap();
    let second = submit(&gpu, &[digit(&gpu, &memory, 2)]).unwrap();
    second.wait(Duration::MAX).unwrap();
    assert!(first.is_done());
    assert_eq!(words(&memory), [12]);
    let third = submit(&gpu, &[digit(&gpu, &memory, 3)]).unwrap();
    while !third.is_done() {}
    assert_eq!(words(&memory), [123]);
}

#[test]
fn a_host_that_touches_what_a_pass_still_works_on_is_found() {
    let gpu = emulator(1);
    let memory = written(&gpu, "digits", &[0; 4]);
    let pass = submit(&gpu, &[digit(&gpu, &memory, 1)]).unwrap();
    words(&memory);
    let error = pass.wait(Duration::MAX).unwrap_err().to_string();
    assert!(error.contains("the host reads digits 0..4 before this pass has ended"), "{error}");
}

#[test]
fn transfers_come_before_and_after_and_carry_what_is_known_of_bytes() {
    let gpu = emulator(1);
    let (a, b) = (gpu.allocate("a", 16).unwrap(), gpu.allocate("b", 16).unwrap());
    let zero = Transfer::Zero { buffer: a.clone(), range: 0..4 };
    let copy = Transfer::Copy { from: a.clone(), from_offset: 0, to: b.clone(), to_offset: 8, bytes: 8 };
    let pass = Pass { label: "test", before: &[zero], dispatches: &[digit(&gpu, &a, 7)], after: &[copy] };
    gpu.submit(&pass).unwrap().wait(Duration::MAX).unwrap();
    assert_eq!(words(&b), [0, 0, 7, 0]);
    // Of the copied bytes the second word was never written.
    let read = "kernel void k(device uint* b [[buffer(0)]]) { b[0] = b[3]; }";
    let fault = crate::support::fault(&gpu, dispatch(&gpu, read, 1, 1, &[&b]));
    assert_eq!(fault.kind, lily_metal::emulator::FaultKind::Unwritten, "{fault}");
}

#[repr(align(4096))]
struct Pages([u8; 4096]);

impl AsRef<[u8]> for Pages {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[test]
fn mapped_bytes_are_read_where_they_are_and_never_written() {
    let gpu = emulator(1);
    let mapped = gpu.map("weights", &Blob::new(Arc::new(Pages([9; 4096])))).unwrap();
    let out = gpu.allocate("out", 4).unwrap();
    let read =
        "kernel void k(device const uint* a [[buffer(0)]], device uint* b [[buffer(1)]]) { b[0] = a[5]; }";
    run(&gpu, dispatch(&gpu, read, 1, 1, &[&mapped, &out]));
    assert_eq!(words(&out), [0x0909_0909]);
    let write = "kernel void k(device uint* a [[buffer(0)]]) { a[0] = 1; }";
    let fault = crate::support::fault(&gpu, dispatch(&gpu, write, 1, 1, &[&mapped]));
    assert_eq!(fault.kind, lily_metal::emulator::FaultKind::ReadOnly, "{fault}");
    assert_eq!(gpu.allocated(), (mapped.bytes() + out.bytes()) as u64);
    drop(mapped);
    assert_eq!(gpu.allocated(), out.bytes() as u64);
    let _ = all_of(&out, true, false);
}
