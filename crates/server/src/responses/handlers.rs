//! `POST /v1/responses`, whole or streamed, and `POST /v1/responses/input_tokens`.

use std::pin::pin;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response as HttpResponse};
use lily_engine::constraint::Subject;
use lily_engine::engine::{FinishReason, Request, SubmitError};
use lily_model::tokenizer::Tokenizer;
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use super::events::{Numbered, StreamEvent};
use super::input;
use super::items::ItemWriter;
use super::request::ResponsesRequest;
use super::response::{Failure, Incomplete, InputDetails, InputTokens, OutputDetails, Response, Usage};
use super::store::{Kept, NotKept, Store};
use crate::answer::{Answer, End, Form, News};
use crate::app::App;
use crate::body::{self, Body};
use crate::chat_model::{ChatModel, Prompt, unix_time};
use crate::error::ApiError;
use crate::models;
use crate::openai::assemble::log_probs;
use crate::openai::response::PromptProgress;
use crate::openapi::{self, responses as form};
use crate::sse::{self, Broken, Events};

/// Answers with a response.
#[utoipa::path(
    post, path = "/v1/responses", tag = "OpenAI", request_body = form::Request,
    security((), ("bearer" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The answer; as server-sent events, each with such a body, where `stream` is true.", content((Response = "application/json"), (Numbered = "text/event-stream"))),
        openapi::Asked,
    ),
)]
pub async fn create(State(app): State<App>, body: Body) -> Result<HttpResponse, ApiError> {
    let body = body::bytes(body)?;
    let started = body::blocking(move || Started::new(&app, &body)).await?;
    if started.stream {
        return Ok(sse::respond_as_written(|events| stream(started, events)));
    }
    Ok(Json(whole(started).await?).into_response())
}

/// Counts what a request would give the model.
#[utoipa::path(
    post, path = "/v1/responses/input_tokens", tag = "OpenAI", request_body = form::Request,
    security((), ("bearer" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The count.", body = InputTokens),
        openapi::Given,
    ),
)]
pub async fn input_tokens(State(app): State<App>, body: Body) -> Result<Json<InputTokens>, ApiError> {
    let body = body::bytes(body)?;
    let count = body::blocking(move || {
        let mut request = ResponsesRequest::parse(&body)?;
        Ok(prompt(&app, &mut request)?.tokens.len())
    });
    Ok(Json(InputTokens { object: "response.input_tokens", input_tokens: count.await? }))
}

/// Checks the model, finds what the request refers to, and renders the conversation.
fn prompt(app: &App, request: &mut ResponsesRequest) -> Result<Prompt, ApiError> {
    if let Some(asked) = &request.model {
        models::check(&app.model, asked, Some("model"))?;
    }
    for (index, item) in request.items.iter_mut().enumerate() {
        if item["type"] == "item_reference" {
            let id = item["id"].as_str().unwrap_or_default();
            *item = app.responses.item(id).ok_or_else(|| {
                let path = format!("input[{index}].id");
                let message = format!("`{path}` is {id:?}, and no response that is kept has such an item");
                ApiError::invalid(path, message)
            })?;
        }
    }
    let before = match &request.previous {
        Some(previous) => earlier(&app.responses, previous)?,
        None => Vec::new(),
    };
    let offered = &request.offered;
    let messages = input::conversation(request.instructions.as_deref(), &before, &request.items, offered)?;
    let variables = std::mem::take(&mut request.template_variables);
    app.model.prompt(&messages, &offered.declared, request.thinking, variables).map_err(|error| {
        let error = ApiError::from(error);
        ApiError { param: error.param.map(|_| "input".to_string()), ..error }
    })
}

/// All items up to the end of a response.
fn earlier(store: &Store, previous: &str) -> Result<Vec<Value>, ApiError> {
    let chain = store.chain(previous).map_err(|NotKept(id)| ApiError {
        code: Some("previous_response_not_found"),
        ..ApiError::invalid(
            "previous_response_id",
            format!("`previous_response_id` leads to {id:?}, which is not kept; send the whole `input`"),
        )
    })?;
    let mut items = Vec::new();
    for kept in chain {
        items.extend(kept.items.iter().cloned());
        items.extend(kept.response["output"].as_array().into_iter().flatten().cloned());
    }
    Ok(items)
}

/// A request whose answer is being generated.
struct Started {
    answer: Answer,
    /// The response, still without output.
    response: Response,
    writer: ItemWriter,
    /// Spells scored tokens, where log probabilities are wanted.
    tokenizer: Option<Tokenizer>,
    /// Where the response is kept, and what with it.
    keep: Option<(Store, Option<String>, Vec<Value>)>,
    stream: bool,
    return_progress: bool,
}

