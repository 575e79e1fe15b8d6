//! Raw completions and the tokenizer's endpoints on the demo, over plain HTTP.

#[path = "support/http.rs"]
mod http;

use http::{Server, with};
use serde_json::{Value, json};

/// A turn of the demo's chat format, ready for the model's answer.
const PROMPT: &str =
    "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";

fn post(server: &Server, path: &str, body: Value) -> Value {
    let response = server.request("POST", path, &body.to_string());
    assert_eq!(response.status, 200, "{response:?}");
    response.json()
}

fn complete(server: &Server, body: Value) -> Value {
    post(server, "/v1/completions", body)
}

fn texts(completion: &Value) -> Vec<&str> {
    let choices = completion["choices"].as_array().expect("choices");
    choices.iter().map(|choice| choice["text"].as_str().expect("text")).collect()
}

#[test]
fn a_prompt_is_read_as_it_is_and_written_on() {
    let server = Server::start(&[]);
    let answer = complete(&server, json!({"prompt": PROMPT}));
    assert_eq!(texts(&answer), ["42"]);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["object"], "text_completion");
    let tokens = post(&server, "/tokenize", json!({"prompt": PROMPT}))["tokens"].clone();
    assert_eq!(answer["usage"]["prompt_tokens"], json!(tokens.as_array().map(Vec::len)));

    assert_eq!(texts(&complete(&server, json!({"prompt": tokens.clone()}))), ["42"]);
    let several = json!({"prompt": [PROMPT, PROMPT.replace("17", "1")], "n": 2, "echo": true});
    let (first, second) = (format!("{PROMPT}42"), format!("{}26", PROMPT.replace("17", "1")));
    assert_eq!(texts(&complete(&server, several)), [&first, &first, &second, &second]);
    assert_eq!(texts(&complete(&server, json!({"prompt": tokens, "echo": true}))), [&first]);
    // Nothing is read into the text: thinking and its marks are what the model wrote.
    let opened = json!({"prompt": PROMPT.replace("\n\n</think>\n\n", "\n"), "max_tokens": 200});
    assert!(texts(&complete(&server, opened))[0].contains("</think>"));
}

#[test]
fn a_completion_is_the_same_whole_and_streamed() {
    let server = Server::start(&[]);
    let body = json!({"prompt": [PROMPT, "Once upon"], "n": 2, "logprobs": 2, "max_tokens": 12, "seed": 3,
        "temperature": 1.5});
    for body in [body.clone(), with(body, json!({"echo": true, "logprobs": null, "stop": ["a"]}))] {
        let whole = complete(&server, body.clone());
        let options = json!({"stream": true, "stream_options": {"include_usage": true}});
        let response = server.request("POST", "/v1/completions", &with(body, options).to_string());
        let events = response.events();
        let (last, pieces) = events.split_last().expect("there are events");
        let details = json!({"prompt_tokens_details": null});
        assert_eq!(with(last["usage"].clone(), details.clone()), with(whole["usage"].clone(), details));
        for choice in whole["choices"].as_array().expect("choices") {
            let of_choice: Vec<_> = pieces
                .iter()
                .map(|event| &event["choices"][0])
                .filter(|piece| piece["index"] == choice["index"])
                .collect();
            let text: String = of_choice.iter().filter_map(|piece| piece["text"].as_str()).collect();
            assert_eq!(choice["text"], text);
            let (end, others) = of_choice.split_last().expect("there are pieces");
            assert_eq!(end["finish_reason"], choice["finish_reason"]);
            assert!(others.iter().all(|piece| piece["finish_reason"].is_null()));
            for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                let joined: Vec<_> = of_choice
                    .iter()
                    .filter_map(|piece| piece["logprobs"][list].as_array())
                    .flatten()
                    .collect();
                let expected: Vec<_> = choice["logprobs"][list].as_array().into_iter().flatten().collect();
                assert_eq!(joined, expected, "{list}");
            }
        }
    }
}

#[test]
fn log_probabilities_stand_beside_their_tokens() {
    let server = Server::start(&[]);
    let answer = complete(&server, json!({"prompt": PROMPT, "logprobs": 3}));
    let scored = &answer["choices"][0]["logprobs"];
    let list = |name: &str| scored[name].as_array().expect("a list").clone();
    let tokens: String = list("tokens").iter().filter_map(Value::as_str).collect();
    assert_eq!(tokens, "42");
    assert_eq!(list("text_offset")[0], 0);
    for ((token, logprob), top) in list("tokens").iter().zip(list("token_logprobs")).zip(list("top_logprobs"))
    {
        let top = top.as_object().expect("alternatives");
        let best = top.values().filter_map(Value::as_f64).fold(f64::NEG_INFINITY, f64::max);
        assert_eq!(top.len(), 3);
        assert_eq!((&top[token.as_str().expect("text")], Some(best)), (&logprob, logprob.as_f64()));
    }
}

#[test]
fn refusals_name_the_field() {
    let server = Server::start(&["--ctx-len", "256"]);
    let cases = [
        (json!({"prompt": null}), "prompt", "missing_required_parameter"),
        (json!({"prompt": [99_999_999]}), "prompt", "invalid_value"),
        (json!({"prompt": "one two three ".repeat(200)}), "prompt", "context_length_exceeded"),
        (json!({"suffix": "end"}), "suffix", "unsupported_parameter"),
        (json!({"best_of": 2}), "best_of", "unsupported_parameter"),
        (json!({"model": "gpt"}), "model", "model_not_found"),
    ];
    for (fields, param, code) in cases {
        let body = with(json!({"prompt": PROMPT}), fields).to_string();
        let error = server.request("POST", "/v1/completions", &body).json()["error"].clone();
        assert_eq!((&error["param"], &error["code"]), (&json!(param), &json!(code)), "{error}");
    }
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": "a", "messages": []}), "prompt"),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": [1, 99_999_999]}), "tokens[1]"),
    ] {
        let response = server.request("POST", path, &body.to_string());
        assert_eq!((response.status, &response.json()["error"]["param"]), (400, &json!(param)));
    }
}

#[test]
fn texts_become_tokens_and_tokens_texts() {
    let server = Server::start(&["--ctx-len", "4096"]);
    for text in ["", "What is 17 + 25?", "Grüße, 世界 🌍", PROMPT] {
        let tokenized = post(&server, "/tokenize", json!({"prompt": text, "return_token_strs": true}));
        let tokens = tokenized["tokens"].as_array().expect("tokens");
        assert_eq!(tokenized["count"], json!(tokens.len()));
        assert_eq!(tokenized["max_model_len"], 4096);
        assert_eq!(tokenized["token_strs"].as_array().map(Vec::len), Some(tokens.len()));
        assert_eq!(post(&server, "/detokenize", json!({"tokens": tokens}))["prompt"], text);
    }
    let chat = json!({"messages": [{"role": "user", "content": "What is 17 + 25?"}]});
    let rendered = |fields: Value| {
        let tokens = post(&server, "/tokenize", with(chat.clone(), fields))["tokens"].clone();
        post(&server, "/detokenize", json!({"tokens": tokens}))["prompt"].as_str().expect("text").to_string()
    };
    assert_eq!(rendered(json!({})), PROMPT);
    let closed = rendered(json!({"add_generation_prompt": false}));
    assert_eq!(closed, "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n");
    assert!(rendered(json!({"enable_thinking": true})).ends_with("<think>\n"));
}
