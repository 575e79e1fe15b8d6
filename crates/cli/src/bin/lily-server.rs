//! `lily-server`.

fn main() {}
