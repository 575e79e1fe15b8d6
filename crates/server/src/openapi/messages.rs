//! What `POST /v1/messages` and `POST /v1/messages/count_tokens` take.
//!
//! As in [`super::chat`], the structures are never filled: [`crate::anthropic::request`] and
//! [`crate::anthropic::conversation`] read the body.

use utoipa::ToSchema;

use super::chat::Sampling;

/// A request for a message.
#[derive(ToSchema)]
#[schema(as = AnthropicRequest)]
pub struct Request {
    /// The most tokens to generate.
    #[schema(minimum = 1, maximum = 4294967295u32)]
    pub max_tokens: u32,
    /// Texts that end the answer and are not part of it.
    #[schema(max_items = 64)]
    pub stop_sequences: Option<Vec<String>>,
    /// Whether the answer comes as server-sent events.
    pub stream: Option<bool>,
    /// Whether a stream tells how far the prompt has been read; only where `stream` is true.
    pub return_progress: Option<bool>,
    /// See [`Sampling`].
    #[serde(flatten)]
    pub sampling: Sampling,
    /// There is one tier.
    pub service_tier: Option<ServiceTier>,
    /// There is one speed.
    pub speed: Option<Speed>,
    /// See [`Counted`].
    #[serde(flatten)]
    pub prompt: Counted,
}

/// A conversation, and what belongs to its prompt.
#[derive(ToSchema)]
#[schema(as = AnthropicCountRequest)]
pub struct Counted {
    /// The model's name, as `GET /v1/models` lists it; the one that is served where absent.
    pub model: Option<String>,
    /// Instructions.
    pub system: Option<SystemText>,
    /// The conversation. Where the last turn is the assistant's, the answer begins with it.
    #[schema(min_items = 1)]
    pub messages: Vec<Turn>,
    /// Tools that the model may call.
    pub tools: Option<Vec<Tool>>,
    /// Whether it may, must or must not call them.
    pub tool_choice: Option<ToolChoice>,
    /// Whether to think.
    pub thinking: Option<Thinking>,
    /// What the answer must look like.
    pub output_config: Option<OutputConfig>,
    /// The older name of `output_config.format`.
    pub output_format: Option<OutputFormat>,
    /// What it may say about old thinking, the chat template does anyway.
    pub context_management: Option<ContextManagement>,
    /// No other server is reached: an empty list.
    #[schema(max_items = 0, value_type = Option<Vec<Object>>)]
    pub mcp_servers: Option<()>,
}

/// A text, or blocks of it, which are joined.
#[derive(ToSchema)]
#[schema(as = AnthropicText)]
#[serde(untagged)]
pub enum SystemText {
    /// The text.
    Text(String),
    /// Its blocks.
    Blocks(Vec<TextBlock>),
}

/// A block of text. Images and documents are refused.
#[derive(ToSchema)]
#[schema(as = AnthropicTextBlock)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum TextBlock {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
}

/// One message of a conversation.
#[derive(ToSchema)]
#[schema(as = AnthropicTurn)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum Turn {
    /// What the user says, and results of calls.
    User {
        /// The text, or blocks.
        content: UserContent,
    },
    /// What the model said.
    Assistant {
        /// The text, or blocks.
        content: AssistantContent,
    },
    /// Instructions.
    System {
        /// The text.
        content: SystemText,
    },
}

/// A text, or blocks.
#[derive(ToSchema)]
#[schema(as = AnthropicUserContent)]
#[serde(untagged)]
pub enum UserContent {
    /// The text.
    Text(String),
    /// Blocks.
    Blocks(Vec<UserBlock>),
}

/// A block of the user's.
#[derive(ToSchema)]
#[schema(as = AnthropicUserBlock)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum UserBlock {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
    /// The result of a call of the turn before.
    ToolResult {
        /// The call's id.
        tool_use_id: String,
        /// The text.
        content: Option<SystemText>,
        /// Whether the call failed.
        is_error: Option<bool>,
    },
}

