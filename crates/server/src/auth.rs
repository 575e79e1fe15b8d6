//! The API key, where the server was started with one.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;

use crate::app::App;
use crate::error::ApiError;

/// Where Anthropic's clients put their key.
const API_KEY: &str = "x-api-key";

/// Lets through what carries the key.
pub async fn require_key(State(app): State<App>, request: Request, next: Next) -> Result<Response, ApiError> {
    match &app.api_key {
        Some(key) if !carries(request.headers(), key) => {
            let message = "the request does not carry this server's API key; send `Authorization: Bearer KEY` or `x-api-key: KEY`";
            Err(ApiError::plain(StatusCode::UNAUTHORIZED, "invalid_api_key", message))
        }
        _ => Ok(next.run(request).await),
    }
}

fn carries(headers: &HeaderMap, key: &str) -> bool {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|sent| sent.as_bytes().strip_prefix(b"Bearer "));
    // Clients that know both headers send both, and fill one of them with nonsense.
    [bearer, headers.get(API_KEY).map(HeaderValue::as_bytes)]
        .into_iter()
        .flatten()
        .fold(false, |carried, sent| carried | equal(sent, key.as_bytes()))
}

/// Compares in a time that depends on the lengths alone, so that a key cannot be guessed byte by byte.
fn equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (x, y)| difference | (x ^ y)) == 0
}
