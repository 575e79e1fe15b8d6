//! Turns of the model that clients send back: the prompt goes on from where the model stopped writing.

#[path = "support/http.rs"]
mod http;

use http::Server;
use serde_json::{Value, json};

/// Tokens at the end of an answer that no snapshot holds: the one that ended it and the one before, which was
/// chosen but not read.
const UNREAD: u64 = 2;

/// A parameter that the model cannot write as the chat template would print it.
fn parameters() -> Value {
    json!({"type": "object", "required": ["range"], "properties": {"range": {
        "type": "object", "required": ["low", "high"], "additionalProperties": false,
        "properties": {"low": {"type": "integer", "minimum": 1, "maximum": 9}, "high": {"const": 12.5}},
        "x-guidance": {"whitespace_flexible": false, "key_separator": " :   ", "item_separator": "  ,\n"}}}})
}

const QUESTION: &str = "Between which numbers does it lie?";

/// What a client makes of arguments before it sends them back.
fn reprinted(arguments: &Value) -> String {
    let parsed: Value = serde_json::from_str(arguments.as_str().expect("text")).expect("JSON");
    parsed.to_string()
}

fn count(usage: &Value, path: &str) -> u64 {
    usage.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {path} in {usage}"))
}

#[test]
fn a_chats_tool_loop_goes_on_where_the_model_stopped() {
    let server = Server::start(&[]);
    for thinking in [false, true] {
        let user = json!({"role": "user", "content": QUESTION});
        let mut body = json!({"messages": [user], "max_tokens": 300, "enable_thinking": thinking, "thinking_budget": 20,
            "tools": [{"type": "function", "function": {"name": "between", "parameters": parameters()}}],
            "tool_choice": "required", "parallel_tool_calls": false});
        let first = server.chat(&body).json();
        let message = &first["choices"][0]["message"];
        let call = message["tool_calls"][0].clone();
        let arguments = &call["function"]["arguments"];
        assert!(arguments.as_str().expect("text").contains(" :   "), "{first}");
        // Reasoning is what most clients do not send back.
        let sent_back = |id: &Value| {
            let function = json!({"name": "between", "arguments": reprinted(arguments)});
            json!({"role": "assistant", "content": null, "tool_calls":
                [{"id": id, "type": "function", "function": function}]})
        };
        let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "yes"});
        body["messages"] = json!([user, sent_back(&call["id"]), result]);
        body["tool_choice"] = json!("auto");
        let second = server.chat(&body).json();
        let written = count(&first["usage"], "/prompt_tokens") + count(&first["usage"], "/completion_tokens");
        let cached = count(&second["usage"], "/prompt_tokens_details/cached_tokens");
        assert!(cached + UNREAD >= written, "{cached} of {written} tokens were cached: {second}");
        // A turn of somebody else's is printed by the template, and the cache ends where that differs.
        body["messages"][1] = sent_back(&json!("call_0_0"));
        let other = server.chat(&body).json();
        let cached = count(&other["usage"], "/prompt_tokens_details/cached_tokens");
        assert!(cached + UNREAD < written, "{cached} of {written} tokens were cached: {other}");
    }
}

#[test]
fn so_does_one_over_messages() {
    let server = Server::start(&[]);
    let user = json!({"role": "user", "content": QUESTION});
    let mut body = json!({"messages": [user], "max_tokens": 300, "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
        "tools": [{"name": "between", "input_schema": parameters()}]});
    let post = |body: &Value| server.request("POST", "/v1/messages", &body.to_string()).json();
    let first = post(&body);
    let call = &first["content"][0];
    assert_eq!(call["type"], "tool_use", "{first}");
    let result = json!({"type": "tool_result", "tool_use_id": call["id"], "content": "yes"});
    body["messages"] =
        json!([user, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]);
    body["tool_choice"] = json!({"type": "auto"});
    let second = post(&body);
    let read = count(&first["usage"], "/input_tokens") + count(&first["usage"], "/cache_read_input_tokens");
    let written = read + count(&first["usage"], "/output_tokens");
    let cached = count(&second["usage"], "/cache_read_input_tokens");
    assert!(cached + UNREAD >= written, "{cached} of {written} tokens were cached: {second}");
}

#[test]
fn so_does_one_over_responses_by_id_or_by_items() {
    let server = Server::start(&[]);
    let user = json!({"role": "user", "content": QUESTION});
    let tool = json!({"type": "function", "name": "between", "parameters": parameters()});
    let body = json!({"input": [user], "max_output_tokens": 300, "tools": [tool], "tool_choice": "required",
        "parallel_tool_calls": false, "reasoning": {"effort": "high"}, "thinking_budget": 20});
    let post = |body: &Value| server.request("POST", "/v1/responses", &body.to_string()).json();
    let first = post(&body);
    let mut call = first["output"][1].clone();
    call["arguments"] = json!(reprinted(&call["arguments"]));
    let result = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "yes"});
    let mut by_id = body.clone();
    by_id["tool_choice"] = json!("auto");
    let mut by_items = by_id.clone();
    by_id["input"] = json!([result]);
    by_id["previous_response_id"] = first["id"].clone();
    by_items["input"] = json!([user, call, result]);
    let written = count(&first["usage"], "/total_tokens");
    for next in [by_id, by_items] {
        let second = post(&next);
        let cached = count(&second["usage"], "/input_tokens_details/cached_tokens");
        assert!(cached + UNREAD >= written, "{cached} of {written} tokens were cached: {second}");
    }
}
