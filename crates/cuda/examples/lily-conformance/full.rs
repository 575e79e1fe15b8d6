//! A full-size checkpoint: every stage of every layer, with as many rows as a step has.
//!
//! Whole-model logits say little where weights are random: the choice of experts is chaotic, so that a change of
//! one part in a hundred in one norm changes the logits by more than half (`docs/lab/activations.md`). So each
//! stage is judged on the inputs that the card itself has, all the way to the logits; how far the whole
//! model's logits are from the CPU backend's is printed and not judged. So are the speeds of prefill and decode.

use std::path::Path;
use std::time::Instant;

use lily_cpu::{CpuBackend, CpuOptions};
use lily_cuda::CudaBackend;
use lily_engine::backend::{Backend, BackendError, DecodeStep, Input, SequenceId, Want};
use lily_model::checkpoint::Checkpoint;
use lily_model::geometry::Geometry;
use lily_model::synth;

use crate::{Report, distance, open, stages};

/// Positions whose logits are looked at.
const POSITIONS: usize = 32;
/// Context that the backends are opened with.
const CONTEXT: usize = 8192;

/// Depths at which decode is timed, and tokens that are decoded there.
const DEPTHS: [usize; 2] = [256, 4096];
const DECODED: usize = 256;
/// Sequences that are decoded together, and their depth.
const BATCHES: [usize; 2] = [8, 32];
const BATCH_DEPTH: usize = 1024;

/// Traces the checkpoint in `dir`, random weights that are written there first where it is not.
pub fn run(report: &mut Report, device: usize, dir: &Path) -> Result<(), String> {
    if !dir.exists() {
        let start = Instant::now();
        synth::write(dir, &Geometry::qwen3_6_35b_a3b(), 0, &|_, _| {}).map_err(|error| error.to_string())?;
        println!("        random weights written in {:.0} s", start.elapsed().as_secs_f64());
    }
    let checkpoint = Checkpoint::open(dir).map_err(|error| error.to_string())?;
    let weights = checkpoint.weights().map_err(|error| error.to_string())?;
    let vocab = weights.geometry.vocab;
    let tokens: Vec<u32> =
        (0..POSITIONS as u32).map(|i| i.wrapping_mul(2_654_435_761) % vocab as u32).collect();
    let logits = |backend: &mut dyn Backend| -> Result<Vec<f32>, BackendError> {
        let sequence = backend.open(None)?;
        let ticket = backend.extend(sequence, &tokens, Want::AllLogits)?;
        Ok(backend.collect(ticket)?.remove(0).logits)
    };
    let start = Instant::now();
    let mut cuda = open(&weights, device, CONTEXT)?;
    let (seconds, bytes) = (start.elapsed().as_secs_f64(), cuda.memory_plan().weights as f64 / 1e9);
    println!("        loaded {bytes:.2} GB in {seconds:.1} s, {:.1} GB/s", bytes / seconds);
    println!("        {}", cuda.memory_plan());
    let found = logits(&mut cuda).map_err(|error| error.to_string())?;
    speed(&mut cuda).map_err(|error| error.to_string())?;
    drop(cuda);
    let options = CpuOptions { ctx_len: CONTEXT, ..CpuOptions::default() };
    let mut cpu = CpuBackend::new(weights.clone(), options).map_err(|error| error.to_string())?;
    let expected = logits(&mut cpu).map_err(|error| error.to_string())?;
    drop(cpu);
    println!(
        "        logits are {:.3} of their own size away from the CPU backend's",
        distance(&found, &expected)
    );
    stages::with_weights(report, "full size", &weights, device, &[("32 rows", &[(0, 32)])])
}

/// Prints how fast prompts are read and tokens decoded.
fn speed(cuda: &mut CudaBackend) -> Result<(), BackendError> {
    let vocab = cuda.geometry().vocab as u32;
    let token = |i: usize| (i as u32).wrapping_mul(2_654_435_761) % vocab;
    let filled = |cuda: &mut CudaBackend, depth: usize, first: usize| -> Result<SequenceId, BackendError> {
        let sequence = cuda.open(None)?;
        let tokens: Vec<u32> = (first..first + depth).map(token).collect();
        let ticket = cuda.extend(sequence, &tokens, Want::Token)?;
        cuda.collect(ticket)?;
        Ok(sequence)
    };
    for depth in DEPTHS {
        let start = Instant::now();
        let sequence = filled(cuda, depth, 0)?;
        let prefill = depth as f64 / start.elapsed().as_secs_f64();
        let decode = DECODED as f64 / decode(cuda, &[sequence])?;
        println!("        {depth} tokens: prefill {prefill:.0} tokens/s, then decode {decode:.0} tokens/s");
        cuda.close(sequence);
    }
    for batch in BATCHES {
        let sequences: Vec<SequenceId> =
            (0..batch).map(|first| filled(cuda, BATCH_DEPTH, first * 97)).collect::<Result<_, _>>()?;
        let decode = (batch * DECODED) as f64 / decode(cuda, &sequences)?;
        println!("        {batch} sequences of {BATCH_DEPTH}: decode {decode:.0} tokens/s together");
        sequences.into_iter().for_each(|sequence| cuda.close(sequence));
    }
    Ok(())
}

/// Seconds that [`DECODED`] steps take, each enqueued before the one before it is collected.
fn decode(cuda: &mut CudaBackend, sequences: &[SequenceId]) -> Result<f64, BackendError> {
    let step = |&sequence: &SequenceId| DecodeStep { sequence, input: Input::LastSampled, want: Want::Token };
    let steps: Vec<DecodeStep> = sequences.iter().map(step).collect();
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
