//! The fuzz targets of `fuzz/`, run on their corpus: what once went wrong stays right, and the targets themselves
//! cannot fall behind the code that they check.

#[path = "../../../fuzz/src/lib.rs"]
mod targets;

use std::path::Path;

/// Bytes of what is made up beside the corpus, and how many of those there are.
const MADE_UP: (usize, u64) = (400, 100);

/// Runs a target on the files of its corpus, and on some bytes that mean nothing.
fn run(target: &str, check: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let mut files: Vec<_> = folder
        .read_dir()
        .expect("there is a corpus")
        .map(|entry| entry.expect("the corpus can be read").path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    for file in files {
        println!("{}", file.display());
        check(&std::fs::read(&file).expect("a file can be read"));
    }
    for seed in 0..MADE_UP.1 {
        println!("seed {seed}");
        check(&noise(seed, MADE_UP.0));
    }
}

/// Bytes of SplitMix64.
fn noise(seed: u64, count: usize) -> Vec<u8> {
    let word = |at: usize| {
        let mut z = (seed << 32 | at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) as u8
    };
    (0..count).map(word).collect()
}

#[test]
fn the_models_text_is_taken_apart_the_same_however_it_is_cut_and_nothing_is_lost() {
    run("answers", targets::answers::check);
}

#[test]
fn every_body_gets_an_answer_that_the_protocol_knows() {
    run("bodies", targets::bodies::check);
}

#[test]
fn the_events_of_a_stream_are_the_whole_answer() {
    run("streams", targets::streams::check);
}

#[test]
fn every_list_of_messages_becomes_a_text_or_an_error() {
    run("templates", targets::templates::check);
}
