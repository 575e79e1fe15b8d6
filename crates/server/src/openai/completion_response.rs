//! What `POST /v1/completions` answers: one `text_completion`, or a stream of them that each hold a piece.

use lily_engine::sampler::TokenLogprobs;
use lily_model::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::response::{PromptProgress, Usage};

/// A whole answer, or one event of a stream.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TextCompletion {
    /// `cmpl-…`, unique in this process and the same for every event of a stream.
    pub id: String,
    /// Always `text_completion`.
    pub object: &'static str,
    /// Unix time in seconds.
    pub created: u64,
    /// The model that answered.
    pub model: String,
    /// The continuations: all choices of the first prompt, then those of the second, and so on.
    pub choices: Vec<TextChoice>,
    /// Tokens read and written. In a stream as in [`Chunk`](super::response::Chunk).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    pub usage: Option<Option<Usage>>,
    /// How far a prompt has been read, in events of their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_progress: Option<PromptProgress>,
}

/// One continuation, or a piece of it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TextChoice {
    /// Its place among the choices.
    pub index: usize,
    /// The text.
    pub text: String,
    /// Log probabilities of the tokens behind the text, where asked for.
    pub logprobs: Option<TextLogProbs>,
    /// Why it ended: `stop` or `length`; null where it has not.
    pub finish_reason: Option<&'static str>,
}

/// Log probabilities in the protocol's older form: lists side by side, one entry a token.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct TextLogProbs {
    /// Each token's text.
    pub tokens: Vec<String>,
    /// Natural logarithm of each token's probability.
    pub token_logprobs: Vec<f64>,
    /// The likeliest tokens at each place, the chosen one among them, by their text.
    #[schema(value_type = Vec<HashMap<String, f64>>)]
    pub top_logprobs: Vec<Map<String, Value>>,
    /// Where each token begins in the choice's text, in characters.
    pub text_offset: Vec<usize>,
}

impl TextLogProbs {
    /// Of `scored` tokens that follow `offset` characters of the choice's text. Afterwards `offset` is the end
    /// of the last one.
    pub fn new(tokenizer: &Tokenizer, scored: &[(u32, TokenLogprobs)], offset: &mut usize) -> TextLogProbs {
        let spell = |id: u32| {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let mut out = TextLogProbs::default();
        for (id, logprobs) in scored {
            let token = spell(*id);
            let mut top: Map<String, Value> =
                logprobs.top.iter().map(|&(id, logprob)| (spell(id), Value::from(logprob))).collect();
            let chosen = f64::from(logprobs.chosen);
            top.insert(token.clone(), Value::from(chosen));
            out.text_offset.push(*offset);
            *offset += token.chars().count();
            out.tokens.push(token);
            out.token_logprobs.push(chosen);
            out.top_logprobs.push(top);
        }
        out
    }
}
