//! The answers that are no success, by what a request goes through: which statuses, in which protocol's shape.

use std::collections::BTreeMap;

use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::response::{Response, ResponseBuilder};
use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{ContentBuilder, Ref, RefOr, Schema};
use utoipa::{IntoResponses, ToSchema};

use crate::{anthropic, error};

/// What a status means.
const MEANINGS: [(u16, &str); 10] = [
    (
        400,
        "The request is wrong, or asks for something that Lily does not do; the message says what and where.",
    ),
    (401, "The request does not carry one of the server's keys."),
    (404, "There is no such model or response."),
    (408, "The body did not arrive in time."),
    (413, "The body is too large."),
    (415, "The body is compressed."),
    (429, "As many requests wait as may."),
    (500, "The server failed."),
    (503, "The model is still loading, or the engine has ended."),
    (529, "The same as 503, in Anthropic's protocol."),
];
/// Statuses whose answers say when it is worth to try again.
const PASSING: [u16; 3] = [429, 503, 529];

/// Answers with these statuses, whose bodies have one of these schemas.
fn refusals(statuses: &[u16], schemas: &[&str]) -> BTreeMap<String, RefOr<Response>> {
    let one = |status: &u16| {
        let meaning = MEANINGS.iter().find(|(known, _)| known == status).map_or("", |(_, meaning)| meaning);
        let schema = match schemas {
            [one] => RefOr::Ref(Ref::from_schema_name(*one)),
            several => {
                let refs = several.iter().map(|name| RefOr::Ref(Ref::from_schema_name(*name)));
                let any =
                    refs.fold(utoipa::openapi::schema::AnyOfBuilder::new(), |any, schema| any.item(schema));
                RefOr::T(Schema::AnyOf(any.build()))
            }
        };
        let content = ContentBuilder::new().schema(Some(schema)).build();
        let mut response = ResponseBuilder::new().description(meaning).content("application/json", content);
        if PASSING.contains(status) {
            let seconds = ObjectBuilder::new().schema_type(SchemaType::new(Type::Integer)).minimum(Some(0));
            let header = HeaderBuilder::new().schema(Some(seconds)).description(Some("Seconds.")).build();
            response = response.header("retry-after", header);
        }
        (status.to_string(), RefOr::T(response.build()))
    };
    statuses.iter().map(one).collect()
}

/// Names a set of refusals for the handlers' documentation.
macro_rules! refused {
    ($(#[$doc:meta])* $name:ident: $statuses:expr, $($body:ty),+) => {
        $(#[$doc])*
        pub struct $name;

        impl IntoResponses for $name {
            fn responses() -> BTreeMap<String, RefOr<Response>> {
                refusals(&$statuses, &[$(&*<$body as ToSchema>::name()),+])
            }
        }
    };
}

refused! {
    /// Of a request that is generated for.
    Asked: [400, 401, 404, 408, 413, 415, 429, 500, 503], error::ErrorBody
}
refused! {
    /// Of a request whose body is worked on at once.
    Given: [400, 401, 404, 408, 413, 415, 500, 503], error::ErrorBody
}
refused! {
    /// Of a request about something that is kept.
    Known: [400, 401, 404, 500, 503], error::ErrorBody
}
refused! {
    /// Of a request for the models, in the protocol that its headers name.
    Listed: [401, 500, 503, 529], error::ErrorBody, anthropic::error::ErrorBody
}
refused! {
    /// Of a request about one model.
    Named: [400, 401, 404, 500, 503, 529], error::ErrorBody, anthropic::error::ErrorBody
}
refused! {
    /// Of a request in Anthropic's protocol that is generated for.
    Messaged: [400, 401, 404, 408, 413, 415, 429, 500, 529], anthropic::error::ErrorBody
}
refused! {
    /// Of a request in Anthropic's protocol that is worked on at once.
    MessagesGiven: [400, 401, 404, 408, 413, 415, 500, 529], anthropic::error::ErrorBody
}
refused! {
    /// Of a request that needs the model and no key.
    Watched: [500, 503], error::ErrorBody
}
refused! {
    /// Of a request that needs nothing.
    Failing: [500], error::ErrorBody
}
