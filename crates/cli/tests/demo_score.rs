//! The built-in demo answers what it was never trained on: the claim of `demo/README.md`, here on a third of the
//! held-out questions; `lily demo-score` asks all of them.

#[path = "support/process.rs"]
mod process;

use std::fs;

use process::{lily, run, text};

const HELDOUT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../demo/heldout.jsonl");

#[test]
fn every_family_of_held_out_questions_reaches_its_target() {
    let output = run(&mut lily(&["demo-score", "--heldout", HELDOUT, "--limit", "20"]));
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn with_a_cache_of_8_bits_it_still_finds_what_it_read_1024_tokens_before() {
    let flags = ["demo-score", "--heldout", HELDOUT, "--family", "recall_1k", "--limit", "8"];
    let output = run(lily(&flags).args(["--backend", "cpu", "--kv-cache-type", "q8"]));
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn a_family_under_its_target_fails_the_command() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("wrong.jsonl");
    let item = r#"{"family": "sum", "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        "enable_thinking": false, "answer": {"content": "43"}}"#;
    fs::write(&path, item.replace('\n', "")).expect("a file");
    let path = path.to_str().expect("a plain path");
    let output = run(&mut lily(&["demo-score", "--heldout", path, "--json"]));
    assert_eq!(output.status.code(), Some(1));
    let scores: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(scores[0]["correct"], 0);
    assert!(text(&output.stderr).contains("under the target: sum"));
}
