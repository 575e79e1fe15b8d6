//! Constrained answers and tool calls over HTTP: what a client may ask for and what it gets.

#[path = "support/http.rs"]
mod http;

use http::Server;
use serde_json::{Value, json};

fn body(text: &str, fields: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": text}], "max_tokens": 400});
    for (name, value) in fields.as_object().expect("fields are an object") {
        body[name] = value.clone();
    }
    body
}

fn content(completion: &Value) -> &str {
    completion["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{completion}"))
}

fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["city"]}}},
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"]}}},
    ])
}

/// Calls of a whole answer, arguments parsed.
fn calls(completion: &Value) -> Vec<(String, Value)> {
    let calls = completion["choices"][0]["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
    calls
        .iter()
        .map(|call| {
            let function = &call["function"];
            let arguments = function["arguments"].as_str().expect("arguments are text");
            let name = function["name"].as_str().expect("a name").to_string();
            (name, serde_json::from_str(arguments).unwrap_or_else(|error| panic!("{error}: {arguments}")))
        })
        .collect()
}

#[test]
fn every_way_to_ask_for_a_form_gets_it() {
    let server = Server::start(&[]);
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"], "additionalProperties": false});
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema}});
    for seed in 0..4 {
        for fields in [
            json!({"response_format": format}),
            json!({"response_format": format, "enable_thinking": true, "thinking_budget": 20}),
            json!({"guided_json": schema}),
            json!({"structured_outputs": {"json": schema.to_string()}}),
        ] {
            let body = body("A number.", fields);
            let mut wild = body.clone();
            wild["temperature"] = json!(2.0);
            wild["seed"] = json!(seed);
            for body in [body, wild] {
                let completion = server.chat(&body).json();
                let value: Value = serde_json::from_str(content(&completion)).expect("JSON");
                assert!(
                    value["n"].is_i64() && value.as_object().is_some_and(|o| o.len() == 1),
                    "{completion}"
                );
                assert_eq!(completion["choices"][0]["finish_reason"], "stop");
            }
        }
    }
    for fields in [
        json!({"regex": "(yes|no)!"}),
        json!({"grammar": "start: (\"yes\" | \"no\") \"!\""}),
        json!({"guided_choice": ["yes!", "no!"]}),
        json!({"structured_outputs": {"regex": "(yes|no)!"}}),
    ] {
        let completion = server.chat(&body("Is it?", fields)).json();
        assert!(matches!(content(&completion), "yes!" | "no!"), "{completion}");
    }
    let object = server.chat(&body("JSON.", json!({"response_format": {"type": "json_object"}}))).json();
    assert!(content(&object).starts_with('{'), "{object}");
    let cut = json!({"regex": "[a-z]{50}", "max_tokens": 2});
    assert_eq!(server.chat(&body("Hi", cut)).json()["choices"][0]["finish_reason"], "length");
}

#[test]
fn what_cannot_be_enforced_names_its_field() {
    let server = Server::start(&[]);
    let schema =
        |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let tool = json!([{"type": "function", "function": {"name": "f", "strict": true, "parameters":
        {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}}}}]);
    for (fields, field) in [
        (json!({"response_format": schema(json!(7))}), "response_format.json_schema.schema"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
        (json!({"regex": "a("}), "regex"),
        (json!({"grammar": "start"}), "grammar"),
        (json!({"guided_regex": "["}), "guided_regex"),
        (json!({"structured_outputs": {"grammar": "x"}}), "structured_outputs.grammar"),
        (json!({"regex": "a", "grammar": "start: \"a\""}), "grammar"),
        (json!({"regex": "a", "tools": tools()}), "regex"),
        (json!({"tools": tool}), "tools"),
    ] {
        let response = server.chat(&body("Hi", fields));
        assert_eq!(response.status, 400, "{response:?}");
        assert_eq!(response.json()["error"]["param"], field, "{response:?}");
    }
}

#[test]
fn tool_choice_is_enforced() {
    let server = Server::start(&[]);
    let named = json!({"type": "function", "function": {"name": "add"}});
    let allowed = json!({"type": "allowed_tools", "allowed_tools": {"mode": "required",
        "tools": [{"type": "function", "function": {"name": "add"}}]}});
    for seed in 0..4 {
        let ask = |choice: Value, parallel: bool| {
            let fields = json!({"tools": tools(), "tool_choice": choice, "temperature": 2.0, "seed": seed,
                "parallel_tool_calls": parallel});
            server.chat(&body("What is 17 + 25?", fields)).json()
        };
        for choice in [json!("required"), named.clone(), allowed.clone()] {
            let completion = ask(choice.clone(), false);
            let calls = calls(&completion);
            assert_eq!(calls.len(), 1, "{completion}");
            assert_eq!(completion["choices"][0]["finish_reason"], "tool_calls");
            assert!(completion["choices"][0]["message"]["content"].is_null(), "{completion}");
            assert!(choice == "required" || calls[0].0 == "add", "{completion}");
        }
        assert!(calls(&ask(json!("none"), true)).is_empty());
    }
}

#[test]
fn a_streamed_call_gives_its_name_first_and_then_its_arguments() {
    let server = Server::start(&[]);
    let fields = json!({"tools": tools(), "tool_choice": "required", "parallel_tool_calls": false});
    let question = body("What is the weather in Rome?", fields);
    let whole = calls(&server.chat(&question).json());
    let mut streamed = question;
    streamed["stream"] = json!(true);
    let events = server.chat(&streamed).events();
    let deltas: Vec<&Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array())
        .flatten()
        .collect();
    assert!(deltas.len() > 1, "{events:?}");
    assert_eq!(deltas[0]["function"]["name"], whole[0].0);
    assert!(deltas[0]["id"].is_string());
    assert!(deltas[1..].iter().all(|delta| delta.get("id").is_none() && delta["index"] == 0), "{deltas:?}");
    let arguments: String =
        deltas.iter().filter_map(|delta| delta["function"]["arguments"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&arguments).expect("JSON"), whole[0].1);
}
