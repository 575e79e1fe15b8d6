//! `POST /v1/completions`: raw prompts continued, without a chat template and without reading anything into
//! the text.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use lily_engine::engine::{Request, SubmitError};
use lily_engine::output::Delta;
use lily_engine::sampler::TokenLogprobs;
use lily_model::tokenizer::Tokenizer;
use tokio::task::JoinSet;

use crate::answer::{Answer, End, Form, News};
use crate::app::App;
use crate::body::{self, Body};
use crate::chat_model::{ChatModel, unix_time};
use crate::error::ApiError;
use crate::models;
use crate::openai::assemble::unique_id;
use crate::openai::completion_request::{CompletionRequest, RawPrompt};
use crate::openai::completion_response::{TextChoice, TextCompletion, TextLogProbs};
use crate::openai::response::{CompletionDetails, PromptDetails, PromptProgress, Usage};
use crate::openapi::{self, chat as form};
use crate::record::choice_id;
use crate::sse::{self, Broken, Events};

/// Continues a prompt.
#[utoipa::path(
    post, path = "/v1/completions", tag = "OpenAI", request_body = form::Completion,
    security((), ("bearer" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The answer; as server-sent events, each with such a body, where `stream` is true.", content((TextCompletion = "application/json"), (TextCompletion = "text/event-stream"))),
        openapi::Asked,
    ),
)]
pub async fn completions(State(app): State<App>, body: Body) -> Result<Response, ApiError> {
    let body = body::bytes(body)?;
    let started = body::blocking(move || Started::new(app.model, &body)).await?;
    if started.request.stream {
        let mut idle = started.stream_head();
        idle.choices.push(unchanged(0));
        // Two levels of strings and numbers, which always have a JSON form.
        let idle = Event::default().json_data(idle).unwrap_or_default();
        return Ok(sse::respond(idle, |events| stream(started, events)));
    }
    Ok(Json(whole(started).await?).into_response())
}

/// A request whose choices are being generated.
struct Started {
    model: ChatModel,
    request: CompletionRequest,
    id: String,
    created: u64,
    choices: Vec<Choice>,
}

struct Choice {
    answer: Answer,
    /// The prompt's text, where it is echoed.
    echo: Option<Arc<str>>,
}

impl Started {
    fn new(model: ChatModel, body: &[u8]) -> Result<Started, ApiError> {
        let request = CompletionRequest::parse(body)?;
        if let Some(asked) = &request.model {
            models::check(&model, asked, Some("model"))?;
        }
        let id = unique_id("cmpl-");
        let mut choices = Vec::with_capacity(request.prompts.len() * request.n);
        for prompt in &request.prompts {
            let (tokens, text) = read(&model.tokenizer, prompt);
            let echo: Option<Arc<str>> = request.echo.then(|| text.into());
            for index in 0..request.n as u64 {
                let id = choice_id(&id, choices.len() as u64);
                let answer = submit(&model, &request, &id, &tokens, index)?;
                choices.push(Choice { answer, echo: echo.clone() });
            }
        }
        Ok(Started { model, request, id, created: unix_time(), choices })
    }

    /// What every event of a stream begins with.
    fn stream_head(&self) -> TextCompletion {
        TextCompletion { usage: self.request.include_usage.then_some(None), ..self.head() }
    }

    /// What an answer begins with.
    fn head(&self) -> TextCompletion {
        TextCompletion {
            id: self.id.clone(),
            object: "text_completion",
            created: self.created,
            model: self.model.name.clone(),
            choices: Vec::new(),
            usage: None,
            prompt_progress: None,
        }
    }
}

/// A prompt's tokens and its text.
fn read(tokenizer: &Tokenizer, prompt: &RawPrompt) -> (Vec<u32>, String) {
    match prompt {
        RawPrompt::Text(text) => (tokenizer.encode(text), text.clone()),
        RawPrompt::Tokens(tokens) => (tokens.clone(), tokenizer.decode_with_special(tokens)),
    }
}

fn submit(
    model: &ChatModel,
    request: &CompletionRequest,
    id: &str,
    prompt: &[u32],
    index: u64,
) -> Result<Answer, ApiError> {
    let mut sampling = model.sampling(&request.sampling, request.logprobs);
    // As in a chat, choices of one seed differ from one another and stay the same from run to run.
    sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(index));
    let asked = Request {
        sampling,
        max_tokens: Some(request.max_tokens),
        stop: request.stop.clone(),
        ignore_eos: request.ignore_eos,
        ..Request::new(prompt.to_vec())
    };
    model.answer(id, asked, Form::Plain).map_err(|error| match error {
        SubmitError::BadToken { .. } => ApiError::invalid("prompt", error.to_string()),
        SubmitError::EmptyPrompt | SubmitError::PromptTooLong { .. } | SubmitError::NeverFits { .. } => {
            ApiError { param: Some("prompt".to_string()), ..error.into() }
        }
        other => other.into(),
    })
}

/// Waits for every choice.
async fn whole(started: Started) -> Result<TextCompletion, ApiError> {
    let mut completion = started.head();
    let Started { model, request, choices, .. } = started;
    let mut ends = Vec::with_capacity(choices.len());
    for (index, Choice { answer, echo }) in choices.into_iter().enumerate() {
        let (parts, scored, end) = answer.collect().await.map_err(ApiError::internal)?;
        let mut text = echo.map(|echo| echo.to_string()).unwrap_or_default();
        text.push_str(&joined(parts));
        let logprobs = request.logprobs.map(|_| TextLogProbs::new(&model.tokenizer, &scored, &mut 0));
        completion.choices.push(TextChoice {
            index,
            text,
            logprobs,
            finish_reason: Some(end.reason.as_str()),
        });
        ends.push((index, end));
    }
    completion.usage = Some(Some(usage(ends, request.n)));
    Ok(completion)
}

