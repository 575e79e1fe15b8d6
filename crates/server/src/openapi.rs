//! `GET /openapi.json`: every path of the server, what it takes and what it answers.
//!
//! The document is derived: answers from the structures that are written, paths and statuses from the handlers. What
//! requests hold is told by structures of its own ([`chat`], [`responses`], [`messages`], [`text`]), because bodies are
//! read field by field for the sake of errors that name the field. The tests here hold these to the readers: every field
//! that is read is in the document, every field of the document is read, and every path of the router is there.

pub mod chat;
pub mod messages;
mod refusals;
pub mod responses;
pub mod text;

use std::sync::LazyLock;

use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use utoipa::openapi::security::{ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityScheme};
use utoipa::{Modify, OpenApi};

pub use refusals::{Asked, Failing, Given, Known, Listed, Messaged, MessagesGiven, Named, Watched};

/// Where it is.
pub const PATH: &str = "/openapi.json";

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Lily",
        description = "One engine for one model: Qwen3.6-35B-A3B, over OpenAI's and Anthropic's protocols. Fields that \
            are not listed and ask for something are refused with 400, which names them; labels are accepted without effect."
    ),
    paths(
        crate::chat::completions,
        crate::completions::completions,
        crate::responses::handlers::create,
        crate::responses::handlers::input_tokens,
        crate::responses::stored::get,
        crate::responses::stored::delete,
        crate::responses::stored::input_items,
        crate::responses::stored::cancel,
        crate::anthropic::handlers::messages,
        crate::anthropic::handlers::count_tokens,
        crate::models::list,
        crate::models::one,
        crate::tokenize::tokenize,
        crate::tokenize::detokenize,
        crate::health::health,
        crate::metrics::metrics,
        crate::page::page,
        document,
    ),
    components(schemas(crate::error::ErrorBody, crate::anthropic::error::ErrorBody)),
    modifiers(&Keys),
)]
struct Document;

/// How a key is sent, where the server asks for one.
struct Keys;

impl Modify for Keys {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let Some(components) = &mut document.components else { return };
        components.add_security_scheme("bearer", SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer)));
        let header = ApiKeyValue::with_description("x-api-key", "As Anthropic's clients send it.");
        components.add_security_scheme("x-api-key", SecurityScheme::ApiKey(ApiKey::Header(header)));
    }
}

/// The document, as JSON.
static TEXT: LazyLock<String> = LazyLock::new(|| {
    // Strings, numbers and maps by names, which always have a JSON form.
    Document::openapi().to_json().unwrap_or_default()
});

/// This document.
#[utoipa::path(
    get, path = PATH, tag = "Server",
    responses(
        (status = 200, description = "An OpenAPI 3.1 document.", content_type = "application/json", body = Object),
    ),
)]
pub async fn document() -> Response {
    ([(CONTENT_TYPE, "application/json")], TEXT.as_str()).into_response()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;
    use crate::anthropic::request::MessagesRequest;
    use crate::error::ApiError;
    use crate::openai::completion_request::CompletionRequest;
    use crate::openai::fields;
    use crate::openai::request::ChatRequest;
    use crate::responses::request::ResponsesRequest;
    use crate::{app, page};

    fn parsed() -> Value {
        serde_json::from_str(&TEXT).expect("the document is JSON")
    }

    /// A schema, whatever refers to it.
    fn resolved<'a>(document: &'a Value, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str() {
            Some(reference) => {
                let name = reference.strip_prefix("#/components/schemas/").expect("references are local");
                resolved(document, &document["components"]["schemas"][name])
            }
            None => schema,
        }
    }

    /// The properties of a schema and of all that it is composed of.
    fn properties<'a>(document: &'a Value, schema: &'a Value) -> BTreeSet<&'a str> {
        let schema = resolved(document, schema);
        let own = schema["properties"].as_object().into_iter().flatten().map(|(name, _)| &**name);
        let parts = schema["allOf"].as_array().into_iter().flatten();
        own.chain(parts.flat_map(|part| properties(document, part))).collect()
    }

    #[test]
    fn every_path_of_the_router_is_in_the_document_and_no_other() {
        let document = parsed();
        let described: BTreeSet<String> =
            document["paths"].as_object().expect("paths").keys().cloned().collect();
        // The name of a model may hold slashes, which the document cannot say.
        let served = app::paths().into_iter().map(|path| path.replace("{*id}", "{id}"));
        let served: BTreeSet<String> = served.chain([page::PATH, PATH].map(String::from)).collect();
        assert_eq!(described, served);
    }

    #[test]
    fn every_reference_leads_somewhere() {
        fn references<'a>(value: &'a Value, found: &mut BTreeSet<&'a str>) {
            match value {
                Value::Object(map) => {
                    found.extend(map.get("$ref").and_then(Value::as_str));
                    map.values().for_each(|value| references(value, found));
                }
                Value::Array(list) => list.iter().for_each(|value| references(value, found)),
                _ => {}
            }
        }
        let document = parsed();
        let mut found = BTreeSet::new();
        references(&document, &mut found);
        for reference in found {
            let pointer = reference.strip_prefix('#').expect("references are local");
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
    }

    /// Compares the fields that the document gives a body with those that its reader looks at. `smallest` is a body that
    /// the reader takes; `others` are fields that are looked at to be refused by name, or after the body was brought
    /// into another protocol's form.
    fn compare<T>(path: &str, smallest: Value, others: &[&str], read: fn(&[u8]) -> Result<T, ApiError>) {
        let document = parsed();
        let content = &document["paths"][path]["post"]["requestBody"]["content"];
        let described = properties(&document, &content["application/json"]["schema"]);
        let (outcome, read) = fields::recorded(|| read(smallest.to_string().as_bytes()));
        if let Err(error) = outcome {
            panic!("{path}: {}", error.message);
        }
        let read: BTreeSet<&str> = read.iter().map(String::as_str).collect();
        let unsaid: Vec<_> = read.difference(&described).filter(|name| !others.contains(name)).collect();
        let unread: Vec<_> = described.difference(&read).collect();
        assert!(unsaid.is_empty(), "{path} reads what the document does not say: {unsaid:?}");
        assert!(unread.is_empty(), "{path} does not read what the document says: {unread:?}");
    }

    #[test]
    fn what_is_read_of_a_body_and_what_the_document_says_of_it_are_the_same_fields() {
        let chat = serde_json::json!({"messages": [{"role": "user", "content": ""}]});
        let refused = ["audio", "function_call", "moderation", "prediction", "web_search_options", "best_of"];
        compare("/v1/chat/completions", chat.clone(), &refused, ChatRequest::parse);
        compare("/v1/completions", serde_json::json!({"prompt": "a"}), &[], CompletionRequest::parse);
        let refused =
            ["access_programs", "background_options", "conversation", "image", "moderation", "prompt"];
        compare("/v1/responses", serde_json::json!({"input": ""}), &refused, ResponsesRequest::parse);
        let others = ["container", "diagnostics", "parallel_tool_calls"];
        compare("/v1/messages", chat, &others, MessagesRequest::parse);
    }
}
