//! Whether the CUDA backend computes what it should, on the card of this machine.
//!
//! `lily-conformance [--device N] [--heldout FILE] [--only PART] [--brief] [--kv-cache-type f16|q8]` runs alone on the
//! built-in demo and on random weights that it writes itself, prints a line for each check, and ends with 1 where one of
//! them fails. `--heldout` names the demo's held-out questions; `--brief` draws fewer tokens, for a run under
//! `compute-sanitizer`; with a cache of 8 bits all parts run but `stages`, which reads pages of halves.
//! `lily-conformance --full DIR` looks at a full-size checkpoint instead, and writes random weights of that size where
//! there is no such directory. `--only` names one of the parts below.
//!
//! The demo:
//! - `stages`: every stage against its f32 form, fed with what the card itself has before the stage.
//! - `sequences`: the bits of an answer do not depend on chunks, batches, snapshots or exports.
//! - `sampling`: what the card draws is what the host's sampler draws from the same logits.
//! - `answers`: the demo's greedy tokens against the CPU backend's, and recall over thousands of tokens.
//!
//! A full-size checkpoint:
//!
//! - `speed`: prompts and decode, timed; nothing is checked.
//! - `sampling`: as above, from the whole vocabulary.
//! - `logits`: the last positions of a prompt, read at once and decoded, against the CPU backend's plain f32, which takes
//!   four core-minutes.
//! - `stages`: every stage of every layer, with as many rows as a step has.

mod answers;
mod card;
mod full;
mod sampling;
mod sequences;
mod stages;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;

use lily_cuda::cache::Cache;
use lily_cuda::{CudaBackend, CudaOptions};
use lily_gpu::layout::KvFormat;
use lily_gpu::memory::Context;
use lily_model::weights::Weights;

/// What went right and wrong.
#[derive(Default)]
pub struct Report {
    failed: usize,
}

impl Report {
    /// Notes the outcome of a check.
    pub fn check(&mut self, name: &str, outcome: Result<String, String>) {
        match outcome {
            Ok(figures) => println!("ok      {name}: {figures}"),
            Err(reason) => {
                self.failed += 1;
                println!("FAILED  {name}: {reason}");
            }
        }
    }
}

/// The largest difference, relative to the root mean square of what is expected.
pub fn relative(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let square: f32 = expected.iter().map(|x| x * x).sum::<f32>() / expected.len().max(1) as f32;
    let scale = square.sqrt().max(f32::MIN_POSITIVE);
    let worst =
        found.iter().zip(expected).map(|(a, b)| if a.is_nan() { f32::INFINITY } else { (a - b).abs() });
    worst.fold(0.0, f32::max) / scale
}

/// Root mean square of the differences, relative to that of what is expected.
pub fn distance(found: &[f32], expected: &[f32]) -> f32 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let differences: f64 = found.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    let all: f64 = expected.iter().map(|&x| square(x)).sum();
    (differences / all.max(f64::MIN_POSITIVE)).sqrt() as f32
}

/// `Ok` with the figure where it is at most `most`.
pub fn within(error: f32, most: f32) -> Result<String, String> {
    let text = format!("differs by at most {error:.2e} of the root mean square, {most:.0e} allowed");
    if error <= most { Ok(text) } else { Err(text) }
}

/// How keys and values are kept.
static KV_FORMAT: OnceLock<KvFormat> = OnceLock::new();

/// Opens `weights` on a card.
pub fn open(weights: &Weights, device: usize, context: usize) -> Result<CudaBackend, String> {
    let options = CudaOptions {
        device,
        context: Context::AtMost(context),
        kv_format: *KV_FORMAT.get_or_init(|| KvFormat::F16),
        memory_bytes: u64::MAX,
        cache: Cache::of_user(),
    };
    CudaBackend::new(weights, &options, &|_, _| {}).map_err(|error| error.to_string())
}

struct Arguments {
    device: usize,
    full: Option<PathBuf>,
    heldout: PathBuf,
    only: Option<String>,
    brief: bool,
}

/// What the demo is checked for, and a full-size checkpoint.
const PARTS: [&str; 4] = ["stages", "sequences", "sampling", "answers"];
const FULL_PARTS: [&str; 4] = ["speed", "sampling", "logits", "stages"];

fn arguments() -> Result<Arguments, String> {
    let mut arguments =
        Arguments { device: 0, full: None, heldout: "demo/heldout.jsonl".into(), only: None, brief: false };
    let mut words = std::env::args().skip(1);
    while let Some(flag) = words.next() {
        let mut value = || words.next().ok_or(format!("{flag} needs a value"));
        match flag.as_str() {
            "--device" => arguments.device = value()?.parse().map_err(|_| "--device needs a number")?,
            "--full" => arguments.full = Some(value()?.into()),
            "--heldout" => arguments.heldout = value()?.into(),
            "--only" => arguments.only = Some(value()?),
            "--brief" => arguments.brief = true,
            "--kv-cache-type" => {
                let format = match value()?.as_str() {
                    "f16" => KvFormat::F16,
                    "q8" => KvFormat::Q8,
                    other => return Err(format!("--kv-cache-type takes f16 or q8, not {other}")),
                };
                KV_FORMAT.set(format).map_err(|_| "--kv-cache-type is given twice")?;
            }
            _ => {
                return Err(format!(
                    "{flag} is not known; flags are --device N, --full DIR, --heldout FILE, --only PART, --brief, \
                     --kv-cache-type f16|q8"
                ));
            }
        }
    }
    let parts = arguments.parts();
    match &arguments.only {
        Some(part) if !parts.contains(&part.as_str()) => {
            Err(format!("--only takes one of {}, not {part}", parts.join(", ")))
        }
        _ => Ok(arguments),
    }
}

impl Arguments {
    /// All parts that there are for what is looked at.
    fn parts(&self) -> [&'static str; 4] {
        if self.full.is_some() { FULL_PARTS } else { PARTS }
    }

    /// The parts that are wanted.
    fn wanted(&self) -> impl Iterator<Item = &'static str> {
        self.parts().into_iter().filter(|part| self.only.as_deref().is_none_or(|only| only == *part))
    }
}

fn run() -> Result<usize, String> {
    let arguments = arguments()?;
    let mut report = Report::default();
    if let Some(dir) = &arguments.full {
        full::run(&mut report, arguments.device, dir, &arguments.wanted().collect::<Vec<_>>())?;
        return Ok(report.failed);
    }
    let device = arguments.device;
    for part in arguments.wanted() {
        match part {
            "stages" if KV_FORMAT.get() == Some(&KvFormat::Q8) => {
                println!("        stages are left out: they read pages of halves");
            }
            "stages" => stages::run(&mut report, device)?,
            "sequences" => sequences::run(&mut report, device)?,
            "sampling" => sampling::run(&mut report, device, arguments.brief)?,
            _ => answers::run(&mut report, device, &arguments.heldout)?,
        }
    }
    Ok(report.failed)
}

fn main() -> ExitCode {
    match run() {
        Ok(0) => {
            println!("everything conforms");
            ExitCode::SUCCESS
        }
        Ok(failed) => {
            println!("{failed} checks failed");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("lily-conformance: {error}");
            ExitCode::FAILURE
        }
    }
}
