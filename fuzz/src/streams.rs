//! Streams: their events, joined, are the whole answer.
//!
//! One and the same question is asked twice, for a stream and for a whole answer, and the device writes the same
//! tokens both times: those of the last bytes, which are text or not. The first bytes say which protocol, with what
//! options. Digits do, so that a person can write an input down.

use arbitrary::{Arbitrary, Unstructured};
use serde_json::{Map, Value, json};

use super::events::{Event, events};
use super::server::{Server, server};

/// The longest answer that is written, in bytes.
const LONGEST: usize = 2000;
/// Answers end in the middle at a multiple of so many tokens.
const LIMIT_STEP: u8 = 3;
/// More than any answer has.
const NO_LIMIT: usize = 3000;

/// A question, and what is written in answer to it.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Exchange<'a> {
    /// 0: chat, 1: completion, 2: response, 3: message.
    protocol: u8,
    thinking: u8,
    tools: u8,
    /// Choices beyond the first, where the protocol has them.
    more: u8,
    logprobs: u8,
    /// 0: none.
    limit: u8,
    stop: u8,
    /// Whether the answer comes in single bytes and not in words.
    bytes: u8,
    /// What else there is to wish for.
    extra: u8,
    answer: &'a [u8],
}

/// See the module's page.
pub fn check(data: &[u8]) {
    // It gives zeros where bytes are missing.
    let Ok(exchange) = Exchange::arbitrary_take_rest(Unstructured::new(data)) else { return };
    let server = server();
    match digit(exchange.protocol) % 4 {
        0 => chat(&server, exchange),
        1 => completion(&server, exchange),
        2 => response(&server, exchange),
        _ => message(&server, exchange),
    }
}

fn digit(byte: u8) -> u8 {
    byte.wrapping_sub(b'0')
}

fn is_set(byte: u8) -> bool {
    digit(byte) % 2 == 1
}

impl Exchange<'_> {
    fn limit(&self) -> usize {
        let limit = usize::from(digit(self.limit).wrapping_mul(LIMIT_STEP));
        if limit == 0 { NO_LIMIT } else { limit }
    }

    fn choices(&self) -> usize {
        1 + usize::from(digit(self.more) % 3)
    }

    fn stop(&self) -> Value {
        [json!([]), json!(["</"]), json!(["é", "\n\n"])][usize::from(digit(self.stop) % 3)].clone()
    }

    fn parameters(&self) -> Value {
        json!({"type": "object", "properties": {"s": {"type": "string"}, "i": {"type": "integer"}}})
    }

    /// The tokens that the device writes.
    fn script(&self, server: &Server) -> Vec<u32> {
        let answer = &self.answer[..self.answer.len().min(LONGEST)];
        let byte = |byte: u8| server.byte_tokens[usize::from(byte)];
        let mut tokens = Vec::new();
        for chunk in answer.utf8_chunks() {
            if is_set(self.bytes) {
                tokens.extend(chunk.valid().bytes().map(byte));
            } else {
                tokens.extend(server.tokenizer.encode(chunk.valid()));
            }
            tokens.extend(chunk.invalid().iter().copied().map(byte));
        }
        tokens
    }

    /// The whole answer, and the events of the stream.
    fn ask(&self, server: &Server, path: &str, mut body: Value, streamed: Value) -> (Value, Vec<Event>) {
        let post = |body: &Value| {
            let answer = server.post(path, body.to_string().into_bytes(), self.script(server));
            assert_eq!(answer.status, 200, "{body} was answered {}", String::from_utf8_lossy(&answer.body));
            answer
        };
        let whole = serde_json::from_slice(&post(&body).body).expect("a whole answer is JSON");
        body["stream"] = json!(true);
        let fields = streamed.as_object().expect("further fields are an object");
        fields.iter().for_each(|(name, value)| body[name] = value.clone());
        let stream = post(&body);
        assert!(stream.streamed, "{path} does not stream");
        (whole, events(&stream.body))
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Adds the text of `more` to that of `value`.
fn append(value: &mut Value, more: &Value) {
    *value = json!(format!("{}{}", text(value), text(more)));
}

/// Takes the last event away, which has to say that there are no more, and the one before it, with the counts.
fn ended(events: &mut Vec<Event>, whole: &Value) {
    assert_eq!(events.pop().map(|event| event.data).as_deref(), Some("[DONE]"));
    let last = events.pop().expect("counts were asked for").json();
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &whole["usage"]));
}

