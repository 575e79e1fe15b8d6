//! `lily inspect`: what a checkpoint holds, and what would be refused of it.

use std::io::Write;

use anyhow::bail;
use lily_model::inspect;

use crate::args::InspectArgs;

/// Prints the report; an error where Lily refuses the checkpoint.
pub fn run(args: &InspectArgs) -> anyhow::Result<()> {
    let report = inspect::report(&args.dir)?;
    write!(std::io::stdout().lock(), "{report}")?;
    match report.problems.len() {
        0 => Ok(()),
        1 => bail!("Lily does not run {}, for the reason above", args.dir.display()),
        count => bail!("Lily does not run {}, for the {count} reasons above", args.dir.display()),
    }
}
