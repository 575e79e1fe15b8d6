//! Tensors are found under every name that writers use, and mean the same in every layout.

use std::sync::Arc;

use lily_model::checkpoint::Checkpoint;
use lily_model::source::Source;
use lily_model::weights::{Blob, Format};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::files::{
    Model, Stored, flatten, read, renamed, rows, tiny, tiny_config, tiny_model, write_sharded, write_single,
};

fn load(config: &Value, model: &Model) -> Vec<Vec<f32>> {
    let dir = TempDir::new().unwrap();
    write_single(dir.path(), config, model);
    flatten(&Checkpoint::open(dir.path()).unwrap().weights().unwrap())
}

fn refusal(config: &Value, model: &Model) -> String {
    let dir = TempDir::new().unwrap();
    write_single(dir.path(), config, model);
    Checkpoint::open(dir.path()).unwrap().weights().unwrap_err().to_string()
}

/// The names of `mlx-lm` and `mlx-vlm`, and of Hugging Face's multimodal checkpoints.
fn spellings() -> [fn(&str) -> String; 2] {
    [
        |name| format!("language_model.{name}"),
        |name| match name.strip_prefix("model.") {
            Some(rest) => format!("model.language_model.{rest}"),
            None => name.to_owned(),
        },
    ]
}

/// `model` as Hugging Face stores it: norms zero-centred, convolution `[channels, 1, width]`, gate and up of
/// each expert one after the other.
fn hugging_face(model: &Model) -> Model {
    let mut out = Model::new();
    for (name, tensor) in model {
        let shape = &tensor.shape;
        let zero_centred = name.ends_with("norm.weight") && !name.contains("linear_attn");
        if name.ends_with("conv1d.weight") {
            out.insert(name.clone(), Stored::f32(&[shape[0], 1, shape[1]], &tensor.values()));
        } else if zero_centred {
            let values: Vec<f32> = tensor.values().iter().map(|w| w - 1.0).collect();
            out.insert(name.clone(), Stored::f32(shape, &values));
        } else if let Some(path) = name.strip_suffix("switch_mlp.gate_proj.weight") {
            let gate = tensor.values();
            let up = model[&format!("{path}switch_mlp.up_proj.weight")].values();
            let size = shape[1] * shape[2];
            let fused: Vec<f32> =
                gate.chunks(size).zip(up.chunks(size)).flat_map(|(gate, up)| [gate, up].concat()).collect();
            let shape = [shape[0], 2 * shape[1], shape[2]];
            out.insert(format!("{path}experts.gate_up_proj"), Stored::f32(&shape, &fused));
        } else if let Some(path) = name.strip_suffix("switch_mlp.down_proj.weight") {
            out.insert(format!("{path}experts.down_proj"), tensor.clone());
        } else if !name.ends_with("switch_mlp.up_proj.weight") {
            out.insert(name.clone(), tensor.clone());
        }
    }
    out
}

#[test]
fn every_value_arrives_where_its_name_says() {
    let model = tiny_model();
    let dir = TempDir::new().unwrap();
    write_single(dir.path(), &tiny_config(), &model);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let weights = checkpoint.weights().unwrap();
    assert_eq!(weights.geometry, tiny());
    assert_eq!(rows(&weights.embed_tokens), model["model.embed_tokens.weight"].values());
    assert_eq!(
        rows(&weights.layers[1].moe.up_proj),
        model["model.layers.1.mlp.switch_mlp.up_proj.weight"].values()
    );
    assert_eq!(weights.layers[0].post_norm, model["model.layers.0.post_attention_layernorm.weight"].values());
    let stored: usize = model.values().map(|t| t.bytes.len()).sum();
    assert_eq!(checkpoint.weight_bytes(), stored as u64);
    // No two of the tensors hold the same values, so each can only have come from its own name.
    let mut loaded: Vec<Vec<u32>> =
        flatten(&weights).iter().map(|t| t.iter().map(|w| w.to_bits()).collect()).collect();
    let mut expected: Vec<Vec<u32>> =
        model.values().map(|t| t.values().iter().map(|w| w.to_bits()).collect()).collect();
    loaded.sort();
    expected.sort();
    assert_eq!(loaded, expected);
}

