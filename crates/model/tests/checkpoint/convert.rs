//! A conversion gives what `mlx_lm.convert` gives, goes on where it was broken off, and says what it cannot convert.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::SystemTime;

use lily_model::checkpoint::{CONFIG_FILE, Checkpoint};
use lily_model::convert::{Options, Summary, convert};
use lily_model::demo;
use lily_model::error::ModelError;
use lily_model::quantize::Rounding;
use lily_model::safetensors::{INDEX_FILE, SINGLE_FILE};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::files::{Model, Stored, flatten, read, write_sharded};

/// An unquantized checkpoint with groups of every kind, and what `mlx_lm.convert` made of it
/// (`oracle/convert_golden.py`).
const SOURCE: &[u8] = include_bytes!("../../../../oracle/golden/convert_source.safetensors");
const EXPECTED: &[u8] = include_bytes!("../../../../oracle/golden/convert_mlx.safetensors");
const CONFIG: &str = include_str!("../../../../oracle/golden/convert_config.json");
const JOURNAL: &str = "lily-convert.json";
/// Cuts what is written into several files.
const SMALL_SHARDS: u64 = 20_000;

fn config() -> Value {
    serde_json::from_str(CONFIG).unwrap()
}

/// The tensors of a file of `oracle/golden`.
fn golden(bytes: &[u8]) -> Model {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join(SINGLE_FILE), bytes).unwrap();
    read(dir.path())
}

/// The demo's text side; of its tokens those of one byte, as the embedding table has no more rows.
fn write_text_side(dir: &Path) {
    for (name, contents) in
        demo::FILES.iter().filter(|(name, _)| *name != SINGLE_FILE && *name != CONFIG_FILE)
    {
        fs::write(dir.join(name), contents).unwrap();
    }
    let path = dir.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
    let bytes = vocab.keys().filter(|token| token.chars().count() == 1);
    let bytes: BTreeMap<&String, usize> = bytes.zip(0..).collect();
    tokenizer["model"]["vocab"] = json!(bytes);
    tokenizer["model"]["merges"] = json!([]);
    tokenizer["added_tokens"] = json!([]);
    fs::write(path, tokenizer.to_string()).unwrap();
}

/// A checkpoint of `model` in three files.
fn source(config: &Value, model: &Model) -> TempDir {
    let dir = TempDir::new().unwrap();
    write_sharded(dir.path(), config, model, 3);
    write_text_side(dir.path());
    dir
}

fn options(threads: usize, shard_bytes: u64) -> Options {
    Options { threads, shard_bytes, rounding: Rounding::Mlx }
}

fn run(from: &Path, to: &Path) -> Result<Summary, ModelError> {
    convert(from, to, &options(2, SMALL_SHARDS), &|_, _| ())
}

/// The sentence that a conversion of `config` and `model` is refused with.
fn refusal(config: &Value, model: &Model) -> String {
    let from = source(config, model);
    let to = TempDir::new().unwrap();
    let sentence = run(from.path(), &to.path().join("out")).unwrap_err().to_string();
    assert!(!sentence.contains('\n'), "{sentence}");
    sentence
}

/// `model` with one tensor changed or, by `None`, taken away.
fn with(model: &Model, name: &str, tensor: Option<Stored>) -> Model {
    let mut model = model.clone();
    match tensor {
        Some(tensor) => drop(model.insert(name.into(), tensor)),
        None => assert!(model.remove(name).is_some(), "{name}"),
    }
    model
}

fn partials(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".partial")).collect()
}

/// Time of change of each weight file that has its own name.
fn changes(dir: &Path) -> BTreeMap<String, SystemTime> {
    let entries = fs::read_dir(dir).unwrap().map(Result::unwrap);
    let files = entries.filter(|e| e.path().extension().is_some_and(|e| e == "safetensors"));
    files.map(|e| (e.file_name().into_string().unwrap(), e.metadata().unwrap().modified().unwrap())).collect()
}

#[test]
fn every_value_is_the_one_that_mlx_lm_writes_however_the_work_is_divided() {
    let expected = golden(EXPECTED);
    let from = source(&config(), &golden(SOURCE));
    for (threads, shard_bytes) in [(1, u64::MAX), (3, SMALL_SHARDS)] {
        let to = TempDir::new().unwrap();
        let summary = convert(from.path(), to.path(), &options(threads, shard_bytes), &|_, _| ()).unwrap();
        let found = read(to.path());
        assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        for (name, tensor) in &expected {
            assert!(found[name] == *tensor, "{name} differs");
        }
        assert_eq!(summary.shards == 1, shard_bytes == u64::MAX, "{summary:?}");
        assert_eq!((summary.vision, summary.mtp, summary.found), (1, 1, 0));
        assert!(to.path().join(INDEX_FILE).exists() && !to.path().join(JOURNAL).exists());
        assert!(partials(to.path()).is_empty());
    }
}

