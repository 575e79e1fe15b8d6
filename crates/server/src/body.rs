//! Request bodies, from bytes to JSON, the same for every endpoint.

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use serde_json::Value;

use crate::app::MAX_BODY_BYTES;
use crate::error::ApiError;

/// A body as a handler receives it.
pub type Body = Result<Bytes, BytesRejection>;

/// The body's bytes, or why there are none.
pub fn bytes(body: Body) -> Result<Bytes, ApiError> {
    body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            let message = format!("the body is larger than {MAX_BODY_BYTES} bytes; send less");
            ApiError::plain(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
        }
        _ => ApiError::malformed(format!("the body cannot be read: {}", rejection.body_text())),
    })
}

/// The body as JSON.
pub fn json(body: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(body)
        .map_err(|error| ApiError::malformed(format!("the body is not valid JSON: {error}")))
}

/// Runs what would hold up other requests' events: rendering and encoding a long prompt takes that long.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| ApiError::internal(format!("the request failed: {error}")))?
}
