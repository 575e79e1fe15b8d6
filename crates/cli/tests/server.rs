//! `lily-server` on the demo, over plain HTTP: what a client can rely on.

#[path = "support/http.rs"]
mod http;
#[path = "support/process.rs"]
mod process;

use http::{Server, question, with};
use process::{lily, run, text};
use serde_json::{Value, json};

const SUM: &str = "What is 17 + 25?";

/// Joins a stream of one choice to the same shape as a whole answer's message and finish reason.
fn joined(events: &[Value]) -> (String, String, Vec<Value>, Value) {
    let (mut content, mut reasoning, mut calls, mut finish) =
        (String::new(), String::new(), vec![], Value::Null);
    for choice in events.iter().flat_map(|event| event["choices"].as_array().expect("choices")) {
        let delta = &choice["delta"];
        content.push_str(delta["content"].as_str().unwrap_or_default());
        reasoning.push_str(delta["reasoning_content"].as_str().unwrap_or_default());
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().expect("a place") as usize;
            if index == calls.len() {
                calls.push(json!({"name": call["function"]["name"], "arguments": ""}));
            }
            let arguments = call["function"]["arguments"].as_str().expect("arguments");
            let known = calls[index]["arguments"].as_str().unwrap_or_default();
            calls[index]["arguments"] = json!(format!("{known}{arguments}"));
        }
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
    }
    (content, reasoning, calls, finish)
}

fn whole(completion: &Value) -> (String, String, Vec<Value>, Value) {
    let choice = &completion["choices"][0];
    let message = &choice["message"];
    let text = |field: &str| message[field].as_str().unwrap_or_default().to_string();
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    let calls = calls.map(|call| call["function"].clone()).collect();
    (text("content"), text("reasoning_content"), calls, choice["finish_reason"].clone())
}

#[test]
fn an_answer_is_the_same_whole_streamed_and_in_the_terminal() {
    let server = Server::start(&[]);
    for fields in [json!({}), json!({"reasoning_effort": "high"}), json!({"max_tokens": 2})] {
        let body = with(question(SUM), fields);
        let completion = server.chat(&body).json();
        let options = json!({"stream": true, "stream_options": {"include_usage": true}});
        let events = server.chat(&with(body, options)).events();
        assert_eq!(joined(&events), whole(&completion));
        let (last, others) = events.split_last().expect("there are events");
        // The second asker finds in the cache what the first one's prompt left there.
        let counts = |usage: &Value| with(usage.clone(), json!({"prompt_tokens_details": null}));
        assert_eq!(counts(&last["usage"]), counts(&completion["usage"]));
        assert!(others.iter().all(|event| event["usage"].is_null()));
        assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    }
    let completion = server.chat(&question(SUM)).json();
    assert_eq!(whole(&completion), ("42".into(), String::new(), vec![], "stop".into()));

    let output = run(&mut lily(&["chat", SUM, "--max-tokens", "200"]));
    assert_eq!(text(&output.stdout), "42\n");
    assert!(text(&output.stderr).contains("--model-path"), "it says that this is the demo");
}

#[test]
fn the_model_calls_a_declared_tool_and_answers_from_its_result() {
    let server = Server::start(&[]);
    let tools = json!([{"type": "function", "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "The city."}},
            "required": ["city"]}}}]);
    let body = with(question("What is the weather in Rome?"), json!({"tools": tools}));
    let completion = server.chat(&body).json();
    let events = server.chat(&with(body.clone(), json!({"stream": true}))).events();
    assert_eq!(joined(&events), whole(&completion));
    let (_, _, calls, finish) = whole(&completion);
    assert_eq!(finish, "tool_calls");
    assert_eq!(calls[0]["name"], "get_weather");
    let arguments: Value =
        serde_json::from_str(calls[0]["arguments"].as_str().expect("a string")).expect("JSON");
    assert_eq!(arguments, json!({"city": "Rome"}));

    let message = completion["choices"][0]["message"].clone();
    let id = message["tool_calls"][0]["id"].clone();
    let result = json!({"role": "tool", "tool_call_id": id, "content": "{\"temperature\": 21}"});
    let mut messages = body["messages"].as_array().expect("messages").clone();
    messages.extend([message, result]);
    let (answer, _, calls, finish) = whole(&server.chat(&with(body, json!({"messages": messages}))).json());
    assert!(calls.is_empty() && finish == "stop" && answer.contains("21"), "{answer}");
}

