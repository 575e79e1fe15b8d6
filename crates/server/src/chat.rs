//! `POST /v1/chat/completions`: from a body to an answer, whole or streamed.

use axum::Json;
use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use lily_engine::constraint::Subject;
use lily_engine::engine::{Request, SubmitError};
use lily_engine::sampler::TokenLogprobs;
use lily_model::tokenizer::Tokenizer;
use tokio::task::JoinSet;

use crate::answer::{Answer, End, Form, News};
use crate::app::App;
use crate::body::{self, Body};
use crate::chat_model::{ChatModel, unix_time};
use crate::error::ApiError;
use crate::models;
use crate::openai::assemble::{self, Calls};
use crate::openai::request::ChatRequest;
use crate::openai::response::{Choice, Chunk, ChunkChoice, Completion, Delta, PromptProgress, Usage};
use crate::openapi::{self, chat as form};
use crate::record::choice_id;
use crate::sse::{self, Broken, Events};

/// Answers a chat.
#[utoipa::path(
    post, path = "/v1/chat/completions", tag = "OpenAI", request_body = form::Chat,
    security((), ("bearer" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The answer; as server-sent events, each with such a body, where `stream` is true.", content((Completion = "application/json"), (Chunk = "text/event-stream"))),
        openapi::Asked,
    ),
)]
pub async fn completions(State(app): State<App>, body: Body) -> Result<Response, ApiError> {
    let body = body::bytes(body)?;
    let started = body::blocking(move || Started::new(app.model, &body)).await?;
    if started.request.stream { Ok(stream(started)) } else { Ok(Json(whole(started).await?).into_response()) }
}

/// A request whose choices are being generated.
struct Started {
    model: ChatModel,
    request: ChatRequest,
    id: String,
    created: u64,
    answers: Vec<Answer>,
}

impl Started {
    fn new(model: ChatModel, body: &[u8]) -> Result<Started, ApiError> {
        let mut request = ChatRequest::parse(body)?;
        if let Some(asked) = &request.model {
            models::check(&model, asked, Some("model"))?;
        }
        let variables = std::mem::take(&mut request.template_variables);
        let prompt = model.prompt(&request.messages, &request.tools, request.thinking, variables)?;
        let sampling = model.sampling(&request.sampling, request.logprobs);
        let id = assemble::unique_id("chatcmpl-");
        let form = Form::Turn { thinking: prompt.thinking, tools: &request.tools };
        let answers = (0..request.n as u64)
            .map(|index| {
                let mut sampling = sampling.clone();
                // Choices of one seed differ from one another and stay the same from run to run.
                sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(index));
                let asked = Request {
                    sampling,
                    max_tokens: request.max_tokens,
                    stop: request.stop.clone(),
                    ignore_eos: request.ignore_eos,
                    constraint: request.asked.as_ref().map(|asked| asked.constraint.clone()),
                    thinking_budget: request.thinking_budget,
                    ..Request::new(prompt.tokens.clone())
                };
                let id = choice_id(&id, index);
                let answer = model.answer(&id, asked, form).map_err(|error| refused(&request, error))?;
                Ok(answer.kept_in(&model.turns, &prompt.opening))
            })
            .collect::<Result<_, ApiError>>()?;
        Ok(Started { model, request, id, created: unix_time(), answers })
    }

    fn head(&self) -> Head {
        Head {
            id: self.id.clone(),
            created: self.created,
            model: self.model.name.clone(),
            with_usage: self.request.include_usage,
        }
    }
}

/// A constraint that cannot be enforced came from one of several fields.
fn refused(request: &ChatRequest, error: SubmitError) -> ApiError {
    let (Some(asked), SubmitError::Constraint(reason)) = (&request.asked, &error) else {
        return error.into();
    };
    let field = match &reason.subject {
        Subject::Tool { name, .. } => {
            let index = request.tools.iter().position(|tool| tool["function"]["name"] == **name);
            format!("tools[{}].function.parameters", index.unwrap_or_default())
        }
        _ => asked.field.clone(),
    };
    ApiError::invalid(field.clone(), format!("`{field}`: {error}"))
}

/// Waits for every choice.
async fn whole(started: Started) -> Result<Completion, ApiError> {
    let Started { model, request, id, created, answers } = started;
    let mut choices = Vec::with_capacity(answers.len());
    let mut ends = Vec::with_capacity(answers.len());
    for (index, answer) in answers.into_iter().enumerate() {
        let turn = answer.turn().to_string();
        let (parts, scored, end) = answer.collect().await.map_err(ApiError::internal)?;
        choices.push(Choice {
            index,
            message: assemble::message(parts, &turn),
            finish_reason: assemble::finish_reason(&end),
            logprobs: request.logprobs.map(|_| assemble::log_probs(&model.tokenizer, &scored)),
        });
        ends.push(end);
    }
    let usage = assemble::usage(&ends);
    Ok(Completion { id, object: "chat.completion", created, model: model.name, choices, usage })
}

/// Sends the choices as they come.
fn stream(started: Started) -> Response {
    sse::respond(idle(&started.head()), |events| send_all(started, events))
}

/// The sign of life: a chunk of which nobody gains anything. Clients that give up on a stream without events, as agents
/// do, count no comments.
fn idle(head: &Head) -> Event {
    // A chunk is strings and numbers, which always have a JSON form.
    Event::default().json_data(head.chunk(vec![unchanged(0)], None)).unwrap_or_default()
}

