//! Errors in the shape that Anthropic's clients parse: `{"type": "error", "error": {"type", "message"}}`.
//!
//! Handlers, the key check and the fallbacks return [`ApiError`]; [`reshape`] rewrites what leaves the
//! protocol's paths.

use axum::Json;
use axum::extract::Request;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::error::ApiError;

/// Where the protocol's paths begin.
const PREFIX: &str = "/v1/messages";
/// Where paths begin that are the protocol's for clients who say so.
const SHARED: &str = "/v1/models";
/// The protocol's own status for a server that takes nothing at the moment.
const OVERLOADED: u16 = 529;

/// The body of an error response, and the last event of a stream that fails half-way.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = AnthropicError)]
pub struct ErrorBody {
    r#type: &'static str,
    error: ErrorDetail,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = AnthropicErrorDetail)]
struct ErrorDetail {
    r#type: &'static str,
    message: String,
}

impl From<&ApiError> for ErrorBody {
    fn from(error: &ApiError) -> ErrorBody {
        // There is no field for the field to blame: it is said in the sentence.
        let message = match &error.param {
            Some(param) if !error.message.contains(param) => format!("{param}: {}", error.message),
            _ => error.message.clone(),
        };
        ErrorBody { r#type: "error", error: ErrorDetail { r#type: kind(error.status), message } }
    }
}

/// The protocol's word for a status.
fn kind(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    }
}

/// Brings errors on the protocol's paths into its shape; everything else passes.
pub async fn reshape(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let under = |prefix: &str| {
        path.strip_prefix(prefix).is_some_and(|rest| matches!(rest.as_bytes(), [] | [b'/', ..]))
    };
    let ours = under(PREFIX) || under(SHARED) && super::speaks(request.headers());
    let response = next.run(request).await;
    let error = response.extensions().get::<ApiError>().filter(|_| ours);
    match error.map(|error| (status(error.status), ErrorBody::from(error))) {
        Some((status, body)) => (status, kept(response.headers()), Json(body)).into_response(),
        None => response,
    }
}

fn status(status: StatusCode) -> StatusCode {
    match status {
        StatusCode::SERVICE_UNAVAILABLE => StatusCode::from_u16(OVERLOADED).unwrap_or(status),
        status => status,
    }
}

/// The headers that do not describe the old body, such as `retry-after`.
fn kept(headers: &HeaderMap) -> HeaderMap {
    let mut kept = headers.clone();
    kept.remove(CONTENT_TYPE);
    kept.remove(CONTENT_LENGTH);
    kept
}
