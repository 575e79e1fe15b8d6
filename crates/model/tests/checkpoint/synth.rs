//! Random checkpoints load like real ones.

use std::fs;
use std::path::Path;

use lily_model::checkpoint::Checkpoint;
use lily_model::synth;
use lily_model::weights::Mixer;
use tempfile::TempDir;

use crate::files::{flatten, rows, tiny};

fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let entry = |e: std::io::Result<fs::DirEntry>| {
        let path = e.unwrap().path();
        (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap())
    };
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(entry).collect();
    files.sort();
    files
}

#[test]
fn a_seed_decides_every_byte_and_shards_change_no_weight() {
    let dirs: [TempDir; 4] = std::array::from_fn(|_| TempDir::new().unwrap());
    let quiet = |_: u64, _: u64| ();
    let single = synth::write(dirs[0].path(), &tiny(), 1, &quiet).unwrap();
    synth::write(dirs[1].path(), &tiny(), 1, &quiet).unwrap();
    synth::write(dirs[2].path(), &tiny(), 2, &quiet).unwrap();
    let sharded = synth::write_sharded(dirs[3].path(), &tiny(), 1, 100_000, &quiet).unwrap();
    assert_eq!(single.shards, 1);
    assert!(sharded.shards > 2);
    assert_eq!(contents(dirs[0].path()), contents(dirs[1].path()));
    let weights = dirs.each_ref().map(|dir| {
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.weight_bytes(), single.bytes);
        flatten(&checkpoint.weights().unwrap())
    });
    assert_eq!(weights[0], weights[3]);
    assert_ne!(weights[0], weights[2]);
}

#[test]
fn the_files_beside_the_weights_are_a_whole_checkpoint() {
    let dir = TempDir::new().unwrap();
    synth::write(dir.path(), &tiny(), 1, &|_, _| ()).unwrap();
    let report = lily_model::inspect::report(dir.path()).unwrap();
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    assert!(report.unknown.is_empty(), "{:?}", report.unknown);
    assert_eq!(report.config.unwrap().geometry, tiny());
    let left: Vec<_> = contents(dir.path()).into_iter().filter(|(n, _)| n.ends_with(".partial")).collect();
    assert!(left.is_empty());
}

#[test]
fn projections_keep_the_variance_of_their_inputs_and_layers_add_little() {
    let dir = TempDir::new().unwrap();
    synth::write(dir.path(), &tiny(), 1, &|_, _| ()).unwrap();
    let weights = Checkpoint::open(dir.path()).unwrap().weights().unwrap();
    let layer = &weights.layers[0];
    let Mixer::Delta(delta) = &layer.mixer else { panic!("the first layer is a DeltaNet") };
    let layers = 2.0 * weights.layers.len() as f32;
    let embed = &weights.embed_tokens;
    let expected = [(embed, embed.cols as f32), (&delta.in_proj_qkv, 1.0), (&layer.moe.gate_proj, 1.0)];
    let added = [&delta.out_proj, &layer.moe.down_proj].map(|matrix| (matrix, 1.0 / layers));
    for (matrix, variance) in expected.into_iter().chain(added) {
        let values = rows(matrix);
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let square = values.iter().map(|w| w * w).sum::<f32>() / values.len() as f32 * matrix.cols as f32;
        let gain = square / variance;
        assert!(
            (0.9..1.1).contains(&gain),
            "an output has {square} times an input's variance, not {variance}"
        );
        assert!(mean.abs() * (matrix.cols as f32 / variance).sqrt() < 0.05, "mean {mean}");
    }
}

#[test]
fn a_finished_checkpoint_is_not_overwritten_and_a_small_vocabulary_is_refused() {
    let dir = TempDir::new().unwrap();
    synth::write(dir.path(), &tiny(), 1, &|_, _| ()).unwrap();
    let again = synth::write(dir.path(), &tiny(), 1, &|_, _| ()).unwrap_err().to_string();
    assert!(again.contains("already holds"), "{again}");
    let mut geometry = tiny();
    geometry.vocab = 64;
    let small = synth::write(&dir.path().join("other"), &geometry, 1, &|_, _| ()).unwrap_err().to_string();
    assert!(small.contains("embedding table has 64 rows"), "{small}");
    geometry.moe.top_k = 99;
    let wrong = synth::write(&dir.path().join("other"), &geometry, 1, &|_, _| ()).unwrap_err().to_string();
    assert!(wrong.contains("num_experts_per_tok"), "{wrong}");
}

#[test]
fn what_the_disk_cannot_hold_is_refused_before_anything_is_written() {
    let dir = TempDir::new().unwrap();
    let mut geometry = tiny();
    // 2^14 experts of 2^18 by 2^18 are half a petabyte for each of three stacks.
    geometry.hidden = 1 << 18;
    geometry.moe.experts = 1 << 14;
    geometry.moe.expert_width = 1 << 18;
    let error = synth::write(dir.path(), &geometry, 1, &|_, _| ()).unwrap_err();
    assert!(matches!(error, lily_model::error::ModelError::DiskFull { .. }), "{error}");
    assert!(contents(dir.path()).is_empty());
}