async fn send_all(started: Started, events: Events) {
    let head = started.head();
    let Started { model, request, answers, .. } = started;
    let writer = ChunkWriter { events: events.clone(), head, with_progress: request.return_progress };
    let mut tasks = JoinSet::new();
    for (index, answer) in answers.into_iter().enumerate() {
        let tokenizer = request.logprobs.map(|_| model.tokenizer.clone());
        let calls = Calls::of(answer.turn());
        tasks.spawn(send_choice(ChoiceWriter { chunks: writer.clone(), index, tokenizer, calls }, answer));
    }
    let ends = match sse::join(tasks).await {
        Ok(ends) => ends,
        Err(broken) => return sse::close(&events, broken, failure).await,
    };
    if request.include_usage && writer.send(Vec::new(), Some(assemble::usage(&ends))).await.is_err() {
        return;
    }
    // The last word; nobody has to hear it.
    let _ = events.send(Ok(Event::default().data("[DONE]"))).await;
}

async fn send_choice(mut writer: ChoiceWriter, mut answer: Answer) -> Result<End, Broken> {
    let opening = Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() };
    writer.send(opening, None, &[]).await?;
    // Log probabilities of tokens whose text is still held back.
    let mut waiting = Vec::new();
    loop {
        let news = sse::next(&mut answer, &writer.chunks.events).await?;
        if let Some(progress) = PromptProgress::of(&news).filter(|_| writer.chunks.with_progress) {
            writer.progress(progress).await?;
        }
        match news {
            News::Prefill { .. } => {}
            News::Token { deltas, scored } => {
                waiting.extend(scored);
                let delta = assemble::delta(deltas, &mut writer.calls);
                if !assemble::is_empty(&delta) {
                    writer.send(delta, None, &waiting).await?;
                    waiting.clear();
                }
            }
            News::End { deltas, end } => {
                let delta = assemble::delta(deltas, &mut writer.calls);
                if !assemble::is_empty(&delta) || !waiting.is_empty() {
                    writer.send(delta, None, &waiting).await?;
                }
                writer.send(Delta::default(), Some(assemble::finish_reason(&end)), &[]).await?;
                return Ok(end);
            }
        }
    }
}

/// A choice that gains nothing, so that clients which look for one find it.
fn unchanged(index: usize) -> ChunkChoice {
    ChunkChoice { index, delta: Delta::default(), finish_reason: None, logprobs: None }
}

/// What all events of one stream have in common.
#[derive(Clone)]
struct Head {
    id: String,
    created: u64,
    model: String,
    with_usage: bool,
}

impl Head {
    fn chunk(&self, choices: Vec<ChunkChoice>, usage: Option<Usage>) -> Chunk {
        Chunk {
            id: self.id.clone(),
            object: "chat.completion.chunk",
            created: self.created,
            model: self.model.clone(),
            choices,
            usage: self.with_usage.then_some(usage),
            prompt_progress: None,
        }
    }
}

/// Writes the events of one stream.
#[derive(Clone)]
struct ChunkWriter {
    events: Events,
    head: Head,
    with_progress: bool,
}

impl ChunkWriter {
    async fn send(&self, choices: Vec<ChunkChoice>, usage: Option<Usage>) -> Result<(), Broken> {
        sse::send(&self.events, Event::default(), &self.head.chunk(choices, usage)).await
    }
}

/// Writes the events of one choice.
struct ChoiceWriter {
    chunks: ChunkWriter,
    index: usize,
    /// Spells scored tokens, where log probabilities are wanted.
    tokenizer: Option<Tokenizer>,
    /// Tool calls sent so far.
    calls: Calls,
}

impl ChoiceWriter {
    async fn send(
        &self,
        delta: Delta,
        finish_reason: Option<&'static str>,
        scored: &[(u32, TokenLogprobs)],
    ) -> Result<(), Broken> {
        let logprobs = match &self.tokenizer {
            Some(tokenizer) if !scored.is_empty() => Some(assemble::log_probs(tokenizer, scored)),
            _ => None,
        };
        let choice = ChunkChoice { index: self.index, delta, finish_reason, logprobs };
        self.chunks.send(vec![choice], None).await
    }

    async fn progress(&self, progress: PromptProgress) -> Result<(), Broken> {
        let chunk = self.chunks.head.chunk(vec![unchanged(self.index)], None);
        let chunk = Chunk { prompt_progress: Some(progress), ..chunk };
        sse::send(&self.chunks.events, Event::default(), &chunk).await
    }
}

/// The last event of a stream that fails half-way.
fn failure(reason: String) -> Event {
    // The body is two levels of strings, which always have a JSON form.
    Event::default().json_data(ApiError::internal(reason).body()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http_body_util::BodyExt;
    use serde_json::{Value, json};

    use super::*;

    #[tokio::test]
    async fn a_stream_without_news_shows_signs_of_life_that_clients_count() {
        let head = Head { id: "c".into(), created: 7, model: "m".into(), with_usage: true };
        let silent = |events: Events| async move { events.closed().await };
        let mut body = sse::respond_within(Duration::from_millis(1), idle(&head), silent).into_body();
        for _ in 0..3 {
            let frame = body.frame().await.expect("the stream goes on").expect("it does not fail");
            let text =
                String::from_utf8(frame.into_data().expect("it is data").to_vec()).expect("it is text");
            let data = text.strip_prefix("data: ").and_then(|rest| rest.strip_suffix("\n\n"));
            let chunk: Value = serde_json::from_str(data.expect("it is one event")).expect("it is JSON");
            let choice = json!({"index": 0, "delta": {}, "finish_reason": null, "logprobs": null});
            let expected = json!({"id": "c", "object": "chat.completion.chunk", "created": 7, "model": "m",
                "choices": [choice], "usage": null});
            assert_eq!(chunk, expected);
        }
    }
}
