//! Conversations in the shapes that real clients give them, over all three protocols: what is taken, what is not.

#[path = "support/http.rs"]
mod http;

use http::Server;
use serde_json::{Value, json};

#[test]
fn conversations_of_all_shapes_are_answered_or_refused_by_their_place() {
    let server = Server::start(&[]);
    let user = json!({"role": "user", "content": "What is 17 + 25?"});
    let call = json!({"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let called = json!({"role": "assistant", "content": null, "tool_calls": [call]});
    let told = json!({"role": "tool", "tool_call_id": "a", "content": "done"});
    let part = |kind: &str, more: Value| json!([{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": kind, kind: more}]}]);
    let chat = [
        (json!([{"role": "developer", "content": "Be brief."}, user]), None),
        (json!([{"role": "system", "content": "A."}, {"role": "developer", "content": "B."}, user]), None),
        (json!([user, {"role": "system", "content": "It is late."}]), None),
        (json!([{"role": "user", "content": ""}]), None),
        (json!([{"role": "user", "content": []}]), None),
        (json!([{"role": "user", "content": [{"type": "text", "text": ""}]}]), None),
        (json!([user, called, told]), None),
        (json!([user, called, told, user]), None),
        (json!([user, called, user, told]), None),
        (
            json!([user, {"role": "assistant", "content": "", "tool_calls": [call], "refusal": null, "annotations": []}, told]),
            None,
        ),
        (
            json!([{"role": "user", "content": "Hi", "metadata": {"a": 1}, "cache_control": {"type": "ephemeral"}}]),
            None,
        ),
        (part("image_url", json!({"url": "data:,"})), Some("messages[0].content[1].type")),
        (part("input_audio", json!({"data": "", "format": "wav"})), Some("messages[0].content[1].type")),
        (part("file", json!({"file_id": "x"})), Some("messages[0].content[1].type")),
        (json!([{"role": "user", "content": null}]), Some("messages[0].content")),
    ];
    for (messages, refused) in chat {
        let body = json!({"messages": messages, "max_tokens": 1, "unknown": {"a": [1]}});
        expect(&server, "/v1/chat/completions", &body, refused);
    }

    let input =
        |kind: &str| json!([{"role": "user", "content": [{"type": kind, "image_url": "x", "file_id": "y"}]}]);
    let call = json!({"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"});
    let told = json!({"type": "function_call_output", "call_id": "a", "output": "done"});
    let responses = [
        (json!([{"role": "developer", "content": "A."}, {"role": "system", "content": "B."}, user]), None),
        (json!([user, {"role": "developer", "content": "It is late."}]), None),
        (json!([{"role": "user", "content": []}]), None),
        (json!([user, call, told]), None),
        (json!([user, call, user, told]), None),
        (json!([user, call, told, user]), None),
        (json!([user, {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, call, told]), None),
        (input("input_image"), Some("input[0].content[0].type")),
        (input("input_file"), Some("input[0].content[0].type")),
        (json!([user, told]), Some("input[1].call_id")),
        (
            json!([user, {"type": "web_search_call", "id": "ws_1", "status": "completed"}]),
            Some("input[1].type"),
        ),
        (json!([{"type": "item_reference", "id": "msg_none"}]), Some("input[0].id")),
    ];
    for (input, refused) in responses {
        let body = json!({"input": input, "max_output_tokens": 1, "unknown": {"a": [1]}});
        expect(&server, "/v1/responses", &body, refused);
    }

    let used =
        json!({"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]});
    let result = json!({"type": "tool_result", "tool_use_id": "a", "content": "done"});
    let text = json!({"type": "text", "text": "And?"});
    let messages = [
        (json!([user, {"role": "user", "content": "Well?"}]), None),
        (json!([user, used, {"role": "user", "content": [result]}]), None),
        (json!([user, used, {"role": "user", "content": [text, result]}]), None),
        (json!([user, used, {"role": "user", "content": [result, text]}]), None),
        (json!([{"role": "user", "content": ""}]), None),
        (json!([user, {"role": "system", "content": "It is late."}]), None),
        (
            json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]),
            Some("messages[0].content[0].type"),
        ),
        (
            json!([{"role": "user", "content": [{"type": "document", "source": {}}]}]),
            Some("messages[0].content[0].type"),
        ),
    ];
    for (messages, refused) in messages {
        let body = json!({"messages": messages, "max_tokens": 1, "unknown": {"a": [1]}});
        expect(&server, "/v1/messages", &body, refused);
    }
    // Turns of the user that follow one another are one turn, as in Anthropic's API.
    let count = |messages: Value| {
        let body = json!({"messages": messages}).to_string();
        server.request("POST", "/v1/messages/count_tokens", &body).json()["input_tokens"].clone()
    };
    let apart = json!([{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}]);
    assert_eq!(count(apart), count(json!([{"role": "user", "content": "One.\n\nTwo."}])));
}

#[test]
fn what_a_client_cut_in_half_does_not_end_its_conversation() {
    let server = Server::start(&[]);
    // A client in JavaScript that shortens the output of a tool in the middle of an emoji sends this, and once more
    // with every turn that follows.
    let half = r"\ud83d";
    let said = format!(r#"{{"role": "user", "content": "What is 17 + 25? {half}"}}"#);
    let call = |arguments: &str| {
        let function = format!(r#"{{"name": "f", "arguments": "{arguments}"}}"#);
        let call = format!(r#"{{"id": "a", "type": "function", "function": {function}}}"#);
        format!(r#"{{"role": "assistant", "tool_calls": [{call}]}}"#)
    };
    let within = call(r#"{\"text\": \"\\ud83d\"}"#);
    let result = format!(r#"{{"role": "tool", "tool_call_id": "a", "content": "cut {half}"}}"#);
    for (path, body) in [
        ("/v1/chat/completions", format!(r#"{{"messages": [{said}], "max_tokens": 1}}"#)),
        ("/v1/chat/completions", format!(r#"{{"messages": [{said}, {within}, {result}], "max_tokens": 1}}"#)),
        ("/v1/responses", format!(r#"{{"input": [{said}], "max_output_tokens": 1}}"#)),
        ("/v1/messages", format!(r#"{{"messages": [{said}], "max_tokens": 1}}"#)),
    ] {
        let response = server.request("POST", path, &body);
        assert_eq!(response.status, 200, "{body}: {}", response.body);
    }
    let tokens = |prompt: &str| {
        server.request("POST", "/tokenize", &format!(r#"{{"prompt": "{prompt}"}}"#)).json()["tokens"].clone()
    };
    assert_eq!(tokens(half), tokens("\u{fffd}"));
}

/// Asks, and expects an answer, or an error that names `refused`.
fn expect(server: &Server, path: &str, body: &Value, refused: Option<&str>) {
    let response = server.request("POST", path, &body.to_string());
    let status = if refused.is_some() { 400 } else { 200 };
    assert_eq!(response.status, status, "{path} {body}: {}", response.body);
    if let Some(place) = refused {
        let message = response.json()["error"]["message"].as_str().unwrap_or_default().to_string();
        assert!(message.contains(place), "{path} {body}: {message}");
    }
}

#[test]
fn models_are_described_in_the_protocol_that_the_client_speaks() {
    let server = Server::start(&[]);
    let ask = |path: &str| server.open("GET", path, "anthropic-version: 2023-06-01\r\n", b"").response();
    let page = ask("/v1/models").json();
    let model = &page["data"][0];
    assert_eq!(
        (&model["type"], &page["has_more"], &page["last_id"]),
        (&json!("model"), &json!(false), &model["id"])
    );
    let id = model["id"].as_str().expect("an id");
    assert_eq!(ask(&format!("/v1/models/{id}")).json(), *model);
    assert_eq!(ask("/v1/models/gpt").json()["error"]["type"], "not_found_error");
    assert_eq!(server.request("GET", "/v1/models", "").json()["object"], "list");
}

#[test]
fn every_response_names_its_request() {
    let server = Server::start(&[]);
    let names = |path: &str, sent: &str| {
        let headers = server.open("GET", path, sent, b"").response().headers;
        let name =
            |name: &str| headers.iter().find_map(|header| header.strip_prefix(name).map(str::to_owned));
        let names = (name("x-request-id: "), name("request-id: "));
        assert_eq!(names.0, names.1);
        names.0.expect("the request has a name")
    };
    let made = names("/health", "");
    assert!(made.starts_with("req_") && names("/nothing", "") != made);
    assert_eq!(names("/v1/models", "X-Request-Id: a-b_c.1\r\n"), "a-b_c.1");
    assert!(names("/v1/models", "X-Request-Id: two words\r\n").starts_with("req_"));
    assert!(names("/v1/models", &format!("X-Request-Id: {}\r\n", "x".repeat(129))).starts_with("req_"));
}
