//! The program `lily-server`; see the library of this crate.

use std::process::ExitCode;

use clap::Parser;
use lily_cli::args::LilyServer;

fn main() -> ExitCode {
    lily_cli::lily_server(&LilyServer::parse().serve)
}
