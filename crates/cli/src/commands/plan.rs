//! `lily plan`: what a GPU would run for one decoded token or for a prompt, without a GPU.

use std::io::Write;

use anyhow::{Context, bail};
use lily_gpu::chips::{APPLE, Chip, H200};
use lily_gpu::decode::{self, MAX_ROWS, Shape};
use lily_gpu::dot::Dot;
use lily_gpu::layout::KvLayout;
use lily_gpu::operations::Tokens;
use lily_gpu::plan::Plan;
use lily_gpu::prefill::{cuda, metal};
use lily_gpu::report::{Estimates, PromptTable, Summary};
use lily_gpu::roofline::Tally;
use lily_gpu::target::Target;
use lily_model::cost::Cost;
use lily_model::geometry::Geometry;
use lily_model::weights::Weights;

use crate::args::{GpuKind, PlanArgs};
use crate::models;

/// Positions of context of a step where none are asked for.
const CONTEXT: usize = 256;

/// Prints the plan that `args` ask for.
pub fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let (name, weights) = match &args.model_path {
        Some(path) => {
            let checkpoint = models::open(path)?;
            (checkpoint.name().to_owned(), checkpoint.weights()?)
        }
        None => {
            let geometry = Geometry::qwen3_6_35b_a3b();
            ("Qwen3.6-35B-A3B, 4-bit".to_owned(), Weights::outline(&geometry))
        }
    };
    let most = weights.geometry.max_context;
    let context = args.context.or(args.prefill).unwrap_or(CONTEXT);
    if context > most {
        let flag = if args.context.is_some() { "--context" } else { "--prefill" };
        bail!("{flag} {context} is more than the {most} tokens of {name}; ask for less");
    }
    match args.prefill {
        Some(tokens) => prompt(args, &name, &weights, tokens, context),
        None => step(args, &name, &weights, context),
    }
}

/// Prints a step of decode.
fn step(args: &PlanArgs, name: &str, weights: &Weights, context: usize) -> anyhow::Result<()> {
    if args.batch > MAX_ROWS {
        bail!("--batch {} is more than the {MAX_ROWS} sequences of a step; ask for less", args.batch);
    }
    let target = match args.backend {
        GpuKind::Cuda => Target::HOPPER,
        GpuKind::Metal => Target::APPLE_MAX,
    };
    let target = target.with_kv(args.kv_cache_type.pages());
    let plan = decode::record(weights, target, Shape { rows: args.batch, context, sampled: false });
    let kv = KvLayout::new(&weights.geometry, target.kv()).token_bytes();
    let floor = Cost::of(weights).batch_bytes(args.batch, context, kv as u64);
    write_dot(args, &plan)?;
    let mut out = std::io::stdout().lock();
    let sequences = if args.batch == 1 { "sequence" } else { "sequences" };
    writeln!(out, "{name}: one step of {} {sequences} at context {context}, {target}", args.batch)?;
    write!(out, "{}", Summary { plan: &plan, floor, tokens: args.batch })?;
    if args.backend == GpuKind::Metal {
        let tally = Tally::step(&plan, weights, args.batch, context);
        write!(out, "\n{}", Estimates { tally: &tally, chips: &APPLE })?;
    }
    Ok(())
}

/// Prints the last `tokens` of `context` as a prompt.
fn prompt(
    args: &PlanArgs,
    name: &str,
    weights: &Weights,
    tokens: usize,
    context: usize,
) -> anyhow::Result<()> {
    let Some(seen) = context.checked_sub(tokens) else {
        bail!(
            "--prefill {tokens} is more than --context {context}, which counts the prompt; ask for less, or for more context"
        );
    };
    match args.backend {
        GpuKind::Cuda => pass(args, name, weights, Tokens { seen, count: tokens, heads: 0 }),
        GpuKind::Metal => passes(args, name, weights, seen, tokens),
    }
}

/// Prints a pass of CUDA's program for prompts.
fn pass(args: &PlanArgs, name: &str, weights: &Weights, tokens: Tokens) -> anyhow::Result<()> {
    let Tokens { seen, count, .. } = tokens;
    let most = cuda::MOST_ROWS;
    if count > most {
        bail!(
            "--prefill {count} is more than the {most} tokens of a pass; ask for less, and with --context for a later pass"
        );
    }
    let target = Target::HOPPER.with_kv(args.kv_cache_type.pages());
    let plan = cuda::record(weights, target, Shape { rows: count, context: seen + count, sampled: false });
    write_dot(args, &plan)?;
    let tally = Tally::pass(&plan, weights, tokens);
    let mut out = std::io::stdout().lock();
    writeln!(out, "{name}: one pass over {count} tokens of a prompt after {seen} others, {target}")?;
    writeln!(
        out,
        "Its last token goes through decode, whose step gives the logits and is not counted here."
    )?;
    writeln!(
        out,
        "{} kernels, {} of them in the longest dependent chain, {} dependencies\n",
        plan.dispatches.len(),
        tally.chain,
        plan.dependencies.edges()
    )?;
    write!(out, "{}", PromptTable { tally: &tally, chip: &H200 })?;
    Ok(())
}

/// Prints a prompt in passes of Metal's program for prompts.
fn passes(args: &PlanArgs, name: &str, weights: &Weights, seen: usize, count: usize) -> anyhow::Result<()> {
    let target = Target::APPLE_MAX.with_kv(args.kv_cache_type.pages());
    let most = metal::PASSES[metal::PASSES.len() - 1];
    let shape = Shape { rows: count.min(most), context: seen + count, sampled: false };
    write_dot(args, &metal::record(weights, target, shape))?;
    let tally = Tally::prompt(weights, target, seen, count, most);
    let number = count.div_ceil(most);
    let passes = if number == 1 { "pass" } else { "passes" };
    let mut out = std::io::stdout().lock();
    writeln!(out, "{name}: {count} tokens of a prompt after {seen} others, {target}")?;
    writeln!(
        out,
        "{number} {passes} of at most {most} tokens, {} kernels in all, {} of them in the longest dependent chain",
        tally.all().kernels,
        tally.chain
    )?;
    let (dense, experts) = metal::block_rows(&weights.geometry, shape.rows);
    writeln!(out, "Blocks of {dense} rows in dense products, of {experts} in those of the experts\n")?;
    let newest: &Chip = &APPLE[APPLE.len() - 1];
    write!(out, "{}", PromptTable { tally: &tally, chip: newest })?;
    write!(out, "\n{}", Estimates { tally: &tally, chips: &APPLE })?;
    Ok(())
}

/// Writes the graph where `args` ask for it.
fn write_dot(args: &PlanArgs, plan: &Plan) -> anyhow::Result<()> {
    let Some(path) = &args.dot else { return Ok(()) };
    std::fs::write(path, Dot(plan).to_string()).with_context(|| {
        format!("the graph cannot be written to {}; choose another place with --dot", path.display())
    })
}
