//! From flags to a model that answers: checkpoint, backend, engine.

use anyhow::{Context, bail};
use lily_cpu::footprint::Footprint;
use lily_cpu::pool::physical_cores;
use lily_cpu::{CpuBackend, CpuOptions};
use lily_engine::backend::Backend;
use lily_engine::engine::{CacheOptions, Engine, EngineOptions};
use lily_engine::prefix_cache::disk::DiskOptions;
use lily_engine::prefix_cache::fingerprint::fingerprint;
use lily_engine::prefix_cache::positions::TurnMarkers;
use lily_model::checkpoint::Checkpoint;
use lily_model::tokenizer::{Tokenizer, markers};
use lily_server::chat_model::{ChatModel, unix_time};
use lily_server::record::Recorder;

use crate::args::{CacheArgs, ModelArgs, PlaceArgs};
use crate::budget::Budget;
use crate::{machine, progress};

/// The default context: room for a coding agent's prompt, 0.7 GB of cache with the full model.
pub const DEFAULT_CONTEXT: usize = 32_768;

/// The most that the prefix cache takes of its own accord: some hundred turns of the full model.
const MOST_CACHE: u64 = 8_000_000_000;
/// The same in sequences of full length, so that a small model does not fill a large machine.
const MOST_CACHED_CONTEXTS: u64 = 16;
/// What it takes where the system does not tell how much memory there is.
const BLIND_CACHE: u64 = 1_000_000_000;

/// Tokens of a prompt between two tokens of a stream. On two cores the full model takes about 3 s for 512 tokens,
/// too long a pause to read through; a quarter of that makes every expert serve fewer tokens per reading of its
/// weights, and prompts slower, only while somebody else is reading.
const BUSY_CHUNK: usize = 128;

/// The marker of a tool's result in the chat template.
const TOOL_RESPONSE: &str = "<tool_response>";

/// Where the real model is, in one command.
const DOWNLOAD: &str = "hf download mlx-community/Qwen3.6-35B-A3B-4bit --local-dir qwen3.6";

/// A model that answers, and the memory it takes.
pub struct Session {
    /// The model.
    pub model: ChatModel,
    /// Its memory.
    pub budget: Budget,
}

/// Loads what `args` name and gives it `places`. Says on standard error when that is the demo.
pub fn start(args: &ModelArgs, cache: &CacheArgs, places: PlaceArgs) -> anyhow::Result<Session> {
    let spinner = progress::spinner("loading the model");
    let checkpoint = open(args)?;
    let budget = budget(args, &checkpoint, DEFAULT_CONTEXT)?;
    let tokenizer = checkpoint.tokenizer()?;
    let defaults = checkpoint.generation_config();
    let cache = cache_options(cache, &budget, &checkpoint, &tokenizer)?;
    let backend = backend_within(args, &checkpoint, budget.context, state_bytes(&budget, cache.bytes))?;
    let options = EngineOptions {
        eos_token_ids: defaults.eos_token_ids.clone(),
        busy_chunk: BUSY_CHUNK,
        max_running: places.max_concurrent,
        max_waiting: places.max_queue,
        cache,
        ..EngineOptions::default()
    };
    let model = ChatModel {
        name: checkpoint.name().to_string(),
        created: unix_time(),
        engine: Engine::start(backend, tokenizer.clone(), options),
        tokenizer,
        template: checkpoint.chat_template()?,
        defaults,
        think: args.think,
        turns: Default::default(),
        recorder: Recorder::default(),
    };
    spinner.finish_and_clear();
    if args.model_path.is_none() {
        eprintln!(
            "lily: no --model-path, so this is the built-in demo, a tiny model; for the real one: `{DOWNLOAD}`, then --model-path qwen3.6"
        );
    }
    Ok(Session { model, budget })
}

/// The device that runs the checkpoint's model, with room for `context` tokens in a sequence.
pub fn backend(
    args: &ModelArgs,
    checkpoint: &Checkpoint,
    context: usize,
) -> anyhow::Result<Box<dyn Backend>> {
    backend_within(args, checkpoint, context, usize::MAX)
}

fn backend_within(
    args: &ModelArgs,
    checkpoint: &Checkpoint,
    context: usize,
    state_bytes: usize,
) -> anyhow::Result<Box<dyn Backend>> {
    let options =
        CpuOptions { threads: args.threads, ctx_len: context, state_bytes, ..CpuOptions::default() };
    Ok(Box::new(CpuBackend::new(checkpoint.weights()?, options)?))
}

/// What sequences and snapshots may take: what one sequence needs, all that the cache may hold, and half of what
/// is then left, for more sequences.
fn state_bytes(budget: &Budget, cache: u64) -> usize {
    let Some(left) = budget.left() else { return usize::MAX };
    let bytes = budget.own.saturating_add(cache).saturating_add(left.saturating_sub(cache) / 2);
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn cache_options(
    args: &CacheArgs,
    budget: &Budget,
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
) -> anyhow::Result<CacheOptions> {
    let most = MOST_CACHE.min(budget.own.saturating_mul(MOST_CACHED_CONTEXTS));
    let usual = || budget.left().map_or(BLIND_CACHE, |left| left / 2).min(most);
    let turn_start = tokenizer.token_id(markers::IM_START);
    let tool_response = tokenizer.token_id(TOOL_RESPONSE);
    let disk = match &args.cache_dir {
        Some(dir) => {
            std::fs::create_dir_all(dir)
                .with_context(|| format!("--cache-dir {} cannot be made", dir.display()))?;
            let (dir, model) = (dir.clone(), fingerprint(&checkpoint.weights()?));
            Some(DiskOptions { dir, bytes: args.cache_dir_bytes, model })
        }
        None => None,
    };
    Ok(CacheOptions {
        bytes: args.cache_bytes.unwrap_or_else(usual),
        markers: turn_start.map(|turn_start| TurnMarkers { turn_start, tool_response }),
        disk,
        ..CacheOptions::default()
    })
}

/// The checkpoint that `args` name, or the demo.
pub fn open(args: &ModelArgs) -> anyhow::Result<Checkpoint> {
    match &args.model_path {
        Some(dir) => Checkpoint::open(dir).with_context(|| format!("{} cannot be loaded", dir.display())),
        None => Ok(Checkpoint::demo()?),
    }
}

/// The memory that the checkpoint's model takes at the context that `args` ask for, else at `usual` or what the
/// model and the machine have room for.
///
/// # Errors
/// A context that is longer than the model's, or that does not fit the machine.
pub fn budget(args: &ModelArgs, checkpoint: &Checkpoint, usual: usize) -> anyhow::Result<Budget> {
    let geometry = checkpoint.geometry();
    let most = geometry.max_context;
    if let Some(asked) = args.ctx_len.filter(|&asked| asked > most) {
        bail!("--ctx-len {asked} is more than the {most} tokens of {}; ask for less", checkpoint.name())
    }
    let threads = args.threads.unwrap_or_else(physical_cores);
    let own = |tokens| Footprint::new(geometry, threads, tokens).total() as u64;
    Budget::new(args.ctx_len, usual.min(most), checkpoint.weight_bytes(), machine::memory_bytes(), own)
}
