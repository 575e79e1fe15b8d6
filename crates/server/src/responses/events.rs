//! The events of a streamed response.
//!
//! ```text
//! response.created, response.in_progress
//!   response.prompt_progress                                Lily's own, where the request asks for it
//!   response.output_item.added                              for each item
//!     response.content_part.added                           reasoning and text
//!     …_text.delta…, …_text.done  /  …arguments.delta…, …arguments.done
//!     response.content_part.done
//!   response.output_item.done
//! response.completed, response.incomplete or response.failed
//! ```
//!
//! Where there is nothing to tell for long, a sign of life comes in between: [`ItemWriter::unchanged`].
//!
//! [`ItemWriter::unchanged`]: super::items::ItemWriter::unchanged

use serde::Serialize;
use utoipa::ToSchema;

use super::response::{Item, Part, Response};
use crate::openai::response::{PromptProgress, TokenLogProb};

/// One event. Its name, on the event's own line, is its `type`.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type")]
#[allow(missing_docs)] // The names are the protocol's, and say what happened.
#[schema(as = ResponseEventKind)]
pub enum StreamEvent {
    #[serde(rename = "response.created")]
    Created { response: Response },
    #[serde(rename = "response.in_progress")]
    InProgress { response: Response },
    #[serde(rename = "response.completed")]
    Completed { response: Response },
    #[serde(rename = "response.incomplete")]
    Incomplete { response: Response },
    #[serde(rename = "response.failed")]
    Failed { response: Response },
    #[serde(rename = "response.prompt_progress")]
    PromptProgress { prompt_progress: PromptProgress },
    #[serde(rename = "response.output_item.added")]
    ItemAdded { output_index: usize, item: Item },
    #[serde(rename = "response.output_item.done")]
    ItemDone { output_index: usize, item: Item },
    #[serde(rename = "response.content_part.added")]
    PartAdded { item_id: String, output_index: usize, content_index: usize, part: Part },
    #[serde(rename = "response.content_part.done")]
    PartDone { item_id: String, output_index: usize, content_index: usize, part: Part },
    #[serde(rename = "response.output_text.delta")]
    TextDelta {
        item_id: String,
        output_index: usize,
        content_index: usize,
        delta: String,
        logprobs: Vec<TokenLogProb>,
    },
    #[serde(rename = "response.output_text.done")]
    TextDone {
        item_id: String,
        output_index: usize,
        content_index: usize,
        text: String,
        logprobs: Vec<TokenLogProb>,
    },
    #[serde(rename = "response.reasoning_text.delta")]
    ReasoningDelta { item_id: String, output_index: usize, content_index: usize, delta: String },
    #[serde(rename = "response.reasoning_text.done")]
    ReasoningDone { item_id: String, output_index: usize, content_index: usize, text: String },
    #[serde(rename = "response.reasoning_summary_part.added")]
    SummaryAdded { item_id: String, output_index: usize, summary_index: usize, part: Part },
    #[serde(rename = "response.reasoning_summary_part.done")]
    SummaryPartDone { item_id: String, output_index: usize, summary_index: usize, part: Part },
    #[serde(rename = "response.reasoning_summary_text.delta")]
    SummaryDelta { item_id: String, output_index: usize, summary_index: usize, delta: String },
    #[serde(rename = "response.reasoning_summary_text.done")]
    SummaryDone { item_id: String, output_index: usize, summary_index: usize, text: String },
    #[serde(rename = "response.function_call_arguments.delta")]
    ArgumentsDelta { item_id: String, output_index: usize, delta: String },
    #[serde(rename = "response.function_call_arguments.done")]
    ArgumentsDone { item_id: String, output_index: usize, name: String, arguments: String },
    #[serde(rename = "response.custom_tool_call_input.delta")]
    InputDelta { item_id: String, output_index: usize, delta: String },
    #[serde(rename = "response.custom_tool_call_input.done")]
    InputDone { item_id: String, output_index: usize, input: String },
}

/// An event with its place in the stream.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ResponseEvent)]
pub struct Numbered {
    /// The event.
    #[serde(flatten)]
    pub event: StreamEvent,
    /// Its place, from 0.
    pub sequence_number: u64,
}

impl StreamEvent {
    /// The event's name.
    pub fn name(&self) -> &'static str {
        match self {
            StreamEvent::Created { .. } => "response.created",
            StreamEvent::InProgress { .. } => "response.in_progress",
            StreamEvent::Completed { .. } => "response.completed",
            StreamEvent::Incomplete { .. } => "response.incomplete",
            StreamEvent::Failed { .. } => "response.failed",
            StreamEvent::PromptProgress { .. } => "response.prompt_progress",
            StreamEvent::ItemAdded { .. } => "response.output_item.added",
            StreamEvent::ItemDone { .. } => "response.output_item.done",
            StreamEvent::PartAdded { .. } => "response.content_part.added",
            StreamEvent::PartDone { .. } => "response.content_part.done",
            StreamEvent::TextDelta { .. } => "response.output_text.delta",
            StreamEvent::TextDone { .. } => "response.output_text.done",
            StreamEvent::ReasoningDelta { .. } => "response.reasoning_text.delta",
            StreamEvent::ReasoningDone { .. } => "response.reasoning_text.done",
            StreamEvent::SummaryAdded { .. } => "response.reasoning_summary_part.added",
            StreamEvent::SummaryPartDone { .. } => "response.reasoning_summary_part.done",
            StreamEvent::SummaryDelta { .. } => "response.reasoning_summary_text.delta",
            StreamEvent::SummaryDone { .. } => "response.reasoning_summary_text.done",
            StreamEvent::ArgumentsDelta { .. } => "response.function_call_arguments.delta",
            StreamEvent::ArgumentsDone { .. } => "response.function_call_arguments.done",
            StreamEvent::InputDelta { .. } => "response.custom_tool_call_input.delta",
            StreamEvent::InputDone { .. } => "response.custom_tool_call_input.done",
        }
    }
}
