//! The report of a directory lists everything that is wrong with it.

use std::fs;

use lily_model::inspect::report;
use serde_json::json;
use tempfile::TempDir;

use crate::files::{tiny, tiny_config, tiny_model, write_single};

#[test]
fn a_sound_checkpoint_is_described() {
    let dir = TempDir::new().unwrap();
    lily_model::synth::write(dir.path(), &tiny(), 1, &|_, _| ()).unwrap();
    let report = report(dir.path()).unwrap();
    assert_eq!(report.used_bytes, report.total_bytes());
    let text = report.to_string();
    for part in
        ["2 layers: 1 Gated DeltaNet, 1 full attention", "top 2 of 4", "8-bit", "Lily runs this checkpoint"]
    {
        assert!(text.contains(part), "{part} in:\n{text}");
    }
}

#[test]
fn every_problem_is_listed_not_only_the_first() {
    let dir = TempDir::new().unwrap();
    let mut model = tiny_model();
    model.remove("model.norm.weight");
    model.remove("lm_head.weight");
    write_single(dir.path(), &tiny_config(), &model);
    fs::write(dir.path().join("tokenizer.json"), "{").unwrap();
    fs::write(dir.path().join("generation_config.json"), json!({"top_p": 7}).to_string()).unwrap();
    let problems = report(dir.path()).unwrap().problems;
    for part in ["model.norm.weight", "lm_head.weight", "tokenizer.json", "chat_template.jinja", "top_p"] {
        assert!(problems.iter().any(|p| p.contains(part)), "{part} in {problems:?}");
    }
}
