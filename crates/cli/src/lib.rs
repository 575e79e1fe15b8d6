//! The programs `lily` and `lily-server`: flags in, answers out.
//!
//! This crate joins what the others offer: a checkpoint from `lily-model`, fetched by `lily-hub` where it is not here, a backend from `lily-cpu` or
//! `lily-cuda`, the engine over it, and either the server or a conversation in the terminal. It has no arithmetic and no
//! protocol of its own.
//!
//! **In**: the command line ([`args`]), standard input, a checkpoint's directory. **Out**: answers on standard
//! output, everything else (the line that names the demo, progress, errors) on standard error, so that
//! `lily chat … | program` passes on nothing but the answer.
//!
//! A program that fails says why in one sentence and exits with 1; a wrong flag exits with 2; a reader of its
//! output that goes away is no failure.
//!
//! Read first: [`session`], which turns flags into a model that answers, and [`device`], which finds what it runs
//! on; then [`commands`].

pub mod args;
pub mod budget;
pub mod commands;
pub mod conversation;
pub mod device;
pub mod log;
pub mod machine;
pub mod models;
pub mod output;
pub mod picture;
pub mod progress;
pub mod session;

use std::io::ErrorKind;
use std::process::ExitCode;
use std::time::Instant;

use args::{Command, Lily, ServeArgs};

/// Runs `lily`.
pub fn lily(args: Lily) -> ExitCode {
    let started = Instant::now();
    exit_code(match args.command {
        Command::Chat(args) => commands::chat::run(&args),
        Command::Serve(args) => commands::serve::run(&args),
        Command::Bench(args) => commands::bench::run(&args, started),
        Command::Pull(args) => commands::pull::run(&args),
        Command::Convert(args) => commands::convert::run(&args),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Eval(args) => commands::eval::run(&args),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Synth(args) => commands::synth::run(&args),
        Command::DemoScore(args) => commands::score::run(&args),
        Command::Completions(args) => commands::completions::run(&args),
        Command::Man(args) => commands::man::run(&args),
    })
}

/// Runs `lily-server`.
pub fn lily_server(args: &ServeArgs) -> ExitCode {
    exit_code(commands::serve::run(args))
}

fn exit_code(outcome: anyhow::Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lily: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether the reader of standard output went away, as `head` does when it has enough.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}
