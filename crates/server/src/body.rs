//! Request bodies, from bytes to JSON, the same for every endpoint.

use std::convert::Infallible;
use std::error::Error;

use axum::body::{Bytes, HttpBody, to_bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use http_body_util::LengthLimitError;
use serde::de::DeserializeOwned;
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
    refuse_encodings(request.headers())?;
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

/// A compressed body would be called no JSON, which it is not, and which helps nobody.
fn refuse_encodings(headers: &HeaderMap) -> Result<(), ApiError> {
    let plain = |value: &[u8]| value.eq_ignore_ascii_case(b"identity");
    match headers.get_all(header::CONTENT_ENCODING).iter().find(|value| !plain(value.as_bytes())) {
        None => Ok(()),
        Some(value) => {
            let name = String::from_utf8_lossy(value.as_bytes());
            let message = format!("the body is encoded as {name:?}; send it without `Content-Encoding`");
            Err(ApiError::plain(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_content_encoding", message))
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
    parse(body).map_err(|error| ApiError::malformed(format!("the body is not valid JSON: {error}")))
}

/// JSON as clients write it, in which a text may end with half a character.
///
/// Strings in JavaScript are of UTF-16. A client that cuts one to a length can leave half of a surrogate pair behind, and
/// writes it as `\ud83d`, which stands for no character. The text stays in the conversation, so that a server which
/// refuses it refuses every turn that follows. Such a half is read as U+FFFD, as decoders do with bytes.
pub(crate) fn parse<T: DeserializeOwned>(text: &[u8]) -> serde_json::Result<T> {
    serde_json::from_slice(text).or_else(|error| match mended(text) {
        Some(mended) => serde_json::from_slice(&mended),
        None => Err(error),
    })
}

/// Length of an escape such as `\ud83d`.
const ESCAPE: usize = 6;

/// `text` with each escaped surrogate that has no partner replaced; `None` where there is none.
fn mended(text: &[u8]) -> Option<Vec<u8>> {
    let mut mended = text.to_vec();
    let mut found = false;
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        at += match (byte, unit(text, at)) {
            (b'\\', Some(0xd800..=0xdbff)) if matches!(unit(text, at + ESCAPE), Some(0xdc00..=0xdfff)) => {
                2 * ESCAPE
            }
            (b'\\', Some(0xd800..=0xdfff)) => {
                mended[at..at + ESCAPE].copy_from_slice(br"\ufffd");
                found = true;
                ESCAPE
            }
            // Whatever is escaped, a backslash among them, begins no escape of its own.
            (b'\\', _) => 2,
            _ => 1,
        };
    }
    found.then_some(mended)
}

/// The UTF-16 unit that the escape at `at` stands for, if one stands there.
fn unit(text: &[u8], at: usize) -> Option<u16> {
    let digits = text.get(at..at + ESCAPE)?.strip_prefix(br"\u")?;
    // Also takes a sign, which no digit is.
    let digits = std::str::from_utf8(digits).ok().filter(|digits| !digits.starts_with('+'))?;
    u16::from_str_radix(digits, 16).ok()
}

/// Runs what would hold up other requests' events: rendering and encoding a long prompt takes that long.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| ApiError::internal(format!("the request failed: {error}")))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_character_is_read_as_a_replacement_and_everything_else_as_it_stands() {
        let read = |text: &str| parse::<String>(format!("\"{text}\"").as_bytes()).ok();
        for (text, expected) in [
            (r"a\ud83d\ude00b", Some("a\u{1f600}b")),
            (r"cut \ud83d", Some("cut \u{fffd}")),
            (r"\uDE00 tail", Some("\u{fffd} tail")),
            (r"\ud83d\ud83d\ude00", Some("\u{fffd}\u{1f600}")),
            (r"\ude00\ud83d", Some("\u{fffd}\u{fffd}")),
            (r"\ud83d\n", Some("\u{fffd}\n")),
            (r"no escape: \\ud83d, one: \ud83d", Some("no escape: \\ud83d, one: \u{fffd}")),
            (r"\ud83", None),
            (r"\ud83d \u+83d", None),
        ] {
            assert_eq!(read(text).as_deref(), expected, "{text}");
        }
    }
}
