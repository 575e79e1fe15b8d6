//! From flags to a model that answers: checkpoint, backend, engine.

use anyhow::{Context, bail};
use lily_cpu::footprint::Footprint;
use lily_cpu::pool::physical_cores;
use lily_cpu::{CpuBackend, CpuOptions};
use lily_engine::backend::Backend;
use lily_engine::engine::{Engine, EngineOptions};
use lily_model::checkpoint::Checkpoint;
use lily_server::chat_model::{ChatModel, unix_time};

use crate::args::ModelArgs;
use crate::budget::Budget;
use crate::{machine, progress};

/// The default context: room for a coding agent's prompt, 0.7 GB of cache with the full model.
pub const DEFAULT_CONTEXT: usize = 32_768;

/// Where the real model is, in one command.
const DOWNLOAD: &str = "hf download mlx-community/Qwen3.6-35B-A3B-4bit --local-dir qwen3.6";

/// A model that answers, and the memory it takes.
pub struct Session {
    /// The model.
    pub model: ChatModel,
    /// Its memory.
    pub budget: Budget,
}

/// Loads what `args` name. Says on standard error when that is the demo.
pub fn start(args: &ModelArgs) -> anyhow::Result<Session> {
    let spinner = progress::spinner("loading the model");
    let checkpoint = open(args)?;
    let budget = budget(args, &checkpoint, DEFAULT_CONTEXT)?;
    let backend = backend(args, &checkpoint, budget.context)?;
    let tokenizer = checkpoint.tokenizer()?;
    let defaults = checkpoint.generation_config();
    let options = EngineOptions { eos_token_ids: defaults.eos_token_ids.clone(), ..EngineOptions::default() };
    let model = ChatModel {
        name: checkpoint.name().to_string(),
        created: unix_time(),
        engine: Engine::start(backend, tokenizer.clone(), options),
        tokenizer,
        template: checkpoint.chat_template()?,
        defaults,
        think: args.think,
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
    let options = CpuOptions { threads: args.threads, ctx_len: context, ..CpuOptions::default() };
    Ok(Box::new(CpuBackend::new(checkpoint.weights()?, options)?))
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
