//! Damaged and hostile files give an error that names them, never a panic.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use lily_model::checkpoint::Checkpoint;
use lily_model::safetensors::{INDEX_FILE, SINGLE_FILE, Tensors};
use lily_model::source::Source;
use proptest::prelude::*;
use serde_json::json;
use tempfile::TempDir;

use crate::files::{
    Model, Stored, safetensors, tiny_config, tiny_model, with_header, write_sharded, write_single,
};

/// What is said of a weight file of these bytes.
fn problem(bytes: &[u8]) -> String {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join(SINGLE_FILE), bytes).unwrap();
    let message = open_error(dir.path());
    assert!(message.contains(SINGLE_FILE), "{message}");
    message
}

fn open_error(dir: &Path) -> String {
    Tensors::open(&Source::directory(dir).unwrap()).unwrap_err().to_string()
}

#[test]
fn damaged_weight_files_are_refused_with_the_reason() {
    let entry = |shape: &str, from: u64, to: u64| {
        format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":[{from},{to}]}}"#)
    };
    let one =
        |shape: &str, from, to| with_header(&format!(r#"{{"t":{}}}"#, entry(shape, from, to)), &[0; 16]);
    let two = |first: &str, second: &str, a: [u64; 2], b: [u64; 2]| {
        let (a, b) = (entry("[2]", a[0], a[1]), entry("[2]", b[0], b[1]));
        with_header(&format!(r#"{{"{first}":{a},"{second}":{b}}}"#), &[0; 16])
    };
    let huge = u64::MAX;
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (vec![], "begins with an 8-byte length"),
        (vec![1, 2, 3], "begins with an 8-byte length"),
        (huge.to_le_bytes().to_vec(), "claims 18446744073709551615 bytes"),
        (1000u64.to_le_bytes().to_vec(), "only 0 follow: the file is truncated"),
        (with_header("not json", &[]), "not a valid one"),
        (with_header("[]", &[]), "an object of tensors"),
        (with_header(r#"{"t":{"dtype":"F32","shape":[1]}}"#, &[0; 4]), "data_offsets"),
        (
            with_header(r#"{"t":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#, &[0; 4]),
            "not a valid one",
        ),
        (with_header(&"[".repeat(100_000), &[]), "not a valid one"),
        (one("[5]", 0, 20), "claims bytes 0 to 20 of the 16"),
        (one("[1]", 8, 4), "claims bytes 8 to 4"),
        (one("[1]", huge - 3, huge), "claims bytes"),
        (one("[3]", 0, 16), "has 16 bytes, which is not its size"),
        (one(&format!("[{huge},{huge}]"), 0, 16), "absurd shape"),
        (one("[4611686018427387904]", 0, 16), "not its size"),
        (one("[4294967296,4294967296,0]", 0, 16), "absurd shape"),
        (one("[1,1,1,1,1,1,1,1,4]", 0, 16), "9 dimensions"),
        (two("a", "b", [0, 8], [4, 12]), "tensors `a` and `b` overlap"),
        (two("a", "a", [0, 8], [8, 16]), "names tensor `a` twice"),
    ];
    for (bytes, reason) in cases {
        let message = problem(&bytes);
        assert!(message.contains(reason), "{reason} in: {message}");
    }
}

#[test]
fn a_file_cut_short_is_called_truncated() {
    let whole = safetensors(&tiny_model());
    for length in [whole.len() - 1, whole.len() / 2, 100] {
        assert!(problem(&whole[..length]).contains("truncated"));
    }
}

#[test]
fn shards_stay_inside_the_directory_and_hold_what_the_index_says() {
    let outside = TempDir::new().unwrap();
    fs::write(outside.path().join("x.safetensors"), safetensors(&tiny_model())).unwrap();
    let absolute = outside.path().join("x.safetensors").display().to_string();
    let cases = [
        (json!({"weight_map": {"a": "../x.safetensors"}}), "leads outside"),
        (json!({"weight_map": {"a": absolute}}), "leads outside"),
        (json!({"weight_map": {"a": ".."}}), "leads outside"),
        (json!({"weight_map": {"a": ""}}), "leads outside"),
        (json!({"weight_map": {"a": "gone.safetensors"}}), "names the shard gone.safetensors"),
        (json!({"weight_map": {"a": "part-0.safetensors"}}), "places tensor `a` in part-0.safetensors"),
        (json!({"weight_map": {"model.norm.weight": 3}}), "a `weight_map` of strings"),
        (json!({"weight_map": {}}), "`weight_map` is empty"),
        (json!({}), "a `weight_map` of strings"),
    ];
    let dir = TempDir::new().unwrap();
    write_sharded(dir.path(), &tiny_config(), &tiny_model(), 2);
    for (index, reason) in cases {
        fs::write(dir.path().join(INDEX_FILE), index.to_string()).unwrap();
        let message = open_error(dir.path());
        assert!(message.contains(reason), "{reason} in: {message}");
    }
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let dir = TempDir::new().unwrap();
    let twice = Model::from([("t".to_owned(), Stored::f32(&[1], &[1.0]))]);
    for shard in ["a.safetensors", "b.safetensors"] {
        fs::write(dir.path().join(shard), safetensors(&twice)).unwrap();
    }
    let mut more = twice.clone();
    more.insert("u".into(), Stored::f32(&[1], &[1.0]));
    fs::write(dir.path().join("b.safetensors"), safetensors(&more)).unwrap();
    let index = json!({"weight_map": {"t": "a.safetensors", "u": "b.safetensors"}});
    fs::write(dir.path().join(INDEX_FILE), index.to_string()).unwrap();
    assert!(open_error(dir.path()).contains("tensor `t` stands here and in another shard"));
}

#[test]
fn a_directory_or_nothing_in_place_of_a_file_is_named() {
    let dir = TempDir::new().unwrap();
    let missing = Checkpoint::open(&dir.path().join("gone")).unwrap_err().to_string();
    assert!(missing.contains("gone"), "{missing}");
    let empty = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(empty.contains("config.json: there is no such file"), "{empty}");
    fs::write(dir.path().join("config.json"), tiny_config().to_string()).unwrap();
    let unweighted = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(unweighted.contains(SINGLE_FILE) && unweighted.contains(INDEX_FILE), "{unweighted}");
    let file = Checkpoint::open(&dir.path().join("config.json")).unwrap_err().to_string();
    assert!(file.contains("not a directory"), "{file}");
    fs::create_dir(dir.path().join(SINGLE_FILE)).unwrap();
    let directory = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(directory.contains(SINGLE_FILE) && directory.contains("a directory"), "{directory}");
}

#[cfg(unix)]
#[test]
fn links_are_followed_and_their_loops_refused() {
    use std::os::unix::fs::symlink;
    let (cache, dir) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    write_single(cache.path(), &tiny_config(), &tiny_model());
    for name in ["config.json", SINGLE_FILE] {
        symlink(cache.path().join(name), dir.path().join(name)).unwrap();
    }
    assert!(Checkpoint::open(dir.path()).unwrap().weights().is_ok());
    fs::remove_file(dir.path().join(SINGLE_FILE)).unwrap();
    symlink(SINGLE_FILE, dir.path().join(SINGLE_FILE)).unwrap();
    let message = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("cannot read") && message.contains(SINGLE_FILE), "{message}");
    fs::remove_file(dir.path().join(SINGLE_FILE)).unwrap();
    symlink("nowhere", dir.path().join(SINGLE_FILE)).unwrap();
    let message = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("cannot read") && message.contains(SINGLE_FILE), "{message}");
}

/// A small valid file: a few tensors, so that most of it is header.
static SMALL: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let tensors = [("a", 4), ("b", 2), ("c", 6)];
    let stored = |(name, n): (&str, usize)| (name.to_owned(), Stored::f32(&[n], &vec![1.0; n]));
    safetensors(&tensors.into_iter().map(stored).collect())
});

proptest! {
    #[test]
    fn no_damage_makes_the_reader_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        cut in any::<prop::sample::Index>(),
        whole in any::<bool>(),
    ) {
        let mut bytes = SMALL.clone();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if !whole {
            bytes.truncate(cut.index(bytes.len()));
        }
        let dir = TempDir::new().unwrap();
        fs::write(dir.path().join(SINGLE_FILE), &bytes).unwrap();
        // What is still accepted must be readable to its last byte.
        if let Ok(tensors) = Tensors::open(&Source::directory(dir.path()).unwrap()) {
            for (_, tensor) in tensors.iter() {
                prop_assert_eq!(tensor.data.iter().count(), tensor.data.len());
            }
        }
    }

    #[test]
    fn no_config_makes_the_parser_panic(
        field in prop::sample::select(tiny_config().as_object().unwrap().keys().cloned().collect::<Vec<_>>()),
        value in prop_oneof![
            Just(json!(null)), Just(json!([])), Just(json!({})), Just(json!("x")), Just(json!(1e300)),
            any::<i64>().prop_map(|n| json!(n)), any::<u64>().prop_map(|n| json!(n)),
            any::<f64>().prop_map(|n| json!(n)),
        ],
    ) {
        let mut config = tiny_config();
        config[&field] = value;
        let _ = lily_model::config::parse_config(&config);
    }
}
