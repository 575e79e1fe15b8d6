//! The router: which handler answers which path, and what holds for all of them.

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware;
use axum::routing::{get, post};

use crate::auth::require_key;
use crate::chat_model::ChatModel;
use crate::error::ApiError;
use crate::responses::store::Store;
use crate::responses::{handlers as responses, stored};
use crate::{anthropic, chat, completions, health, models, request_id, tokenize};

/// Largest request body: a full context of 262,144 tokens is about 1 MB of text, and JSON escapes can make
/// six bytes of one.
pub const MAX_BODY_BYTES: usize = 16 * 1024 * 1024;

/// What the handlers share. Cheap to clone.
#[derive(Clone)]
pub struct App {
    /// The model that is served.
    pub model: ChatModel,
    /// The key that requests must carry, if any.
    pub api_key: Option<Arc<str>>,
    /// Responses that can be continued.
    pub responses: Store,
}

/// The whole server as one service, for a listener or for a test.
pub fn router(app: App) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::completions))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/responses/{id}", get(stored::get).delete(stored::delete))
        .route("/v1/responses/{id}/input_items", get(stored::input_items))
        .route("/v1/responses/{id}/cancel", post(stored::cancel))
        .route("/v1/messages", post(anthropic::handlers::messages))
        .route("/v1/messages/count_tokens", post(anthropic::handlers::count_tokens))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .layer(middleware::from_fn_with_state(app.clone(), require_key))
        .route("/health", get(health::health))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn(anthropic::error::reshape))
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(middleware::from_fn(request_id::name))
        .with_state(app)
}

async fn unknown_path(uri: Uri) -> ApiError {
    let message = format!(
        "there is nothing at {}; Lily serves POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens, /tokenize and /detokenize, GET /v1/models and /health",
        uri.path()
    );
    ApiError::plain(StatusCode::NOT_FOUND, "unknown_url", message)
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} does not take {method}", uri.path());
    ApiError::plain(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}
