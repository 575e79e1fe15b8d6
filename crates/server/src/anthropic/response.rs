//! What `POST /v1/messages` answers: one `message`, or a stream of events.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::openai::response::PromptProgress;

/// A whole answer; in a stream's first event one without content.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = AnthropicMessage)]
pub struct Message {
    /// `msg_…`, unique in this process.
    pub id: String,
    /// Always `message`.
    pub r#type: &'static str,
    /// Always `assistant`.
    pub role: &'static str,
    /// The model that answered.
    pub model: String,
    /// What the model said, in its order.
    pub content: Vec<Block>,
    /// Why it ended; null where it has not.
    pub stop_reason: Option<&'static str>,
    /// The stop sequence that ended it, if one did.
    pub stop_sequence: Option<String>,
    /// Tokens read and written.
    pub usage: Usage,
}

/// A part of an answer; in the event that starts it, an empty one.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicBlock)]
pub enum Block {
    /// The answer.
    Text {
        /// Its text.
        text: String,
    },
    /// The thinking before the answer.
    Thinking {
        /// Its text; empty where the request asked to omit it.
        thinking: String,
        /// See [`SIGNATURE`](super::blocks::SIGNATURE).
        signature: String,
    },
    /// A call of a declared tool.
    ToolUse {
        /// `toolu_…`, unique in this process.
        id: String,
        /// The tool's name.
        name: String,
        /// The arguments, an object.
        #[schema(value_type = Object)]
        input: Value,
    },
}

/// A gain of the block that is open.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicDelta)]
pub enum BlockDelta {
    /// More of a text.
    TextDelta {
        /// The gain.
        text: String,
    },
    /// More of the thinking.
    ThinkingDelta {
        /// The gain.
        thinking: String,
    },
    /// The thinking's signature, last in its block.
    SignatureDelta {
        /// See [`SIGNATURE`](super::blocks::SIGNATURE).
        signature: String,
    },
    /// More of a call's arguments.
    InputJsonDelta {
        /// The gain; all gains joined are a JSON object.
        partial_json: String,
    },
}

/// One event of a stream. Its name, on the event's own line, is its `type`.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicEvent)]
pub enum StreamEvent {
    /// The first event.
    MessageStart {
        /// The message, still empty.
        message: Message,
    },
    /// A block begins.
    ContentBlockStart {
        /// Its place in the content.
        index: usize,
        /// The block, still empty.
        content_block: Block,
    },
    /// The open block gains something.
    ContentBlockDelta {
        /// The block's place.
        index: usize,
        /// The gain.
        delta: BlockDelta,
    },
    /// The open block is complete.
    ContentBlockStop {
        /// The block's place.
        index: usize,
    },
    /// How the message ended; after its last block.
    MessageDelta {
        /// Why it ended.
        delta: MessageEnd,
        /// The true counts of the whole message.
        usage: Usage,
    },
    /// The last event.
    MessageStop,
    /// A sign of life.
    Ping {
        /// How far the prompt has been read, where the request asked for that.
        #[serde(skip_serializing_if = "Option::is_none")]
        prompt_progress: Option<PromptProgress>,
    },
}

impl StreamEvent {
    /// The event's name.
    pub fn name(&self) -> &'static str {
        match self {
            StreamEvent::MessageStart { .. } => "message_start",
            StreamEvent::ContentBlockStart { .. } => "content_block_start",
            StreamEvent::ContentBlockDelta { .. } => "content_block_delta",
            StreamEvent::ContentBlockStop { .. } => "content_block_stop",
            StreamEvent::MessageDelta { .. } => "message_delta",
            StreamEvent::MessageStop => "message_stop",
            StreamEvent::Ping { .. } => "ping",
        }
    }
}

/// How a message ended.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = AnthropicMessageEnd)]
pub struct MessageEnd {
    /// Why.
    pub stop_reason: &'static str,
    /// The stop sequence that ended it, if one did.
    pub stop_sequence: Option<String>,
}

/// Tokens read and written. Those read are the first three together.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
#[schema(as = AnthropicUsage)]
pub struct Usage {
    /// Tokens of the rendered prompt that were processed.
    pub input_tokens: usize,
    /// Always 0: what is kept of a prompt costs no work of its own, so its tokens count as input.
    pub cache_creation_input_tokens: usize,
    /// Tokens of the rendered prompt that came from the prefix cache.
    pub cache_read_input_tokens: usize,
    /// Tokens generated.
    pub output_tokens: usize,
    /// What the generated tokens were spent on.
    pub output_tokens_details: OutputDetails,
}

/// What generated tokens were spent on.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
#[schema(as = AnthropicOutputDetails)]
pub struct OutputDetails {
    /// Tokens of thinking.
    pub thinking_tokens: usize,
}

/// The body of `POST /v1/messages/count_tokens`.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[schema(as = AnthropicTokenCount)]
pub struct TokenCount {
    /// Tokens of the rendered prompt.
    pub input_tokens: usize,
}
