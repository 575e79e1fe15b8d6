//! `lily bench`: how fast a model runs here, and how near that comes to what the machine can do.
//!
//! It drives the [`Backend`](lily_engine::backend::Backend) itself, with no engine and no sampling above it, so that the figures are the
//! device's and every backend is measured in the same way. **Prefill** of N tokens: a fresh sequence, random
//! tokens in the chunks that the engine uses, the greedy token after the last; so its time is also the time to
//! the first token. **Decode** at depth D: a sequence is filled to D once and frozen, and each run begins there
//! and decodes one token after the other, each collected before the next.
//!
//! Read first: `report`, which says what every figure means; then `measure`.

mod measure;
mod plan;
mod plot;
mod report;
mod table;

use std::time::Instant;

use lily_model::cost::Cost;

use crate::args::{BenchArgs, ModelArgs};
use crate::device::{self, Opened};
use crate::{machine, models, output, progress, session};
use measure::Bench;
use plan::Plan;
use report::{Machine, Memory, Report, Start};

/// Exit code of a program that Ctrl-C ended, as shells have it.
const INTERRUPTED: i32 = 130;

/// Measures what `args` name; the program has run since `started`.
pub fn run(args: &BenchArgs, started: Instant) -> anyhow::Result<()> {
    if let Some(path) = &args.plot {
        output::check_picture_place(path)?;
    }
    stop_at_interrupt()?;
    // Files that are not here yet come first, and their time is not the model's.
    let fetching = Instant::now();
    args.model.model_path.as_deref().map(models::find).transpose()?;
    let started = started + fetching.elapsed();
    let progress = progress::spinner("loading the model");
    let opening = Instant::now();
    let checkpoint = session::open(&args.model)?;
    // All the context that there is room for: the cache takes only what is used.
    let most = device::most_context(&args.model, &checkpoint)?;
    let plan = Plan::new(args, most)?;
    let measured = ModelArgs { ctx_len: Some(plan.context), ..args.model.clone() };
    let Opened { backend, memory: planned, .. } =
        device::open(&measured, &checkpoint, plan.context, &|_| usize::MAX)?;
    let load_seconds = opening.elapsed().as_secs_f64();
    let weights = checkpoint.weights()?;

    let mut bench = Bench::new(backend, plan, progress);
    let first_prompt_tokens = bench.first_token()?;
    let start = Start {
        load_seconds,
        first_token_seconds: started.elapsed().as_secs_f64(),
        prompt_tokens: first_prompt_tokens,
    };
    let prefill = bench.prefill()?;
    let decode = bench.decode()?;
    // Before the limits are measured, which may take memory of their own.
    let memory = Memory::new(bench.resident(), planned.mapped_weights());
    let limits = if args.no_floor { None } else { bench.limits() };
    let mut report = Report {
        lily: env!("CARGO_PKG_VERSION"),
        date: chrono::Local::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, false),
        model: checkpoint.name().to_string(),
        backend: bench.description(),
        machine: Machine { cpu: machine::cpu_name(), memory_bytes: machine::memory_bytes() },
        start,
        memory,
        limits: limits.map(Into::into),
        prefill,
        decode,
    };
    report.compare(&Cost::of(&weights), bench.kv_bytes());
    bench.finish();

    if let Some(path) = &args.plot {
        output::write_picture(path, &plot::draw(&report)?)?;
    }
    output::print(&report, table::Table(&report), args.json)
}

/// Ctrl-C ends the program with a sentence, whatever it computes at the time.
fn stop_at_interrupt() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("lily-interrupt".into()).spawn(move || {
        if runtime.block_on(tokio::signal::ctrl_c()).is_ok() {
            eprintln!("\nlily: stopped before everything was measured; nothing was written");
            std::process::exit(INTERRUPTED);
        }
    })?;
    Ok(())
}
