//! Request bodies, from bytes to JSON, the same for every endpoint.

use std::convert::Infallible;
use std::error::Error;

use axum::body::{Bytes, HttpBody, to_bytes};
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use http_body_util::LengthLimitError;
use serde_json::Value;
use tokio::time::timeout;

use crate::app::{App, Limits};
use crate::error::ApiError;

/// A body as a handler receives it: within the server's limits, or why not.
#[derive(Debug)]
pub struct Body(Result<Bytes, ApiError>);

impl FromRequest<App> for Body {
    /// Handlers bring errors into their protocol's shape.
    type Rejection = Infallible;

    async fn from_request(request: Request, app: &App) -> Result<Body, Infallible> {
        Ok(Body(read(request, &app.limits).await))
    }
}

async fn read(request: Request, limits: &Limits) -> Result<Bytes, ApiError> {
    let body = request.into_body();
    let most = limits.body_bytes;
    // A client that says beforehand how much it will send need not send it.
    if body.size_hint().lower() > most as u64 {
        return Err(too_large(most));
    }
    match timeout(limits.body_time, to_bytes(body, most)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(error)) if error.source().is_some_and(|source| source.is::<LengthLimitError>()) => {
            Err(too_large(most))
        }
        Ok(Err(error)) => Err(ApiError::malformed(format!("the body cannot be read: {error}"))),
        Err(_) => {
            let seconds = limits.body_time.as_secs_f64();
            let message = format!("the body did not arrive within {seconds} seconds; send it faster");
            Err(ApiError::plain(StatusCode::REQUEST_TIMEOUT, "request_timeout", message))
        }
    }
}

fn too_large(most: usize) -> ApiError {
    let message = format!(
        "the body is larger than {most} bytes; send less, or start the server with a larger --max-body"
    );
    ApiError::plain(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
}

/// The body's bytes, or why there are none.
pub fn bytes(body: Body) -> Result<Bytes, ApiError> {
    body.0
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