/// A plain answer has content and nothing else.
fn joined(parts: Vec<Delta>) -> String {
    let text = |part| match part {
        Delta::Content(text) => Some(text),
        Delta::Reasoning(_) | Delta::ToolCall { .. } | Delta::Arguments(_) | Delta::ToolCallEnd => None,
    };
    parts.into_iter().filter_map(text).collect()
}

async fn stream(started: Started, events: Events) {
    if let Err(broken) = send_all(started, &events).await {
        let error =
            |reason| Event::default().json_data(ApiError::internal(reason).body()).unwrap_or_default();
        sse::close(&events, broken, error).await;
    }
}

async fn send_all(started: Started, events: &Events) -> Result<(), Broken> {
    let mut head = started.stream_head();
    let Started { model, request, choices, .. } = started;
    let mut tasks = JoinSet::new();
    for (index, choice) in choices.into_iter().enumerate() {
        let tokenizer = request.logprobs.map(|_| model.tokenizer.clone());
        let with_progress = request.return_progress;
        let head = head.clone();
        let writer = Writer { events: events.clone(), head, index, tokenizer, offset: 0, with_progress };
        tasks.spawn(async move { Ok((index, send_choice(writer, choice).await?)) });
    }
    let mut ends = sse::join(tasks).await?;
    // As in a whole answer, whichever ended first.
    ends.sort_unstable_by_key(|&(index, _)| index);
    if request.include_usage {
        head.usage = Some(Some(usage(ends, request.n)));
        sse::send(events, Event::default(), &head).await?;
    }
    events.send(Ok(Event::default().data("[DONE]"))).await.map_err(|_| Broken::Gone)
}

async fn send_choice(mut writer: Writer, choice: Choice) -> Result<End, Broken> {
    let Choice { mut answer, echo } = choice;
    if let Some(echo) = echo {
        writer.send(echo.to_string(), &[], None).await?;
    }
    // Log probabilities of tokens whose text is still held back.
    let mut waiting = Vec::new();
    loop {
        let news = sse::next(&mut answer, &writer.events).await?;
        if let Some(progress) = PromptProgress::of(&news).filter(|_| writer.with_progress) {
            writer.progress(progress).await?;
        }
        match news {
            News::Prefill { .. } => {}
            News::Token { deltas, scored } => {
                waiting.extend(scored);
                let text = joined(deltas);
                if !text.is_empty() {
                    writer.send(text, &std::mem::take(&mut waiting), None).await?;
                }
            }
            News::End { deltas, end } => {
                writer.send(joined(deltas), &waiting, Some(end.reason.as_str())).await?;
                return Ok(end);
            }
        }
    }
}

/// A choice that gains nothing, so that clients which look for one find it.
fn unchanged(index: usize) -> TextChoice {
    TextChoice { index, text: String::new(), logprobs: None, finish_reason: None }
}

/// Writes the events of one choice.
struct Writer {
    events: Events,
    head: TextCompletion,
    index: usize,
    /// Spells scored tokens, where log probabilities are wanted.
    tokenizer: Option<Tokenizer>,
    /// Characters of the tokens scored so far.
    offset: usize,
    with_progress: bool,
}

impl Writer {
    async fn progress(&self, progress: PromptProgress) -> Result<(), Broken> {
        let (choices, prompt_progress) = (vec![unchanged(self.index)], Some(progress));
        let event = TextCompletion { choices, prompt_progress, ..self.head.clone() };
        sse::send(&self.events, Event::default(), &event).await
    }

    async fn send(
        &mut self,
        text: String,
        scored: &[(u32, TokenLogprobs)],
        finish_reason: Option<&'static str>,
    ) -> Result<(), Broken> {
        let logprobs = match &self.tokenizer {
            Some(tokenizer) if !scored.is_empty() => {
                Some(TextLogProbs::new(tokenizer, scored, &mut self.offset))
            }
            _ => None,
        };
        let choice = TextChoice { index: self.index, text, logprobs, finish_reason };
        let event = TextCompletion { choices: vec![choice], ..self.head.clone() };
        sse::send(&self.events, Event::default(), &event).await
    }
}

/// The totals of all choices, of which each prompt has `n`; a prompt counts once, and of it as cached what
/// every choice of it found.
fn usage(ends: Vec<(usize, End)>, n: usize) -> Usage {
    let mut usage = Usage::default();
    let mut cached = 0;
    for choices in ends.chunks(n) {
        let usages = || choices.iter().map(|(_, end)| end.usage);
        usage.prompt_tokens += usages().next().map_or(0, |usage| usage.prompt_tokens);
        usage.completion_tokens += usages().map(|usage| usage.completion_tokens).sum::<usize>();
        cached += usages().map(|usage| usage.cached_tokens).min().unwrap_or(0);
    }
    usage.total_tokens = usage.prompt_tokens + usage.completion_tokens;
    usage.prompt_tokens_details = PromptDetails { cached_tokens: cached };
    usage.completion_tokens_details = CompletionDetails::default();
    usage
}
