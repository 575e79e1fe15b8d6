//! Random weights of any geometry in the real file layout, for measuring without the real checkpoint.
//!
//! Speed and memory of the engine do not depend on what the weights say, only on their shapes and on
//! activations that stay finite. They are scaled as trained ones are in the two places where it matters to how errors
//! grow: a layer adds little to the residual stream, and the router prefers some experts clearly. Without that the
//! choice of experts is chaotic, and no two correct programs agree on the logits (`docs/lab/activations.md`). [`write()`] fills a directory as `mlx-lm` would: 4-bit shards of about 5 GB,
//! index, `config.json`; beside them the demo's tokenizer, template and generation config, whose token ids all
//! lie below the vocabulary. The same seed gives the same bytes on any number of threads.
//!
//! Files are written under temporary names and renamed when all are whole, `config.json` last, so a directory
//! with a config holds a finished checkpoint.

mod fill;
mod tensors;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::checkpoint::{CONFIG_FILE, GENERATION_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE};
use crate::config;
use crate::demo;
use crate::error::ModelError;
use crate::geometry::{Geometry, LayerKind};
use crate::layout::{self, Module};
use crate::safetensors::{INDEX_FILE, SINGLE_FILE};
use crate::shards::{self, pretty, temporary, write_error};
use crate::source::Source;
use tensors::Spec;

/// Bytes of tensors in a shard, unless a single one has more: what `mlx-lm` writes.
pub const SHARD_BYTES: u64 = 5 << 30;
/// Shards written at the same time: all of the full model's. Some generate while others wait for the disk, and a file system in
/// memory takes as many as there are cores.
const WRITERS: usize = 4;
/// Bytes generated at a time.
const CHUNK: usize = 1 << 20;

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Weight files.
    pub shards: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
}