#[test]
fn every_spelling_of_the_names_gives_the_same_weights() {
    let model = tiny_model();
    let expected = load(&tiny_config(), &model);
    for spelling in spellings() {
        assert_eq!(load(&tiny_config(), &renamed(&model, spelling)), expected);
    }
}

#[test]
fn quantized_tensors_load_under_every_spelling() {
    let dir = TempDir::new().unwrap();
    lily_model::synth::write(dir.path(), &tiny(), 3, &|_, _| ()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let expected = flatten(&checkpoint.weights().unwrap());
    let weights = checkpoint.weights().unwrap();
    assert_eq!(weights.embed_tokens.format, Format::Affine4);
    assert_eq!(weights.layers[0].moe.gate.format, Format::Affine8);
    let config = serde_json::from_slice(&std::fs::read(dir.path().join("config.json")).unwrap()).unwrap();
    let plain = renamed(&read(dir.path()), |name| name.strip_prefix("language_model.").unwrap().to_owned());
    assert_eq!(load(&config, &plain), expected);
    for spelling in spellings() {
        assert_eq!(load(&config, &renamed(&plain, spelling)), expected);
    }
}

#[test]
fn the_layout_of_hugging_face_gives_the_same_weights() {
    let model = tiny_model();
    let expected = load(&tiny_config(), &model);
    assert_eq!(load(&tiny_config(), &hugging_face(&model)), expected);
}

#[test]
fn shards_give_the_same_weights_as_one_file() {
    let model = tiny_model();
    let dir = TempDir::new().unwrap();
    write_sharded(dir.path(), &tiny_config(), &model, 3);
    let sharded = flatten(&Checkpoint::open(dir.path()).unwrap().weights().unwrap());
    assert_eq!(sharded, load(&tiny_config(), &model));
}

#[test]
fn files_in_memory_give_the_same_weights_as_files_on_disk() {
    let dir = TempDir::new().unwrap();
    lily_model::synth::write(dir.path(), &tiny(), 3, &|_, _| ()).unwrap();
    let mut files: Vec<(&'static str, &'static [u8])> = Vec::new();
    for name in ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"] {
        files.push((name, std::fs::read(dir.path().join(name)).unwrap().leak()));
    }
    let source = Source::Embedded { name: "in memory", files: files.leak() };
    let embedded = Checkpoint::from_source("in memory".into(), source).unwrap();
    let on_disk = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(flatten(&embedded.weights().unwrap()), flatten(&on_disk.weights().unwrap()));
    assert_eq!(embedded.tokenizer().unwrap().encode("sum"), on_disk.tokenizer().unwrap().encode("sum"));
    assert!(embedded.chat_template().is_ok());
}

#[test]
fn a_tied_head_is_the_embedding_table() {
    let mut config = tiny_config();
    config["tie_word_embeddings"] = json!(true);
    let mut model = tiny_model();
    model.remove("lm_head.weight");
    let weights = load(&config, &model);
    assert_eq!(weights[0], weights[2]);
}

#[test]
fn vision_and_mtp_are_skipped_by_name_and_strangers_reported() {
    let mut model = tiny_model();
    let stranger = Stored::f32(&[1], &[1.0]);
    let skipped = ["model.visual.blocks.0.norm.weight", "mtp.layers.0.norm.weight", "vision_tower.x.weight"];
    for name in skipped.iter().chain(&["model.layers.0.extra.weight"]) {
        model.insert((*name).into(), stranger.clone());
    }
    let dir = TempDir::new().unwrap();
    write_single(dir.path(), &tiny_config(), &model);
    let (report, weights) = Checkpoint::open(dir.path()).unwrap().load();
    assert!(weights.is_ok());
    let names: Vec<&str> = report.skipped.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        ["model.visual.blocks.0.norm.weight", "mtp.layers.0.norm.weight", "vision_tower.x.weight"]
    );
    assert_eq!(report.unknown, ["model.layers.0.extra.weight"]);
}

