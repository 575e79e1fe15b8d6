//! A conversation rendered to the text that the model reads.
//!
//! Checkpoints carry a Jinja template, written for Python and run there by Hugging Face's
//! `apply_chat_template`. A single character more or less changes the prompt, so the template runs here
//! under the same rules: `minijinja` with trimmed blocks, and with Python's own answers wherever a template
//! can see the difference. What is where:
//!
//! - `json`: `tojson`, as Python's `json.dumps` prints.
//! - `python`: `str()` and `repr()` of a value, floats above all.
//! - `strings`: the methods of Python strings.
//! - `environment`: filters, tests and functions, put together.
//!
//! Known differences. The operator `~` prints floats below 1e-4 or from 1e16 on, and lists and mappings, in
//! `minijinja`'s notation; everything else that prints goes through `python`. Integers outside 64 bits
//! arrive from JSON as floats. The `generation` tag, which marks text for training, is not known.
//!
//! A template is a program that comes with the weights, and trusted as far as they are: the steps that it
//! takes are bounded ([`ChatTemplate::STEP_LIMIT`]), the depth and size of values that it builds are not.

mod environment;
mod json;
mod python;
mod strings;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::{Environment, ErrorKind, Value};
use serde_json::Map;

use environment::Refusal;

/// The name that the template goes by inside its environment and in its error messages.
const NAME: &str = "chat template";

/// Why a template could not be used, or did not render a conversation.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// Neither file holds a template.
    #[error(
        "the checkpoint has no chat template: neither chat_template.jinja nor a chat_template in \
         tokenizer_config.json; take one of them from the model's repository"
    )]
    Missing,
    /// `tokenizer_config.json` is not what it should be.
    #[error("tokenizer_config.json cannot be read: {0}; take it from the model's repository again")]
    Config(String),
    /// The template does not parse.
    #[error("the chat template does not parse: {0}")]
    Syntax(String),
    /// The template itself refused the conversation, through `raise_exception`; the text is its own.
    #[error("the chat template refuses the conversation: {0}")]
    Refused(String),
    /// The template does something with the conversation that cannot be done, such as reading a field of
    /// a missing value.
    #[error("the chat template fails on the conversation: {0}")]
    Failed(String),
    /// The template ran for longer than any conversation justifies.
    #[error("the chat template did not come to an end within {0} steps; shorten the conversation")]
    Runaway(u64),
}

/// What a template is given.
#[derive(Clone, Debug, Default)]
pub struct ChatInput<'a> {
    /// The conversation, oldest message first, as in OpenAI's protocol, except that the arguments of tool
    /// calls are objects and not strings.
    pub messages: &'a [serde_json::Value],
    /// The tools on offer, as in OpenAI's protocol; none at all where empty.
    pub tools: &'a [serde_json::Value],
    /// Whether to end with the opening of the answer.
    pub add_generation_prompt: bool,
    /// Asks for reasoning or for none; the template's own default where absent.
    pub enable_thinking: Option<bool>,
    /// Further variables (`chat_template_kwargs` of several servers); those above take precedence.
    pub extra: Map<String, serde_json::Value>,
}

