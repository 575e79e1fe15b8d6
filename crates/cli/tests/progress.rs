//! How far a prompt has been read, told in the stream of whoever asks for it.

#[path = "support/http.rs"]
mod http;

use http::{Server, question, with};
use serde_json::{Value, json};

/// Longer than two of the pieces in which a prompt is read.
fn long() -> String {
    format!("{} What is 17 + 25?", "The sun is warm. ".repeat(400))
}

fn wanted() -> Value {
    json!({"stream": true, "return_progress": true})
}

/// Checks the steps of one prompt, in their order, and returns what of it came from the cache.
fn check(steps: &[Value]) -> u64 {
    let number = |step: &Value, name: &str| step[name].as_u64().unwrap_or_else(|| panic!("{name} in {step}"));
    let processed: Vec<u64> = steps.iter().map(|step| number(step, "processed")).collect();
    assert!(processed.is_sorted_by(|a, b| a < b), "{steps:?}");
    let last = steps.last().expect("there are steps");
    assert_eq!(number(last, "processed"), number(last, "total"), "{steps:?}");
    for step in steps {
        assert!(number(step, "cache") < number(step, "processed"), "{step}");
        assert!(step["time_ms"].is_u64(), "{step}");
    }
    number(last, "cache")
}

#[test]
fn every_protocol_tells_how_far_a_prompt_is_read() {
    let server = Server::start(&[]);
    let steps = |events: Vec<Value>| -> Vec<Value> {
        events.into_iter().map(|event| event["prompt_progress"].clone()).filter(Value::is_object).collect()
    };
    let chat = with(question(&long()), wanted());
    let first = steps(server.chat(&chat).events());
    assert!(first.len() > 2, "{first:?}");
    assert_eq!(check(&first), 0);
    // The second time, what came from the cache is not read again.
    assert!(check(&steps(server.chat(&chat).events())) > 0);

    let body = with(json!({"prompt": long(), "max_tokens": 2}), wanted());
    check(&steps(server.request("POST", "/v1/completions", &body.to_string()).events()));

    let named = |path: &str, body: Value| {
        let events = server.request("POST", path, &with(body, wanted()).to_string()).named_events();
        events.into_iter().filter(|(_, event)| event["prompt_progress"].is_object()).unzip()
    };
    let (names, events): (Vec<String>, Vec<Value>) = named("/v1/messages", question(&long()));
    assert!(names.iter().all(|name| name == "ping"), "{names:?}");
    check(&steps(events));
    let body = json!({"input": long(), "max_output_tokens": 50});
    let (names, events): (Vec<String>, Vec<Value>) = named("/v1/responses", body);
    assert!(names.iter().all(|name| name == "response.prompt_progress"), "{names:?}");
    check(&steps(events));
}

#[test]
fn nobody_is_told_who_does_not_ask_and_only_streams_can_tell() {
    let server = Server::start(&[]);
    let silent = server.chat(&with(question(&long()), json!({"stream": true})));
    assert!(!silent.body.contains("prompt_progress"), "{silent:?}");
    for (path, body) in [
        ("/v1/chat/completions", question("hi")),
        ("/v1/completions", json!({"prompt": "hi"})),
        ("/v1/messages", question("hi")),
        ("/v1/responses", json!({"input": "hi"})),
    ] {
        let refused = server.request("POST", path, &with(body, json!({"return_progress": true})).to_string());
        assert_eq!(refused.status, 400, "{path}: {refused:?}");
        assert!(refused.body.contains("return_progress"), "{path}: {refused:?}");
    }
}
