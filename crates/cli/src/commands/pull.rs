//! `lily pull`: a model from the hub, or the rest of one; standard output has the directory that it is in.

use std::io::Write;

use lily_hub::{Patience, Repo};

use crate::args::PullArgs;
use crate::models;

/// Fetches what `args` name.
pub fn run(args: &PullArgs) -> anyhow::Result<()> {
    let repo: Repo = args.repo.parse()?;
    let patience = Patience { retries: args.retries, ..Patience::default() };
    let dir = models::pull(&repo, patience, patience, args.jobs)?;
    writeln!(std::io::stdout().lock(), "{}", dir.display())?;
    Ok(())
}
