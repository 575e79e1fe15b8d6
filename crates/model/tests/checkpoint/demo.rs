//! The demo that the binary embeds is a whole checkpoint, and a small one.

use lily_model::checkpoint::Checkpoint;
use lily_model::demo;
use lily_model::inspect::report_source;

/// What all files of the demo may add to the binary.
const MOST_BYTES: usize = 14_000_000;

#[test]
fn the_demo_runs_without_a_file_on_disk() {
    let report = report_source(&demo::source());
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    assert!(report.unknown.is_empty() && report.skipped.is_empty());
    let demo = Checkpoint::demo().unwrap();
    assert_eq!(demo.name(), demo::NAME);
    assert_eq!(demo.weights().unwrap().layers.len(), demo.geometry().layers.len());
    let tokenizer = demo.tokenizer().unwrap();
    let ends = demo.generation_config().eos_token_ids;
    assert!(ends.contains(&tokenizer.token_id("<|im_end|>").unwrap()), "{ends:?}");
}

#[test]
fn the_demo_has_the_head_sizes_of_the_real_model_and_is_small() {
    let demo = Checkpoint::demo().unwrap();
    let (small, real) = (demo.geometry(), lily_model::geometry::Geometry::qwen3_6_35b_a3b());
    assert_eq!(small.attention.head_dim, real.attention.head_dim);
    assert_eq!(small.attention.rotary_dim, real.attention.rotary_dim);
    assert_eq!(
        small.attention.heads / small.attention.kv_heads,
        real.attention.heads / real.attention.kv_heads
    );
    assert_eq!(small.delta.key_dim, real.delta.key_dim);
    assert_eq!(small.delta.value_dim, real.delta.value_dim);
    assert_eq!(
        small.delta.value_heads / small.delta.key_heads,
        real.delta.value_heads / real.delta.key_heads
    );
    assert_eq!(small.moe.top_k, real.moe.top_k);
    let bytes: usize = demo::FILES.iter().map(|(_, bytes)| bytes.len()).sum();
    assert!(bytes <= MOST_BYTES, "{bytes} bytes");
}
