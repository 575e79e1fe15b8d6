//! The API keys, where the server was started with any.

use std::fmt;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use subtle::{Choice, ConstantTimeEq};

use crate::app::App;
use crate::error::ApiError;

/// Where Anthropic's clients put their key.
const API_KEY: &str = "x-api-key";
/// What comes before a key in the header of everybody else, in any case.
const SCHEME: &[u8] = b"Bearer ";

/// Keys of which a request must carry one; without any, every request is served. Cheap to clone.
#[derive(Clone, Default)]
pub struct Keys(Arc<[String]>);

impl Keys {
    /// These keys.
    pub fn new(keys: Vec<String>) -> Keys {
        Keys(keys.into())
    }

    /// Whether the request with these headers may pass. It takes the same time whichever key was sent, and however
    /// much of it is right, so that a key cannot be guessed byte by byte; only its length shows.
    fn admit(&self, headers: &HeaderMap) -> bool {
        let bearer = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes).and_then(|sent| {
            let (scheme, key) = sent.split_at_checked(SCHEME.len())?;
            scheme.eq_ignore_ascii_case(SCHEME).then_some(key)
        });
        // Clients that know both headers send both, and fill one of them with nonsense.
        let sent = [bearer, headers.get(API_KEY).map(HeaderValue::as_bytes)];
        let mut admitted = Choice::from(u8::from(self.0.is_empty()));
        for sent in sent.into_iter().flatten() {
            for key in self.0.iter() {
                admitted |= sent.ct_eq(key.as_bytes());
            }
        }
        admitted.into()
    }
}

impl fmt::Debug for Keys {
    /// Their number: keys do not belong into logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

/// Lets through what carries a key.
pub async fn require_key(State(app): State<App>, request: Request, next: Next) -> Result<Response, ApiError> {
    if app.keys.admit(request.headers()) {
        return Ok(next.run(request).await);
    }
    let message = "the request does not carry this server's API key; send `Authorization: Bearer KEY` or `x-api-key: KEY`";
    Err(ApiError::plain(StatusCode::UNAUTHORIZED, "invalid_api_key", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_of_the_keys_admits_in_either_header() {
        let keys = Keys::new(vec!["first".to_string(), "second key".to_string()]);
        let sent = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            headers
        };
        for headers in [
            sent("authorization", "Bearer first"),
            sent("authorization", "bearer second key"),
            sent("x-api-key", "first"),
        ] {
            assert!(keys.admit(&headers), "{headers:?}");
        }
        for headers in [
            HeaderMap::new(),
            sent("authorization", "Bearer firsT"),
            sent("authorization", "Bearer firs"),
            sent("authorization", "Bearer "),
            sent("authorization", "Basic first"),
            sent("authorization", "first"),
            sent("x-api-key", ""),
        ] {
            assert!(!keys.admit(&headers), "{headers:?}");
        }
        let mut both = sent("x-api-key", "second key");
        both.insert("authorization", HeaderValue::from_static("Bearer dummy"));
        assert!(keys.admit(&both));
        assert!(Keys::default().admit(&HeaderMap::new()));
    }
}