/// A parsed chat template.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token`, `eos_token` and the like, which templates may refer to.
    special_tokens: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// Steps of the template after which rendering is given up: some seconds. A conversation that fills the
    /// context of 262,144 tokens with the shortest possible messages takes less than half of this.
    pub const STEP_LIMIT: u64 = 20_000_000;

    /// Parses a template.
    pub fn from_source(source: &str) -> Result<ChatTemplate, TemplateError> {
        let mut environment = environment::new();
        environment.set_fuel(Some(Self::STEP_LIMIT));
        // Jinja2 reads every kind of line end as a line feed, in the text and in string literals.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        catching_panics(|| environment.add_template_owned(NAME, source))?
            .map_err(|error| TemplateError::Syntax(error.to_string()))?;
        Ok(ChatTemplate { environment, special_tokens: BTreeMap::new() })
    }

    /// Takes the template from a checkpoint's files: `chat_template.jinja` where it exists, else the
    /// `chat_template` of `tokenizer_config.json` (one template, or several of which the one named
    /// `default` counts). The special tokens that `tokenizer_config.json` names become variables.
    pub fn from_files(
        chat_template_jinja: Option<&str>,
        tokenizer_config: Option<&str>,
    ) -> Result<ChatTemplate, TemplateError> {
        let config: Map<String, serde_json::Value> = match tokenizer_config {
            Some(text) => {
                serde_json::from_str(text).map_err(|error| TemplateError::Config(error.to_string()))?
            }
            None => Map::new(),
        };
        let source = match chat_template_jinja {
            Some(source) => source,
            None => configured_template(&config)?,
        };
        let mut template = ChatTemplate::from_source(source)?;
        for (name, token) in &config {
            // A token is given as text, or as an object with its tokenizer flags.
            let text = token.as_str().or_else(|| token.get("content")?.as_str());
            if let (true, Some(text)) = (name.ends_with("_token"), text) {
                template.special_tokens.insert(name.clone(), text.to_string());
            }
        }
        Ok(template)
    }

    /// Renders a conversation.
    pub fn render(&self, input: &ChatInput) -> Result<String, TemplateError> {
        let mut variables: BTreeMap<&str, Value> = BTreeMap::new();
        // Hugging Face hands every template `documents`, as None where there are none.
        variables.insert("documents", Value::from(()));
        for (name, token) in &self.special_tokens {
            variables.insert(name, Value::from(token.as_str()));
        }
        for (name, value) in &input.extra {
            variables.insert(name, Value::from_serialize(value));
        }
        if let Some(enable_thinking) = input.enable_thinking {
            variables.insert("enable_thinking", Value::from(enable_thinking));
        }
        variables.insert("messages", Value::from_serialize(input.messages));
        let tools = if input.tools.is_empty() { Value::from(()) } else { Value::from_serialize(input.tools) };
        variables.insert("tools", tools);
        variables.insert("add_generation_prompt", Value::from(input.add_generation_prompt));

        let template = self.environment.get_template(NAME).map_err(explain)?;
        catching_panics(|| template.render(Value::from_iter(variables)))?.map_err(explain)
    }
}

/// The template in `tokenizer_config.json`.
fn configured_template(config: &Map<String, serde_json::Value>) -> Result<&str, TemplateError> {
    use serde_json::Value;
    match config.get("chat_template") {
        None | Some(Value::Null) => Err(TemplateError::Missing),
        Some(Value::String(source)) => Ok(source),
        Some(Value::Array(named)) => named
            .iter()
            .find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"))
            .and_then(|entry| entry.get("template")?.as_str())
            .ok_or_else(|| {
                TemplateError::Config("its list of chat templates has none named \"default\"".to_string())
            }),
        Some(_) => Err(TemplateError::Config(
            "its chat_template is neither a text nor a list of templates".to_string(),
        )),
    }
}

/// Runs the template library, which indexes outside of empty values for some expressions
/// (`minijinja` 2.24, `""[::-1]`). It keeps no state between runs that a panic could leave half changed.
fn catching_panics<T>(run: impl FnOnce() -> T) -> Result<T, TemplateError> {
    catch_unwind(AssertUnwindSafe(run))
        .map_err(|_| TemplateError::Failed("an expression in it is beyond the template library".to_string()))
}

/// Tells the template's own refusal, a runaway and a failure apart.
fn explain(error: minijinja::Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    let mut innermost = &error;
    while let Some(current) = cause {
        if let Some(Refusal(message)) = current.downcast_ref() {
            return TemplateError::Refused(message.clone());
        }
        if let Some(error) = current.downcast_ref::<minijinja::Error>() {
            if error.kind() == ErrorKind::OutOfFuel {
                return TemplateError::Runaway(ChatTemplate::STEP_LIMIT);
            }
            innermost = error;
        }
        cause = current.source();
    }
    TemplateError::Failed(innermost.to_string())
}