impl Started {
    fn new(app: &App, body: &[u8]) -> Result<Started, ApiError> {
        let model: &ChatModel = &app.model;
        let mut request = ResponsesRequest::parse(body)?;
        let prompt = prompt(app, &mut request)?;
        let sampling = model.sampling(&request.sampling, request.logprobs);
        let response = Response::begun(&model.name, &sampling, std::mem::take(&mut request.echo));
        let asked = Request {
            sampling,
            max_tokens: request.max_tokens,
            stop: request.stop.clone(),
            ignore_eos: request.ignore_eos,
            constraint: request.offered.asked.as_ref().map(|asked| asked.constraint.clone()),
            thinking_budget: request.thinking_budget,
            ..Request::new(prompt.tokens)
        };
        let form = Form::Turn { thinking: prompt.thinking, tools: &request.offered.declared };
        let answer = model.answer(&response.id, asked, form).map_err(|error| refused(&request, error))?;
        let answer = answer.kept_in(&model.turns, &prompt.opening).known_by_items();
        let writer = ItemWriter::new(answer.turn().to_string(), request.offered, request.wish);
        let keep = request.store.then(|| (app.responses.clone(), request.previous, request.items));
        Ok(Started {
            answer,
            response,
            writer,
            tokenizer: request.logprobs.map(|_| model.tokenizer.clone()),
            keep,
            stream: request.stream,
            return_progress: request.return_progress,
        })
    }

    /// What happens next, as events; true with the last of them. The last is not among them.
    fn events(&mut self, news: News, waiting: &mut Scored) -> (Vec<StreamEvent>, bool) {
        let (deltas, end) = match news {
            News::Prefill { .. } => {
                let progress = PromptProgress::of(&news).filter(|_| self.return_progress);
                let event = |prompt_progress| StreamEvent::PromptProgress { prompt_progress };
                return (progress.map(event).into_iter().collect(), false);
            }
            News::Token { deltas, scored } => {
                waiting.extend(scored);
                (deltas, None)
            }
            News::End { deltas, end } => (deltas, Some(end)),
        };
        // Log probabilities wait for the text that they belong to.
        let spelled = match &self.tokenizer {
            Some(tokenizer) if !deltas.is_empty() => log_probs(tokenizer, &std::mem::take(waiting)).content,
            _ => Vec::new(),
        };
        let mut events = self.writer.push(deltas, spelled);
        let Some(end) = end else { return (events, false) };
        let status = if end.reason == FinishReason::Length { "incomplete" } else { "completed" };
        events.extend(self.writer.finish(status));
        self.finish(status, &end);
        (events, true)
    }

    /// Completes the response, and keeps it.
    fn finish(&mut self, status: &'static str, end: &End) {
        let response = &mut self.response;
        response.status = status;
        match end.reason {
            FinishReason::Length => {
                response.incomplete_details = Some(Incomplete { reason: "max_output_tokens" });
            }
            FinishReason::EndOfSequence | FinishReason::StopString => {
                response.completed_at = Some(unix_time())
            }
        }
        response.output = self.writer.items().to_vec();
        response.usage = Some(usage(end));
        // A response is strings, numbers and lists of them, which always have a JSON form.
        if let (Some((store, previous, items)), Ok(kept)) =
            (self.keep.take(), serde_json::to_value(&self.response))
        {
            store.keep(&self.response.id, Kept { previous, items, response: kept });
        }
    }
}

/// Tokens whose log probabilities were not sent yet.
type Scored = Vec<(u32, lily_engine::sampler::TokenLogprobs)>;

/// Why the engine did not take the request, by this protocol's fields.
fn refused(request: &ResponsesRequest, error: SubmitError) -> ApiError {
    let message = error.to_string();
    match (error, &request.offered.asked) {
        (SubmitError::Constraint(error), Some(asked)) => {
            let field = match &error.subject {
                Subject::Tool { name, .. } => request.offered.schema_path(name),
                _ => asked.field.clone(),
            };
            let message = format!("`{field}`: {message}");
            ApiError::invalid(field, message)
        }
        (error, _) => {
            let error = ApiError::from(error);
            let param = error.param.map(|param| match param.as_str() {
                "messages" => "input".to_string(),
                "max_tokens" => "max_output_tokens".to_string(),
                _ => param,
            });
            ApiError { param, ..error }
        }
    }
}

async fn whole(mut started: Started) -> Result<Response, ApiError> {
    let mut waiting = Vec::new();
    loop {
        let news = started.answer.next().await.map_err(ApiError::internal)?;
        if started.events(news, &mut waiting).1 {
            return Ok(started.response);
        }
    }
}

