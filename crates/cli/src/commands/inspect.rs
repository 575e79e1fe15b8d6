//! `lily inspect`: what a checkpoint holds, what would be refused of it, and what memory it takes here.

use std::io::Write;

use anyhow::bail;
use lily_model::inspect;

use crate::args::{InspectArgs, ModelArgs};
use crate::{device, models, session};

/// Prints the report; an error where Lily refuses the checkpoint.
pub fn run(args: &InspectArgs) -> anyhow::Result<()> {
    let dir = models::find(&args.dir)?.dir;
    let report = inspect::report(&dir)?;
    let mut out = std::io::stdout().lock();
    write!(out, "{report}")?;
    match report.problems.len() {
        0 => {
            let kv_cache_type = args.kv_cache_type;
            let model = ModelArgs { model_path: Some(dir), kv_cache_type, ..ModelArgs::default() };
            let budget = device::cpu_budget(&model, &session::open(&model)?, session::DEFAULT_CONTEXT)?;
            writeln!(out, "Memory: {budget}.")?;
            Ok(())
        }
        1 => bail!("Lily does not run {}, for the reason above", args.dir.display()),
        count => bail!("Lily does not run {}, for the {count} reasons above", args.dir.display()),
    }
}