#[test]
fn what_is_written_is_a_checkpoint_that_lily_runs_with_weights_near_the_sources() {
    let tame = |tensor: &Stored| {
        let count: usize = tensor.shape.iter().product();
        let value = |i: usize| (i.wrapping_mul(2_654_435_761) % 1009) as f32 / 504.0 - 1.0;
        Stored::f32(&tensor.shape, &(0..count).map(value).collect::<Vec<_>>())
    };
    let model: Model = golden(SOURCE).iter().map(|(name, tensor)| (name.clone(), tame(tensor))).collect();
    let from = source(&config(), &model);
    let to = TempDir::new().unwrap();
    run(from.path(), to.path()).unwrap();
    let report = lily_model::inspect::report(to.path()).unwrap();
    assert!(report.problems.is_empty() && report.unknown.is_empty(), "{report}");
    let converted = Checkpoint::open(to.path()).unwrap();
    let original = Checkpoint::open(from.path()).unwrap();
    assert_eq!(converted.geometry(), original.geometry());
    let pairs = flatten(&converted.weights().unwrap()).into_iter().zip(flatten(&original.weights().unwrap()));
    for (converted, original) in pairs {
        for (w, original) in converted.iter().zip(&original) {
            // Groups from -1 to 1 have steps of an eighth, of which fifteen end one short of the far side; and the
            // rounding of elements, scale and bias to bf16.
            assert!((w - original).abs() < 0.125 + 0.01, "{w} for {original}");
        }
    }
    for (name, contents) in demo::FILES.iter().filter(|(name, _)| name.contains("template")) {
        assert_eq!(fs::read(to.path().join(name)).unwrap(), *contents);
    }
    let written: Value = serde_json::from_slice(&fs::read(to.path().join(CONFIG_FILE)).unwrap()).unwrap();
    assert_eq!(written["quantization"], written["quantization_config"]);
    assert_eq!(
        written["quantization"]["language_model.model.layers.1.mlp.gate"],
        json!({"group_size": 64, "bits": 8})
    );
    assert!(written.get("vision_config").is_none());
}

/// Squared error of each group of 64 in `model`, against `original`.
fn errors(model: &[Vec<f32>], original: &[Vec<f32>]) -> Vec<f64> {
    let square = |(w, original): (&f32, &f32)| f64::from(w - original).powi(2);
    let pairs = model.iter().zip(original);
    let groups = pairs.flat_map(|(model, original)| model.chunks(64).zip(original.chunks(64)));
    groups.map(|(model, original)| model.iter().zip(original).map(square).sum()).collect()
}

#[test]
fn least_squares_make_no_group_worse_and_all_together_much_better() {
    let mut state = 1u64;
    // The sum of four uniform numbers is near enough to what weights are like.
    let mut draw = || -> f32 {
        let uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        std::iter::repeat_with(uniform).take(4).sum()
    };
    let mut bell = |tensor: &Stored| {
        let count: usize = tensor.shape.iter().product();
        // As bf16 holds them, so that nothing but the groups is compared.
        let values: Vec<f32> = (0..count).map(|_| half::bf16::from_f32(draw()).to_f32()).collect();
        Stored::f32(&tensor.shape, &values)
    };
    let model: Model = golden(SOURCE).iter().map(|(name, tensor)| (name.clone(), bell(tensor))).collect();
    let from = source(&config(), &model);
    let weights = |dir: &Path| flatten(&Checkpoint::open(dir).unwrap().weights().unwrap());
    let original = weights(from.path());
    let [mlx, fitted] = [Rounding::Mlx, Rounding::LeastSquares].map(|rounding| {
        let to = TempDir::new().unwrap();
        let options = Options { rounding, ..options(2, SMALL_SHARDS) };
        convert(from.path(), to.path(), &options, &|_, _| ()).unwrap();
        errors(&weights(to.path()), &original)
    });
    for (mlx, fitted) in mlx.iter().zip(&fitted) {
        // Up to the rounding of the sums by which they are compared.
        assert!(*fitted <= mlx * 1.0001, "{fitted} where MLX has {mlx}");
    }
    let (mlx, fitted): (f64, f64) = (mlx.iter().sum(), fitted.iter().sum());
    println!("squared error: MLX {mlx:.3}, least squares {fitted:.3}");
    assert!(fitted < 0.85 * mlx, "{fitted} of {mlx}");
}

