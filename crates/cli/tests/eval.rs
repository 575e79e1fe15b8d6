//! `lily eval` finds what differs, finds nothing where nothing does, and agrees with what other programs say.

#[path = "support/process.rs"]
mod process;

use process::{lily, run, text};
use serde_json::Value;

const GOLDEN: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../oracle/golden/mlx_teacher_forced.safetensors");
/// A text as good as any: two backends are compared on it, not judged.
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../demo/README.md");

fn eval(args: &[&str]) -> Value {
    let output = run(lily(&["eval", "--json", "--backend", "cpu"]).args(args));
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn a_backend_is_as_near_to_f32_as_rounding_lets_it_and_f32_is_at_no_distance_from_itself() {
    let rounded = eval(&[TEXT, "--window", "64", "--positions", "200", "--against", "f32"]);
    let compared = &rounded["all"]["compared"];
    assert_eq!(rounded["all"]["positions"], 200);
    let mean = compared["divergence"]["mean"].as_f64().unwrap();
    assert!(mean > 0.0 && mean < 0.05, "{compared:#}");

    let same = eval(&[TEXT, "--window", "64", "--positions", "70", "--f32", "--against", "f32"]);
    let compared = &same["all"]["compared"];
    assert_eq!(compared["perplexity_change_percent"], 0.0);
    assert_eq!(compared["same_top_percent"], 100.0);
    assert_eq!(compared["divergence"]["largest"], 0.0);
}

/// The reference of a comparison has an f16 cache, so that this one is of the two caches and of nothing else.
#[test]
fn a_cache_of_8_bits_moves_the_distributions_little() {
    let flags = ["--window", "64", "--positions", "200", "--against", "cpu"];
    let halves = eval(&[&[TEXT], &flags[..]].concat());
    assert_eq!(halves["all"]["compared"]["divergence"]["largest"], 0.0);
    let rounded = eval(&[&[TEXT, "--kv-cache-type", "q8"], &flags[..]].concat());
    let mean = rounded["all"]["compared"]["divergence"]["mean"].as_f64().unwrap();
    assert!(mean > 0.0 && mean < 0.01, "{:#}", rounded["all"]);
}

#[test]
fn mlx_lm_says_the_same_of_the_demos_answers() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("eval.svg");
    let report = eval(&["--reference", GOLDEN, "--positions", "4000", "--plot", plot.to_str().unwrap()]);
    let answers = &report["answers"];
    let change = answers["compared"]["perplexity_change_percent"].as_f64().unwrap();
    let same = answers["compared"]["same_top_percent"].as_f64().unwrap();
    assert!(answers["positions"].as_u64().unwrap() > 100, "{answers:#}");
    assert!(change.abs() < 1.0 && same > 98.0, "{answers:#}");
    assert_eq!(report["positions"].as_array().unwrap().len(), 4000);

    // What stands between answers is read like a prompt, which on this backend changes no bit.
    let only = eval(&["--reference", GOLDEN, "--positions", "4000", "--answers-only"]);
    assert_eq!(only["answers"], *answers);
    assert_eq!(only["positions"].as_array().unwrap().len() as u64, answers["positions"].as_u64().unwrap());
    assert!(std::fs::read_to_string(plot).unwrap().contains("</svg>"));
}

#[test]
fn what_cannot_be_scored_is_one_sentence() {
    let refused = |args: &[&str]| {
        let output = run(lily(&["eval"]).args(args));
        assert_eq!(output.status.code(), Some(1));
        text(&output.stderr)
    };
    assert!(refused(&[]).contains("nothing to score"));
    assert!(refused(&["/no/such/file"]).contains("/no/such/file"));
    assert!(refused(&["--reference", TEXT]).contains("is no stored reference"));
    assert!(refused(&[TEXT, "--answers-only"]).contains("--answers-only needs a stored reference"));
}
