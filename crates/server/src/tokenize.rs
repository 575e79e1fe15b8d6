//! `POST /tokenize` and `POST /detokenize`, as vLLM has them: what a text or a conversation is to the model.

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::app::App;
use crate::body::{self, Body};
use crate::chat_model::ChatModel;
use crate::error::ApiError;
use crate::models;
use crate::openai::completion_request::tokens;
use crate::openai::fields::{Fields, missing};
use crate::openai::request::ChatRequest;
use crate::openapi::{self, text as form};

/// The body of an answer to `POST /tokenize`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Tokenized {
    /// Number of tokens.
    count: usize,
    /// Tokens that prompt and answer may hold together.
    max_model_len: usize,
    /// The tokens' ids.
    tokens: Vec<u32>,
    /// The tokens' texts, where asked for.
    token_strs: Option<Vec<String>>,
}

/// The body of an answer to `POST /detokenize`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Detokenized {
    /// The text, special tokens spelled out.
    prompt: String,
}

/// Turns a text or a conversation to tokens.
#[utoipa::path(
    post, path = "/tokenize", tag = "Tokens", request_body = form::Tokenize,
    security((), ("bearer" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The tokens.", body = Tokenized),
        openapi::Given,
    ),
)]
pub async fn tokenize(State(app): State<App>, body: Body) -> Result<Json<Tokenized>, ApiError> {
    let body = body::bytes(body)?;
    body::blocking(move || tokenized(&app.model, &body)).await.map(Json)
}

fn tokenized(model: &ChatModel, bytes: &[u8]) -> Result<Tokenized, ApiError> {
    let value = body::json(bytes)?;
    let body = Fields::body(&value)?;
    check_model(model, &body)?;
    // The model's tokenizer adds none of its own, so that both values ask for the same.
    body.boolean("add_special_tokens")?;
    let tokens = match (body.text("prompt")?, body.get("messages")) {
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid("prompt", "`prompt` and `messages` exclude each other; send one"));
        }
        (Some(prompt), None) => model.tokenizer.encode(prompt),
        (None, Some(_)) => rendered(model, &body, bytes)?,
        (None, None) => return Err(missing("prompt")),
    };
    let strings = body.boolean("return_token_strs")?.unwrap_or(false);
    Ok(Tokenized {
        count: tokens.len(),
        max_model_len: model.engine.context_limit(),
        token_strs: strings.then(|| tokens.iter().map(|&id| spelled(model, id)).collect()),
        tokens,
    })
}

/// The conversation as the model would read it. Its fields are those of a chat.
fn rendered(model: &ChatModel, body: &Fields<'_>, bytes: &[u8]) -> Result<Vec<u32>, ApiError> {
    if body.boolean("continue_final_message")? == Some(true) {
        let message = "`continue_final_message` may not be true: a chat's last message is always complete";
        return Err(ApiError::unsupported("continue_final_message", message));
    }
    let open = body.boolean("add_generation_prompt")?.unwrap_or(true);
    let chat = ChatRequest::parse(bytes)?;
    let rendered =
        model.rendered(&chat.messages, &chat.tools, chat.thinking, chat.template_variables, open)?;
    Ok(model.encoded(rendered).tokens)
}

fn spelled(model: &ChatModel, id: u32) -> String {
    String::from_utf8_lossy(&model.tokenizer.token_bytes(id).unwrap_or_default()).into_owned()
}

fn check_model(model: &ChatModel, body: &Fields<'_>) -> Result<(), ApiError> {
    body.text("model")?.map_or(Ok(()), |asked| models::check(model, asked, Some("model")))
}

/// Turns tokens to a text.
#[utoipa::path(
    post, path = "/detokenize", tag = "Tokens", request_body = form::Detokenize,
    security((), ("bearer" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The text.", body = Detokenized),
        openapi::Given,
    ),
)]
pub async fn detokenize(State(app): State<App>, body: Body) -> Result<Json<Detokenized>, ApiError> {
    let bytes = body::bytes(body)?;
    body::blocking(move || detokenized(&app.model, &bytes)).await.map(Json)
}

fn detokenized(model: &ChatModel, bytes: &[u8]) -> Result<Detokenized, ApiError> {
    let value = body::json(bytes)?;
    let body = Fields::body(&value)?;
    check_model(model, &body)?;
    let ids = tokens(body.list("tokens")?.ok_or_else(|| missing("tokens"))?, "tokens")?;
    let vocab = model.tokenizer.vocab_size();
    if let Some(index) = ids.iter().position(|&id| model.tokenizer.token_bytes(id).is_none()) {
        let path = format!("tokens[{index}]");
        let message =
            format!("`{path}` is {}, and the vocabulary of {vocab} tokens has no such token", ids[index]);
        return Err(ApiError::invalid(path, message));
    }
    Ok(Detokenized { prompt: model.tokenizer.decode_with_special(&ids) })
}
