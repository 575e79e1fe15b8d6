//! The same tokens give the same bits, alone or in a batch, and where a prompt is cut at pages.

use lily_cuda::CudaBackend;
use lily_engine::backend::{Backend, BackendError, DecodeStep, Input, SequenceId, Want};
use lily_model::checkpoint::Checkpoint;

use crate::answers::LOGITS;
use crate::{Report, distance, open, within};

/// Tokens of a prompt: several pages, and not a whole number of them.
const PROMPT: usize = 150;
/// Tokens of a longer one.
const LONG_PROMPT: usize = 1111;
/// The DeltaNet's chunks begin at multiples of this: a prompt that is cut there has the same bits as a whole one.
const ALIGNED: usize = 64;
/// Sequences of a batch.
const BATCH: usize = 8;
/// Tokens that are decoded.
const DECODED: usize = 24;

/// Tokens of a prompt that no other seed gives.
fn prompt(seed: u32, length: usize) -> Vec<u32> {
    (0..length as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed * 40_503) >> 7) % 4000)
        .collect()
}

/// Prefills in chunks of `chunk` and returns the last row's logits.
fn prefill(
    backend: &mut CudaBackend,
    tokens: &[u32],
    chunk: usize,
) -> Result<(SequenceId, Vec<f32>), BackendError> {
    let sequence = backend.open(None)?;
    let mut logits = Vec::new();
    let mut parts = tokens.chunks(chunk).peekable();
    while let Some(part) = parts.next() {
        let want = if parts.peek().is_some() { Want::Nothing } else { Want::Logits };
        let ticket = backend.extend(sequence, part, want)?;
        let mut outputs = backend.collect(ticket)?;
        if want == Want::Logits {
            logits = outputs.remove(0).logits;
        }
    }
    Ok((sequence, logits))
}

/// Decodes greedily, each step enqueued before the one before it is collected.
fn decode(backend: &mut CudaBackend, sequences: &[SequenceId]) -> Result<Vec<Vec<u32>>, BackendError> {
    let mut tokens = vec![Vec::new(); sequences.len()];
    let mut waiting = None;
    for _ in 0..DECODED {
        let steps: Vec<DecodeStep> = sequences
            .iter()
            .map(|&sequence| DecodeStep { sequence, input: Input::LastSampled, want: Want::Token })
            .collect();
        let ticket = backend.decode(&steps)?;
        if let Some(earlier) = waiting.replace(ticket) {
            gather(backend.collect(earlier)?, &mut tokens);
        }
    }
    if let Some(last) = waiting {
        gather(backend.collect(last)?, &mut tokens);
    }
    Ok(tokens)
}

fn gather(outputs: Vec<lily_engine::backend::StepOutput>, tokens: &mut [Vec<u32>]) {
    for (output, tokens) in outputs.into_iter().zip(tokens) {
        tokens.extend(output.token);
    }
}

fn equal<T: PartialEq>(found: &T, expected: &T, what: &str) -> Result<(), String> {
    if found == expected { Ok(()) } else { Err(format!("{what} differ")) }
}

/// Runs all checks on the demo.
pub fn run(report: &mut Report, device: usize) -> Result<(), String> {
    let weights = Checkpoint::demo().and_then(|demo| demo.weights()).map_err(|error| error.to_string())?;
    let mut backend = open(&weights, device, 16_384)?;
    report.check("chunks", chunks(&mut backend));
    report.check("batches", batches(&mut backend));
    report.check("snapshots", snapshots(&mut backend));
    report.check("exports", exports(&mut backend));
    report.check("counts", counts(&mut backend));
    Ok(())
}

fn text(error: BackendError) -> String {
    error.to_string()
}

fn chunks(backend: &mut CudaBackend) -> Result<String, String> {
    let mut most = 0.0f32;
    for (length, chunks) in
        [(PROMPT, [1, 3, 8, 31, 33, 64, 128]), (LONG_PROMPT, [17, 64, 100, 130, 192, 511, 1024])]
    {
        let tokens = prompt(1, length);
        let (whole, expected) = prefill(backend, &tokens, length).map_err(text)?;
        let answer = decode(backend, &[whole]).map_err(text)?;
        backend.close(whole);
        for chunk in chunks {
            let (sequence, logits) = prefill(backend, &tokens, chunk).map_err(text)?;
            if chunk.is_multiple_of(ALIGNED) {
                equal(&logits, &expected, &format!("logits of {length} tokens in chunks of {chunk}"))?;
                let found = decode(backend, &[sequence]).map_err(text)?;
                equal(&found, &answer, &format!("what follows {length} tokens in chunks of {chunk}"))?;
            } else {
                most = most.max(distance(&logits, &expected));
            }
            backend.close(sequence);
        }
    }
    // Elsewhere last bits differ, and then roundings to f16: as much as logits may differ from f32.
    within(most, LOGITS)?;
    Ok(format!(
        "{PROMPT} and {LONG_PROMPT} tokens leave the same bits in pieces of {ALIGNED} and its multiples, and logits within \
         {most:.1e} of them in pieces of 1 to 511"
    ))
}

