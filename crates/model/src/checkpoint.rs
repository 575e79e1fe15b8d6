//! A checkpoint as a whole: the way in.
//!
//! [`Checkpoint::open`] reads a directory, [`Checkpoint::demo`] what the binary embeds; after that there is no
//! difference. Opening reads `config.json` and the headers of the weight files, not the weights: those stay
//! mapped, and the system fetches them when a kernel first touches them.

use std::path::Path;

use crate::chat_template::ChatTemplate;
use crate::config::{ModelConfig, parse_config_text};
use crate::demo;
use crate::error::ModelError;
use crate::generation_config::GenerationConfig;
use crate::geometry::Geometry;
use crate::load::{self, LoadReport};
use crate::safetensors::Tensors;
use crate::source::Source;
use crate::tokenizer::Tokenizer;
use crate::weights::Weights;

/// The file of sizes.
pub const CONFIG_FILE: &str = "config.json";
/// The file of the tokenizer.
pub const TOKENIZER_FILE: &str = "tokenizer.json";
/// Where the chat template stands alone.
pub const TEMPLATE_FILE: &str = "chat_template.jinja";
/// Where the chat template stands in older checkpoints, in the field `chat_template`.
pub const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";
/// The file of end-of-sequence ids and sampling defaults; a checkpoint may do without it.
pub const GENERATION_FILE: &str = "generation_config.json";

/// An opened checkpoint.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    name: String,
    source: Source,
    config: ModelConfig,
    generation: GenerationConfig,
    tensors: Tensors,
}

impl Checkpoint {
    /// Opens the checkpoint in the directory `dir`.
    ///
    /// # Errors
    /// [`ModelError`] where a file is missing or damaged, or the model is not one that Lily runs. Tensors are
    /// compared with the geometry by [`Checkpoint::weights`].
    pub fn open(dir: &Path) -> Result<Checkpoint, ModelError> {
        let source = Source::directory(dir)?;
        let absolute = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        let name = absolute.file_name().unwrap_or(dir.as_os_str()).to_string_lossy();
        Checkpoint::from_source(name.into_owned(), source)
    }

    /// Opens the checkpoint that `source` holds, under the name `name`.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn from_source(name: String, source: Source) -> Result<Checkpoint, ModelError> {
        let config = parse_config_text(&source.require(CONFIG_FILE)?)?;
        let mut generation = read_generation_config(&source)?;
        if generation.eos_token_ids.is_empty() {
            generation.eos_token_ids.clone_from(&config.eos_token_ids);
        }
        let tensors = Tensors::open(&source)?;
        Ok(Checkpoint { name, source, config, generation, tensors })
    }

    /// Opens the demo that the binary embeds.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn demo() -> Result<Checkpoint, ModelError> {
        Checkpoint::from_source(demo::NAME.to_owned(), demo::source())
    }

    /// What the model is called: the directory's name, or the demo's.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Every size of the model.
    pub fn geometry(&self) -> &Geometry {
        &self.config.geometry
    }

    /// What `config.json` says.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The stored tensors.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// The weights, in place.
    ///
    /// # Errors
    /// [`ModelError::Refused`] naming every tensor that is missing or not of the type and shape that the
    /// geometry calls for.
    pub fn weights(&self) -> Result<Weights, ModelError> {
        self.load().1
    }

    /// The weights, and what became of every tensor in the files.
    pub fn load(&self) -> (LoadReport, Result<Weights, ModelError>) {
        load::load(&self.config, &self.tensors)
    }

    /// Bytes of the tensors that the weights refer to: what the engine touches of the files.
    pub fn weight_bytes(&self) -> u64 {
        self.load().0.used_bytes
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// [`ModelError`] where `tokenizer.json` is missing or damaged, or has more tokens than the embedding table
    /// has rows.
    pub fn tokenizer(&self) -> Result<Tokenizer, ModelError> {
        read_tokenizer(&self.source, Some(self.geometry().vocab))
    }

    /// The chat template: `chat_template.jinja` where there is one, else the field in `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`ModelError`] where there is none or it does not compile.
    pub fn chat_template(&self) -> Result<ChatTemplate, ModelError> {
        read_chat_template(&self.source)
    }

    /// End-of-sequence ids and sampling defaults: `generation_config.json`, the ids else from `config.json`.
    pub fn generation_config(&self) -> GenerationConfig {
        self.generation.clone()
    }
}

/// The tokenizer of `source`, which may have at most `vocab` tokens.
pub(crate) fn read_tokenizer(source: &Source, vocab: Option<usize>) -> Result<Tokenizer, ModelError> {
    let json = source.require(TOKENIZER_FILE)?;
    let tokenizer =
        Tokenizer::from_bytes(&json).map_err(|e| ModelError::file(source.place(), e.to_string()))?;
    match vocab {
        Some(vocab) if tokenizer.vocab_size() > vocab => {
            let tokens = tokenizer.vocab_size();
            let problem = format!("it has {tokens} tokens; the model's embedding table has {vocab} rows");
            Err(ModelError::file(source.path(TOKENIZER_FILE), problem))
        }
        _ => Ok(tokenizer),
    }
}

/// The chat template of `source`.
pub(crate) fn read_chat_template(source: &Source) -> Result<ChatTemplate, ModelError> {
    let template = read_text(source, TEMPLATE_FILE)?;
    let config = read_text(source, TOKENIZER_CONFIG_FILE)?;
    ChatTemplate::from_files(template.as_deref(), config.as_deref())
        .map_err(|e| ModelError::file(source.place(), e.to_string()))
}

/// The text of a file of `source`, where there is one.
fn read_text(source: &Source, file: &str) -> Result<Option<String>, ModelError> {
    let Some(bytes) = source.open(file)? else { return Ok(None) };
    match std::str::from_utf8(&bytes) {
        Ok(text) => Ok(Some(text.to_owned())),
        Err(e) => Err(ModelError::file(source.path(file), format!("this is not UTF-8 text ({e})"))),
    }
}

/// `generation_config.json` of `source`, or nothing but absent fields where there is none.
pub(crate) fn read_generation_config(source: &Source) -> Result<GenerationConfig, ModelError> {
    match source.open(GENERATION_FILE)? {
        Some(json) => {
            GenerationConfig::from_json(&json).map_err(|e| ModelError::file(source.place(), e.to_string()))
        }
        None => Ok(GenerationConfig::default()),
    }
}
