//! Everything that can go wrong with a request, in the shape that OpenAI's clients parse:
//! `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use lily_engine::constraint::Subject;
use lily_engine::engine::SubmitError;
use lily_model::chat_template::TemplateError;
use serde::Serialize;
use utoipa::ToSchema;

/// Seconds that a server which takes nothing at the moment asks a client to wait before it tries again.
const RETRY_AFTER_SECONDS: u64 = 2;
/// The most seconds that a full queue asks for: by then another answer may have ended early.
const LONGEST_WAIT_SECONDS: u64 = 60;

/// A request that was not served, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// One sentence for a person: what was wrong, where, and what to do.
    pub message: String,
    /// The field to blame, as a path into the body (`messages[2].content`).
    pub param: Option<String>,
    /// A word for programs, from OpenAI's list where it has one.
    pub code: Option<&'static str>,
    /// Seconds after which it is worth to try again.
    pub retry_after: Option<u64>,
}

/// The body of an error response.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OpenAiError)]
pub struct ErrorBody {
    error: ErrorDetail,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OpenAiErrorDetail)]
struct ErrorDetail {
    message: String,
    r#type: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    /// The value of `param` is not one that the protocol allows.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError {
            status: StatusCode::BAD_REQUEST,
            message: message.into(),
            param: Some(param.into()),
            code: Some("invalid_value"),
            retry_after: None,
        }
    }

    /// The protocol allows it and Lily does not do it: said by name rather than ignored.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError { code: Some("unsupported_parameter"), ..ApiError::invalid(param, message) }
    }

    /// A body that is not JSON, or not an object.
    pub fn malformed(message: impl Into<String>) -> ApiError {
        ApiError {
            status: StatusCode::BAD_REQUEST,
            message: message.into(),
            param: None,
            code: Some("invalid_json"),
            retry_after: None,
        }
    }

    /// A failure that is not the client's.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            message: message.into(),
            param: None,
            code: None,
            retry_after: None,
        }
    }

    /// An error with a status and code of its own and no field to blame.
    pub fn plain(status: StatusCode, code: &'static str, message: impl Into<String>) -> ApiError {
        let unavailable = status == StatusCode::SERVICE_UNAVAILABLE;
        let retry_after = unavailable.then_some(RETRY_AFTER_SECONDS);
        ApiError { status, message: message.into(), param: None, code: Some(code), retry_after }
    }

    /// The body; also sent as the last event of a stream that fails half-way.
    pub fn body(&self) -> ErrorBody {
        let r#type = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        ErrorBody {
            error: ErrorDetail {
                message: self.message.clone(),
                r#type,
                param: self.param.clone(),
                code: self.code,
            },
        }
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> ApiError {
        let message = error.to_string();
        match error {
            SubmitError::EmptyPrompt => ApiError::invalid("messages", message),
            SubmitError::PromptTooLong { .. } | SubmitError::NeverFits { .. } => {
                ApiError { code: Some("context_length_exceeded"), ..ApiError::invalid("messages", message) }
            }
            SubmitError::Zero { field } => ApiError::invalid(field, message),
            SubmitError::Sampling(error) => ApiError::invalid(error.field, message),
            SubmitError::Stop(_) => ApiError::invalid("stop", message),
            SubmitError::Constraint(error) => {
                let field = match error.subject {
                    Subject::JsonSchema => "response_format.json_schema.schema".to_owned(),
                    Subject::Regex => "regex".to_owned(),
                    Subject::Grammar => "grammar".to_owned(),
                    Subject::Tools => "tools".to_owned(),
                    Subject::Tool { index, .. } => format!("tools[{index}].function.parameters"),
                };
                ApiError::invalid(field, message)
            }
            SubmitError::Busy { free_in, .. } => {
                let seconds = (free_in.as_secs() + 1).min(LONGEST_WAIT_SECONDS);
                let error = ApiError::plain(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", message);
                ApiError { retry_after: Some(seconds), ..error }
            }
            SubmitError::Stopped(_) => {
                ApiError::plain(StatusCode::SERVICE_UNAVAILABLE, "engine_stopped", message)
            }
            // The prompt was encoded with the model's own tokenizer.
            SubmitError::BadToken { .. } => ApiError::internal(message),
        }
    }
}

impl From<TemplateError> for ApiError {
    fn from(error: TemplateError) -> ApiError {
        let message = error.to_string();
        match error {
            TemplateError::Refused(_) | TemplateError::Failed(_) | TemplateError::Runaway(_) => {
                ApiError::invalid("messages", message)
            }
            TemplateError::Missing | TemplateError::Config(_) | TemplateError::Syntax(_) => {
                ApiError::internal(message)
            }
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        // For the layers that log errors and bring them into the shape of another protocol.
        response.extensions_mut().insert(self);
        response
    }
}