fn batches(backend: &mut CudaBackend) -> Result<String, String> {
    let (mut alone, mut together) = (Vec::new(), Vec::new());
    for seed in 0..BATCH as u32 {
        // Each at its own position, some of them across a page's end.
        let tokens = prompt(seed, 40 + 17 * seed as usize);
        let (sequence, _) = prefill(backend, &tokens, 32).map_err(text)?;
        alone.extend(decode(backend, &[sequence]).map_err(text)?);
        backend.close(sequence);
        together.push(prefill(backend, &tokens, 32).map_err(text)?.0);
    }
    let batched = decode(backend, &together).map_err(text)?;
    for (seed, (found, expected)) in batched.iter().zip(&alone).enumerate() {
        equal(found, expected, &format!("greedy tokens of sequence {seed} alone and in a batch of {BATCH}"))?;
    }
    let step = |sequence| DecodeStep { sequence, input: Input::LastSampled, want: Want::Logits };
    let steps: Vec<DecodeStep> = together.iter().map(|&sequence| step(sequence)).collect();
    let ticket = backend.decode(&steps).map_err(text)?;
    let outputs = backend.collect(ticket).map_err(text)?;
    equal(&outputs.len(), &BATCH, "numbers of outputs")?;
    together.iter().for_each(|&sequence| backend.close(sequence));
    Ok(format!("{DECODED} greedy tokens of {BATCH} sequences are the same alone and together"))
}

fn snapshots(backend: &mut CudaBackend) -> Result<String, String> {
    let tokens = prompt(7, PROMPT);
    let (sequence, _) = prefill(backend, &tokens, 64).map_err(text)?;
    let snapshot = backend.snapshot(sequence).map_err(text)?;
    // Two ways from one point: each writes into the partly filled page.
    let expected = decode(backend, &[sequence]).map_err(text)?;
    for _ in 0..2 {
        let resumed = backend.open(Some(snapshot)).map_err(text)?;
        let detour = backend.open(Some(snapshot)).map_err(text)?;
        let ticket = backend.extend(detour, &prompt(9, 20), Want::Token).map_err(text)?;
        backend.collect(ticket).map_err(text)?;
        equal(&decode(backend, &[resumed]).map_err(text)?, &expected, "tokens after a snapshot")?;
        backend.close(resumed);
        backend.close(detour);
    }
    backend.discard(snapshot);
    backend.close(sequence);
    Ok("a snapshot resumes with the same tokens, whatever its other heirs do".into())
}

fn exports(backend: &mut CudaBackend) -> Result<String, String> {
    let tokens = prompt(11, PROMPT);
    let (sequence, expected) = prefill(backend, &tokens, 64).map_err(text)?;
    let snapshot = backend.snapshot(sequence).map_err(text)?;
    let export = backend.export(snapshot).map_err(text)?;
    backend.discard(snapshot);
    let written = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        export(&mut bytes).map(|()| bytes)
    });
    let bytes = written.join().map_err(|_| "the export panicked")?.map_err(|error| error.to_string())?;
    let imported = backend.import(PROMPT, &mut &bytes[..]).map_err(text)?;
    let short = backend.import(PROMPT, &mut &bytes[..bytes.len() - 1]);
    if !matches!(short, Err(BackendError::BadExport(_))) {
        return Err("a short export was not refused".into());
    }
    let resumed = backend.open(Some(imported)).map_err(text)?;
    let mut logits = Vec::new();
    for sequence in [sequence, resumed] {
        let ticket = backend.extend(sequence, &[5, 6, 7], Want::Logits).map_err(text)?;
        logits.push(backend.collect(ticket).map_err(text)?.remove(0).logits);
    }
    equal(&logits[0], &logits[1], "logits after an import")?;
    backend.discard(imported);
    backend.close(sequence);
    backend.close(resumed);
    drop(expected);
    Ok(format!("{} bytes written on another thread come back with the same bits", bytes.len()))
}

fn counts(backend: &mut CudaBackend) -> Result<String, String> {
    if backend.memory().used != 0 || backend.memory().snapshots != 0 {
        return Err(format!("with nothing open, {:?}", backend.memory()));
    }
    let (sequence, _) = prefill(backend, &prompt(3, PROMPT), 64).map_err(text)?;
    let alone = backend.sequence_bytes(PROMPT);
    equal(&backend.memory().used, &alone, "bytes of one sequence")?;
    let snapshot = backend.snapshot(sequence).map_err(text)?;
    let state = backend.sequence_bytes(0);
    equal(&backend.memory().used, &(alone + state), "bytes with a snapshot that shares the pages")?;
    equal(&backend.memory().snapshots, &alone, "bytes that the snapshot holds")?;
    backend.close(sequence);
    equal(&backend.memory().used, &alone, "bytes of the snapshot alone")?;
    backend.discard(snapshot);
    equal(&backend.memory().used, &0, "bytes at the end")?;
    Ok("every byte is counted once".into())
}