fn chat(server: &Server, asked: Exchange<'_>) {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": asked.limit(),
        "n": asked.choices(), "stop": asked.stop(), "enable_thinking": is_set(asked.thinking)});
    if is_set(asked.tools) {
        let function = json!({"name": "f", "parameters": asked.parameters()});
        body["tools"] = json!([{"type": "function", "function": function}]);
    }
    if is_set(asked.logprobs) {
        (body["logprobs"], body["top_logprobs"]) = (json!(true), json!(2));
    }
    let fields = json!({"stream_options": {"include_usage": true}, "return_progress": is_set(asked.extra)});
    let (whole, mut events) = asked.ask(server, "/v1/chat/completions", body, fields);
    ended(&mut events, &whole);
    let mut joined: Vec<Value> = vec![json!({"scored": []}); asked.choices()];
    for event in &events {
        let event = event.json();
        for choice in list(&event["choices"]) {
            let index = choice["index"].as_u64().expect("a choice has a place") as usize;
            let into = &mut joined[index];
            assert!(into["finish_reason"].is_null(), "an event follows the last one of its choice");
            into["finish_reason"] = choice["finish_reason"].clone();
            let delta = &choice["delta"];
            append(&mut into["content"], &delta["content"]);
            append(&mut into["reasoning"], &delta["reasoning_content"]);
            for call in list(&delta["tool_calls"]) {
                let index = call["index"].as_u64().expect("a call has a place") as usize;
                if into["calls"].is_null() {
                    into["calls"] = json!([]);
                }
                let calls = into["calls"].as_array_mut().expect("it was made one");
                if index == calls.len() {
                    assert!(!text(&call["id"]).is_empty() && call["function"]["name"].is_string());
                    calls.push(json!({"name": call["function"]["name"], "arguments": ""}));
                }
                append(&mut calls[index]["arguments"], &call["function"]["arguments"]);
            }
            let scored = into["scored"].as_array_mut().expect("it is one");
            scored.extend(list(&choice["logprobs"]["content"]).iter().cloned());
        }
    }
    for (choice, joined) in list(&whole["choices"]).iter().zip(&joined) {
        let message = &choice["message"];
        assert_eq!(joined["finish_reason"], choice["finish_reason"], "{whole}");
        assert_eq!(text(&joined["content"]), text(&message["content"]), "{whole}");
        assert_eq!(text(&joined["reasoning"]), text(&message["reasoning_content"]), "{whole}");
        assert_eq!(list(&joined["scored"]), list(&choice["logprobs"]["content"]), "{whole}");
        let calls = list(&message["tool_calls"]).iter().map(|call| &call["function"]);
        assert!(calls.eq(list(&joined["calls"])), "{joined} of {whole}");
    }
    assert_eq!(list(&whole["choices"]).len(), joined.len());
}

fn completion(server: &Server, asked: Exchange<'_>) {
    let mut body = json!({"prompt": ["Once", "é"], "max_tokens": asked.limit(), "n": asked.choices(),
        "stop": asked.stop()});
    if is_set(asked.logprobs) {
        body["logprobs"] = json!(2);
    } else {
        body["echo"] = json!(is_set(asked.extra));
    }
    let fields = json!({"stream_options": {"include_usage": true}, "return_progress": is_set(asked.extra)});
    let (whole, mut events) = asked.ask(server, "/v1/completions", body, fields);
    ended(&mut events, &whole);
    let choices = list(&whole["choices"]);
    let mut joined: Vec<Value> = vec![json!({"logprobs": {}}); choices.len()];
    for event in &events {
        for choice in list(&event.json()["choices"]) {
            let index = choice["index"].as_u64().expect("a choice has a place") as usize;
            let into = &mut joined[index];
            assert!(into["finish_reason"].is_null(), "an event follows the last one of its choice");
            into["finish_reason"] = choice["finish_reason"].clone();
            append(&mut into["text"], &choice["text"]);
            for (name, values) in choice["logprobs"].as_object().into_iter().flatten() {
                let mut all = list(&into["logprobs"][name]).to_vec();
                all.extend_from_slice(list(values));
                into["logprobs"][name] = Value::Array(all);
            }
        }
    }
    for (choice, joined) in choices.iter().zip(&joined) {
        assert_eq!(joined["finish_reason"], choice["finish_reason"], "{whole}");
        assert_eq!(text(&joined["text"]), text(&choice["text"]), "{whole}");
        for (name, values) in choice["logprobs"].as_object().into_iter().flatten() {
            assert_eq!(list(&joined["logprobs"][name]), list(values), "{name} of {whole}");
        }
    }
}

/// `value` without what differs from answer to answer.
fn nameless(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let told = map.iter().filter(|(name, _)| !matches!(name.as_str(), "id" | "call_id" | "item_id"));
            Value::Object(told.map(|(name, value)| (name.clone(), nameless(value))).collect::<Map<_, _>>())
        }
        Value::Array(values) => values.iter().map(nameless).collect(),
        other => other.clone(),
    }
}

