//! A full-size checkpoint: its logits against the CPU backend's plain f32, every stage of every layer with as many
//! rows as a step has, and what is drawn from the whole vocabulary. Speeds of prefill and decode are printed: those
//! of the program, and beside them those of the card when it repeats a pass with no host in between.

use std::path::Path;
use std::time::Instant;

use lily_cpu::{CpuBackend, CpuOptions, Numerics};
use lily_cuda::CudaBackend;
use lily_engine::backend::{Backend, BackendError, DecodeStep, Input, SequenceId, Want};
use lily_engine::sampler::{Sampler, SamplingParams};
use lily_model::checkpoint::Checkpoint;
use lily_model::geometry::Geometry;
use lily_model::synth;
use lily_model::weights::Weights;

use crate::{Report, distance, open, sampling, stages, within};

/// A prompt, the positions at its end whose logits are looked at, and those of them that are decoded too.
const PROMPT: usize = 1000;
const POSITIONS: usize = 64;
const STEPS: usize = 32;
/// What they may differ from plain f32.
const LOGITS: f32 = 2e-2;
/// Tokens that are drawn for each kind of request.
const DRAWN: usize = 12;
/// Context that the backends are opened with.
const CONTEXT: usize = 8192;
const CUDA_CONTEXT: usize = 40_960;
/// Lengths of prompts that are timed, each so often.
const PROMPTS: [usize; 4] = [64, 512, 4096, 32_768];
const TIMES: usize = 5;

/// Depths at which decode is timed, and tokens that are decoded there.
const DEPTHS: [usize; 2] = [256, 4096];
const DECODED: usize = 256;
/// Sequences that are decoded together, and their depth.
const BATCHES: [usize; 2] = [8, 32];
const BATCH_DEPTH: usize = 1024;

/// Looks at the checkpoint in `dir`, random weights that are written there first where it is not: `parts` of
/// [`FULL_PARTS`](crate::FULL_PARTS).
pub fn run(report: &mut Report, device: usize, dir: &Path, parts: &[&str]) -> Result<(), String> {
    if !dir.exists() {
        let start = Instant::now();
        synth::write(dir, &Geometry::qwen3_6_35b_a3b(), 0, &|_, _| {}).map_err(|error| error.to_string())?;
        println!("        random weights written in {:.0} s", start.elapsed().as_secs_f64());
    }
    let checkpoint = Checkpoint::open(dir).map_err(|error| error.to_string())?;
    let weights = checkpoint.weights().map_err(|error| error.to_string())?;
    if parts.iter().any(|part| *part != "stages") {
        let start = Instant::now();
        let mut cuda = open(&weights, device, CUDA_CONTEXT)?;
        let (seconds, bytes) = (start.elapsed().as_secs_f64(), cuda.memory_plan().weights as f64 / 1e9);
        println!("        loaded {bytes:.2} GB in {seconds:.1} s, {:.1} GB/s", bytes / seconds);
        println!("        {}", cuda.memory_plan());
        if parts.contains(&"speed") {
            speed(&mut cuda).map_err(|error| error.to_string())?;
        }
        if parts.contains(&"sampling") {
            sampling::equal(report, &mut cuda, "full size", DRAWN);
        }
        if parts.contains(&"logits") {
            logits(report, cuda, &weights).map_err(|error| error.to_string())?;
        }
    }
    if parts.contains(&"stages") {
        stages::with_weights(report, "full size", &weights, device, &[("32 rows", &[(0, 32)])])?;
    }
    Ok(())
}

/// Compares the logits of the last positions of a prompt with plain f32's: read at once, and one token a step.
fn logits(report: &mut Report, mut cuda: CudaBackend, weights: &Weights) -> Result<(), BackendError> {
    let vocab = weights.geometry.vocab;
    let tokens: Vec<u32> = (0..PROMPT as u32).map(|i| i.wrapping_mul(2_654_435_761) % vocab as u32).collect();
    let of = |backend: &mut dyn Backend| -> Result<Vec<f32>, BackendError> {
        let sequence = backend.open(None)?;
        let (before, last) = tokens.split_at(PROMPT - POSITIONS);
        let ticket = backend.extend(sequence, before, Want::Nothing)?;
        backend.collect(ticket)?;
        let ticket = backend.extend(sequence, last, Want::AllLogits)?;
        Ok(backend.collect(ticket)?.remove(0).logits)
    };
    let found = of(&mut cuda)?;
    let (before, last) = tokens.split_at(PROMPT - STEPS);
    let decoded = stepwise(&mut cuda, before, last)?;
    drop(cuda);
    let threads = std::thread::available_parallelism().ok().map(usize::from);
    let options = CpuOptions { ctx_len: CONTEXT, numerics: Numerics::F32, threads, ..CpuOptions::default() };
    let start = Instant::now();
    let expected = of(&mut CpuBackend::new(weights.clone(), options)?)?;
    println!("        plain f32 took {:.0} s", start.elapsed().as_secs_f64());
    let mut compare = |name: String, found: &[f32]| {
        let expected = &expected[expected.len() - found.len()..];
        let mut each: Vec<f32> =
            found.chunks(vocab).zip(expected.chunks(vocab)).map(|(a, b)| distance(a, b)).collect();
        each.sort_by(f32::total_cmp);
        let (median, worst) = (each[each.len() / 2], each[each.len() - 1]);
        println!("        by position: median {median:.2e}, worst {worst:.2e}");
        report.check(&name, within(distance(found, expected), LOGITS));
    };
    let name = |what| format!("full size, logits of {what} of {PROMPT} positions against plain f32");
    compare(name(format!("the last {POSITIONS}")), &found);
    compare(name(format!("{STEPS} decoded ones")), &decoded);
    Ok(())
}

