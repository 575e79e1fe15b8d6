//! What `POST /v1/chat/completions` answers: one `chat.completion`, or a stream of
//! `chat.completion.chunk`s.

use serde::Serialize;
use utoipa::ToSchema;

use crate::answer::News;

/// A whole answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = ChatCompletion)]
pub struct Completion {
    /// `chatcmpl-…`, unique in this process.
    pub id: String,
    /// Always `chat.completion`.
    pub object: &'static str,
    /// Unix time in seconds.
    pub created: u64,
    /// The model that answered.
    pub model: String,
    /// One for each of the `n` asked for, by index.
    pub choices: Vec<Choice>,
    /// Tokens read and written, all choices together.
    pub usage: Usage,
}

/// One of the answers.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = ChatChoice)]
pub struct Choice {
    /// Its place among the choices.
    pub index: usize,
    /// What the model said.
    pub message: Message,
    /// Why it ended: `stop`, `length` or `tool_calls`.
    pub finish_reason: &'static str,
    /// Log probabilities, where asked for.
    pub logprobs: Option<LogProbs>,
}

/// The model's turn.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = ChatMessage)]
pub struct Message {
    /// Always `assistant`.
    pub role: &'static str,
    /// The answer; null where the turn is tool calls alone.
    pub content: Option<String>,
    /// The thinking before the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Calls of declared tools.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Always null: the model's refusals are text like any other.
    pub refusal: Option<String>,
}

/// One call of a tool.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ToolCall {
    /// `call_…`, unique in this process.
    pub id: String,
    /// Always `function`.
    pub r#type: &'static str,
    /// The call itself.
    pub function: FunctionCall,
}

/// Name and arguments of a call.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct FunctionCall {
    /// The tool's name.
    pub name: String,
    /// A JSON object, as text.
    pub arguments: String,
}

/// One event of a stream.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = ChatCompletionChunk)]
pub struct Chunk {
    /// The same for every event of the stream.
    pub id: String,
    /// Always `chat.completion.chunk`.
    pub object: &'static str,
    /// Unix time in seconds, the same for every event.
    pub created: u64,
    /// The model that answers.
    pub model: String,
    /// What one choice gained; empty in the event that carries `usage`.
    pub choices: Vec<ChunkChoice>,
    /// Last event's totals. `None` leaves the field out, `Some(None)` says null, as the protocol wants in
    /// every other event where usage was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    pub usage: Option<Option<Usage>>,
    /// How far the prompt has been read, in events of their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_progress: Option<PromptProgress>,
}

/// What one choice gained.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = ChatChunkChoice)]
pub struct ChunkChoice {
    /// The choice's place.
    pub index: usize,
    /// The gain.
    pub delta: Delta,
    /// Set in the choice's last event.
    pub finish_reason: Option<&'static str>,
    /// Log probabilities of the tokens behind this event, where asked for.
    pub logprobs: Option<LogProbs>,
}

/// A piece of the model's turn.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
#[schema(as = ChatDelta)]
pub struct Delta {
    /// `assistant`, in the choice's first event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// More of the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// More of the thinking.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// More of the tool calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallDelta>,
}

/// A piece of a tool call: id, type and name come first, then the arguments' text.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ToolCallDelta {
    /// The call's place among the turn's calls.
    pub index: usize,
    /// The call's id, in its first piece.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `function`, in its first piece.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r#type: Option<&'static str>,
    /// The piece.
    pub function: FunctionDelta,
}

/// A piece of a call's name and arguments.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct FunctionDelta {
    /// The name, in the first piece.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// More of the arguments' JSON text.
    pub arguments: String,
}

/// Log probabilities of generated tokens.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = ChatLogProbs)]
pub struct LogProbs {
    /// One entry a token, in order.
    pub content: Vec<TokenLogProb>,
    /// Always null.
    pub refusal: Option<Vec<TokenLogProb>>,
}

/// One token, how likely it was and what else was likely.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TokenLogProb {
    /// Its text.
    pub token: String,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// UTF-8 bytes of its text.
    pub bytes: Vec<u8>,
    /// The likeliest tokens there.
    pub top_logprobs: Vec<Alternative>,
}

/// One of the likeliest tokens at a position.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = AlternativeToken)]
pub struct Alternative {
    /// Its text.
    pub token: String,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// UTF-8 bytes of its text.
    pub bytes: Vec<u8>,
}

/// How far the prompt has been read, in an event of a stream whose request asked for it with `return_progress`. The
/// names are those of llama.cpp's server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct PromptProgress {
    /// Tokens of the prompt.
    pub total: usize,
    /// Those among them that came from the prefix cache.
    pub cache: usize,
    /// Tokens read so far, those from the cache included.
    pub processed: usize,
    /// Milliseconds since the request.
    pub time_ms: u64,
}

impl PromptProgress {
    /// What `news` says of a prompt, where it does.
    pub fn of(news: &News) -> Option<PromptProgress> {
        let &News::Prefill { done, cached, total, elapsed } = news else { return None };
        let time_ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        Some(PromptProgress { total, cache: cached, processed: done, time_ms })
    }
}

/// Tokens read and written.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
#[schema(as = ChatUsage)]
pub struct Usage {
    /// Tokens of the rendered prompt.
    pub prompt_tokens: usize,
    /// Tokens generated, all choices together.
    pub completion_tokens: usize,
    /// Both together.
    pub total_tokens: usize,
    /// What became of the prompt's tokens.
    pub prompt_tokens_details: PromptDetails,
    /// What the generated tokens were spent on.
    pub completion_tokens_details: CompletionDetails,
}

/// What became of the prompt's tokens.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub struct PromptDetails {
    /// Tokens that came from the prefix cache; the others were processed.
    pub cached_tokens: usize,
}

/// What generated tokens were spent on.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub struct CompletionDetails {
    /// Tokens of thinking.
    pub reasoning_tokens: usize,
}
