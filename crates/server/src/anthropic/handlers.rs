//! `POST /v1/messages`, whole or streamed, and `POST /v1/messages/count_tokens`.

use axum::Json;
use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use lily_engine::constraint::Subject;
use lily_engine::engine::{FinishReason, Request, SubmitError};
use lily_engine::reasoning::prompt_opens_reasoning;
use serde_json::Map;

use super::blocks::{self, BlockWriter};
use super::error::ErrorBody;
use super::request::MessagesRequest;
use super::response::{Message, MessageEnd, OutputDetails, StreamEvent, TokenCount, Usage};
use crate::answer::{Answer, End, Form, News};
use crate::app::App;
use crate::body::{self, Body};
use crate::chat_model::{ChatModel, Prompt};
use crate::error::ApiError;
use crate::models;
use crate::openai::assemble::unique_id;
use crate::openai::fields::missing;
use crate::openai::response::PromptProgress;
use crate::openapi::{self, messages as form};
use crate::sse::{self, Broken, Events};

/// Answers with a message.
#[utoipa::path(
    post, path = "/v1/messages", tag = "Anthropic", request_body = form::Request,
    security((), ("bearer" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The answer; as server-sent events, each with such a body, where `stream` is true.", content((Message = "application/json"), (StreamEvent = "text/event-stream"))),
        openapi::Messaged,
    ),
)]
pub async fn messages(State(app): State<App>, body: Body) -> Result<Response, ApiError> {
    let body = body::bytes(body)?;
    let started = body::blocking(move || Started::new(&app.model, &body)).await?;
    if !started.stream {
        return Ok(Json(whole(started).await?).into_response());
    }
    let idle = StreamEvent::Ping { prompt_progress: None };
    let idle = event(idle.name(), &idle);
    Ok(sse::respond(idle, |events| stream(started, events)))
}

/// Counts what a request would give the model.
#[utoipa::path(
    post, path = "/v1/messages/count_tokens", tag = "Anthropic", request_body = form::Counted,
    security((), ("bearer" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The count.", body = TokenCount),
        openapi::MessagesGiven,
    ),
)]
pub async fn count_tokens(State(app): State<App>, body: Body) -> Result<Json<TokenCount>, ApiError> {
    let body = body::bytes(body)?;
    let count = body::blocking(move || {
        let request = MessagesRequest::parse(&body)?;
        check_model(&app.model, &request)?;
        Ok(prompt(&app.model, &request)?.tokens.len())
    });
    Ok(Json(TokenCount { input_tokens: count.await? }))
}

fn check_model(model: &ChatModel, request: &MessagesRequest) -> Result<(), ApiError> {
    request.model.as_ref().map_or(Ok(()), |asked| models::check(model, asked, Some("model")))
}

/// Renders the conversation, and the opening of the answer where the client wrote one.
fn prompt(model: &ChatModel, request: &MessagesRequest) -> Result<Prompt, ApiError> {
    let conversation = &request.conversation;
    let mut rendered =
        model.rendered(&conversation.messages, &request.tools, request.thinking.enabled, Map::new(), true)?;
    if let Some(opening) = &conversation.opening {
        if prompt_opens_reasoning(&rendered.text) {
            let message = "`messages` may not end with the assistant's turn where `thinking` is on: the answer would begin before its thinking";
            return Err(ApiError::invalid("messages", message));
        }
        rendered.text.push_str(opening);
    }
    Ok(model.encoded(rendered))
}

/// A request whose answer is being generated.
struct Started {
    answer: Answer,
    /// The message, still empty.
    message: Message,
    stop_sequences: Vec<String>,
    max_tokens: usize,
    omit_thinking: bool,
    stream: bool,
    return_progress: bool,
}

impl Started {
    fn new(model: &ChatModel, body: &[u8]) -> Result<Started, ApiError> {
        let request = MessagesRequest::parse(body)?;
        check_model(model, &request)?;
        let max_tokens = request.max_tokens.ok_or_else(|| missing("max_tokens"))?;
        let prompt = prompt(model, &request)?;
        let usage = Usage { input_tokens: prompt.tokens.len(), ..Usage::default() };
        let id = unique_id("msg_");
        let asked = Request {
            sampling: model.sampling(&request.sampling, None),
            max_tokens: Some(max_tokens),
            stop: request.stop_sequences.clone(),
            constraint: request.asked.as_ref().map(|asked| asked.constraint.clone()),
            thinking_budget: request.thinking.budget,
            ..Request::new(prompt.tokens)
        };
        let form = Form::Turn { thinking: prompt.thinking, tools: &request.tools };
        let answer = model.answer(&id, asked, form).map_err(|error| refused(&request, error))?;
        Ok(Started {
            answer: answer.kept_in(&model.turns, &prompt.opening),
            message: Message {
                id,
                r#type: "message",
                role: "assistant",
                model: model.name.clone(),
                content: Vec::new(),
                stop_reason: None,
                stop_sequence: None,
                usage,
            },
            stop_sequences: request.stop_sequences,
            max_tokens,
            omit_thinking: request.thinking.omitted,
            stream: request.stream,
            return_progress: request.return_progress,
        })
    }
}

