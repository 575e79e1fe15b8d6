//! What `POST /v1/responses` takes, and what its answer repeats.
//!
//! As in [`super::chat`], the structures are never filled: [`crate::responses::request`] and
//! [`crate::responses::input`] read the body.

use std::collections::HashMap;

use utoipa::ToSchema;

use super::chat::{
    Constraints, Effort, Ends, NamedSchema, ResponseFormat, Sampling, ServiceTier, StreamOptions, Thinking,
    ToolWord, Verbosity,
};

/// A request for a response.
#[derive(ToSchema)]
#[schema(as = ResponseRequest)]
pub struct Request {
    /// The model's name, as `GET /v1/models` lists it; the one that is served where absent.
    pub model: Option<String>,
    /// What the user says, or items of a conversation.
    pub input: Input,
    /// The system text.
    pub instructions: Option<String>,
    /// The response that this one continues.
    pub previous_response_id: Option<String>,
    /// The most tokens to generate; up to the end of the context where absent.
    #[schema(minimum = 1, maximum = 4294967295u32)]
    pub max_output_tokens: Option<u32>,
    /// Tools that the model may call.
    pub tools: Option<Vec<Tool>>,
    /// Whether it may, must or must not call them.
    pub tool_choice: Option<ToolChoice>,
    /// Whether one turn may hold several calls.
    pub parallel_tool_calls: Option<bool>,
    /// What the answer must look like.
    pub text: Option<Text>,
    /// As in a chat; `text.format` is this protocol's own.
    pub response_format: Option<ResponseFormat>,
    /// Whether to think, and how much of it is shown.
    pub reasoning: Option<Reasoning>,
    /// As in a chat; `reasoning.effort` is this protocol's own.
    pub reasoning_effort: Option<Effort>,
    /// Whether the response is kept; true where absent.
    pub store: Option<bool>,
    /// Whether the answer comes as server-sent events.
    pub stream: Option<bool>,
    /// How a stream is written; only where `stream` is true.
    pub stream_options: Option<StreamOptions>,
    /// Whether a stream tells how far the prompt has been read; only where `stream` is true.
    pub return_progress: Option<bool>,
    /// What comes beside the answer.
    pub include: Option<Vec<Includable>>,
    /// Alternatives at each place to report log probabilities of.
    #[schema(minimum = 0, maximum = 20)]
    pub top_logprobs: Option<u32>,
    /// See [`Sampling`].
    #[serde(flatten)]
    pub sampling: Sampling,
    /// See [`Ends`].
    #[serde(flatten)]
    pub ends: Ends,
    /// See [`Thinking`].
    #[serde(flatten)]
    pub thinking: Thinking,
    /// See [`Constraints`].
    #[serde(flatten)]
    pub constraint: Constraints,
    /// Labels, up to 16 of 64 and 512 characters; the answer repeats them.
    pub metadata: Option<HashMap<String, String>>,
    /// A label; the answer repeats it.
    pub user: Option<String>,
    /// A label; the answer repeats it.
    pub safety_identifier: Option<String>,
    /// Without effect: the cache needs no keys. The answer repeats it.
    pub prompt_cache_key: Option<String>,
    /// Without effect; the answer repeats it.
    pub prompt_cache_retention: Option<String>,
    /// Without effect.
    #[schema(value_type = Option<Object>)]
    pub prompt_cache_options: Option<()>,
    /// Bounds calls of tools that run at OpenAI, of which there are none.
    #[schema(minimum = 1, maximum = 4294967295u32)]
    pub max_tool_calls: Option<u32>,
    /// Every client waits for its answer: false.
    pub background: Option<bool>,
    /// Conversations are not edited: an empty list.
    #[schema(max_items = 0, value_type = Option<Vec<Object>>)]
    pub context_management: Option<()>,
    /// There is one tier.
    pub service_tier: Option<ServiceTier>,
    /// Conversations are not edited.
    pub truncation: Option<Truncation>,
}

/// What the user says, or items of a conversation.
#[derive(ToSchema)]
#[serde(untagged)]
pub enum Input {
    /// What the user says.
    Text(String),
    /// Items.
    Items(Vec<InputItem>),
}

