//! What the host does around a pass: what fails leaves everything as it was, bytes are counted once, two steps
//! are under way, weights stay in their files. No kernel runs here.

mod hollow;

use std::time::Duration;

use hollow::Hollow;
use lily_engine::backend::{Backend, BackendError, DecodeStep, Input, SequenceId, Want};
use lily_engine::sampler::{Sampler, SamplingParams};
use lily_gpu::layout::KvFormat;
use lily_gpu::memory::Context;
use lily_gpu::plan::Role;
use lily_metal::device::{Buffer, Device};
use lily_metal::error::DeviceError;
use lily_metal::{MetalBackend, MetalOptions, program, weights};
use lily_model::checkpoint::Checkpoint;
use lily_model::weights::Weights;

const GIB: u64 = 1 << 30;
/// Tokens of a prompt: several pages, and not a whole number of them.
const PROMPT: usize = 150;

fn demo() -> Weights {
    Checkpoint::demo().unwrap().weights().unwrap()
}

fn open(device: &Hollow, state_bytes: u64) -> MetalBackend<Hollow> {
    let options = MetalOptions { context: Context::AtMost(4096), state_bytes, ..MetalOptions::default() };
    MetalBackend::new(device, &demo(), &options).unwrap()
}

fn no_memory() -> DeviceError {
    DeviceError::OutOfMemory { what: "a test".into(), bytes: 1 }
}

fn gone() -> DeviceError {
    DeviceError::Lost { pass: "a test".into(), reason: "it was unplugged".into() }
}

fn late() -> DeviceError {
    DeviceError::Timeout { pass: "a test".into(), after: Duration::from_secs(60) }
}

fn prompt(length: usize) -> Vec<u32> {
    (0..length as u32).collect()
}

/// A sequence that holds a prompt, with a token to go on from.
fn sequence(backend: &mut MetalBackend<Hollow>, length: usize) -> SequenceId {
    let sequence = backend.open(None).unwrap();
    let ticket = backend.extend(sequence, &prompt(length), Want::Token).unwrap();
    backend.collect(ticket).unwrap();
    sequence
}

fn next(sequence: SequenceId) -> DecodeStep {
    DecodeStep { sequence, input: Input::LastSampled, want: Want::Token }
}

#[test]
fn a_pass_that_is_refused_changes_nothing() {
    let device = Hollow::new(8 * GIB, 2 * GIB);
    let mut backend = open(&device, GIB);
    let (a, b) = (sequence(&mut backend, PROMPT), sequence(&mut backend, 64));
    let before = backend.memory();
    for error in [no_memory(), gone(), late()] {
        device.fail_submission(0, error.clone());
        let refused = backend.decode(&[next(a), next(b)]).unwrap_err();
        match &error {
            DeviceError::OutOfMemory { .. } => {
                assert!(matches!(refused, BackendError::OutOfMemory { .. }), "{refused}");
            }
            other => assert_eq!(refused.to_string(), format!("the device failed: {other}")),
        }
        assert_eq!(backend.memory(), before);
        assert_eq!((backend.length(a).unwrap(), backend.length(b).unwrap()), (PROMPT, 64));
        device.fail_submission(0, error);
        backend.extend(a, &prompt(20), Want::Logits).unwrap_err();
        assert_eq!((backend.memory(), backend.length(a).unwrap()), (before, PROMPT));
    }
    let ticket = backend.decode(&[next(a), next(b)]).unwrap();
    assert_eq!(backend.collect(ticket).unwrap().len(), 2);
    assert_eq!((backend.length(a).unwrap(), backend.length(b).unwrap()), (PROMPT + 1, 65));
}