/// Why the engine did not take the request, by this protocol's fields.
fn refused(request: &MessagesRequest, error: SubmitError) -> ApiError {
    let message = error.to_string();
    match (error, &request.asked) {
        (SubmitError::Stop(_), _) => ApiError::invalid("stop_sequences", message),
        (SubmitError::Constraint(error), Some(asked)) => match &error.subject {
            Subject::Tool { name, .. } => {
                let index = request.tools.iter().position(|tool| tool["function"]["name"] == **name);
                ApiError::invalid(format!("tools[{}].input_schema", index.unwrap_or_default()), message)
            }
            _ => ApiError::invalid(asked.field.clone(), message),
        },
        (error, _) => error.into(),
    }
}

async fn whole(started: Started) -> Result<Message, ApiError> {
    let Started { answer, mut message, stop_sequences, max_tokens, omit_thinking, .. } = started;
    let mut writer = BlockWriter::new(answer.turn(), omit_thinking);
    let (parts, _, end) = answer.collect().await.map_err(ApiError::internal)?;
    let mut events = writer.push(parts);
    events.extend(writer.finish());
    let ended = message_end(&end, &stop_sequences, max_tokens);
    message.content = blocks::join(events);
    message.stop_reason = Some(ended.stop_reason);
    message.stop_sequence = ended.stop_sequence;
    message.usage = usage(&end);
    Ok(message)
}

async fn stream(started: Started, events: Events) {
    if let Err(broken) = send_all(started, &events).await {
        let error = |reason| event("error", &ErrorBody::from(&ApiError::internal(reason)));
        sse::close(&events, broken, error).await;
    }
}

async fn send_all(started: Started, events: &Events) -> Result<(), Broken> {
    let Started { mut answer, message, stop_sequences, max_tokens, omit_thinking, return_progress, .. } =
        started;
    // What the cache has is not known yet; the last event corrects the counts.
    send(events, &StreamEvent::MessageStart { message }).await?;
    let mut writer = BlockWriter::new(answer.turn(), omit_thinking);
    loop {
        let news = sse::next(&mut answer, events).await?;
        if let Some(progress) = PromptProgress::of(&news).filter(|_| return_progress) {
            send(events, &StreamEvent::Ping { prompt_progress: Some(progress) }).await?;
        }
        let (parts, end) = match news {
            News::Prefill { .. } => continue,
            News::Token { deltas, .. } => (deltas, None),
            News::End { deltas, end } => (deltas, Some(end)),
        };
        for event in writer.push(parts) {
            send(events, &event).await?;
        }
        let Some(end) = end else { continue };
        for event in writer.finish() {
            send(events, &event).await?;
        }
        let delta = message_end(&end, &stop_sequences, max_tokens);
        send(events, &StreamEvent::MessageDelta { delta, usage: usage(&end) }).await?;
        return send(events, &StreamEvent::MessageStop).await;
    }
}

async fn send(events: &Events, event: &StreamEvent) -> Result<(), Broken> {
    sse::send(events, Event::default().event(event.name()), event).await
}

/// An event whose body is strings, which always have a JSON form.
fn event(name: &str, body: &impl serde::Serialize) -> Event {
    Event::default().event(name).json_data(body).unwrap_or_default()
}

fn message_end(end: &End, stop_sequences: &[String], max_tokens: usize) -> MessageEnd {
    let stop_sequence = end.stop.and_then(|index| stop_sequences.get(index)).cloned();
    let stop_reason = match end.reason {
        FinishReason::StopString => "stop_sequence",
        FinishReason::EndOfSequence if end.called => "tool_use",
        FinishReason::EndOfSequence => "end_turn",
        FinishReason::Length if end.usage.completion_tokens < max_tokens => "model_context_window_exceeded",
        FinishReason::Length => "max_tokens",
    };
    MessageEnd { stop_reason, stop_sequence }
}

fn usage(end: &End) -> Usage {
    Usage {
        input_tokens: end.usage.prompt_tokens - end.usage.cached_tokens,
        cache_creation_input_tokens: 0,
        cache_read_input_tokens: end.usage.cached_tokens,
        output_tokens: end.usage.completion_tokens,
        output_tokens_details: OutputDetails { thinking_tokens: end.reasoning_tokens },
    }
}
