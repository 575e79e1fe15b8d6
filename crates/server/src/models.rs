//! `GET /v1/models` and `GET /v1/models/{id}`: the one model that is served.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde::Serialize;

use crate::app::App;
use crate::chat_model::ChatModel;
use crate::error::ApiError;

/// A model, as OpenAI's protocol describes one.
#[derive(Debug, Serialize)]
pub struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
}

/// The list of models.
#[derive(Debug, Serialize)]
pub struct ModelList {
    object: &'static str,
    data: Vec<Model>,
}

fn describe(model: &ChatModel) -> Model {
    Model { id: model.name.clone(), object: "model", created: model.created, owned_by: "lily" }
}

/// Handles `GET /v1/models`.
pub async fn list(State(app): State<App>) -> Json<ModelList> {
    Json(ModelList { object: "list", data: vec![describe(&app.model)] })
}

/// Handles `GET /v1/models/{id}`.
pub async fn one(State(app): State<App>, Path(id): Path<String>) -> Result<Json<Model>, ApiError> {
    check(&app.model, &id, None)?;
    Ok(Json(describe(&app.model)))
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
