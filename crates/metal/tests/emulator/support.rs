//! One kernel on one emulated GPU.

use std::time::Duration;

use lily_metal::DeviceError;
use lily_metal::device::{Argument, Buffer, Completion, Device, Dispatch, Pass, Source, Touch};
use lily_metal::emulator::{Emulator, Fault, FaultKind, Memory, Options, Submitted};

/// Seeds that every test runs under.
pub const SEEDS: [u64; 3] = [1, 2, 3];

pub fn emulator(seed: u64) -> Emulator {
    Emulator::new(Options { seed, tracked: true }).unwrap()
}

/// Under all seeds, tracked and not.
pub fn emulators() -> impl Iterator<Item = Emulator> {
    let both = |seed| [true, false].map(|tracked| Emulator::new(Options { seed, tracked }).unwrap());
    SEEDS.into_iter().flat_map(both)
}

/// A source of one kernel, `k`, with what all begin with.
pub fn source(body: &str) -> Source {
    let text = format!("#include <metal_stdlib>\nusing namespace metal;\n#line 1 \"k.metal\"\n{body}");
    Source { name: "k.metal".into(), text, macros: vec![("WIDTH".into(), "32".into())] }
}

pub fn bytes_of<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&v| bytes(v)).collect()
}

pub fn floats(memory: &Memory) -> Vec<f32> {
    let mut bytes = vec![0; memory.bytes()];
    memory.read(0, &mut bytes);
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

pub fn words(memory: &Memory) -> Vec<u32> {
    let mut bytes = vec![0; memory.bytes()];
    memory.read(0, &mut bytes);
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Memory that the host wrote.
pub fn written(gpu: &Emulator, label: &str, bytes: &[u8]) -> Memory {
    let memory = gpu.allocate(label, bytes.len()).unwrap();
    memory.write(0, bytes);
    memory
}

pub fn all_of(memory: &Memory, reads: bool, writes: bool) -> Touch<Memory> {
    Touch { buffer: memory.clone(), range: 0..memory.bytes(), reads, writes }
}

/// A dispatch of `k` that may read and write all that is bound to it.
pub fn dispatch(
    gpu: &Emulator,
    body: &str,
    groups: u32,
    threads: u32,
    bound: &[&Memory],
) -> Dispatch<Emulator> {
    let library = gpu.compile(&source(body)).unwrap();
    Dispatch {
        label: "k".into(),
        pipeline: gpu.pipeline(&library, "k").unwrap(),
        arguments: bound.iter().map(|&m| Argument::Buffer { buffer: m.clone(), offset: 0 }).collect(),
        threadgroup_memory: vec![],
        grid: [groups, 1, 1],
        threads,
        waits_for: vec![],
        touches: bound.iter().map(|&m| all_of(m, true, true)).collect(),
    }
}

pub fn submit(gpu: &Emulator, dispatches: &[Dispatch<Emulator>]) -> Result<Submitted, DeviceError> {
    gpu.submit(&Pass { label: "test", before: &[], dispatches, after: &[] })
}

/// Runs one dispatch and expects it to be right.
pub fn run(gpu: &Emulator, dispatch: Dispatch<Emulator>) {
    submit(gpu, &[dispatch]).unwrap().wait(Duration::MAX).unwrap();
}

/// Runs one dispatch and expects it to be found wrong.
pub fn fault(gpu: &Emulator, dispatch: Dispatch<Emulator>) -> Fault {
    let done = submit(gpu, &[dispatch]).unwrap();
    let error = done.wait(Duration::MAX).unwrap_err();
    let fault = done.fault().unwrap_or_else(|| panic!("{error}")).clone();
    assert!(error.to_string().contains(&fault.to_string()), "{error}");
    fault
}

/// Runs `k` under all seeds over 256 written bytes and 256 that nobody wrote, and expects a fault of this kind at one of these lines.
pub fn finds(body: &str, groups: u32, threads: u32, kind: FaultKind, lines: &[u32]) {
    // Whether lanes meet is seen without looking at what they read and write.
    let untracked = [FaultKind::DivergentBarrier, FaultKind::DivergentCollective, FaultKind::InactiveLane]
        .contains(&kind);
    for gpu in emulators().filter(|gpu| gpu.options().tracked || untracked) {
        let (a, b) = (written(&gpu, "a", &[0; 256]), gpu.allocate("b", 256).unwrap());
        let fault = fault(&gpu, dispatch(&gpu, body, groups, threads, &[&a, &b]));
        assert_eq!(fault.kind, kind, "{fault}");
        let expected: Vec<String> = lines.iter().map(|line| format!("k.metal:{line}")).collect();
        assert!(
            fault.line.as_ref().is_some_and(|line| expected.contains(line)),
            "{fault}, not at {expected:?}"
        );
        assert_eq!(fault.kernel, "k");
    }
}

/// Runs `k` under all seeds over the same and expects no fault.
pub fn accepts(body: &str, groups: u32, threads: u32) {
    for gpu in emulators() {
        let (a, b) = (written(&gpu, "a", &[0; 256]), gpu.allocate("b", 256).unwrap());
        run(&gpu, dispatch(&gpu, body, groups, threads, &[&a, &b]));
    }
}
