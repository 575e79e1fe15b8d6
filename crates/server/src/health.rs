//! `GET /health`: whether the server can answer, and how much it has to do.
//!
//! `loading` until the model is there, then `ready`; `failing` when the engine has ended, or as long as the device
//! fails at what it is given. Only `ready` has status 200.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::app::App;
use crate::openapi;

/// Where it is.
pub const PATH: &str = "/health";

/// The body of `GET /health`.
#[derive(Debug, Serialize, ToSchema)]
struct Health {
    /// `ready`, or `failing` with status 503.
    status: &'static str,
    /// The model's name.
    model: String,
    /// What runs it.
    device: String,
    /// The most tokens of prompt and answer together.
    context: usize,
    /// Requests that are being worked on.
    running: usize,
    /// Requests that wait for a place.
    waiting: usize,
    /// Why it is failing.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// The body of `GET /health` before there is a model.
#[derive(Debug, Serialize, ToSchema)]
struct Loading {
    /// `loading`.
    status: &'static str,
}

/// The bodies of `GET /health` with status 503.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "it stands in the document alone")]
enum Unhealthy {
    Failing(Health),
    Loading(Loading),
}

/// The answer before there is a model.
pub fn loading() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, Json(Loading { status: "loading" })).into_response()
}

/// Says whether the server can answer.
#[utoipa::path(
    get, path = PATH, tag = "Server",
    responses(
        (status = 200, description = "It can.", body = Health),
        (status = 503, description = "It cannot: the model is still loading, or the device fails.", body = Unhealthy),
        openapi::Failing,
    ),
)]
pub async fn health(State(app): State<App>) -> Response {
    let engine = &app.model.engine;
    let load = engine.load();
    let reason = engine.stopped().or_else(|| engine.trouble());
    let (code, status) = match reason {
        None => (StatusCode::OK, "ready"),
        Some(_) => (StatusCode::SERVICE_UNAVAILABLE, "failing"),
    };
    let body = Health {
        status,
        model: app.model.name.clone(),
        device: engine.description().to_string(),
        context: engine.context_limit(),
        running: load.running,
        waiting: load.waiting,
        reason,
    };
    (code, Json(body)).into_response()
}