#[test]
fn memory_that_runs_out_is_said_before_anything_is_done() {
    let device = Hollow::new(8 * GIB, 2 * GIB);
    let backend = open(&device, GIB);
    let (page, state) = (backend.sequence_bytes(1) - backend.sequence_bytes(0), backend.sequence_bytes(0));
    // Room for one sequence of three pages and a second one's first.
    let mut backend = open(&device, 2 * state + 4 * page);
    let a = sequence(&mut backend, PROMPT);
    let b = sequence(&mut backend, 64);
    let before = backend.memory();
    assert_eq!(before.used, before.limit);
    assert!(matches!(backend.open(None), Err(BackendError::OutOfMemory { .. })));
    assert!(matches!(backend.snapshot(a), Err(BackendError::OutOfMemory { .. })));
    // `a` has room in its last page and `b` has none: neither takes the step.
    assert!(matches!(backend.decode(&[next(a), next(b)]), Err(BackendError::OutOfMemory { .. })));
    assert_eq!((backend.memory(), backend.length(a).unwrap()), (before, PROMPT));
    let ticket = backend.decode(&[next(a)]).unwrap();
    backend.collect(ticket).unwrap();
    backend.close(a);
    let ticket = backend.decode(&[next(b)]).unwrap();
    backend.collect(ticket).unwrap();

    // The device itself has less than it said: the pool cannot grow.
    let mut backend = open(&device, GIB);
    let a = sequence(&mut backend, 64);
    let before = backend.memory();
    device.fail_allocation(0, no_memory());
    let refused = backend.extend(a, &prompt(64 * 20), Want::Nothing).unwrap_err();
    assert!(matches!(refused, BackendError::OutOfMemory { bytes, .. } if bytes as u64 == page), "{refused}");
    assert_eq!((backend.memory(), backend.length(a).unwrap()), (before, 64));
    let ticket = backend.extend(a, &prompt(64 * 20), Want::Nothing).unwrap();
    backend.collect(ticket).unwrap();
}

#[test]
fn what_a_failed_pass_wrote_is_lost_and_nothing_else() {
    for error in [no_memory(), gone(), late()] {
        let device = Hollow::new(8 * GIB, 2 * GIB);
        let mut backend = open(&device, GIB);
        let (a, b) = (sequence(&mut backend, PROMPT), sequence(&mut backend, 64));
        let snapshot = backend.snapshot(a).unwrap();
        let ticket = backend.decode(&[next(b)]).unwrap();
        backend.collect(ticket).unwrap();

        device.fail_pass(0, error.clone());
        let (failed, after) = (backend.decode(&[next(a)]).unwrap(), backend.decode(&[next(a)]).unwrap());
        let said = backend.collect(failed).unwrap_err();
        match error {
            DeviceError::OutOfMemory { .. } => assert!(matches!(said, BackendError::OutOfMemory { .. })),
            other => assert_eq!(said.to_string(), format!("the device failed: {other}")),
        }
        // The step behind it went on from what it left.
        let _ = backend.collect(after);
        for refused in [
            backend.decode(&[next(a)]).map(|_| ()),
            backend.extend(a, &[1], Want::Token).map(|_| ()),
            backend.snapshot(a).map(|_| ()),
        ] {
            assert!(refused.unwrap_err().to_string().contains("was lost in a pass that failed"));
        }
        // The other sequence, and what was frozen before, go on.
        let resumed = backend.open(Some(snapshot)).unwrap();
        assert_eq!(backend.length(resumed).unwrap(), PROMPT);
        let ticket = backend.decode(&[next(b), next(resumed)]).unwrap();
        assert_eq!(backend.collect(ticket).unwrap().len(), 2);
        [a, b, resumed].into_iter().for_each(|sequence| backend.close(sequence));
        backend.discard(snapshot);
        assert_eq!(backend.memory().used, 0);
    }
}

#[test]
fn a_call_that_fails_in_its_middle_closes_the_sequence() {
    let device = Hollow::new(8 * GIB, 2 * GIB);
    let mut backend = open(&device, GIB);
    let a = backend.open(None).unwrap();
    // One token more than a pass takes.
    let tokens = prompt(backend.prefill_chunks().alone + 1);
    device.fail_submission(1, gone());
    backend.extend(a, &tokens, Want::Token).unwrap_err();
    assert!(matches!(backend.length(a), Err(BackendError::Unknown(_))));
    assert_eq!(backend.memory().used, 0);
}

