//! `lily plan`: what a GPU would run for one decoded token, without a GPU.

use std::io::Write;

use anyhow::{Context, bail};
use lily_gpu::decode::{self, MAX_ROWS, Shape};
use lily_gpu::dot::Dot;
use lily_gpu::layout::KV_ELEMENT_BYTES;
use lily_gpu::report::Summary;
use lily_gpu::target::Target;
use lily_model::cost::Cost;
use lily_model::geometry::Geometry;
use lily_model::weights::Weights;

use crate::args::{GpuKind, PlanArgs};
use crate::models;

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
    if args.context > most {
        bail!("--context {} is more than the {most} tokens of {name}; ask for less", args.context);
    }
    if args.batch > MAX_ROWS {
        bail!("--batch {} is more than the {MAX_ROWS} sequences of a step; ask for less", args.batch);
    }
    let target = match args.backend {
        GpuKind::Cuda => Target::HOPPER,
        GpuKind::Metal => Target::APPLE_MAX,
    };
    let plan =
        decode::record(&weights, target, Shape { rows: args.batch, context: args.context, sampled: false });
    let floor = Cost::of(&weights).batch_bytes(args.batch, args.context, KV_ELEMENT_BYTES);
    if let Some(path) = &args.dot {
        std::fs::write(path, Dot(&plan).to_string()).with_context(|| {
            format!("the graph cannot be written to {}; choose another place with --dot", path.display())
        })?;
    }
    let mut out = std::io::stdout().lock();
    let sequences = if args.batch == 1 { "sequence" } else { "sequences" };
    writeln!(out, "{name}: one step of {} {sequences} at context {}, {target}", args.batch, args.context)?;
    write!(out, "{}", Summary { plan: &plan, floor, tokens: args.batch })?;
    Ok(())
}
