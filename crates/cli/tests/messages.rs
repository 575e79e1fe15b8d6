//! Anthropic's Messages protocol on the demo, over plain HTTP: what a client can rely on.

#[path = "support/http.rs"]
mod http;

use http::{Response, Server, question, with};
use serde_json::{Value, json};

const MESSAGES: &str = "/v1/messages";
/// The demo's answer is a sentence with the word "tiny".
const WHO: &str = "Hello! Who are you?";
const COUNT: &str = "/v1/messages/count_tokens";

fn weather() -> Value {
    json!([{
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string", "description": "The city."}},
            "required": ["city"]},
        "cache_control": {"type": "ephemeral"},
    }])
}

fn post(server: &Server, path: &str, body: &Value) -> Response {
    server.request("POST", path, &body.to_string())
}

/// What does not depend on who asked before: ids are unique, and the cache has what earlier askers left.
fn comparable(mut message: Value) -> Value {
    message["id"] = Value::Null;
    for block in message["content"].as_array_mut().expect("content") {
        if block["type"] == "tool_use" {
            block["id"] = Value::Null;
        }
    }
    let usage = &mut message["usage"];
    let read = usage["input_tokens"].as_u64().expect("a count");
    let cached = usage["cache_read_input_tokens"].as_u64().expect("a count");
    usage["input_tokens"] = json!(read + cached);
    usage["cache_read_input_tokens"] = Value::Null;
    message
}

/// Follows the events of a stream as a client does, holds them to their order, and returns the message.
fn joined(events: &[(String, Value)]) -> Value {
    let mut message = Value::Null;
    let mut open: Option<(usize, String)> = None;
    let mut stopped = false;
    for (name, data) in events {
        assert_eq!(data["type"], name.as_str());
        assert!(!stopped, "{name} after message_stop");
        match name.as_str() {
            "message_start" => {
                assert!(message.is_null(), "message_start comes first and once");
                message = data["message"].clone();
                assert_eq!((&message["content"], &message["stop_reason"]), (&json!([]), &Value::Null));
            }
            "content_block_start" => {
                let content = message["content"].as_array_mut().expect("message_start comes first");
                assert_eq!((&open, data["index"].as_u64()), (&None, Some(content.len() as u64)));
                open = Some((content.len(), String::new()));
                content.push(data["content_block"].clone());
            }
            "content_block_delta" => {
                let (index, json) = open.as_mut().expect("a block is open");
                assert_eq!(data["index"].as_u64(), Some(*index as u64));
                let (block, delta) = (&mut message["content"][*index], &data["delta"]);
                let field = match delta["type"].as_str().expect("a delta has a type") {
                    "text_delta" => "text",
                    "thinking_delta" => "thinking",
                    "signature_delta" => "signature",
                    "input_json_delta" => {
                        json.push_str(delta["partial_json"].as_str().expect("text"));
                        continue;
                    }
                    other => panic!("{other}"),
                };
                let so_far = block[field].as_str().expect("a block of the delta's kind is open").to_string();
                block[field] = json!(so_far + delta[field].as_str().expect("text"));
            }
            "content_block_stop" => {
                let (index, json) = open.take().expect("a block is open");
                assert_eq!(data["index"].as_u64(), Some(index as u64));
                if message["content"][index]["type"] == "tool_use" {
                    message["content"][index]["input"] =
                        serde_json::from_str(&json).expect("JSON when joined");
                }
            }
            "message_delta" => {
                assert_eq!(open, None);
                for (field, value) in data["delta"].as_object().expect("an object") {
                    message[field] = value.clone();
                }
                message["usage"] = data["usage"].clone();
            }
            "message_stop" => stopped = true,
            "ping" => {}
            other => panic!("{other}"),
        }
    }
    assert!(stopped, "message_stop comes last");
    message
}