#[test]
fn choices_are_numbered_and_repeat_with_their_seed() {
    let server = Server::start(&[]);
    let body =
        with(question("Tell me a story."), json!({"n": 3, "temperature": 2.0, "seed": 11, "max_tokens": 12}));
    let contents = |completion: &Value| -> Vec<Value> {
        let choices = completion["choices"].as_array().expect("choices");
        choices.iter().map(|choice| json!([choice["index"], choice["message"]["content"]])).collect()
    };
    let first = server.chat(&body).json();
    assert_eq!(contents(&first), contents(&server.chat(&body).json()));
    assert_eq!(first["choices"].as_array().map(Vec::len), Some(3));
    let streamed = server.chat(&with(body, json!({"stream": true}))).events();
    for (index, expected) in contents(&first).iter().enumerate() {
        let of_choice = |choice: &&Value| choice["index"] == index;
        let choices = streamed.iter().flat_map(|event| event["choices"].as_array().expect("choices"));
        let text: String =
            choices.filter(of_choice).filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(json!([index, text]), *expected);
    }
}

#[test]
fn log_probabilities_come_for_every_token_of_the_answer() {
    let server = Server::start(&[]);
    let body = with(question(SUM), json!({"logprobs": true, "top_logprobs": 3}));
    let completion = server.chat(&body).json();
    let scored = completion["choices"][0]["logprobs"]["content"].as_array().expect("logprobs").clone();
    for position in &scored {
        let top = position["top_logprobs"].as_array().expect("alternatives");
        assert_eq!(top.len(), 3);
        assert_eq!(top[0]["token"], position["token"], "greedy takes the likeliest");
    }
    let spelled: String = scored.iter().filter_map(|position| position["token"].as_str()).collect();
    assert!(spelled.starts_with("42"), "{spelled}");
    let events = server.chat(&with(body, json!({"stream": true}))).events();
    let streamed = events.iter().filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(streamed.flatten().cloned().collect::<Vec<_>>(), scored);
}

#[test]
fn what_is_wrong_is_said_in_the_protocols_shape_and_by_its_field() {
    let server = Server::start(&["--ctx-len", "256"]);
    let model = server.request("GET", "/v1/models", "").json()["data"][0]["id"].clone();
    let chat = "/v1/chat/completions";
    let body = |fields: Value| with(question("hi"), fields).to_string();
    let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]);
    let long = json!([{"role": "user", "content": "one two three ".repeat(200)}]);
    let no_question = json!([{"role": "system", "content": "Be brief."}]);
    let cases = [
        ("GET", "/nothing", String::new(), 404, Value::Null, "unknown_url"),
        ("GET", "/v1/models/gpt", String::new(), 404, Value::Null, "model_not_found"),
        ("GET", chat, String::new(), 405, Value::Null, "method_not_allowed"),
        ("POST", chat, "{\"messages\": [".into(), 400, Value::Null, "invalid_json"),
        ("POST", chat, "[]".into(), 400, Value::Null, "invalid_json"),
        ("POST", chat, " ".repeat(17 << 20), 413, Value::Null, "request_too_large"),
        ("POST", chat, "{}".into(), 400, json!("messages"), "missing_required_parameter"),
        ("POST", chat, body(json!({"model": "gpt"})), 404, json!("model"), "model_not_found"),
        ("POST", chat, body(json!({"temperature": "hot"})), 400, json!("temperature"), "invalid_type"),
        ("POST", chat, body(json!({"top_p": 2})), 400, json!("top_p"), "invalid_value"),
        ("POST", chat, body(json!({"presence_penalty": 3})), 400, json!("presence_penalty"), "invalid_value"),
        (
            "POST",
            chat,
            body(json!({"logit_bias": {"99999999": 1}})),
            400,
            json!("logit_bias"),
            "invalid_value",
        ),
        ("POST", chat, body(json!({"stop": [""]})), 400, json!("stop"), "invalid_value"),
        ("POST", chat, body(json!({"prediction": {}})), 400, json!("prediction"), "unsupported_parameter"),
        ("POST", chat, body(json!({"messages": no_question})), 400, json!("messages"), "invalid_value"),
        ("POST", chat, body(json!({"messages": long})), 400, json!("messages"), "context_length_exceeded"),
        (
            "POST",
            chat,
            body(json!({"messages": image})),
            400,
            json!("messages[0].content[0].type"),
            "unsupported_parameter",
        ),
    ];
    for (method, path, body, status, param, code) in cases {
        let response = server.request(method, path, &body);
        let error = &response.json()["error"];
        let case = format!("{method} {path} {:.80}: {error}", body);
        assert_eq!(response.status, status, "{case}");
        assert_eq!(error["param"], param, "{case}");
        assert_eq!(error["code"], code, "{case}");
        assert_eq!(error["type"], "invalid_request_error", "{case}");
        let message = error["message"].as_str().expect("a message");
        let field = param.as_str().filter(|field| !matches!(*field, "messages" | "model"));
        assert!(!message.is_empty() && field.is_none_or(|field| message.contains(field)), "{case}");
    }
    let reply = server.request("POST", chat, &body(json!({"messages": long}))).json();
    let message = reply["error"]["message"].as_str().expect("a message");
    assert!(message.contains("256"), "{message}");
    assert_eq!(server.chat(&with(question("hi"), json!({"model": model}))).status, 200);
}

