//! `GET /v1/models` and `GET /v1/models/{id}`: the one model that is served.
//!
//! OpenAI and Anthropic have the same paths with different bodies. Anthropic's clients say which version of their
//! protocol they speak in a header, and get theirs.

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, SecondsFormat};
use serde::Serialize;
use utoipa::ToSchema;

use crate::anthropic;
use crate::app::App;
use crate::chat_model::ChatModel;
use crate::error::ApiError;
use crate::openapi;
use crate::path::Id;

/// A model, as OpenAI's protocol describes one.
#[derive(Debug, Serialize, ToSchema)]
pub struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
}

/// The list of models in OpenAI's protocol.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelList {
    object: &'static str,
    data: Vec<Model>,
}

/// A model, as Anthropic's protocol describes one.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AnthropicModel)]
pub struct ModelInfo {
    r#type: &'static str,
    id: String,
    display_name: String,
    /// RFC 3339, UTC.
    created_at: String,
    lifecycle: &'static str,
    max_input_tokens: usize,
    max_tokens: usize,
}

/// The list of models in Anthropic's protocol.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AnthropicModelPage)]
pub struct ModelPage {
    #[schema(value_type = Vec<ModelInfo>)]
    data: [ModelInfo; 1],
    has_more: bool,
    first_id: String,
    last_id: String,
}

/// The list, in either protocol.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "it stands in the document alone")]
enum Models {
    OpenAi(ModelList),
    Anthropic(ModelPage),
}

/// A model, in either protocol.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "it stands in the document alone")]
enum OneModel {
    OpenAi(Model),
    Anthropic(ModelInfo),
}

fn describe(model: &ChatModel) -> Model {
    Model { id: model.name.clone(), object: "model", created: model.created, owned_by: "lily" }
}

fn inform(model: &ChatModel) -> ModelInfo {
    let created = i64::try_from(model.created).ok().and_then(|seconds| DateTime::from_timestamp(seconds, 0));
    let context = model.engine.context_limit();
    ModelInfo {
        r#type: "model",
        id: model.name.clone(),
        display_name: model.name.clone(),
        created_at: created.unwrap_or_default().to_rfc3339_opts(SecondsFormat::Secs, true),
        lifecycle: "active",
        max_input_tokens: context,
        max_tokens: context,
    }
}

/// Lists the one model that is served.
#[utoipa::path(
    get, path = "/v1/models", tag = "Models",
    params(
        ("anthropic-version" = Option<String>, Header, description = "Asks for the answer in Anthropic's protocol."),
    ),
    security((), ("bearer" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The list.", body = inline(Models)),
        openapi::Listed,
    ),
)]
pub async fn list(State(app): State<App>, headers: HeaderMap) -> Response {
    if !anthropic::speaks(&headers) {
        return Json(ModelList { object: "list", data: vec![describe(&app.model)] }).into_response();
    }
    let (model, id) = (inform(&app.model), app.model.name.clone());
    Json(ModelPage { data: [model], has_more: false, first_id: id.clone(), last_id: id }).into_response()
}

/// Describes the model.
#[utoipa::path(
    get, path = "/v1/models/{id}", tag = "Models",
    params(
        ("id" = String, Path, description = "The model's name."),
        ("anthropic-version" = Option<String>, Header, description = "Asks for the answer in Anthropic's protocol."),
    ),
    security((), ("bearer" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The model.", body = inline(OneModel)),
        openapi::Named,
    ),
)]
pub async fn one(State(app): State<App>, Id(id): Id, headers: HeaderMap) -> Result<Response, ApiError> {
    check(&app.model, &id, None)?;
    Ok(if anthropic::speaks(&headers) {
        Json(inform(&app.model)).into_response()
    } else {
        Json(describe(&app.model)).into_response()
    })
}
/// Refuses a model that is not the one served; `param` is the request's field that named it.
pub fn check(model: &ChatModel, asked: &str, param: Option<&str>) -> Result<(), ApiError> {
    if asked == model.name {
        return Ok(());
    }
    let message = format!("the model {asked:?} is not served here; this server has {:?}", model.name);
    let error = ApiError::plain(StatusCode::NOT_FOUND, "model_not_found", message);
    Err(ApiError { param: param.map(str::to_string), ..error })
}