/// Logits of the positions of `last`, decoded one by one behind a prompt of `before`.
fn stepwise(cuda: &mut CudaBackend, before: &[u32], last: &[u32]) -> Result<Vec<f32>, BackendError> {
    let sequence = cuda.open(None)?;
    let ticket = cuda.extend(sequence, before, Want::Nothing)?;
    cuda.collect(ticket)?;
    let mut logits = Vec::new();
    for &token in last {
        let step = DecodeStep { sequence, input: Input::Token(token), want: Want::Logits };
        let ticket = cuda.decode(&[step])?;
        logits.extend(cuda.collect(ticket)?.remove(0).logits);
    }
    cuda.close(sequence);
    Ok(logits)
}

/// Prints how fast prompts are read and tokens decoded.
fn speed(cuda: &mut CudaBackend) -> Result<(), BackendError> {
    for length in PROMPTS {
        let mut times = Vec::with_capacity(TIMES);
        for _ in 0..TIMES {
            let start = Instant::now();
            let sequences = filled(cuda, length, 1)?;
            times.push(start.elapsed().as_secs_f64());
            close(cuda, sequences);
        }
        times.sort_by(f64::total_cmp);
        let median = times[TIMES / 2];
        let rate = length as f64 / median;
        println!("        {length} tokens: first token after {:.1} ms, {rate:.0} tokens/s", median * 1e3);
    }
    for depth in DEPTHS {
        let start = Instant::now();
        let sequences = filled(cuda, depth, 1)?;
        let prefill = depth as f64 / start.elapsed().as_secs_f64();
        println!(
            "        {depth} tokens: prefill {prefill:.0} tokens/s, then decode {}",
            decode(cuda, &sequences, depth)?
        );
        close(cuda, sequences);
    }
    for batch in BATCHES {
        let sequences = filled(cuda, BATCH_DEPTH, batch)?;
        let figures = decode(cuda, &sequences, BATCH_DEPTH)?;
        println!("        {batch} sequences of {BATCH_DEPTH}: decode {figures}, together");
        close(cuda, sequences);
    }
    let base = || SamplingParams { seed: Some(1), temperature: 1.0, ..SamplingParams::default() };
    let requests = [
        ("temperature", base()),
        ("top_k 20, top_p 0.95", SamplingParams { top_k: 20, top_p: 0.95, ..base() }),
        ("top_p 0.95", SamplingParams { top_p: 0.95, ..base() }),
        ("top_k 20 and penalties", SamplingParams { top_k: 20, presence_penalty: 1.5, ..base() }),
    ];
    for (name, params) in requests {
        let sequences = filled(cuda, DEPTHS[0], 1)?;
        let state = Sampler::new(params, &[]).state();
        let state = state.ok_or_else(|| BackendError::Device(format!("{name} is not for a device")))?;
        cuda.sample_on_device(sequences[0], &state)?;
        println!("        with {name}: {:.0} tokens/s", DECODED as f64 / seconds(cuda, &sequences)?);
        close(cuda, sequences);
    }
    Ok(())
}

/// So many sequences of different tokens.
fn filled(cuda: &mut CudaBackend, depth: usize, count: usize) -> Result<Vec<SequenceId>, BackendError> {
    let vocab = cuda.geometry().vocab as u32;
    let token = |i: usize| (i as u32).wrapping_mul(2_654_435_761) % vocab;
    (0..count)
        .map(|first| {
            let sequence = cuda.open(None)?;
            let tokens: Vec<u32> = (first * 97..first * 97 + depth).map(token).collect();
            let ticket = cuda.extend(sequence, &tokens, Want::Token)?;
            cuda.collect(ticket)?;
            Ok(sequence)
        })
        .collect()
}

fn close(cuda: &mut CudaBackend, sequences: Vec<SequenceId>) {
    sequences.into_iter().for_each(|sequence| cuda.close(sequence));
}

/// Tokens per second of the program, and of the card alone. The sequences are of no use afterwards.
fn decode(cuda: &mut CudaBackend, sequences: &[SequenceId], depth: usize) -> Result<String, BackendError> {
    let tokens = (sequences.len() * DECODED) as f64;
    let program = tokens / seconds(cuda, sequences)?;
    let ticket = cuda.decode(&steps(sequences, Want::Logits))?;
    cuda.collect(ticket)?;
    let card = tokens / f64::from(cuda.repeat(sequences.len(), depth + DECODED + 1, DECODED)? / 1e3);
    Ok(format!("{program:.0} tokens/s (the card alone {card:.0})"))
}

fn steps(sequences: &[SequenceId], want: Want) -> Vec<DecodeStep> {
    sequences.iter().map(|&sequence| DecodeStep { sequence, input: Input::LastSampled, want }).collect()
}

/// Seconds that [`DECODED`] steps take, each enqueued before the one before it is collected.
fn seconds(cuda: &mut CudaBackend, sequences: &[SequenceId]) -> Result<f64, BackendError> {
    let steps = steps(sequences, Want::Token);
    let start = Instant::now();
    let mut waiting = None;
    for _ in 0..DECODED {
        let ticket = cuda.decode(&steps)?;
        if let Some(earlier) = waiting.replace(ticket) {
            cuda.collect(earlier)?;
        }
    }
    if let Some(last) = waiting {
        cuda.collect(last)?;
    }
    Ok(start.elapsed().as_secs_f64())
}