#[test]
fn two_steps_are_under_way_and_never_three() {
    let device = Hollow::new(8 * GIB, 2 * GIB);
    let mut backend = open(&device, GIB);
    let a = sequence(&mut backend, 1);
    let passes = device.passes();
    let tickets: Vec<_> = (0..6).map(|_| backend.decode(&[next(a)]).unwrap()).collect();
    assert_eq!((device.most_under_way(), device.passes() - passes), (2, 6));
    for ticket in tickets {
        assert_eq!(backend.collect(ticket).unwrap().len(), 1);
    }
    // Copies have no passes of their own.
    let passes = device.passes();
    let snapshot = backend.snapshot(a).unwrap();
    let b = backend.open(Some(snapshot)).unwrap();
    let ticket = backend.decode(&[next(a), next(b)]).unwrap();
    backend.collect(ticket).unwrap();
    assert_eq!(device.passes() - passes, 1);
}

#[test]
fn how_tokens_are_chosen_is_counted_and_copied_with_the_next_pass() {
    let device = Hollow::new(8 * GIB, 2 * GIB);
    let mut backend = open(&device, GIB);
    let a = sequence(&mut backend, 1);
    let (before, passes) = (backend.memory().used, device.passes());
    let state = |params: SamplingParams| Sampler::new(params, &[]).state().unwrap();
    let warm = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    let penalized = SamplingParams { presence_penalty: 1.0, ..warm.clone() };
    assert!(backend.sample_on_device(a, &state(penalized)).unwrap());
    let table = 4 * backend.geometry().vocab as u64;
    let recipe = backend.memory().used - before - table;
    assert!((1..1024).contains(&recipe), "{recipe} bytes beside a table");
    // What is said last holds.
    assert!(backend.sample_on_device(a, &state(warm.clone())).unwrap());
    assert_eq!((backend.memory().used, device.passes()), (before + recipe, passes));
    let ticket = backend.decode(&[next(a)]).unwrap();
    backend.collect(ticket).unwrap();
    assert_eq!(device.passes(), passes + 1);
    assert!(matches!(
        backend.sample_on_device(SequenceId(999), &state(warm.clone())),
        Err(BackendError::Unknown(_))
    ));

    // Where there is no memory for it the host chooses, and nothing has changed.
    let before = backend.memory();
    for well in [0, 1, 2] {
        let biased = SamplingParams { logit_bias: vec![(1, 1.0)], ..warm.clone() };
        // Three more tables and recipes than there is room for: the pools grow, then memory of its own is asked for.
        let others: Vec<_> = (0..3).map(|_| backend.open(None).unwrap()).collect();
        device.fail_allocation(well, no_memory());
        let taken: Vec<bool> =
            others.iter().map(|&id| backend.sample_on_device(id, &state(biased.clone())).unwrap()).collect();
        assert_eq!(taken.iter().filter(|&&taken| !taken).count(), 1, "{taken:?}");
        others.into_iter().for_each(|id| backend.close(id));
        assert_eq!(backend.memory(), before);
    }
    backend.close(a);
    assert_eq!(backend.memory().used, 0);
}

