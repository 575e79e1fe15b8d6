//! What `POST /v1/chat/completions` and `POST /v1/completions` take.
//!
//! The bodies are read field by field, by [`crate::openai::request`] and its neighbours; the structures here are never
//! filled. They say in the document's language what those readers accept, and the tests of [`super`] hold the two
//! together.

use std::collections::HashMap;

use utoipa::ToSchema;

/// A chat.
#[derive(ToSchema)]
#[schema(as = ChatRequest)]
pub struct Chat {
    /// The model's name, as `GET /v1/models` lists it; the one that is served where absent.
    pub model: Option<String>,
    /// The conversation.
    #[schema(min_items = 1)]
    pub messages: Vec<Turn>,
    /// The most tokens to generate; up to the end of the context where absent.
    #[schema(minimum = 1, maximum = 4294967295u32)]
    pub max_tokens: Option<u32>,
    /// The same under its newer name. Where both are sent they must agree.
    #[schema(minimum = 1, maximum = 4294967295u32)]
    pub max_completion_tokens: Option<u32>,
    /// Choices to generate.
    #[schema(minimum = 1, maximum = 16)]
    pub n: Option<u32>,
    /// Whether the answer comes as server-sent events.
    pub stream: Option<bool>,
    /// How a stream is written; only where `stream` is true.
    pub stream_options: Option<StreamOptions>,
    /// Whether a stream tells how far the prompt has been read; only where `stream` is true.
    pub return_progress: Option<bool>,
    /// Whether log probabilities come with the answer.
    pub logprobs: Option<bool>,
    /// Alternatives at each place; only where `logprobs` is true.
    #[schema(minimum = 0, maximum = 20)]
    pub top_logprobs: Option<u32>,
    /// Tools that the model may call.
    pub tools: Option<Vec<Tool>>,
    /// Whether it may, must or must not call them.
    pub tool_choice: Option<ToolChoice>,
    /// Whether one turn may hold several calls.
    pub parallel_tool_calls: Option<bool>,
    /// What the answer must look like.
    pub response_format: Option<ResponseFormat>,
    /// See [`Sampling`].
    #[serde(flatten)]
    pub sampling: Sampling,
    /// See [`Ends`].
    #[serde(flatten)]
    pub ends: Ends,
    /// See [`Thinking`].
    #[serde(flatten)]
    pub thinking: Thinking,
    /// One of the words that say whether to think: `none` is no thinking, all others are thinking.
    pub reasoning_effort: Option<Effort>,
    /// See [`Constraints`].
    #[serde(flatten)]
    pub constraint: Constraints,
    /// The old form of tools; nothing but an empty list.
    #[schema(max_items = 0, value_type = Option<Vec<Object>>)]
    pub functions: Option<()>,
    /// Nothing is kept: false.
    #[schema(schema_with = only_false)]
    pub store: Option<bool>,
    /// Text is all there is.
    pub modalities: Option<Vec<Modality>>,
    /// The model has no such setting.
    pub verbosity: Option<Verbosity>,
    /// There is one tier.
    pub service_tier: Option<ServiceTier>,
}

/// A prompt to continue.
#[derive(ToSchema)]
#[schema(as = CompletionRequest)]
pub struct Completion {
    /// The model's name, as `GET /v1/models` lists it; the one that is served where absent.
    pub model: Option<String>,
    /// What to continue: a text, tokens, or several of either.
    pub prompt: RawPrompt,
    /// The most tokens to generate for each choice; 16 where absent.
    #[schema(minimum = 1, maximum = 4294967295u32)]
    pub max_tokens: Option<u32>,
    /// Choices of each prompt.
    #[schema(minimum = 1, maximum = 16)]
    pub n: Option<u32>,
    /// Every continuation is returned: the same as `n`.
    #[schema(minimum = 1, maximum = 16)]
    pub best_of: Option<u32>,
    /// Whether the prompt comes back before its continuation.
    pub echo: Option<bool>,
    /// Alternatives at each place to report log probabilities of; not together with `echo`.
    #[schema(minimum = 0, maximum = 20)]
    pub logprobs: Option<u32>,
    /// Nothing can be written up to a suffix: an empty text.
    #[schema(max_length = 0)]
    pub suffix: Option<String>,
    /// Whether the answer comes as server-sent events.
    pub stream: Option<bool>,
    /// How a stream is written; only where `stream` is true.
    pub stream_options: Option<StreamOptions>,
    /// Whether a stream tells how far the prompt has been read; only where `stream` is true.
    pub return_progress: Option<bool>,
    /// See [`Sampling`].
    #[serde(flatten)]
    pub sampling: Sampling,
    /// See [`Ends`].
    #[serde(flatten)]
    pub ends: Ends,
}

