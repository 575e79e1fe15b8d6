//! `lily`.

fn main() {}
