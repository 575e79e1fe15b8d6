//! The built programs as a test runs them.

#![allow(dead_code, reason = "each test program uses a part")]

use std::process::{Command, Output, Stdio};

/// `lily` with arguments.
pub fn lily(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lily"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs a command to its end.
pub fn run(command: &mut Command) -> Output {
    command.output().expect("the program starts")
}

/// What a program wrote, as text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("output is UTF-8")
}
