//! A name for every request, by which a client's log and the server's can be brought together.
//!
//! A client may choose it with `x-request-id`; otherwise it is made here. It comes back with every response, under
//! the names that OpenAI's and Anthropic's clients look for.

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;

use crate::openai::assemble::unique_id;

/// Where a client's name for its request stands, and where OpenAI's clients look for it.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Where Anthropic's clients look for it.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// The longest name that is taken over.
const MAX_LENGTH: usize = 128;

/// Names a request and its response.
pub async fn name(request: Request, next: Next) -> Response {
    let id = chosen(request.headers()).unwrap_or_else(made);
    let mut response = next.run(request).await;
    response.headers_mut().insert(ANTHROPIC_REQUEST_ID, id.clone());
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// The client's own name, where it is a plain word: others could break the lines of a log.
fn chosen(headers: &HeaderMap) -> Option<HeaderValue> {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:/".contains(byte);
    let sane = |id: &&HeaderValue| (1..=MAX_LENGTH).contains(&id.len()) && id.as_bytes().iter().all(plain);
    headers.get(REQUEST_ID).filter(sane).cloned()
}

fn made() -> HeaderValue {
    // Letters and digits, which may stand in any header.
    HeaderValue::try_from(unique_id("req_")).unwrap_or(HeaderValue::from_static("req_0"))
}
