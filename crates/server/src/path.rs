//! What stands in a request's path.

use axum::extract::{FromRequestParts, Path};
use axum::http::StatusCode;
use axum::http::request::Parts;

use crate::error::ApiError;

/// The one thing that a path names.
#[derive(Debug)]
pub struct Id(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Id, ApiError> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(id)) => Ok(Id(id)),
            Err(error) => {
                let message = format!("the path cannot be read: {}", error.body_text());
                Err(ApiError::plain(StatusCode::BAD_REQUEST, "invalid_path", message))
            }
        }
    }
}