/// How tokens are chosen. Greedy where none of these is sent.
#[derive(ToSchema)]
pub struct Sampling {
    /// 0 is greedy.
    #[schema(minimum = 0, maximum = 2)]
    pub temperature: Option<f64>,
    /// Mass of the nucleus.
    #[schema(minimum = 0, maximum = 1)]
    pub top_p: Option<f64>,
    /// Candidates; 0 and -1 are all.
    #[schema(minimum = -1, maximum = 4294967295u32)]
    pub top_k: Option<i64>,
    /// Least probability, relative to the likeliest candidate's.
    #[schema(minimum = 0, maximum = 1)]
    pub min_p: Option<f64>,
    /// Seed of the random choices.
    #[schema(minimum = -9223372036854775808i64, maximum = 9223372036854775807i64)]
    pub seed: Option<i64>,
    /// Taken off the logit of each token that was generated already.
    #[schema(minimum = -2, maximum = 2)]
    pub presence_penalty: Option<f64>,
    /// Taken off the logit of a token once for each time that it was generated.
    #[schema(minimum = -2, maximum = 2)]
    pub frequency_penalty: Option<f64>,
    /// Divides positive and multiplies negative logits of tokens seen already.
    #[schema(exclusive_minimum = 0)]
    pub repetition_penalty: Option<f64>,
    /// Added to the logits of tokens, by their ids.
    pub logit_bias: Option<HashMap<String, f64>>,
}

/// Where an answer ends.
#[derive(ToSchema)]
pub struct Ends {
    /// Texts that end the answer and are not part of it.
    pub stop: Option<Stop>,
    /// Whether to go on past the model's own end.
    pub ignore_eos: Option<bool>,
}

/// Whether and how the model thinks before it answers.
#[derive(ToSchema)]
pub struct Thinking {
    /// Whether to think; the server's default where absent.
    pub enable_thinking: Option<bool>,
    /// The most tokens of thinking.
    #[schema(minimum = 0, maximum = 4294967295u32)]
    pub thinking_budget: Option<u32>,
    /// Variables of the chat template, `enable_thinking` and `thinking_budget` among them.
    pub chat_template_kwargs: Option<HashMap<String, serde_json::Value>>,
}

/// What the answer must look like. One of these at the most.
#[derive(ToSchema)]
pub struct Constraints {
    /// A regular expression.
    pub regex: Option<String>,
    /// A Lark grammar.
    pub grammar: Option<String>,
    /// JSON of a schema, which may be written as a text.
    #[schema(value_type = Option<Value>)]
    pub guided_json: Option<serde_json::Value>,
    /// A regular expression.
    pub guided_regex: Option<String>,
    /// A Lark grammar.
    pub guided_grammar: Option<String>,
    /// One of these texts.
    #[schema(min_items = 1)]
    pub guided_choice: Option<Vec<String>>,
    /// vLLM's newer form of the same.
    pub structured_outputs: Option<StructuredOutputs>,
}

/// One of these.
#[derive(ToSchema)]
pub struct StructuredOutputs {
    /// JSON of a schema.
    #[schema(value_type = Option<Value>)]
    pub json: Option<serde_json::Value>,
    /// A regular expression.
    pub regex: Option<String>,
    /// A Lark grammar.
    pub grammar: Option<String>,
    /// One of these texts.
    #[schema(min_items = 1)]
    pub choice: Option<Vec<String>>,
    /// Any JSON object.
    pub json_object: Option<bool>,
}

/// How a stream is written.
#[derive(ToSchema)]
pub struct StreamOptions {
    /// Whether its last event carries `usage`.
    pub include_usage: Option<bool>,
    /// Accepted without effect.
    pub include_obfuscation: Option<bool>,
}

/// One message of a conversation.
#[derive(ToSchema)]
#[schema(as = ChatTurn)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum Turn {
    /// Instructions.
    System {
        /// The text.
        content: Content,
    },
    /// Instructions, in OpenAI's newer word.
    Developer {
        /// The text.
        content: Content,
    },
    /// What the user says.
    User {
        /// The text.
        content: Content,
    },
    /// What the model said. It has content, calls or both.
    Assistant {
        /// The text.
        content: Option<Content>,
        /// The thinking before it.
        reasoning_content: Option<String>,
        /// Its calls.
        tool_calls: Option<Vec<Call>>,
    },
    /// The result of a call.
    Tool {
        /// The call's id.
        tool_call_id: String,
        /// The text.
        content: Content,
    },
}

/// A text, or parts of one, which are joined.
#[derive(ToSchema)]
#[schema(as = ChatContent)]
#[serde(untagged)]
pub enum Content {
    /// The text.
    Text(String),
    /// Its parts.
    Parts(Vec<TextPart>),
}

