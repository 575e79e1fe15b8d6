//! From flags to a model that answers: checkpoint, backend, engine.

use anyhow::Context;
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
use crate::device::{self, MemoryUse, Opened};
use crate::{models, progress};

/// The default context: room for a coding agent's prompt, 0.7 GB of cache with the full model.
pub const DEFAULT_CONTEXT: usize = 32_768;

/// The most that the prefix cache takes of its own accord: some hundred turns of the full model.
const MOST_CACHE: u64 = 8_000_000_000;
/// The same in sequences of full length, so that a small model does not fill a large machine.
const MOST_CACHED_CONTEXTS: u64 = 16;
/// What it takes where the system does not tell how much memory there is.
const BLIND_CACHE: u64 = 1_000_000_000;

/// The marker of a tool's result in the chat template.
const TOOL_RESPONSE: &str = "<tool_response>";

/// A model that answers, and the memory it takes.
pub struct Session {
    /// The model.
    pub model: ChatModel,
    /// The memory that it takes.
    pub memory: MemoryUse,
    /// Why it runs on the device that it runs on.
    pub chosen: String,
}

/// Loads what `args` name and gives it `places`. Says on standard error when that is the demo.
pub fn start(args: &ModelArgs, cache: &CacheArgs, places: PlaceArgs) -> anyhow::Result<Session> {
    // Before the spinner: files that are not here yet come with a bar of their own.
    let checkpoint = open(args)?;
    let spinner = progress::spinner("loading the model");
    let tokenizer = checkpoint.tokenizer()?;
    let defaults = checkpoint.generation_config();
    let wished = cache.cache_bytes;
    let state = |budget: &Budget| state_bytes(budget, cache_bytes(wished, budget.own, budget.left()));
    let Opened { backend, memory, chosen } = device::open(args, &checkpoint, DEFAULT_CONTEXT, &state)?;
    let bytes = cache_bytes(wished, memory.own(), memory.left());
    let cache = cache_options(cache, bytes, &checkpoint, &tokenizer)?;
    let options = EngineOptions {
        eos_token_ids: defaults.eos_token_ids.clone(),
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
            "lily: no --model-path, so this is the built-in demo, a tiny model; for the real one: `lily pull`, then --model-path {}",
            models::DEFAULT
        );
    }
    Ok(Session { model, memory, chosen })
}

/// What sequences and snapshots may take: what one sequence needs, all that the cache may hold, and half of what
/// is then left, for more sequences.
fn state_bytes(budget: &Budget, cache: u64) -> usize {
    let Some(left) = budget.left() else { return usize::MAX };
    let bytes = budget.own.saturating_add(cache).saturating_add(left.saturating_sub(cache) / 2);
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Bytes of the prefix cache: those asked for, else half of what is left beside one sequence, which takes `own`.
fn cache_bytes(asked: Option<u64>, own: u64, left: Option<u64>) -> u64 {
    let most = MOST_CACHE.min(own.saturating_mul(MOST_CACHED_CONTEXTS));
    asked.unwrap_or_else(|| left.map_or(BLIND_CACHE, |left| left / 2).min(most))
}

fn cache_options(
    args: &CacheArgs,
    bytes: u64,
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
) -> anyhow::Result<CacheOptions> {
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
        bytes,
        markers: turn_start.map(|turn_start| TurnMarkers { turn_start, tool_response }),
        disk,
        ..CacheOptions::default()
    })
}

/// The checkpoint that `args` name, or the demo.
pub fn open(args: &ModelArgs) -> anyhow::Result<Checkpoint> {
    match &args.model_path {
        Some(path) => models::open(path),
        None => Ok(Checkpoint::demo()?),
    }
}
