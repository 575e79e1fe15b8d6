//! The program `lily`; see the library of this crate.

use std::process::ExitCode;

use clap::Parser;
use lily_cli::args::Lily;

fn main() -> ExitCode {
    lily_cli::lily(Lily::parse())
}