#[test]
fn every_byte_of_state_is_counted_once() {
    let device = Hollow::new(8 * GIB, 2 * GIB);
    let mut backend = open(&device, GIB);
    assert_eq!((backend.memory().used, backend.memory().snapshots), (0, 0));
    let (alone, state) = (backend.sequence_bytes(PROMPT), backend.sequence_bytes(0));
    let page = backend.sequence_bytes(1) - state;
    let a = sequence(&mut backend, PROMPT);
    assert_eq!(backend.memory().used, alone);
    let snapshot = backend.snapshot(a).unwrap();
    assert_eq!((backend.memory().used, backend.memory().snapshots), (alone + state, alone));
    // The next token goes into a page that the snapshot has too.
    let ticket = backend.decode(&[next(a)]).unwrap();
    backend.collect(ticket).unwrap();
    assert_eq!(backend.memory().used, alone + state + page);
    backend.close(a);
    assert_eq!((backend.memory().used, backend.memory().snapshots), (alone, alone));
    // An export keeps what it writes, after the snapshot is gone, until it has written it.
    let export = backend.export(snapshot).unwrap();
    backend.discard(snapshot);
    assert_eq!((backend.memory().used, backend.memory().snapshots), (alone, 0));
    let mut bytes = Vec::new();
    std::thread::scope(|scope| scope.spawn(|| export(&mut bytes)).join().unwrap().unwrap());
    assert_eq!((backend.memory().used, bytes.len() as u64), (0, alone - 4));

    let imported = backend.import(PROMPT, &mut &bytes[..]).unwrap();
    assert_eq!((backend.memory().used, backend.memory().snapshots), (alone, alone));
    bytes.push(0);
    for damaged in [&bytes[..bytes.len() - 2], &bytes[..]] {
        assert!(matches!(backend.import(PROMPT, &mut &*damaged), Err(BackendError::BadExport(_))));
        assert_eq!(backend.memory().used, alone);
    }
    backend.discard(imported);
    assert_eq!(backend.memory().used, 0);
}

#[test]
fn weights_stay_in_their_files_where_the_kernels_can_read_them() {
    let dir = tempfile::tempdir().unwrap();
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/checkpoint");
    for entry in std::fs::read_dir(source).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let weights = Checkpoint::open(dir.path()).unwrap().weights().unwrap();
    let largest = weights.embed_tokens.data.len() as u64;
    // One buffer for the file, or as many as it takes where none may be much longer than the largest tensor.
    for (max_buffer, least_buffers) in [(2 * GIB, 1), (largest + (64 << 10), 3)] {
        let device = Hollow::new(8 * GIB, max_buffer);
        let plans = program::plans(&weights, device.info(), program::SHORT, KvFormat::F16);
        let plan = &plans[0].1;
        let loaded = weights::load(&device, &weights, plan).unwrap();
        let mapped = device.mapped();
        assert!(mapped.len() >= least_buffers, "{} buffers", mapped.len());
        let names: Vec<_> = plan.buffers.iter().filter(|buffer| buffer.role == Role::Weights).collect();
        for buffer in &names {
            let (memory, offset) = loaded.place(&buffer.name).unwrap();
            assert!(offset.is_multiple_of(4) && offset + buffer.bytes as usize <= memory.bytes());
        }
        let mut bytes = vec![0; weights.lm_head.data.len()];
        let (memory, offset) = loaded.place("head.lm_head").unwrap();
        memory.read(offset, &mut bytes);
        assert!(bytes == weights.lm_head.data[..], "the head is what the file has");
        let copied = device.allocated();
        assert!(copied < weights::bytes(plan) / 8, "{copied} bytes of vectors and misplaced tensors");
        assert_eq!(copied, loaded.copied());
    }

    // What the program itself holds begins anywhere: it is copied, and is as right.
    let weights = demo();
    let device = Hollow::new(8 * GIB, 2 * GIB);
    let plans = program::plans(&weights, device.info(), program::SHORT, KvFormat::F16);
    let loaded = weights::load(&device, &weights, &plans[0].1).unwrap();
    let (memory, offset) = loaded.place("layers.3.attn_in.k").unwrap();
    let lily_model::weights::Mixer::Attention(layer) = &weights.layers[3].mixer else { unreachable!() };
    let mut bytes = vec![0; layer.k_proj.data.len()];
    memory.read(offset, &mut bytes);
    assert!(bytes == layer.k_proj.data[..]);
}

#[test]
fn formats_that_the_kernels_do_not_read_are_named() {
    let mut weights = demo();
    weights.layers[1].moe.down_proj.format = lily_model::weights::Format::Affine8;
    let device = Hollow::new(8 * GIB, 2 * GIB);
    let refused = MetalBackend::new(&device, &weights, &MetalOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("moe_down down of layer 1 is 8-bit"), "{refused}");
}
