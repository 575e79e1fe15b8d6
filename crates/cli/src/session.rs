//! From flags to a model that answers: checkpoint, backend, engine.

use anyhow::{Context, bail};
use lily_cpu::{CpuBackend, CpuOptions};
use lily_engine::backend::Backend;
use lily_engine::engine::{Engine, EngineOptions};
use lily_model::checkpoint::Checkpoint;
use lily_server::chat_model::{ChatModel, unix_time};

use crate::args::ModelArgs;
use crate::progress;

/// The default context: room for a coding agent's prompt, 0.7 GB of cache with the full model.
const DEFAULT_CONTEXT: usize = 32_768;

/// Where the real model is, in one command.
const DOWNLOAD: &str = "hf download mlx-community/Qwen3.6-35B-A3B-4bit --local-dir qwen3.6";

/// Loads what `args` name. Says on standard error when that is the demo.
pub fn start(args: &ModelArgs) -> anyhow::Result<ChatModel> {
    let spinner = progress::spinner("loading the model");
    let checkpoint = open(args)?;
    let context = context(args, &checkpoint)?;
    let backend = backend(args, &checkpoint, context)?;
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
    Ok(model)
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

/// The context that `args` ask for, at most the model's.
pub fn context(args: &ModelArgs, checkpoint: &Checkpoint) -> anyhow::Result<usize> {
    let most = checkpoint.geometry().max_context;
    match args.ctx_len {
        Some(asked) if asked > most => {
            bail!("--ctx-len {asked} is more than the {most} tokens of {}; ask for less", checkpoint.name())
        }
        Some(asked) => Ok(asked),
        None => Ok(most.min(DEFAULT_CONTEXT)),
    }
}
