//! An unquantized checkpoint into the 4-bit one that Lily runs, as `mlx_lm.convert` makes it.
//!
//! **In**: a directory in Hugging Face's layout, or an unquantized one in MLX's, of BF16, F16 or F32 tensors. **Out**:
//! the modules of [`crate::layout`], quantized by [`crate::quantize`], with `config.json`, index, tokenizer and
//! template. Every value is the one that `mlx_lm.convert --quantize --dtype bfloat16` writes, to the bit, unless
//! [`Rounding::LeastSquares`] is asked for: elements
//! become bf16 first; norms that are stored minus one get it back, in the type that they are stored in; the taps of the
//! convolution change places with its empty dimension; fused gate and up projections of the experts are taken apart;
//! `A_log` keeps its type; vision tower and multi-token-prediction head are left out. A tensor that the architecture does
//! not have is refused, not dropped.
//!
//! **Memory**: each thread reads a piece of some MiB of the source (`work`), writes what it becomes where it belongs,
//! and takes the next. Nothing else grows with the model.
//!
//! **Interruption**: a weight file is written beside its name, synced and renamed, and a journal (`claim`) says of which
//! source. Whoever finds that journal goes on after the files that are whole; it is removed last.

mod claim;
mod origin;
mod work;

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::checkpoint::{
    self, CONFIG_FILE, GENERATION_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE,
};
use crate::config::{Quantization, parse_config};
use crate::error::ModelError;
use crate::layout::{self, Module};
use crate::load::{self, LoadReport};
use crate::names::Skipped;
use crate::quantize::Rounding;
use crate::safetensors::{Dtype, INDEX_FILE, Tensors};
use crate::shards::{self, pretty, temporary, write_error};
use crate::source::Source;
use claim::Claim;
use origin::Origins;
use work::Shard;

/// Bytes of tensors in a weight file, where nothing is said: what is lost where a conversion breaks off.
pub const SHARD_BYTES: u64 = 1 << 30;

/// Files that are copied as they are where they are there: what Lily reads, and what other programs read instead.
const COPIED: [&str; 8] = [
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    TEMPLATE_FILE,
    GENERATION_FILE,
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
];

/// How to convert.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads that convert.
    pub threads: usize,
    /// Most bytes of tensors in a weight file, unless a single module has more.
    pub shard_bytes: u64,
    /// How scales and biases are found.
    pub rounding: Rounding,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Weight files.
    pub shards: usize,
    /// Of them, those that an earlier run had finished.
    pub found: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Tensors of the vision tower, which are left out.
    pub vision: usize,
    /// Tensors of the multi-token-prediction head, which are left out.
    pub mtp: usize,
}