/// A part of a text. Images, audio and files are refused.
#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum TextPart {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
}

/// A call that the model made.
#[derive(ToSchema)]
#[schema(as = ChatCall)]
pub struct Call {
    /// Its id.
    pub id: Option<String>,
    /// Functions are all there is.
    pub r#type: Option<FunctionKind>,
    /// What was called.
    pub function: CalledFunction,
}

/// A function that was called.
#[derive(ToSchema)]
pub struct CalledFunction {
    /// Its name.
    pub name: String,
    /// A JSON object, written as a text or as it is.
    pub arguments: Option<Arguments>,
}

/// A JSON object, written as a text or as it is.
#[derive(ToSchema)]
#[serde(untagged)]
pub enum Arguments {
    /// Written as a text.
    Text(String),
    /// As it is.
    Object(HashMap<String, serde_json::Value>),
}

/// `function`.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FunctionKind {
    /// A function.
    Function,
}

/// A tool.
#[derive(ToSchema)]
#[schema(as = ChatTool)]
pub struct Tool {
    /// Functions are all there is.
    pub r#type: FunctionKind,
    /// What it is.
    pub function: Function,
}

/// A function that the model may call.
#[derive(ToSchema)]
pub struct Function {
    /// Its name.
    #[schema(min_length = 1)]
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// A JSON schema of its arguments.
    #[schema(value_type = Option<Object>)]
    pub parameters: Option<serde_json::Value>,
    /// Whether arguments must follow the schema.
    pub strict: Option<bool>,
}

/// Whether tools are called.
#[derive(ToSchema)]
#[schema(as = ChatToolChoice)]
#[serde(untagged)]
pub enum ToolChoice {
    /// In a word.
    Word(ToolWord),
    /// By name.
    Named(NamedTools),
}

/// Whether tools are called, in a word.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ToolWord {
    /// They are not.
    None,
    /// The model decides.
    Auto,
    /// At least one is.
    Required,
}

/// Which tools are called.
#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum NamedTools {
    /// This one.
    Function {
        /// The tool.
        function: FunctionName,
    },
    /// Some of these.
    AllowedTools {
        /// Them.
        allowed_tools: AllowedTools,
    },
}

/// The name of a declared function.
#[derive(ToSchema)]
pub struct FunctionName {
    /// The name.
    pub name: String,
}

/// Tools that may be called.
#[derive(ToSchema)]
pub struct AllowedTools {
    /// `auto` or `required`.
    pub mode: Option<AllowedMode>,
    /// The tools.
    #[schema(min_items = 1)]
    pub tools: Vec<AllowedTool>,
}

/// A tool that may be called.
#[derive(ToSchema)]
pub struct AllowedTool {
    /// It.
    pub function: FunctionName,
}

/// Whether one of the allowed tools has to be called.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AllowedMode {
    /// It has not.
    Auto,
    /// It has.
    Required,
}

/// What the answer must look like.
#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponseFormat {
    /// Anything.
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON of a schema.
    JsonSchema {
        /// The schema.
        json_schema: NamedSchema,
    },
}

/// A schema and how strictly it is taken.
#[derive(ToSchema)]
pub struct NamedSchema {
    /// The JSON schema.
    #[schema(value_type = Value)]
    pub schema: serde_json::Value,
    /// Whether a keyword that cannot be enforced is refused.
    pub strict: Option<bool>,
}

/// Texts that end an answer.
#[derive(ToSchema)]
#[serde(untagged)]
pub enum Stop {
    /// One.
    One(String),
    /// Several.
    Several(Vec<String>),
}

/// What to continue.
#[derive(ToSchema)]
#[serde(untagged)]
pub enum RawPrompt {
    /// A text.
    Text(String),
    /// Several texts.
    Texts(Vec<String>),
    /// Tokens.
    Tokens(Vec<u32>),
    /// Several lists of tokens.
    TokenLists(Vec<Vec<u32>>),
}

/// How much to think.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // The words are the protocol's.
pub enum Effort {
    None,
    Minimal,
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

/// `text`.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Modality {
    /// Text.
    Text,
}

/// `medium`.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Verbosity {
    /// As the model likes it.
    Medium,
}

/// `auto` or `default`.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ServiceTier {
    /// The one tier.
    Auto,
    /// The same.
    Default,
}

/// A boolean that may not be true.
fn only_false() -> utoipa::openapi::schema::Object {
    use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
    let types = SchemaType::from_iter([Type::Boolean, Type::Null]);
    ObjectBuilder::new().schema_type(types).enum_values(Some([Some(false), None])).build()
}