/// An item of a conversation. Those of tools that Lily does not have are refused.
#[derive(ToSchema)]
#[serde(untagged)]
pub enum InputItem {
    /// A message; its `type` may be left out.
    Message(InputMessage),
    /// Everything else.
    Other(OtherItem),
}

/// A message.
#[derive(ToSchema)]
pub struct InputMessage {
    /// `message`.
    pub r#type: Option<MessageKind>,
    /// Whose it is.
    pub role: Role,
    /// Its text.
    pub content: ItemText,
    /// Its id.
    pub id: Option<String>,
}

/// `message`.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MessageKind {
    /// A message.
    Message,
}

/// Whose a message is.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // The words are the protocol's.
pub enum Role {
    User,
    Assistant,
    System,
    Developer,
}

/// An item that is no message.
#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OtherItem {
    /// Thinking, in the first of its parts that has a text.
    Reasoning {
        /// Its text as `reasoning_text`.
        content: Option<Vec<ReasoningPart>>,
        /// Its text as `summary_text`.
        summary: Option<Vec<SummaryPart>>,
        /// As an answer of Lily's had it.
        encrypted_content: Option<String>,
    },
    /// A call of a function.
    FunctionCall {
        /// The call's id.
        call_id: String,
        /// The function's name.
        name: String,
        /// Where it is declared.
        namespace: Option<String>,
        /// A JSON object, written as a text.
        arguments: String,
    },
    /// Its result.
    FunctionCallOutput {
        /// The call's id.
        call_id: String,
        /// The text.
        output: ItemText,
    },
    /// A call of a custom tool.
    CustomToolCall {
        /// The call's id.
        call_id: String,
        /// The tool's name.
        name: String,
        /// Where it is declared.
        namespace: Option<String>,
        /// Its input.
        input: String,
    },
    /// Its result.
    CustomToolCallOutput {
        /// The call's id.
        call_id: String,
        /// The text.
        output: ItemText,
    },
    /// An item of a response that is kept.
    ItemReference {
        /// Its id.
        id: String,
    },
}

/// A text, or parts of one, which are joined.
#[derive(ToSchema)]
#[serde(untagged)]
pub enum ItemText {
    /// The text.
    Text(String),
    /// Its parts.
    Parts(Vec<ItemPart>),
}

/// A part of a text. Images, audio and files are refused.
#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(missing_docs)] // The names are the protocol's.
pub enum ItemPart {
    InputText { text: String },
    OutputText { text: String },
    Refusal { refusal: String },
}

/// A part of thinking.
#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(missing_docs)] // The names are the protocol's.
pub enum ReasoningPart {
    ReasoningText { text: String },
}

/// A part of a summary.
#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(missing_docs)] // The names are the protocol's.
pub enum SummaryPart {
    SummaryText { text: String },
}

/// A tool. Others that run at OpenAI are refused.
#[derive(ToSchema)]
#[schema(as = ResponseTool)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Tool {
    /// A function.
    Function {
        /// Its name.
        #[schema(min_length = 1)]
        name: String,
        /// What it does.
        description: Option<String>,
        /// A JSON schema of its arguments.
        #[schema(value_type = Option<Object>)]
        parameters: Option<serde_json::Value>,
        /// Whether arguments must follow the schema.
        strict: Option<bool>,
    },
    /// A tool whose input is a text.
    Custom {
        /// Its name.
        #[schema(min_length = 1)]
        name: String,
        /// What it does.
        description: Option<String>,
        /// What the text must look like.
        format: Option<InputFormat>,
    },
    /// Tools under a common name.
    Namespace {
        /// The name.
        #[schema(min_length = 1)]
        name: String,
        /// What they do.
        description: Option<String>,
        /// The tools: functions and custom ones.
        #[schema(value_type = Vec<Object>)]
        tools: Vec<serde_json::Value>,
    },
    /// Left out, as an offer that the model does not take up.
    WebSearch,
    /// Left out.
    ImageGeneration,
}

/// What the input of a custom tool must look like.
#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum InputFormat {
    /// Anything.
    Text,
    /// A regular expression.
    Grammar {
        /// `regex`.
        syntax: GrammarSyntax,
        /// The expression.
        #[schema(min_length = 1)]
        definition: String,
    },
}

/// `regex`.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum GrammarSyntax {
    /// A regular expression.
    Regex,
}

