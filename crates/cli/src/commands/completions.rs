//! `lily completions`: what a shell must know to complete flags, made from the command line's own description.

use std::io::Write;

use clap::CommandFactory;

use crate::args::{CompletionsArgs, Lily, LilyServer, Program};

/// Prints the completions of `args`.
pub fn run(args: &CompletionsArgs) -> anyhow::Result<()> {
    let (mut command, name) = match args.program {
        Program::Lily => (Lily::command(), "lily"),
        Program::LilyServer => (LilyServer::command(), "lily-server"),
    };
    // Into memory first: the generator panics where its reader goes away.
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, name, &mut text);
    std::io::stdout().lock().write_all(&text)?;
    Ok(())
}
