//! The router: which handler answers which path, and what holds for all of them.

use std::time::Duration;

use axum::Router;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware;
use axum::routing::{MethodRouter, get, post};

use crate::auth::{Keys, require_key};
use crate::chat_model::ChatModel;
use crate::error::ApiError;
use crate::responses::store::Store;
use crate::responses::{handlers as responses, stored};
use crate::{anthropic, chat, completions, health, metrics, models, tokenize};

/// What one request may take of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest body, in bytes.
    pub body_bytes: usize,
    /// The longest that a body may take to arrive.
    pub body_time: Duration,
}

impl Default for Limits {
    /// A full context of 262,144 tokens is about 1 MB of text, and JSON escapes can make six bytes of one: 16 MiB.
    /// At a megabit per second that takes two minutes.
    fn default() -> Limits {
        Limits { body_bytes: 16 << 20, body_time: Duration::from_secs(120) }
    }
}

/// What the handlers share. Cheap to clone.
#[derive(Clone)]
pub struct App {
    /// The model that is served.
    pub model: ChatModel,
    /// The keys of which requests must carry one.
    pub keys: Keys,
    /// What a request may take.
    pub limits: Limits,
    /// Responses that can be continued.
    pub responses: Store,
}

/// A path and what answers there.
type Route = (&'static str, MethodRouter<App>);

/// The paths that ask for a key, where the server has any.
fn keyed() -> [Route; 13] {
    [
        ("/v1/chat/completions", post(chat::completions)),
        ("/v1/completions", post(completions::completions)),
        ("/v1/responses", post(responses::create)),
        ("/v1/responses/input_tokens", post(responses::input_tokens)),
        ("/v1/responses/{id}", get(stored::get).delete(stored::delete)),
        ("/v1/responses/{id}/input_items", get(stored::input_items)),
        ("/v1/responses/{id}/cancel", post(stored::cancel)),
        ("/v1/messages", post(anthropic::handlers::messages)),
        ("/v1/messages/count_tokens", post(anthropic::handlers::count_tokens)),
        ("/v1/models", get(models::list)),
        ("/v1/models/{*id}", get(models::one)),
        ("/tokenize", post(tokenize::tokenize)),
        ("/detokenize", post(tokenize::detokenize)),
    ]
}

/// The paths that ask for none: whoever watches over the server needs none.
fn open() -> [Route; 2] {
    [(health::PATH, get(health::health)), ("/metrics", get(metrics::metrics))]
}

/// All paths that need the model.
#[cfg(test)]
pub(crate) fn paths() -> Vec<&'static str> {
    keyed().into_iter().chain(open()).map(|(path, _)| path).collect()
}

/// Everything that needs the model. What holds before there is one, and around it, is [`crate::gate`]'s.
pub fn router(app: App) -> Router {
    let add = |router: Router<App>, (path, methods): Route| router.route(path, methods);
    let keyed = keyed().into_iter().fold(Router::new(), add);
    open()
        .into_iter()
        .fold(keyed.layer(middleware::from_fn_with_state(app.clone(), require_key)), add)
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .with_state(app)
}

async fn unknown_path(uri: Uri) -> ApiError {
    let message = format!(
        "there is nothing at {}; Lily serves POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens, /tokenize and /detokenize, GET /v1/models, /health, /metrics and /openapi.json",
        uri.path()
    );
    ApiError::plain(StatusCode::NOT_FOUND, "unknown_url", message)
}

/// The answer to a method that a path does not have.
pub(crate) async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} does not take {method}", uri.path());
    ApiError::plain(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}
