//! What `POST /v1/responses` answers: one `response`, whose output is a list of items.

use lily_engine::sampler::SamplingParams;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::chat_model::unix_time;
use crate::openai::assemble::secret_id;
use crate::openai::response::TokenLogProb;
use crate::openapi::responses::Echo;

/// A response; while it is generated, one without an end.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Response {
    /// `resp_…`.
    pub id: String,
    /// Always `response`.
    pub object: &'static str,
    /// Unix time in seconds.
    pub created_at: u64,
    /// Unix time in seconds when it was complete.
    pub completed_at: Option<u64>,
    /// `in_progress`, `completed`, `incomplete` or `failed`.
    pub status: &'static str,
    /// Always false: every response is generated while its client waits.
    pub background: bool,
    /// Why it failed.
    pub error: Option<Failure>,
    /// Why it is incomplete.
    pub incomplete_details: Option<Incomplete>,
    /// The model that answers.
    pub model: String,
    /// What the model said, in its order.
    pub output: Vec<Item>,
    /// How tokens were chosen.
    pub temperature: f32,
    /// Mass of the nucleus.
    pub top_p: f32,
    /// Subtracted from the logits of what was said.
    pub presence_penalty: f32,
    /// The same for each time that it was said.
    pub frequency_penalty: f32,
    /// Tokens read and written; null while it is generated.
    pub usage: Option<Usage>,
    /// Fields of the request, as it sent them or by their defaults.
    #[serde(flatten)]
    #[schema(value_type = Echo)]
    pub echo: Map<String, Value>,
}

impl Response {
    /// The response of `model` that begins now.
    pub fn begun(model: &str, sampling: &SamplingParams, echo: Map<String, Value>) -> Response {
        Response {
            // Whoever knows the id can read the response.
            id: secret_id("resp_"),
            object: "response",
            created_at: unix_time(),
            completed_at: None,
            status: "in_progress",
            background: false,
            error: None,
            incomplete_details: None,
            model: model.to_string(),
            output: Vec::new(),
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            usage: None,
            echo,
        }
    }
}

/// Why a response failed.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = ResponseFailure)]
pub struct Failure {
    /// A word for programs.
    pub code: &'static str,
    /// A sentence for people.
    pub message: String,
}

/// Why a response is incomplete.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[schema(as = ResponseIncomplete)]
pub struct Incomplete {
    /// `max_output_tokens`, which stands for the end of the context too.
    pub reason: &'static str,
}

/// A part of the output.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = ResponseItem)]
pub enum Item {
    /// The thinking before the answer.
    Reasoning {
        /// `rs_…`.
        id: String,
        /// Its text, where the request asked for a summary.
        summary: Vec<Part>,
        /// Its text, where it did not.
        #[serde(skip_serializing_if = "Option::is_none")]
        content: Option<Vec<Part>>,
        /// See [`super::reasoning`].
        #[serde(skip_serializing_if = "Option::is_none")]
        encrypted_content: Option<String>,
        /// How far it is.
        status: &'static str,
    },
    /// The answer.
    Message {
        /// `msg_…`.
        id: String,
        /// Always `assistant`.
        role: &'static str,
        /// How far it is.
        status: &'static str,
        /// One `output_text`.
        content: Vec<Part>,
    },
    /// A call of a declared function.
    FunctionCall {
        /// `fc_…`.
        id: String,
        /// `call_…`, which the result names.
        call_id: String,
        /// The function's name.
        name: String,
        /// The namespace that it is declared in.
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        /// A JSON object, as text.
        arguments: String,
        /// How far it is.
        status: &'static str,
    },
    /// A call of a custom tool.
    CustomToolCall {
        /// `ctc_…`.
        id: String,
        /// `call_…`, which the result names.
        call_id: String,
        /// The tool's name.
        name: String,
        /// The namespace that it is declared in.
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        /// Its input.
        input: String,
        /// How far it is.
        status: &'static str,
    },
}

/// A part of an item.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = ResponsePart)]
pub enum Part {
    /// Text of the answer.
    OutputText {
        /// The text.
        text: String,
        /// Always empty: Lily cites nothing.
        #[schema(value_type = Vec<Object>)]
        annotations: [(); 0],
        /// Log probabilities of its tokens, where asked for.
        logprobs: Vec<TokenLogProb>,
    },
    /// Text of the thinking.
    ReasoningText {
        /// The text.
        text: String,
    },
    /// The same in a summary's place.
    SummaryText {
        /// The text.
        text: String,
    },
}

/// Tokens read and written.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
#[schema(as = ResponseUsage)]
pub struct Usage {
    /// Tokens of the rendered prompt.
    pub input_tokens: usize,
    /// What became of them.
    pub input_tokens_details: InputDetails,
    /// Tokens generated.
    pub output_tokens: usize,
    /// What they were spent on.
    pub output_tokens_details: OutputDetails,
    /// Both together.
    pub total_tokens: usize,
}

/// What became of the prompt's tokens.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
#[schema(as = ResponseInputDetails)]
pub struct InputDetails {
    /// Tokens that came from the prefix cache.
    pub cached_tokens: usize,
    /// Always 0: what is kept of a prompt costs no work of its own.
    pub cache_write_tokens: usize,
}

/// What generated tokens were spent on.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
#[schema(as = ResponseOutputDetails)]
pub struct OutputDetails {
    /// Tokens of thinking.
    pub reasoning_tokens: usize,
}

/// The body of an answer to `DELETE /v1/responses/{id}`.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = ResponseDeleted)]
pub struct Deleted {
    /// The response's id.
    pub id: String,
    /// Always `response`.
    pub object: &'static str,
    /// Always true.
    pub deleted: bool,
}

/// The body of an answer to `GET /v1/responses/{id}/input_items`.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = ResponseItemList)]
pub struct ItemList {
    /// Always `list`.
    pub object: &'static str,
    /// The items.
    #[schema(value_type = Vec<Object>)]
    pub data: Vec<Value>,
    /// Id of the first.
    pub first_id: Option<String>,
    /// Id of the last.
    pub last_id: Option<String>,
    /// Whether more follow it.
    pub has_more: bool,
}

/// The body of an answer to `POST /v1/responses/input_tokens`.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[schema(as = ResponseInputTokens)]
pub struct InputTokens {
    /// Always `response.input_tokens`.
    pub object: &'static str,
    /// Tokens of the rendered prompt.
    pub input_tokens: usize,
}