/// Converts the checkpoint in `from` into the directory `to`, which is made, is empty, or holds what an interrupted
/// conversion of the same checkpoint left. `progress` is called with bytes written and bytes in all, from several
/// threads.
///
/// # Errors
/// [`ModelError`] where `from` is not an unquantized checkpoint of this architecture, where `to` holds something else,
/// where the disk has no room, and where reading or writing fails. What was finished stays, and is not done again.
pub fn convert(
    from: &Path,
    to: &Path,
    options: &Options,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Summary, ModelError> {
    let source = Source::directory(from)?;
    let config: Value = serde_json::from_slice(&source.require(CONFIG_FILE)?)
        .map_err(|e| ModelError::file(source.path(CONFIG_FILE), format!("this is not valid JSON ({e})")))?;
    let parsed = parse_config(&config)?;
    let tensors = Tensors::open(&source)?;
    refuse_quantized(&source, &parsed.quantization, &tensors)?;
    let (report, weights) = load::load(&parsed, &tensors);
    weights?;
    refuse_unknown(&source, &report, parsed.geometry.tied_head)?;
    checkpoint::read_tokenizer(&source, Some(parsed.geometry.vocab))?;
    checkpoint::read_chat_template(&source)?;
    checkpoint::read_generation_config(&source)?;

    let modules = layout::modules(&parsed.geometry);
    let config = quantized_config(config, &modules);
    let parts = Origins::new(&tensors, report.zero_centred).parts(modules)?;
    let shards = Shard::cut(parts, options.shard_bytes);
    let bytes = shards.iter().map(Shard::tensor_bytes).sum();

    let claim = Claim::take(to, &journal(from, options)?)?;
    let whole: Vec<bool> = shards.iter().map(|shard| shard.is_whole(to)).collect();
    require_room(to, &shards, &whole).inspect_err(|_| claim.give_up())?;
    work::write(from, to, &shards, &whole, options, progress)?;

    let entries = shards.iter().flat_map(Shard::entries);
    put(to, INDEX_FILE, &shards::index(entries, bytes))?;
    for name in COPIED {
        if let Some(contents) = source.open(name)? {
            put(to, name, &contents)?;
        }
    }
    put(to, CONFIG_FILE, &pretty(&config))?;
    claim.finish()?;
    let skipped = |part| report.skipped.iter().filter(|(_, of)| *of == part).count();
    Ok(Summary {
        shards: shards.len(),
        found: whole.iter().filter(|&&whole| whole).count(),
        bytes,
        vision: skipped(Skipped::Vision),
        mtp: skipped(Skipped::Mtp),
    })
}

fn refuse_quantized(
    source: &Source,
    quantization: &Quantization,
    tensors: &Tensors,
) -> Result<(), ModelError> {
    let declared =
        quantization.default.or_else(|| quantization.overrides.values().find_map(|&format| format));
    let packed = tensors.iter().find(|(_, tensor)| tensor.dtype == Dtype::U32);
    let found = match (declared, packed) {
        (Some(format), _) => format!("config.json says that its weights are {format}"),
        (None, Some((name, _))) => format!("its tensor `{name}` is packed"),
        (None, None) => return Ok(()),
    };
    let problem =
        format!("this checkpoint is quantized already ({found}); name the one that it was made from");
    Err(ModelError::file(source.place(), problem))
}

/// A tied head is its embedding table, whatever else is in the file, as `mlx-lm` has it.
fn refuse_unknown(source: &Source, report: &LoadReport, tied_head: bool) -> Result<(), ModelError> {
    let mut unknown = report.unknown.iter().filter(|name| !(tied_head && name.ends_with("lm_head.weight")));
    let Some(first) = unknown.next() else { return Ok(()) };
    let others = match unknown.count() {
        0 => String::new(),
        more => format!(", nor {more} others"),
    };
    let problem = format!(
        "the architecture has no tensor `{first}`{others}; what it is for is not known, so that it cannot be left out"
    );
    Err(ModelError::file(source.place(), problem))
}

/// The `config.json` of what is written: the source's, with the types and the quantization that the tensors now have and
/// under the name by which `mlx-lm` knows the architecture.
fn quantized_config(mut config: Value, modules: &[Module]) -> Value {
    let Some(root) = config.as_object_mut() else { return config };
    for field in ["_name_or_path", "vision_config", "quantization", "quantization_config"] {
        root.shift_remove(field);
    }
    root.insert("model_type".into(), json!("qwen3_5_moe"));
    let set_dtype = |object: &mut serde_json::Map<String, Value>| {
        for field in ["dtype", "torch_dtype"] {
            if let Some(dtype) = object.get_mut(field) {
                *dtype = json!("bfloat16");
            }
        }
    };
    set_dtype(root);
    root.get_mut("text_config").and_then(Value::as_object_mut).map(set_dtype);
    let quantization = layout::quantization(modules);
    root.insert("quantization".into(), quantization.clone().into());
    root.insert("quantization_config".into(), quantization.into());
    config
}

/// What an interrupted conversion must have been of, to be gone on with: the source's files by name, size and time of
/// change, how they are rounded and how they are cut.
fn journal(from: &Path, options: &Options) -> Result<Value, ModelError> {
    let failed = |reason| ModelError::Io { file: from.display().to_string(), reason };
    let mut files = Vec::new();
    for entry in fs::read_dir(from).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name != CONFIG_FILE && !name.ends_with(".safetensors") {
            continue;
        }
        // Links are followed, as download caches are made of them.
        let meta = fs::metadata(&path).map_err(failed)?;
        let changed = meta.modified().ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
        files.push(json!({
            "name": name,
            "bytes": meta.len(),
            "changed": changed.map(|time| time.as_nanos().to_string()),
        }));
    }
    files.sort_by_key(|file| file["name"].as_str().map(str::to_owned));
    let rounding = match options.rounding {
        Rounding::Mlx => "mlx",
        Rounding::LeastSquares => "least squares",
    };
    Ok(json!({"format": 1, "shard_bytes": options.shard_bytes, "rounding": rounding, "source": files}))
}

/// Refuses where the disk cannot hold what is not here yet. What broken-off files take is theirs again.
fn require_room(to: &Path, shards: &[Shard], whole: &[bool]) -> Result<(), ModelError> {
    let missing = shards.iter().zip(whole).filter(|(_, whole)| !**whole).map(|(shard, _)| shard);
    let (mut needed, mut held) = (0, 0);
    for shard in missing {
        needed += shard.file_bytes();
        held += shard.held_bytes(to);
    }
    shards::require_room(to, needed, held)
}

/// Writes a small file, whole or not at all.
fn put(dir: &Path, name: &str, contents: &[u8]) -> Result<(), ModelError> {
    let path = temporary(dir, name);
    fs::write(&path, contents).map_err(|e| work::write_failed(&path, e))?;
    let target = dir.join(name);
    fs::rename(&path, &target).map_err(|e| write_error(&target, e))
}