/// Writes random weights of `geometry` into the directory `dir`, which is made if need be. `progress` is called
/// with bytes done and bytes in all, from several threads.
///
/// # Errors
/// [`ModelError::Refused`] where Lily could not run the geometry, [`ModelError::File`] where `dir` already
/// holds a checkpoint or the vocabulary is smaller than the demo's tokenizer, [`ModelError::DiskFull`] before
/// anything is written, [`ModelError::Write`] where the disk fails.
pub fn write(
    dir: &Path,
    geometry: &Geometry,
    seed: u64,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Summary, ModelError> {
    write_sharded(dir, geometry, seed, SHARD_BYTES, progress)
}

/// As [`write()`], with shards of about `shard_bytes`.
///
/// # Errors
/// As [`write()`].
pub fn write_sharded(
    dir: &Path,
    geometry: &Geometry,
    seed: u64,
    shard_bytes: u64,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Summary, ModelError> {
    let refusals = config::constraints(geometry);
    if !refusals.is_empty() {
        return Err(ModelError::Refused(refusals));
    }
    let text = text_files(geometry)?;
    fs::create_dir_all(dir).map_err(|e| write_error(dir, e))?;
    refuse_occupied(dir)?;

    let modules = layout::modules(geometry);
    let specs = tensors::list(geometry, &modules, seed);
    let bytes = specs.iter().map(|spec| spec.tensor.bytes()).sum();
    shards::require_room(dir, bytes, 0)?;

    let shards = shards::cut(specs, |spec| spec.tensor.bytes(), shard_bytes);
    let mut files = shards::names(shards.len());
    let entries = shards
        .iter()
        .zip(&files)
        .flat_map(|(shard, file)| shard.iter().map(|spec| (spec.tensor.name.as_str(), file.as_str())));
    let small = [(INDEX_FILE, shards::index(entries, bytes))]
        .into_iter()
        .chain(text)
        .chain([(CONFIG_FILE, pretty(&config_json(geometry, &modules)))]);
    let result = write_shards(dir, &shards, &files, bytes, progress).and_then(|()| {
        for (name, contents) in small {
            let path = temporary(dir, name);
            fs::write(&path, contents).map_err(|e| write_error(&path, e))?;
            files.push(name.to_owned());
        }
        files.iter().try_for_each(|name| {
            let target = dir.join(name);
            fs::rename(temporary(dir, name), &target).map_err(|e| write_error(&target, e))
        })
    });
    if result.is_err() {
        // What is left would only take up the disk; that it cannot be removed changes nothing of the error.
        files.iter().for_each(|name| drop(fs::remove_file(temporary(dir, name))));
    }
    result.map(|()| Summary { shards: shards.len(), bytes })
}

/// The files of the text side, from the demo.
fn text_files(geometry: &Geometry) -> Result<Vec<(&'static str, Vec<u8>)>, ModelError> {
    let demo = demo::source();
    crate::checkpoint::read_tokenizer(&demo, Some(geometry.vocab))?;
    let read = |name: &'static str, demo: &Source| Ok(demo.open(name)?.map(|b| (name, b.to_vec())));
    [TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, TEMPLATE_FILE, GENERATION_FILE]
        .into_iter()
        .filter_map(|name| read(name, &demo).transpose())
        .collect()
}

fn refuse_occupied(dir: &Path) -> Result<(), ModelError> {
    let occupied = [CONFIG_FILE, INDEX_FILE, SINGLE_FILE].into_iter().find(|name| dir.join(name).exists());
    match occupied {
        Some(name) => Err(ModelError::file(
            dir.display().to_string(),
            format!("it already holds {name}; name a directory without a checkpoint"),
        )),
        None => Ok(()),
    }
}

fn write_shards(
    dir: &Path,
    shards: &[Vec<Spec>],
    names: &[String],
    total: u64,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), ModelError> {
    let next = AtomicUsize::new(0);
    let done = AtomicU64::new(0);
    let failed = AtomicBool::new(false);
    let first_error = Mutex::new(None);
    let worker = || {
        while !failed.load(Ordering::Relaxed) {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let (Some(shard), Some(name)) = (shards.get(i), names.get(i)) else { return };
            let path = temporary(dir, name);
            let advance = |bytes: u64| {
                let done = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
                progress(done, total);
                !failed.load(Ordering::Relaxed)
            };
            if let Err(error) = write_shard(&path, shard, &advance) {
                failed.store(true, Ordering::Relaxed);
                let mut first = first_error.lock().unwrap_or_else(|e| e.into_inner());
                first.get_or_insert(write_error(&path, error));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..WRITERS {
            scope.spawn(worker);
        }
    });
    let first = first_error.into_inner().unwrap_or_else(|e| e.into_inner());
    first.map_or(Ok(()), Err)
}

/// Writes one safetensors file. `advance` hears of bytes written and says whether to go on.
fn write_shard(path: &Path, specs: &[Spec], advance: &dyn Fn(u64) -> bool) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(&shards::header(specs.iter().map(|spec| &spec.tensor)))?;
    let mut buffer = vec![0; CHUNK];
    for spec in specs {
        let mut start = 0;
        let bytes = spec.tensor.bytes();
        while start < bytes {
            let length = (bytes - start).min(CHUNK as u64) as usize;
            spec.fill.bytes(start, &mut buffer[..length]);
            file.write_all(&buffer[..length])?;
            start += length as u64;
            if !advance(length as u64) {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// The `config.json` of `geometry`, quantized as `modules` say.
fn config_json(g: &Geometry, modules: &[Module]) -> Value {
    let (a, d, m) = (&g.attention, &g.delta, &g.moe);
    let layer_types: Vec<&str> = g
        .layers
        .iter()
        .map(|kind| match kind {
            LayerKind::Delta => "linear_attention",
            LayerKind::Attention => "full_attention",
        })
        .collect();
    let quantization = layout::quantization(modules);
    json!({
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "quantization": quantization.clone(),
        "quantization_config": quantization,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "attention_bias": false,
            "head_dim": a.head_dim,
            "hidden_act": "silu",
            "hidden_size": g.hidden,
            "layer_types": layer_types,
            "linear_conv_kernel_dim": d.conv_width,
            "linear_key_head_dim": d.key_dim,
            "linear_num_key_heads": d.key_heads,
            "linear_num_value_heads": d.value_heads,
            "linear_value_head_dim": d.value_dim,
            "max_position_embeddings": g.max_context,
            "moe_intermediate_size": m.expert_width,
            "num_attention_heads": a.heads,
            "num_experts": m.experts,
            "num_experts_per_tok": m.top_k,
            "num_hidden_layers": g.layers.len(),
            "num_key_value_heads": a.kv_heads,
            "rms_norm_eps": f64::from(g.rms_eps),
            "rope_parameters": {
                "partial_rotary_factor": a.rotary_dim as f64 / a.head_dim as f64,
                "rope_theta": a.rope_theta,
                "rope_type": "default",
            },
            "shared_expert_intermediate_size": m.shared_width,
            "tie_word_embeddings": g.tied_head,
            "vocab_size": g.vocab,
        },
        "tie_word_embeddings": g.tied_head,
    })
}