#[test]
fn a_broken_off_conversion_goes_on_after_the_files_that_are_whole_and_trusts_no_half_one() {
    let from = source(&config(), &golden(SOURCE));
    let to = TempDir::new().unwrap();
    let stop = |done: u64, total: u64| assert!(done < total / 2, "the machine stops here");
    let stopped = || convert(from.path(), to.path(), &options(1, SMALL_SHARDS), &stop);
    assert!(catch_unwind(AssertUnwindSafe(stopped)).is_err());
    let before = changes(to.path());
    assert!(before.len() >= 2 && partials(to.path()).len() == 1, "{before:?}");
    assert!(!to.path().join(CONFIG_FILE).exists());

    // One file has lost its end, as after a power cut; one that was never begun is there with nothing in it.
    let cut = before.keys().next().unwrap();
    let file = File::options().write(true).open(to.path().join(cut)).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    let last = before.keys().last().unwrap();
    let count = last.split("-of-").nth(1).unwrap();
    let empty = to.path().join(format!("model-{}-of-{count}", count.trim_end_matches(".safetensors")));
    assert!(!empty.exists());
    fs::write(&empty, []).unwrap();

    let summary = run(from.path(), to.path()).unwrap();
    assert_eq!(summary.found, before.len() - 1);
    let after = changes(to.path());
    assert!(before.iter().all(|(name, time)| name == cut || after[name] == *time), "{before:?} {after:?}");
    assert!(read(to.path()) == golden(EXPECTED));
    assert!(partials(to.path()).is_empty() && !to.path().join(JOURNAL).exists());
    let again = run(from.path(), to.path()).unwrap_err().to_string();
    assert!(again.contains("is no conversion in progress"), "{again}");
}

#[test]
fn a_directory_that_something_else_is_in_or_being_made_in_is_left_alone() {
    let from = source(&config(), &golden(SOURCE));
    let to = TempDir::new().unwrap();
    let refused = |to: &Path| run(from.path(), to).unwrap_err().to_string();
    assert!(refused(from.path()).contains("is no conversion in progress"));
    let file = to.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(refused(&file).contains("this is a file"));

    let half = to.path().join("half");
    let stop = |done: u64, total: u64| assert!(done < total / 2, "the machine stops here");
    let stopped = || convert(from.path(), &half, &options(1, SMALL_SHARDS), &stop);
    assert!(catch_unwind(AssertUnwindSafe(stopped)).is_err());
    let other = options(1, 2 * SMALL_SHARDS);
    let sentence = convert(from.path(), &half, &other, &|_, _| ()).unwrap_err().to_string();
    assert!(sentence.contains("unfinished conversion of another checkpoint"), "{sentence}");
    let journal = File::open(half.join(JOURNAL)).unwrap();
    journal.lock().unwrap();
    assert!(refused(&half).contains("another program converts into it"));
    journal.unlock().unwrap();
    run(from.path(), &half).unwrap();
}

#[test]
fn what_cannot_be_converted_is_one_sentence_that_names_it() {
    let (config, model) = (config(), golden(SOURCE));
    let norm = "model.language_model.norm.weight";
    let gate = "model.language_model.layers.0.mlp.gate.weight";
    let stored = |dtype: &str| Stored { dtype: dtype.into(), ..model[gate].clone() };

    let missing = refusal(&config, &with(&model, norm, None));
    assert_eq!(missing, "tensor `model.norm.weight` is missing; expected BF16 or F16 or F32 [64]");
    let shape = refusal(&config, &with(&model, norm, Some(Stored::f32(&[32], &[0.0; 32]))));
    assert!(shape.contains(norm) && shape.contains("F32 [32]; expected"), "{shape}");
    let dtype = refusal(&config, &with(&model, gate, Some(stored("I16"))));
    assert!(dtype.contains(gate) && dtype.contains("is I16 [2, 64]"), "{dtype}");
    let unknown = refusal(&config, &with(&model, "model.language_model.extra", Some(stored("BF16"))));
    assert!(unknown.contains("has no tensor `model.language_model.extra`"), "{unknown}");
    let mut broken = stored("BF16");
    broken.bytes[..2].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    let broken = refusal(&config, &with(&model, gate, Some(broken)));
    assert!(broken.contains(gate) && broken.contains("not numbers"), "{broken}");
    let packed = Stored { dtype: "U32".into(), shape: vec![2, 32], ..model[gate].clone() };
    let packed = refusal(&config, &with(&model, gate, Some(packed)));
    assert!(packed.contains("is quantized already") && packed.contains(gate), "{packed}");

    let from = TempDir::new().unwrap();
    for (name, contents) in demo::FILES {
        fs::write(from.path().join(name), contents).unwrap();
    }
    let quantized = run(from.path(), &from.path().join("out")).unwrap_err().to_string();
    assert!(quantized.contains("is quantized already (config.json says that its weights are 4-bit)"));
    let nowhere = run(&from.path().join("nowhere"), &from.path().join("out")).unwrap_err().to_string();
    assert!(nowhere.contains("nowhere"), "{nowhere}");
    assert!(!from.path().join("out").exists());
}

#[test]
fn a_tied_head_is_its_embedding_table_whether_the_source_has_both_or_not() {
    let mut config = config();
    config["tie_word_embeddings"] = json!(true);
    config["text_config"]["tie_word_embeddings"] = json!(true);
    let both = golden(SOURCE);
    let mut expected = golden(EXPECTED);
    expected.retain(|name, _| !name.contains("lm_head"));
    for model in [with(&both, "lm_head.weight", None), both] {
        let from = source(&config, &model);
        let to = TempDir::new().unwrap();
        run(from.path(), to.path()).unwrap();
        assert!(read(to.path()) == expected);
    }
}