fn response(server: &Server, asked: Exchange<'_>) {
    let mut body = json!({"input": "Hi", "max_output_tokens": asked.limit(), "stop": asked.stop(),
        "enable_thinking": is_set(asked.thinking), "store": false});
    if is_set(asked.tools) {
        let custom = digit(asked.tools) % 4 == 3;
        body["tools"] = if custom {
            json!([{"type": "custom", "name": "f"}])
        } else {
            json!([{"type": "function", "name": "f", "parameters": asked.parameters()}])
        };
    }
    if is_set(asked.logprobs) {
        body["include"] = json!(["message.output_text.logprobs", "reasoning.encrypted_content"]);
    }
    if is_set(asked.extra) {
        body["reasoning"] = json!({"summary": "auto"});
    }
    let (whole, events) =
        asked.ask(server, "/v1/responses", body, json!({"return_progress": is_set(asked.more)}));
    let (mut output, mut end) = (Vec::new(), Value::Null);
    // What the deltas of the open item come to, and its log probabilities.
    let (mut gained, mut scored) = (Value::Null, Vec::new());
    for (number, event) in events.iter().enumerate() {
        assert!(end.is_null(), "an event follows the last one");
        let body = event.json();
        assert_eq!(body["sequence_number"], number);
        assert_eq!(event.name.as_deref(), body["type"].as_str());
        let kind = text(&body["type"]);
        match kind {
            "response.completed" | "response.incomplete" => end = body["response"].clone(),
            "response.failed" => panic!("{body}"),
            "response.output_item.added" => {
                assert_eq!(body["output_index"], output.len());
                (gained, scored) = (json!(""), Vec::new());
            }
            "response.output_item.done" => {
                let item = &body["item"];
                let parts = [list(&item["content"]), list(&item["summary"])].concat();
                let said: String = parts.iter().map(|part| text(&part["text"])).collect();
                let said = said + text(&item["arguments"]) + text(&item["input"]);
                assert_eq!(text(&gained), said, "{body}");
                let listed: Vec<Value> =
                    parts.iter().flat_map(|part| list(&part["logprobs"]).to_vec()).collect();
                assert_eq!(scored, listed, "{body}");
                output.push(nameless(item));
            }
            _ if kind.ends_with(".delta") => {
                append(&mut gained, &body["delta"]);
                scored.extend_from_slice(list(&body["logprobs"]));
            }
            _ => {}
        }
    }
    assert_eq!(nameless(&end["output"]), Value::Array(output));
    for field in ["output", "status", "incomplete_details", "usage", "error"] {
        assert_eq!(nameless(&end[field]), nameless(&whole[field]), "{field}");
    }
}

fn message(server: &Server, asked: Exchange<'_>) {
    let thinking = if is_set(asked.thinking) { "adaptive" } else { "disabled" };
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": asked.limit(),
        "stop_sequences": asked.stop(), "thinking": {"type": thinking}});
    if is_set(asked.extra) && is_set(asked.thinking) {
        body["thinking"]["display"] = json!("omitted");
    }
    if is_set(asked.tools) {
        body["tools"] = json!([{"name": "f", "input_schema": asked.parameters()}]);
    }
    let (whole, events) =
        asked.ask(server, "/v1/messages", body, json!({"return_progress": is_set(asked.more)}));
    let (mut content, mut open, mut end, mut input) = (Vec::new(), false, Value::Null, String::new());
    for event in &events {
        let body = event.json();
        assert_eq!(event.name.as_deref(), body["type"].as_str());
        if open || text(&body["type"]) == "content_block_start" {
            let place = content.len() - usize::from(open);
            assert!(body["index"].is_null() || body["index"] == place, "{body}");
        }
        match text(&body["type"]) {
            "message_start" => assert!(content.is_empty() && end.is_null()),
            "content_block_start" => {
                assert!(!open && end.is_null());
                open = true;
                content.push(nameless(&body["content_block"]));
            }
            "content_block_delta" => {
                let block = content.last_mut().filter(|_| open).expect("a block is open");
                let delta = &body["delta"];
                for name in ["text", "thinking", "signature"] {
                    if delta[name].is_string() {
                        append(&mut block[name], &delta[name]);
                    }
                }
                input.push_str(text(&delta["partial_json"]));
            }
            "content_block_stop" => {
                assert!(std::mem::take(&mut open));
                let block = content.last_mut().expect("a block was open");
                if block["type"] == "tool_use" {
                    // What was cut off each client completes as it thinks best.
                    let json = std::mem::take(&mut input);
                    block["input"] = serde_json::from_str(&json).unwrap_or(Value::Null);
                }
                assert!(input.is_empty(), "arguments without a call");
            }
            "message_delta" => end = body.clone(),
            "message_stop" => assert!(!end.is_null() && !open),
            "ping" => {}
            other => panic!("{other}"),
        }
    }
    assert_eq!(events.last().and_then(|event| event.name.as_deref()), Some("message_stop"));
    for field in ["stop_reason", "stop_sequence"] {
        assert_eq!(end["delta"][field], whole[field]);
    }
    assert_eq!(end["usage"], whole["usage"]);
    let mut expected = nameless(&whole["content"]);
    let blocks = expected.as_array_mut().expect("content is a list");
    for (block, streamed) in
        blocks.iter_mut().zip(&content).filter(|(_, streamed)| streamed["input"].is_null())
    {
        if let (Some(input), true) = (block.get_mut("input"), streamed["type"] == "tool_use") {
            assert!(input.is_object() && whole["stop_reason"] != "end_turn");
            *input = Value::Null;
        }
    }
    assert_eq!(Value::Array(content), expected);
}
