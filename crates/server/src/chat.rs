//! `POST /v1/chat/completions`: from a body to an answer, whole or streamed.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use lily_engine::engine::Request;
use lily_engine::sampler::TokenLogprobs;
use lily_model::tokenizer::Tokenizer;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

use crate::answer::{Answer, End, News};
use crate::app::{App, MAX_BODY_BYTES};
use crate::chat_model::{ChatModel, unix_time};
use crate::error::ApiError;
use crate::models;
use crate::openai::assemble;
use crate::openai::request::ChatRequest;
use crate::openai::response::{Choice, Chunk, ChunkChoice, Completion, Delta, Usage};

/// Between two events of a stream a comment goes out this often, so that no proxy or client takes a long
/// prefill for a dead connection.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Events that wait for a slow reader before the stream's task does.
const STREAM_BUFFER: usize = 32;

/// Handles `POST /v1/chat/completions`.
pub async fn completions(
    State(app): State<App>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = body.map_err(unreadable)?;
    // Rendering and encoding a long prompt takes long enough to hold up other requests' events.
    let started = tokio::task::spawn_blocking(move || Started::new(app.model, &body)).await;
    let started = started.map_err(|error| ApiError::internal(format!("the request failed: {error}")))??;
    if started.request.stream { Ok(stream(started)) } else { Ok(Json(whole(started).await?).into_response()) }
}

fn unreadable(rejection: BytesRejection) -> ApiError {
    match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            let message = format!("the body is larger than {MAX_BODY_BYTES} bytes; send less");
            ApiError::plain(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
        }
        _ => ApiError::malformed(format!("the body cannot be read: {}", rejection.body_text())),
    }
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
        let answers = (0..request.n as u64)
            .map(|index| {
                let mut sampling = sampling.clone();
                // Choices of one seed differ from one another and stay the same from run to run.
                sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(index));
                let generation = model.engine.submit(Request {
                    sampling,
                    max_tokens: request.max_tokens,
                    stop: request.stop.clone(),
                    ignore_eos: request.ignore_eos,
                    ..Request::new(prompt.tokens.clone())
                })?;
                Ok(Answer::new(generation, prompt.thinking, &request.tools))
            })
            .collect::<Result<_, ApiError>>()?;
        let id = assemble::unique_id("chatcmpl-");
        Ok(Started { model, request, id, created: unix_time(), answers })
    }
}

/// Waits for every choice.
async fn whole(started: Started) -> Result<Completion, ApiError> {
    let Started { model, request, id, created, answers } = started;
    let mut choices = Vec::with_capacity(answers.len());
    let mut ends = Vec::with_capacity(answers.len());
    for (index, mut answer) in answers.into_iter().enumerate() {
        let mut parts = Vec::new();
        let mut scored = Vec::new();
        let end = loop {
            match answer.next().await.map_err(ApiError::internal)? {
                News::Prefill { .. } => {}
                News::Token { deltas, scored: token } => {
                    parts.extend(deltas);
                    scored.extend(token);
                }
                News::End { deltas, end } => {
                    parts.extend(deltas);
                    break end;
                }
            }
        };
        choices.push(Choice {
            index,
            message: assemble::message(parts),
            finish_reason: assemble::finish_reason(&end),
            logprobs: request.logprobs.map(|_| assemble::log_probs(&model.tokenizer, &scored)),
        });
        ends.push(end);
    }
    log(&id, &ends);
    let usage = assemble::usage(&ends);
    Ok(Completion { id, object: "chat.completion", created, model: model.name, choices, usage })
}

/// Sends the choices as they come. Each has a task of its own; all end as soon as the client goes away,
/// and their answers with them.
fn stream(started: Started) -> Response {
    let (events, receiver) = mpsc::channel::<Result<Event, Infallible>>(STREAM_BUFFER);
    tokio::spawn(send_all(started, events));
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    Sse::new(ReceiverStream::new(receiver)).keep_alive(keep_alive).into_response()
}

/// Where a stream's events go.
type Events = mpsc::Sender<Result<Event, Infallible>>;

/// Why a stream ends early.
enum Broken {
    /// The client is gone; there is nobody to tell.
    Gone,
    /// The engine failed.
    Failed(String),
}

async fn send_all(started: Started, events: Events) {
    let Started { model, request, id, created, answers } = started;
    let writer = ChunkWriter {
        events: events.clone(),
        id,
        created,
        model: model.name.clone(),
        with_usage: request.include_usage,
    };
    let mut tasks = JoinSet::new();
    for (index, answer) in answers.into_iter().enumerate() {
        let tokenizer = request.logprobs.map(|_| model.tokenizer.clone());
        tasks.spawn(send_choice(ChoiceWriter { chunks: writer.clone(), index, tokenizer, calls: 0 }, answer));
    }
    let mut ends = Vec::new();
    while let Some(outcome) = tasks.join_next().await {
        let failure = match outcome {
            Ok(Ok(end)) => {
                ends.push(end);
                continue;
            }
            Ok(Err(Broken::Gone)) => {
                tracing::info!(id = writer.id, "the client went away");
                return;
            }
            Ok(Err(Broken::Failed(reason))) => reason,
            Err(panic) => format!("the request failed: {panic}"),
        };
        // Dropping the tasks on return ends the other choices. A client that is gone needs no message.
        let _ = send(&events, &ApiError::internal(failure).body()).await;
        return;
    }
    log(&writer.id, &ends);
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
        let news = tokio::select! {
            news = answer.next() => news.map_err(Broken::Failed)?,
            () = writer.chunks.events.closed() => return Err(Broken::Gone),
        };
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

/// Writes the events of one stream.
#[derive(Clone)]
struct ChunkWriter {
    events: Events,
    id: String,
    created: u64,
    model: String,
    with_usage: bool,
}

impl ChunkWriter {
    async fn send(&self, choices: Vec<ChunkChoice>, usage: Option<Usage>) -> Result<(), Broken> {
        let chunk = Chunk {
            id: self.id.clone(),
            object: "chat.completion.chunk",
            created: self.created,
            model: self.model.clone(),
            choices,
            usage: self.with_usage.then_some(usage),
        };
        send(&self.events, &chunk).await
    }
}

/// Writes the events of one choice.
struct ChoiceWriter {
    chunks: ChunkWriter,
    index: usize,
    /// Spells scored tokens, where log probabilities are wanted.
    tokenizer: Option<Tokenizer>,
    /// Tool calls sent so far.
    calls: usize,
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
}

async fn send(events: &Events, body: &impl Serialize) -> Result<(), Broken> {
    let event = Event::default().json_data(body).map_err(|error| Broken::Failed(error.to_string()))?;
    events.send(Ok(event)).await.map_err(|_| Broken::Gone)
}

/// One line for each answer.
fn log(id: &str, ends: &[End]) {
    for end in ends {
        tracing::info!(
            id,
            prompt = end.usage.prompt_tokens,
            cached = end.usage.cached_tokens,
            completion = end.usage.completion_tokens,
            queue_ms = end.timings.queue.as_millis() as u64,
            prefill_ms = end.timings.prefill.as_millis() as u64,
            decode_ms = end.timings.decode.as_millis() as u64,
            finish = assemble::finish_reason(end),
            "answered"
        );
    }
}
