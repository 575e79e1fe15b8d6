//! A model that one can talk to: the engine with the tokenizer, template and defaults of its checkpoint.
//!
//! What every protocol and `lily chat` share: a conversation becomes a [`Prompt`], sampling wishes become
//! [`SamplingParams`], and both become a request of the engine.

use std::time::{SystemTime, UNIX_EPOCH};

use lily_engine::engine::{Engine, Request, SubmitError};
use lily_engine::reasoning::prompt_opens_reasoning;
use lily_engine::sampler::SamplingParams;
use lily_model::chat_template::{ChatInput, ChatTemplate, TemplateError};
use lily_model::generation_config::GenerationConfig;
use lily_model::tokenizer::Tokenizer;
use serde_json::{Map, Value};

use crate::answer::{Answer, Form};
use crate::openai::request::SamplingRequest;
use crate::record::Recorder;
use crate::turns::{self, Turns};

/// The temperature of a request that asks for sampling and names none, where the checkpoint names none
/// either.
const NEUTRAL_TEMPERATURE: f32 = 1.0;

/// One model, ready to answer. Cheap to clone.
#[derive(Clone)]
pub struct ChatModel {
    /// What clients call it.
    pub name: String,
    /// When it was loaded, Unix time in seconds.
    pub created: u64,
    /// Runs it.
    pub engine: Engine,
    /// Its tokens.
    pub tokenizer: Tokenizer,
    /// Its chat format.
    pub template: ChatTemplate,
    /// Sampling values that its makers recommend.
    pub defaults: GenerationConfig,
    /// Whether it thinks before it answers where a request does not say.
    pub think: bool,
    /// What it wrote lately, for when it comes back.
    pub turns: Turns,
    /// What is written down about its requests.
    pub recorder: Recorder,
}

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Whether it ends inside a thinking block, so that the answer begins with thinking.
    pub thinking: bool,
    /// How the model's turn begins at its end.
    pub opening: String,
}

/// A rendered conversation on the way to its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// Tokens up to the last turn that is kept as the model wrote it; none where there is no such turn.
    pub tokens: Vec<u32>,
    /// The text after them.
    pub text: String,
}

impl ChatModel {
    /// Renders a conversation, ready for the model's turn. `messages` and `tools` are in the template's
    /// form, `variables` are further template variables.
    pub fn prompt(
        &self,
        messages: &[Value],
        tools: &[Value],
        thinking: Option<bool>,
        variables: Map<String, Value>,
    ) -> Result<Prompt, TemplateError> {
        Ok(self.encoded(self.rendered(messages, tools, thinking, variables, true)?))
    }

    /// Renders a conversation, its turns of the model's as they were written, where that is known: see
    /// [`crate::turns`].
    pub fn rendered(
        &self,
        messages: &[Value],
        tools: &[Value],
        thinking: Option<bool>,
        variables: Map<String, Value>,
        add_generation_prompt: bool,
    ) -> Result<Rendered, TemplateError> {
        if let Some(marked) = self.turns.mark(messages) {
            let variables = variables.clone();
            let text = self.render(&marked.messages, tools, thinking, variables, add_generation_prompt)?;
            if let Some((tokens, text)) = marked.resolve(&text, &self.tokenizer) {
                return Ok(Rendered { tokens, text });
            }
        }
        let text = self.render(messages, tools, thinking, variables, add_generation_prompt)?;
        Ok(Rendered { tokens: Vec::new(), text })
    }

    /// The tokens of a rendered conversation.
    pub fn encoded(&self, rendered: Rendered) -> Prompt {
        let Rendered { mut tokens, text } = rendered;
        let (thinking, opening) = (prompt_opens_reasoning(&text), turns::opening(&text));
        tokens.extend(self.tokenizer.encode(&text));
        Prompt { tokens, thinking, opening }
    }

    /// The conversation as the chat template alone renders it; `add_generation_prompt` opens the model's turn at
    /// its end.
    pub fn render(
        &self,
        messages: &[Value],
        tools: &[Value],
        thinking: Option<bool>,
        variables: Map<String, Value>,
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        self.template.render(&ChatInput {
            messages,
            tools,
            add_generation_prompt,
            enable_thinking: Some(thinking.unwrap_or(self.think)),
            extra: variables,
        })
    }

    /// Has the engine take a request, whose answer is recorded under `id` and read as `form` says.
    pub fn answer(&self, id: &str, request: Request, form: Form<'_>) -> Result<Answer, SubmitError> {
        let record = self.recorder.begin(id, &self.tokenizer, &request);
        match self.engine.submit(request) {
            Ok(generation) => Ok(Answer::new(generation, form, record)),
            Err(error) => {
                record.discard();
                Err(error)
            }
        }
    }

    /// Fills in what a request leaves open.
    ///
    /// Greedy where nothing is asked. A request that sets `top_p`, `top_k` or `min_p` without a temperature
    /// asks for sampling: at the temperature that the checkpoint recommends, else at 1. Filters that a
    /// request does not set are off.
    pub fn sampling(&self, request: &SamplingRequest, logprobs: Option<usize>) -> SamplingParams {
        let off = SamplingParams::default();
        let filtered = request.top_p.is_some_and(|p| p < off.top_p)
            || request.top_k.is_some_and(|k| k > off.top_k)
            || request.min_p.is_some_and(|p| p > off.min_p);
        let unset =
            if filtered { self.defaults.temperature.unwrap_or(NEUTRAL_TEMPERATURE) } else { off.temperature };
        SamplingParams {
            temperature: request.temperature.unwrap_or(unset),
            top_k: request.top_k.unwrap_or(off.top_k),
            top_p: request.top_p.unwrap_or(off.top_p),
            min_p: request.min_p.unwrap_or(off.min_p),
            repetition_penalty: request.repetition_penalty.unwrap_or(off.repetition_penalty),
            presence_penalty: request.presence_penalty.unwrap_or(off.presence_penalty),
            frequency_penalty: request.frequency_penalty.unwrap_or(off.frequency_penalty),
            logit_bias: request.logit_bias.clone(),
            seed: request.seed,
            logprobs,
        }
    }
}

/// Now, as Unix time in seconds.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