/// Whether tools are called.
#[derive(ToSchema)]
#[schema(as = ResponseToolChoice)]
#[serde(untagged)]
pub enum ToolChoice {
    /// In a word.
    Word(ToolWord),
    /// By name.
    Named(NamedTools),
}

/// Which tools are called.
#[derive(ToSchema)]
#[schema(as = ResponseNamedTools)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum NamedTools {
    /// This function.
    Function {
        /// Its name.
        name: String,
    },
    /// This custom tool.
    Custom {
        /// Its name.
        name: String,
    },
    /// Some of these.
    AllowedTools {
        /// `auto` or `required`.
        mode: Option<super::chat::AllowedMode>,
        /// The tools.
        #[schema(value_type = Vec<Object>, min_items = 1)]
        tools: Vec<serde_json::Value>,
    },
}

/// What the answer must look like.
#[derive(ToSchema)]
pub struct Text {
    /// Its form.
    pub format: Option<TextFormat>,
    /// The model has no such setting.
    pub verbosity: Option<Verbosity>,
}

/// The form of an answer.
#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum TextFormat {
    /// Anything.
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON of a schema.
    JsonSchema {
        /// The schema's name.
        name: String,
        /// The schema.
        #[serde(flatten)]
        schema: NamedSchema,
    },
}

/// Whether to think, and how much of it is shown.
#[derive(ToSchema)]
pub struct Reasoning {
    /// `none` is no thinking, all other words are thinking.
    pub effort: Option<Effort>,
    /// Whether the thinking comes as a summary, which is all of it.
    pub summary: Option<Summary>,
    /// The same under its older name.
    pub generate_summary: Option<Summary>,
    /// The chat template decides what old thinking stays.
    pub context: Option<ReasoningContext>,
    /// There is one mode.
    pub mode: Option<ReasoningMode>,
}

/// Which summary. All are the same.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // The words are the protocol's.
pub enum Summary {
    Auto,
    Concise,
    Detailed,
}

/// What old thinking stays.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // The words are the protocol's.
pub enum ReasoningContext {
    Auto,
    CurrentTurn,
}

/// `standard`.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // The word is the protocol's.
pub enum ReasoningMode {
    Standard,
}

/// `disabled`.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // The word is the protocol's.
pub enum Truncation {
    Disabled,
}

/// What may come beside an answer. Of all but the last two there is never anything.
#[derive(ToSchema)]
#[allow(missing_docs)] // The names are the protocol's.
pub enum Includable {
    #[schema(rename = "file_search_call.results")]
    FileSearch,
    #[schema(rename = "web_search_call.results")]
    WebSearch,
    #[schema(rename = "web_search_call.action.sources")]
    WebSources,
    #[schema(rename = "message.input_image.image_url")]
    InputImage,
    #[schema(rename = "computer_call_output.output.image_url")]
    Computer,
    #[schema(rename = "code_interpreter_call.outputs")]
    CodeInterpreter,
    #[schema(rename = "reasoning.encrypted_content")]
    Reasoning,
    #[schema(rename = "message.output_text.logprobs")]
    LogProbs,
}

/// What an answer repeats of its request, as it was sent or by its default.
#[derive(ToSchema)]
#[schema(as = ResponseEcho)]
#[allow(missing_docs)] // As in the request.
pub struct Echo {
    pub instructions: Option<String>,
    pub max_output_tokens: Option<u32>,
    pub max_tool_calls: Option<u32>,
    #[schema(value_type = Object)]
    pub metadata: HashMap<String, String>,
    pub parallel_tool_calls: bool,
    pub previous_response_id: Option<String>,
    pub prompt_cache_key: Option<String>,
    pub prompt_cache_retention: Option<String>,
    #[schema(value_type = Object)]
    pub reasoning: Reasoning,
    pub safety_identifier: Option<String>,
    pub store: bool,
    #[schema(value_type = Vec<Object>)]
    pub tools: Vec<Tool>,
    #[schema(value_type = Value)]
    pub tool_choice: ToolChoice,
    pub user: Option<String>,
    #[schema(value_type = Object)]
    pub text: Text,
    pub top_logprobs: u32,
    pub truncation: Truncation,
    pub service_tier: ServiceTier,
}