/// A text, or blocks.
#[derive(ToSchema)]
#[schema(as = AnthropicAssistantContent)]
#[serde(untagged)]
pub enum AssistantContent {
    /// The text.
    Text(String),
    /// Blocks.
    Blocks(Vec<AssistantBlock>),
}

/// A block of the model's.
#[derive(ToSchema)]
#[schema(as = AnthropicAssistantBlock)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AssistantBlock {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
    /// Thinking.
    Thinking {
        /// The text.
        thinking: String,
        /// Not looked at.
        signature: Option<String>,
    },
    /// Another server's thinking, which is left out.
    RedactedThinking,
    /// A call.
    ToolUse {
        /// The call's id.
        id: String,
        /// The tool's name.
        name: String,
        /// The arguments.
        #[schema(value_type = Object)]
        input: serde_json::Value,
    },
}

/// A tool. Those that run at Anthropic are refused.
#[derive(ToSchema)]
#[schema(as = AnthropicTool)]
pub struct Tool {
    /// `custom`.
    pub r#type: Option<ToolKind>,
    /// Its name.
    #[schema(min_length = 1)]
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// A JSON schema of its arguments.
    #[schema(value_type = Object)]
    pub input_schema: serde_json::Value,
    /// Whether arguments must follow the schema.
    pub strict: Option<bool>,
    /// Examples of arguments, which the model reads.
    #[schema(value_type = Option<Vec<Value>>)]
    pub input_examples: Option<Vec<serde_json::Value>>,
    /// Without effect.
    pub eager_input_streaming: Option<bool>,
}

/// `custom`.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ToolKind {
    /// A tool of the client's.
    Custom,
}

/// Whether tools are called.
#[derive(ToSchema)]
#[schema(as = AnthropicToolChoice)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToolChoice {
    /// The model decides.
    Auto {
        /// Whether one turn may hold one call at the most.
        disable_parallel_tool_use: Option<bool>,
    },
    /// At least one is.
    Any {
        /// Whether one turn may hold one call at the most.
        disable_parallel_tool_use: Option<bool>,
    },
    /// This one is.
    Tool {
        /// Its name.
        name: String,
        /// Whether one turn may hold one call at the most.
        disable_parallel_tool_use: Option<bool>,
    },
    /// None is.
    None,
}

/// Whether to think.
#[derive(ToSchema)]
#[schema(as = AnthropicThinking)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Thinking {
    /// Yes.
    Enabled {
        /// The most tokens of thinking, less than `max_tokens`.
        #[schema(minimum = 1, maximum = 4294967295u32)]
        budget_tokens: Option<u32>,
        /// Whether the thinking is shown.
        display: Option<Display>,
    },
    /// Yes.
    Adaptive {
        /// Whether the thinking is shown.
        display: Option<Display>,
    },
    /// No.
    Disabled,
}

/// Whether thinking is shown.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Display {
    /// It is.
    Summarized,
    /// It is not.
    Omitted,
}

/// What the answer must look like.
#[derive(ToSchema)]
pub struct OutputConfig {
    /// Without effect: the model thinks or it does not, as `thinking` says.
    pub effort: Option<OutputEffort>,
    /// Its form.
    pub format: Option<OutputFormat>,
}

/// Without effect.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // The words are the protocol's.
pub enum OutputEffort {
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

/// The form of an answer.
#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputFormat {
    /// JSON of a schema.
    JsonSchema {
        /// The schema.
        #[schema(value_type = Value)]
        schema: serde_json::Value,
    },
}

/// Edits of the conversation.
#[derive(ToSchema)]
pub struct ContextManagement {
    /// `clear_thinking` edits, which change nothing.
    pub edits: Option<Vec<Edit>>,
}

/// An edit of the conversation.
#[derive(ToSchema)]
pub struct Edit {
    /// `clear_thinking…`.
    #[schema(pattern = "^clear_thinking")]
    pub r#type: String,
}

/// There is one tier.
#[derive(ToSchema)]
#[schema(as = AnthropicServiceTier)]
#[serde(rename_all = "snake_case")]
pub enum ServiceTier {
    /// It.
    Auto,
    /// The same.
    StandardOnly,
}

/// There is one speed.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Speed {
    /// It.
    Standard,
}
