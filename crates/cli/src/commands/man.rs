//! `lily man`: manual pages, one a command, made from the command line's own description.

use std::io::Write;

use anyhow::Context;
use clap::CommandFactory;

use crate::args::{Lily, LilyServer, ManArgs};

/// Writes the pages into the directory of `args`.
pub fn run(args: &ManArgs) -> anyhow::Result<()> {
    let dir = &args.dir;
    std::fs::create_dir_all(dir).with_context(|| format!("{} cannot be made", dir.display()))?;
    for command in [Lily::command(), LilyServer::command()] {
        clap_mangen::generate_to(command, dir)
            .with_context(|| format!("the pages cannot be written to {}", dir.display()))?;
    }
    writeln!(std::io::stdout().lock(), "{}", dir.display())?;
    Ok(())
}
