//! Request bodies: whatever is sent, the answer is one that the protocol knows.
//!
//! Bytes that begin with `{` are a body as it is, which goes to every path; of others a body is made that the
//! server's own `/openapi.json` allows, more or less, for one path.

use std::sync::OnceLock;

use arbitrary::Unstructured;
use serde_json::Value;

use super::events::events;
use super::json;
use super::server::{Answer, Server, server};

/// The paths that take a body.
const PATHS: [&str; 8] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
];
/// Those of them that speak Anthropic's protocol.
const ANTHROPIC: &str = "/v1/messages";
/// What the device writes where nothing constrains it.
const ANSWER: &str =
    "Hm.\n</think>\n\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>";

/// See the module's page.
pub fn check(data: &[u8]) {
    let server = server();
    if data.first() == Some(&b'{') {
        return PATHS.iter().for_each(|path| judge(&server, path, data.to_vec()));
    }
    let mut u = Unstructured::new(data);
    // It gives what there is and goes on with zeros, so that it cannot fail for want of bytes.
    if let Ok((path, body)) = made_up(&mut u, &server) {
        judge(&server, path, body.to_string().into_bytes());
    }
}

fn made_up(u: &mut Unstructured<'_>, server: &Server) -> arbitrary::Result<(&'static str, Value)> {
    let path = *u.choose(&PATHS)?;
    let document = document(server);
    let place = ["paths", path, "post", "requestBody", "content", "application/json", "schema"];
    let schema = place.iter().fold(document, |value, name| &value[name]);
    assert!(schema.is_object(), "/openapi.json says what {path} takes");
    Ok((path, json::allowed(u, document, schema, 0)?))
}

/// The server's description of itself.
fn document(server: &Server) -> &'static Value {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    DOCUMENT.get_or_init(|| parsed(&server.get("/openapi.json")).expect("the server describes itself"))
}

fn judge(server: &Server, path: &str, body: Vec<u8>) {
    let sent = String::from_utf8_lossy(&body).into_owned();
    let answer = server.post(path, body, server.tokenizer.encode(ANSWER));
    if let Err(why) = verdict(path, &answer) {
        panic!(
            "{path} answered {} to {sent}: {why}: {}",
            answer.status,
            String::from_utf8_lossy(&answer.body)
        );
    }
}

fn verdict(path: &str, answer: &Answer) -> Result<(), String> {
    match answer.status {
        200 if answer.streamed => {
            for event in events(&answer.body).iter().filter(|event| event.data != "[DONE]") {
                let body = event.json();
                let failed = ["error", "response.failed"].iter().any(|name| body["type"] == *name);
                if failed || body.get("error").is_some_and(|error| !error.is_null()) {
                    return Err("the stream failed".to_string());
                }
            }
            Ok(())
        }
        200 => parsed(answer).map(|_| ()),
        // An unknown model is not found.
        400 | 404 => {
            let error = parsed(answer)?;
            if path.starts_with(ANTHROPIC) && error["type"] != "error" {
                return Err("the error has another protocol's shape".to_string());
            }
            let said = error["error"]["message"].as_str().is_some_and(|message| !message.is_empty());
            let named = error["error"]["type"].is_string();
            if said && named { Ok(()) } else { Err("the error says nothing".to_string()) }
        }
        _ => Err("the status is not one of those declared for such a request".to_string()),
    }
}

fn parsed(answer: &Answer) -> Result<Value, String> {
    let value: Value = serde_json::from_slice(&answer.body).map_err(|error| error.to_string())?;
    if value.is_object() { Ok(value) } else { Err("the body is no object".to_string()) }
}