async fn stream(started: Started, events: Events) {
    let mut failed = started.response.clone();
    let mut sender = Sender::new(events.clone(), sse::KEEP_ALIVE);
    if let Err(broken) = send_all(started, &mut sender).await {
        let number = sender.number;
        let error = |message| {
            failed.status = "failed";
            failed.error = Some(Failure { code: "server_error", message });
            let event = Numbered { event: StreamEvent::Failed { response: failed }, sequence_number: number };
            // Strings and numbers, which always have a JSON form.
            Event::default().event(event.event.name()).json_data(&event).unwrap_or_default()
        };
        sse::close(&events, broken, error).await;
    }
}

/// Sends events and counts them.
struct Sender {
    events: Events,
    number: u64,
    /// A sign of life goes out where there was no other event for so long.
    silence: Duration,
    /// When the next is due.
    due: Instant,
}

impl Sender {
    fn new(events: Events, silence: Duration) -> Sender {
        Sender { events, number: 0, silence, due: Instant::now() + silence }
    }

    async fn send(&mut self, event: StreamEvent) -> Result<(), Broken> {
        let name = event.name();
        let numbered = Numbered { event, sequence_number: self.number };
        self.number += 1;
        sse::send(&self.events, Event::default().event(name), &numbered).await?;
        self.due = Instant::now() + self.silence;
        Ok(())
    }

    /// Waits for `news`, and sends what `unchanged` gives as signs of life.
    async fn meanwhile<T>(
        &mut self,
        unchanged: impl Fn() -> StreamEvent,
        news: impl Future<Output = T>,
    ) -> Result<T, Broken> {
        let mut news = pin!(news);
        loop {
            match timeout_at(self.due, news.as_mut()).await {
                Ok(news) => return Ok(news),
                Err(_) => self.send(unchanged()).await?,
            }
        }
    }
}

async fn send_all(mut started: Started, sender: &mut Sender) -> Result<(), Broken> {
    sender.send(StreamEvent::Created { response: started.response.clone() }).await?;
    sender.send(StreamEvent::InProgress { response: started.response.clone() }).await?;
    let mut waiting = Vec::new();
    loop {
        let Started { answer, response, writer, .. } = &mut started;
        let events = sender.events.clone();
        let news = sse::next(answer, &events);
        let news = sender.meanwhile(|| writer.unchanged(response), news).await??;
        let (events, over) = started.events(news, &mut waiting);
        for event in events {
            sender.send(event).await?;
        }
        if over {
            let response = started.response;
            return sender
                .send(match response.status {
                    "incomplete" => StreamEvent::Incomplete { response },
                    _ => StreamEvent::Completed { response },
                })
                .await;
        }
    }
}

fn usage(end: &End) -> Usage {
    let (input_tokens, output_tokens) = (end.usage.prompt_tokens, end.usage.completion_tokens);
    Usage {
        input_tokens,
        input_tokens_details: InputDetails { cached_tokens: end.usage.cached_tokens, cache_write_tokens: 0 },
        output_tokens,
        output_tokens_details: OutputDetails { reasoning_tokens: end.reasoning_tokens },
        total_tokens: input_tokens + output_tokens,
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use lily_engine::sampler::SamplingParams;
    use serde_json::{Map, json};

    use super::*;
    use crate::responses::items::Wish;
    use crate::responses::tools::Offered;

    #[tokio::test]
    async fn a_stream_without_news_shows_signs_of_life_that_clients_count() {
        let response = Response::begun("m", &SamplingParams::default(), Map::new());
        let expected = serde_json::to_value(&response).expect("it has a JSON form");
        let silent = |events: Events| async move {
            let mut sender = Sender::new(events.clone(), Duration::from_millis(1));
            let writer = ItemWriter::new("t".to_string(), Offered::default(), Wish::default());
            sender.send(StreamEvent::Created { response: response.clone() }).await.expect("somebody listens");
            // It ends with the test, which no longer listens then.
            let _ = sender.meanwhile(|| writer.unchanged(&response), events.closed()).await;
        };
        let mut body = sse::respond_as_written(silent).into_body();
        for number in 0..4 {
            let frame = body.frame().await.expect("the stream goes on").expect("it does not fail");
            let text =
                String::from_utf8(frame.into_data().expect("it is data").to_vec()).expect("it is text");
            let name = if number == 0 { "response.created" } else { "response.in_progress" };
            let data = text.strip_prefix(&format!("event: {name}\ndata: ")).expect("the event has its name");
            let event: Value = serde_json::from_str(data).expect("it is one event in JSON");
            let sign = json!({"type": name, "sequence_number": number, "response": expected});
            assert_eq!(event, sign);
        }
    }
}