#[test]
fn an_answer_is_the_same_whole_and_streamed() {
    let server = Server::start(&[]);
    let sum = question("What is 17 + 25?");
    let bodies = [
        sum.clone(),
        with(sum.clone(), json!({"thinking": {"type": "adaptive"}})),
        with(sum.clone(), json!({"thinking": {"type": "adaptive", "display": "omitted"}})),
        with(sum.clone(), json!({"max_tokens": 2})),
        with(question(WHO), json!({"stop_sequences": ["never", " tiny"]})),
        with(question("What is the weather in Rome?"), json!({"tools": weather()})),
        with(
            question("Tell me a story."),
            json!({"temperature": 1.0, "top_k": 40, "seed": 7, "max_tokens": 40}),
        ),
    ];
    for body in bodies {
        let whole = post(&server, MESSAGES, &body).json();
        let events = post(&server, MESSAGES, &with(body, json!({"stream": true}))).named_events();
        assert_eq!(comparable(joined(&events)), comparable(whole));
    }
    let answer = post(&server, MESSAGES, &sum).json();
    assert_eq!(answer["content"], json!([{"type": "text", "text": "42"}]));
    assert_eq!((&answer["type"], &answer["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(answer["stop_reason"], "end_turn");
}

#[test]
fn why_an_answer_ended_is_said_in_the_protocols_words() {
    let server = Server::start(&["--ctx-len", "256"]);
    let end = |body: &Value| {
        let answer = post(&server, MESSAGES, body).json();
        (answer["stop_reason"].clone(), answer["stop_sequence"].clone())
    };
    let who = question(WHO);
    assert_eq!(end(&who), (json!("end_turn"), Value::Null));
    assert_eq!(end(&with(who.clone(), json!({"max_tokens": 2}))), (json!("max_tokens"), Value::Null));
    let stops = json!({"stop_sequences": ["never", " tiny"]});
    assert_eq!(end(&with(who.clone(), stops)), (json!("stop_sequence"), json!(" tiny")));
    let endless = with(who, json!({"max_tokens": 100_000, "logit_bias": eos_banned(&server)}));
    assert_eq!(end(&endless), (json!("model_context_window_exceeded"), Value::Null));
}

/// A bias against every marker that ends an answer.
fn eos_banned(server: &Server) -> Value {
    let markers = json!({"prompt": "<|im_end|><|endoftext|>"});
    let tokens = post(server, "/tokenize", &markers).json()["tokens"].clone();
    let bias = tokens.as_array().expect("tokens").iter().map(|id| (id.to_string(), json!(-100)));
    Value::Object(bias.collect())
}

#[test]
fn the_model_calls_a_declared_tool_and_answers_from_its_result() {
    let server = Server::start(&[]);
    let body = with(question("What is the weather in Rome?"), json!({"tools": weather()}));
    let call = post(&server, MESSAGES, &body).json();
    assert_eq!(call["stop_reason"], "tool_use");
    let block = call["content"].as_array().and_then(|content| content.last()).expect("there is a block");
    assert_eq!((&block["name"], &block["input"]), (&json!("get_weather"), &json!({"city": "Rome"})));

    let result = json!({"type": "tool_result", "tool_use_id": block["id"],
        "content": [{"type": "text", "text": "{\"temperature\": 21}"}]});
    let mut messages = body["messages"].as_array().expect("messages").clone();
    messages.push(json!({"role": "assistant", "content": call["content"]}));
    messages.push(json!({"role": "user", "content": [result]}));
    let answer = post(&server, MESSAGES, &with(body.clone(), json!({"messages": messages}))).json();
    let text = answer["content"][0]["text"].as_str().expect("text");
    assert!(answer["stop_reason"] == "end_turn" && text.contains("21"), "{answer}");

    let hidden = with(body, json!({"tool_choice": {"type": "none"}}));
    assert_ne!(post(&server, MESSAGES, &hidden).json()["stop_reason"], "tool_use");
}

#[test]
fn a_call_can_be_forced_and_a_schema_too() {
    let server = Server::start(&[]);
    let sum = with(question("What is 17 + 25?"), json!({"tools": weather(), "max_tokens": 300}));
    for choice in [json!({"type": "any"}), json!({"type": "tool", "name": "get_weather"})] {
        let body = with(sum.clone(), json!({"tool_choice": choice}));
        let whole = post(&server, MESSAGES, &body).json();
        assert_eq!(whole["content"][0]["name"], "get_weather", "{whole}");
        assert!(whole["stop_reason"] == "max_tokens" || whole["content"][0]["input"]["city"].is_string());
        let events = post(&server, MESSAGES, &with(body, json!({"stream": true}))).named_events();
        // Of a call that was cut off a client of a stream has a part that is no JSON yet.
        if whole["stop_reason"] == "tool_use" {
            assert_eq!(comparable(joined(&events)), comparable(whole));
        }
    }
    let schema = json!({"type": "object", "properties": {"sum": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["sum"], "additionalProperties": false});
    let format = json!({"output_config": {"format": {"type": "json_schema", "schema": schema}}});
    let answer = post(&server, MESSAGES, &with(question("What is 17 + 25?"), format)).json();
    let text = answer["content"][0]["text"].as_str().expect("text");
    let value: Value = serde_json::from_str(text).expect("JSON");
    assert!(value["sum"].is_u64(), "{text}");
}

#[test]
fn a_thinking_budget_closes_the_block() {
    let server = Server::start(&[]);
    let thinking = json!({"thinking": {"type": "enabled", "budget_tokens": 8}});
    let answer = post(&server, MESSAGES, &with(question("What is 17 + 25?"), thinking)).json();
    let [thinking, text] = &answer["content"].as_array().expect("content")[..] else { panic!("{answer}") };
    assert_eq!((&thinking["type"], &text["type"]), (&json!("thinking"), &json!("text")));
    let spent = answer["usage"]["output_tokens_details"]["thinking_tokens"].as_u64().expect("a count");
    // The words that close the block count as well.
    assert!((8..16).contains(&spent), "{answer}");
}

#[test]
fn thinking_is_a_block_of_its_own_that_clients_may_send_back() {
    let server = Server::start(&[]);
    let body = with(question("What is 17 + 25?"), json!({"thinking": {"type": "adaptive"}}));
    let answer = post(&server, MESSAGES, &body).json();
    let [thinking, text] = &answer["content"].as_array().expect("content")[..] else { panic!("{answer}") };
    assert!(thinking["thinking"].as_str().is_some_and(|thinking| !thinking.is_empty()), "{answer}");
    assert!(thinking["signature"].as_str().is_some_and(|signature| !signature.is_empty()), "{answer}");
    assert_eq!(text, &json!({"type": "text", "text": "42"}));
    let spent = answer["usage"]["output_tokens_details"]["thinking_tokens"].as_u64().expect("a count");
    assert!(spent > 0 && spent < answer["usage"]["output_tokens"].as_u64().expect("a count"), "{answer}");

    let mut messages = body["messages"].as_array().expect("messages").clone();
    messages.push(json!({"role": "assistant", "content": answer["content"]}));
    messages.push(json!({"role": "user", "content": "What is 2 + 2?"}));
    let again = post(&server, MESSAGES, &with(question(""), json!({"messages": messages}))).json();
    assert_eq!(again["content"], json!([{"type": "text", "text": "4"}]));
}

#[test]
fn the_assistants_last_turn_is_written_on() {
    let server = Server::start(&[]);
    let whole = post(&server, MESSAGES, &question(WHO)).json();
    let text = whole["content"][0]["text"].as_str().expect("text");
    let (begun, rest) = text.split_at(text.find(" tiny").expect("it says what it is"));
    let messages = json!([{"role": "user", "content": WHO}, {"role": "assistant", "content": begun}]);
    let continued = post(&server, MESSAGES, &with(question(""), json!({"messages": messages}))).json();
    assert_eq!(continued["content"], json!([{"type": "text", "text": rest}]));
}

#[test]
fn counted_tokens_are_those_that_an_answer_reads() {
    let server = Server::start(&[]);
    let body = with(
        question("What is the weather in Rome?"),
        json!({"tools": weather(), "system": [{"type": "text", "text": "You are precise. ".repeat(30)}]}),
    );
    let usage = || post(&server, MESSAGES, &body).json()["usage"].clone();
    let number = |value: &Value| value.as_u64().expect("a count");
    let (first, second) = (usage(), usage());
    let mut unbounded = body.clone();
    unbounded.as_object_mut().expect("an object").remove("max_tokens");
    let count = number(&post(&server, COUNT, &unbounded).json()["input_tokens"]);
    assert_eq!(number(&first["cache_read_input_tokens"]), 0);
    assert_eq!(number(&first["input_tokens"]), count);
    assert!(number(&second["cache_read_input_tokens"]) > count - 20, "{second}");
    assert_eq!(number(&second["input_tokens"]) + number(&second["cache_read_input_tokens"]), count);
    assert_eq!(first["output_tokens"], second["output_tokens"]);
}

#[test]
fn what_is_wrong_is_said_in_the_protocols_shape() {
    let server = Server::start(&["--ctx-len", "256"]);
    let body = |fields: Value| with(question("hi"), fields).to_string();
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    let long = json!([{"role": "user", "content": "one two three ".repeat(200)}]);
    let opened = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    let other = json!({"tools": weather(), "tool_choice": {"type": "tool", "name": "get_time"}});
    let invalid = "invalid_request_error";
    let cases = [
        ("GET", MESSAGES, String::new(), 405, invalid, ""),
        ("GET", "/v1/messages/batches", String::new(), 404, "not_found_error", ""),
        ("POST", MESSAGES, "{".into(), 400, invalid, "JSON"),
        ("POST", MESSAGES, " ".repeat(17 << 20), 413, "request_too_large", ""),
        ("POST", MESSAGES, body(json!({"model": "claude"})), 404, "not_found_error", "claude"),
        ("POST", MESSAGES, body(json!({"max_tokens": null})), 400, invalid, "max_tokens"),
        ("POST", MESSAGES, body(json!({"top_p": 2})), 400, invalid, "top_p"),
        ("POST", MESSAGES, body(json!({"stop_sequences": [""]})), 400, invalid, "stop_sequences"),
        ("POST", MESSAGES, body(json!({"messages": image})), 400, invalid, "messages[0].content[0].type"),
        ("POST", MESSAGES, body(json!({"messages": long})), 400, invalid, "256"),
        ("POST", MESSAGES, body(other), 400, invalid, "tool_choice.name"),
        (
            "POST",
            MESSAGES,
            body(json!({"messages": opened, "thinking": {"type": "adaptive"}})),
            400,
            invalid,
            "thinking",
        ),
        ("POST", COUNT, "{}".into(), 400, invalid, "messages"),
    ];
    for (method, path, body, status, kind, named) in cases {
        let response = server.request(method, path, &body);
        let reply = response.json();
        let case = format!("{method} {path} {:.80}: {reply}", body);
        assert_eq!(response.status, status, "{case}");
        assert_eq!((&reply["type"], &reply["error"]["type"]), (&json!("error"), &json!(kind)), "{case}");
        assert!(reply["error"]["message"].as_str().is_some_and(|message| message.contains(named)), "{case}");
    }
}

#[test]
fn a_key_may_come_in_either_header() {
    let server = Server::start(&["--api-key", "secret"]);
    let body = question("What is 17 + 25?").to_string();
    let ask = |headers: &str| server.open("POST", MESSAGES, headers, body.as_bytes()).response();
    for headers in ["", "x-api-key: secreT\r\n", "Authorization: Bearer other\r\n"] {
        let refused = ask(headers);
        assert_eq!((refused.status, &refused.json()["error"]["type"]), (401, &json!("authentication_error")));
    }
    for headers in [
        "x-api-key: secret\r\nanthropic-version: 2023-06-01\r\n",
        "Authorization: Bearer secret\r\n",
        "Authorization: Bearer secret\r\nx-api-key: none\r\n",
    ] {
        assert_eq!(ask(headers).status, 200, "{headers}");
    }
}

#[test]
fn more_than_the_queue_holds_is_refused_for_now() {
    let server = Server::start(&[]);
    let chat = with(
        question("Tell me a story."),
        json!({"ignore_eos": true, "max_tokens": 30_000, "n": 16, "stream": true}),
    );
    let open = || server.open("POST", "/v1/chat/completions", "", chat.to_string().as_bytes());
    let mut connections: Vec<_> = (0..4).map(|_| open()).collect();
    connections.iter_mut().for_each(|connection| drop(connection.first_event()));
    // 64 of 72 places are taken.
    let one = with(question("Tell me a story."), json!({"max_tokens": 30_000, "stream": true})).to_string();
    let more: Vec<_> = (0..8).map(|_| server.open("POST", MESSAGES, "", one.as_bytes())).collect();
    server.wait_until("waiting", 64);
    let refused = server.request("POST", MESSAGES, &one);
    assert_eq!((refused.status, &refused.json()["error"]["type"]), (429, &json!("rate_limit_error")));
    assert!(refused.headers.iter().any(|header| header.starts_with("retry-after: ")), "{refused:?}");
    drop((connections, more));
    server.wait_until_running(0);
    assert_eq!(post(&server, MESSAGES, &question("What is 17 + 25?")).status, 200);
}

#[test]
fn a_client_that_goes_away_takes_its_work_with_it() {
    let server = Server::start(&[]);
    let fields = json!({"max_tokens": 30_000, "logit_bias": eos_banned(&server)});
    let endless = with(question("Tell me a story."), fields);
    for stream in [true, false] {
        let body = with(endless.clone(), json!({"stream": stream})).to_string();
        let mut connection = server.open("POST", MESSAGES, "", body.as_bytes());
        if stream {
            connection.first_event();
        }
        server.wait_until_running(1);
        drop(connection);
        server.wait_until_running(0);
    }
}