#[test]
fn missing_misshapen_and_mistyped_tensors_are_named_with_what_was_expected() {
    let mut model = tiny_model();
    model.remove("model.layers.0.linear_attn.A_log");
    model.insert("model.norm.weight".into(), Stored::f32(&[63], &[0.0; 63]));
    let words = Stored { dtype: "I32".into(), shape: vec![4, 64], bytes: vec![0; 4 * 64 * 4] };
    model.insert("model.layers.1.mlp.gate.weight".into(), words);
    let packed = Stored { dtype: "U32".into(), shape: vec![4096, 8], bytes: vec![0; 4096 * 8 * 4] };
    model.insert("lm_head.weight".into(), packed);
    let message = refusal(&tiny_config(), &model);
    for sentence in [
        "tensor `model.layers.0.linear_attn.A_log` is missing; expected BF16 or F16 or F32 [2]",
        "tensor `model.norm.weight` is F32 [63]; expected BF16 or F16 or F32 [64]",
        "tensor `model.layers.1.mlp.gate.weight` is I32 [4, 64]; expected BF16 or F16 or F32 [4, 64]",
        "tensor `lm_head.weight` is U32 [4096, 8]; expected BF16, F16 or F32, because `quantization`",
    ] {
        assert!(message.contains(sentence), "{sentence} in:\n{message}");
    }
}

#[test]
fn quantized_tensors_that_are_not_what_the_config_declares_are_refused() {
    let dir = TempDir::new().unwrap();
    lily_model::synth::write(dir.path(), &tiny(), 3, &|_, _| ()).unwrap();
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("config.json")).unwrap()).unwrap();
    let mut model = read(dir.path());
    config["quantization"]["language_model.lm_head"] = json!({"group_size": 64, "bits": 8});
    let embedding = "language_model.model.embed_tokens";
    let scales = model.get_mut(&format!("{embedding}.scales")).unwrap();
    scales.dtype = "F16".into();
    let biases = "language_model.model.layers.0.linear_attn.out_proj.biases";
    model.remove(biases);
    let message = refusal(&config, &model);
    for sentence in [
        "tensor `language_model.lm_head.weight` is U32 [4096, 8]; expected U32 [4096, 16] (8-bit in groups of 64",
        "tensor `language_model.model.embed_tokens.scales` is F16 [4096, 1]; expected BF16 [4096, 1]",
        "tensor `model.layers.0.linear_attn.out_proj.biases` is missing; expected BF16 [64, 2]",
    ] {
        assert!(message.contains(sentence), "{sentence} in:\n{message}");
    }
}

#[test]
fn one_tensor_under_two_spellings_is_refused() {
    let mut model = tiny_model();
    let norm = model["model.norm.weight"].clone();
    model.insert("language_model.model.norm.weight".into(), norm);
    assert!(refusal(&tiny_config(), &model).contains("one spelling of each tensor's name"));
}

#[test]
fn an_empty_checkpoint_is_refused_without_filling_the_screen() {
    let stranger = Model::from([("x".to_owned(), Stored::f32(&[1], &[1.0]))]);
    let message = refusal(&tiny_config(), &stranger);
    assert!(message.lines().count() < 12, "{message}");
    assert!(message.ends_with("more; `lily inspect` lists all of them"), "{message}");
}

#[test]
fn a_range_outside_a_blob_is_not_given() {
    let blob = Blob::new(Arc::new(vec![1u8, 2, 3, 4]));
    let middle = blob.slice(1..3).unwrap();
    assert_eq!(middle[..], [2, 3]);
    assert_eq!(middle.slice(1..2).unwrap()[..], [3]);
    assert!(middle.slice(1..3).is_none());
    assert!(middle.slice(usize::MAX..usize::MAX).is_none());
}
