//! `/openapi.json` beside the server that it describes.

#[path = "support/http.rs"]
mod http;

use http::{Server, question};
use serde_json::Value;

/// The methods that a path might take.
const METHODS: [&str; 5] = ["GET", "POST", "PUT", "PATCH", "DELETE"];

#[test]
fn every_path_takes_the_methods_that_the_document_names_and_no_others() {
    let server = Server::start(&[]);
    let document = server.request("GET", "/openapi.json", "").json();
    for (path, operations) in document["paths"].as_object().expect("the document has paths") {
        for method in METHODS {
            let described = operations.get(method.to_lowercase()).is_some();
            let response = server.request(method, &path.replace("{id}", "no-such-thing"), "");
            assert_eq!(response.status == 405, !described, "{method} {path}: {response:?}");
            assert!(
                !described
                    || !operations[method.to_lowercase()]["responses"][response.status.to_string()].is_null(),
                "{method} {path} answers {}, which the document does not say",
                response.status
            );
        }
    }
}

#[test]
fn the_document_is_there_without_a_key_and_names_both_ways_to_send_one() {
    let server = Server::start(&["--api-key", "secret"]);
    let response = server.request("GET", "/openapi.json", "");
    assert_eq!(response.status, 200);
    let document = response.json();
    assert_eq!(document["openapi"], "3.1.0");
    let schemes = &document["components"]["securitySchemes"];
    assert_eq!(schemes["bearer"]["scheme"], "bearer");
    assert_eq!(schemes["x-api-key"]["name"], "x-api-key");
    assert_eq!(server.chat(&question("hi")).status, 401);
}

#[test]
fn a_stream_is_described_by_the_body_of_its_events() {
    let server = Server::start(&[]);
    let document = server.request("GET", "/openapi.json", "").json();
    for path in ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"] {
        let content = &document["paths"][path]["post"]["responses"]["200"]["content"];
        for kind in ["application/json", "text/event-stream"] {
            assert!(content[kind]["schema"]["$ref"].is_string(), "{path}: {kind} in {content}");
        }
    }
    assert_eq!(document["info"]["version"], Value::from(env!("CARGO_PKG_VERSION")));
}