#[test]
fn a_client_that_goes_away_takes_its_work_with_it() {
    let server = Server::start(&[]);
    let endless = with(question("Tell me a story."), json!({"ignore_eos": true, "max_tokens": 30_000}));
    for stream in [true, false] {
        let body = with(endless.clone(), json!({"stream": stream})).to_string();
        let mut connection = server.open("POST", "/v1/chat/completions", "", body.as_bytes());
        if stream {
            connection.first_event();
        }
        server.wait_until_running(1);
        drop(connection);
        server.wait_until_running(0);
    }
}

#[test]
fn more_than_the_queue_holds_is_refused_for_now() {
    let server = Server::start(&[]);
    let body = with(question("Tell me a story."), json!({"ignore_eos": true, "max_tokens": 30_000, "n": 16}));
    let streamed = with(body.clone(), json!({"stream": true})).to_string();
    let open = || server.open("POST", "/v1/chat/completions", "", streamed.as_bytes());
    let mut connections: Vec<_> = (0..4).map(|_| open()).collect();
    connections.iter_mut().for_each(|connection| drop(connection.first_event()));
    let refused = server.chat(&body);
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (429, &json!("rate_limit_exceeded")));
    assert!(refused.headers.iter().any(|header| header.starts_with("retry-after: ")), "{refused:?}");
    drop(connections);
    server.wait_until_running(0);
    assert_eq!(server.chat(&question(SUM)).status, 200);
}

#[test]
fn what_was_read_before_is_not_read_again_not_even_by_the_next_server() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let flags = ["--cache-dir", dir.path().to_str().expect("the path is UTF-8")];
    let mut body = question("What is 17 + 25?");
    let system = json!({"role": "system", "content": "You are precise. ".repeat(30)});
    body["messages"].as_array_mut().expect("messages").insert(0, system);
    let ask = |server: &Server| {
        let reply = server.chat(&body).json();
        let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number");
        (cached, reply["usage"]["prompt_tokens"].as_u64().expect("a number"), whole(&reply).0)
    };
    let mut server = Server::start(&flags);
    let (cached, prompt, answer) = ask(&server);
    assert_eq!(cached, 0);
    let (again, _, same) = ask(&server);
    // All but the beginning of the model's turn.
    assert!(prompt > again && again > prompt - 20, "{again} of {prompt}");
    assert_eq!(same, answer);
    server.terminate();
    assert_eq!(server.exit_code(), Some(0));
    assert_eq!(ask(&Server::start(&flags)), (again, prompt, answer.clone()));
    assert_eq!(ask(&Server::start(&["--cache-bytes", "0"])), (0, prompt, answer));
}

#[test]
fn a_key_is_asked_for_where_one_was_set() {
    let server = Server::start(&["--api-key", "secret"]);
    let refused = server.request("GET", "/v1/models", "");
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (401, &json!("invalid_api_key")));
    let ask = |header: &str| server.open("GET", "/v1/models", header, b"").response().status;
    assert_eq!(ask("Authorization: Bearer secreT\r\n"), 401);
    assert_eq!(ask("Authorization: Bearer secret\r\n"), 200);
    assert_eq!(server.request("GET", "/health", "").status, 200);
}

#[test]
fn sigterm_lets_an_answer_finish_and_ends_with_success() {
    let mut server = Server::start(&[]);
    let body = with(question("Count from 1 to 9."), json!({"stream": true})).to_string();
    let mut connection = server.open("POST", "/v1/chat/completions", "", body.as_bytes());
    connection.first_event();
    server.terminate();
    let mut last = String::new();
    while let Some(line) = connection.line() {
        if line.starts_with("data: ") {
            last = line;
        }
    }
    assert_eq!(last, "data: [DONE]");
    assert_eq!(server.exit_code(), Some(0));
}
