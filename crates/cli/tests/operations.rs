//! `lily-server` as whoever runs it sees it: keys, limits, time-outs, figures, logs and traces.

#[path = "support/http.rs"]
mod http;
#[path = "support/process.rs"]
mod process;

use std::collections::HashMap;
use std::io::{Read, Write};

use http::{Server, question, with};
use process::text;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// The figures at `/metrics`, by name and labels; the label that all share is left out.
fn figures(server: &Server) -> HashMap<String, f64> {
    let response = server.request("GET", "/metrics", "");
    assert!(response.headers.iter().any(|header| header.starts_with("content-type: text/plain")));
    let lines = response.body.lines().filter(|line| !line.starts_with('#'));
    let figure = |line: &str| {
        let (name, value) = line.rsplit_once(' ').expect("a name and a value");
        assert!(name.contains("model_name=\"lily-demo\""), "{line}");
        let name = name.replace("model_name=\"lily-demo\",", "").replace(",model_name=\"lily-demo\"", "");
        (name.replace("{model_name=\"lily-demo\"}", ""), value.parse().expect("a number"))
    };
    lines.map(figure).collect()
}

fn endless() -> Value {
    with(question("Tell me a story."), json!({"ignore_eos": true, "max_tokens": 30_000, "stream": true}))
}

#[test]
fn keys_come_from_flags_and_a_file_and_guard_everything_but_health_and_metrics() {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), "# for the team\nthird\n\n").expect("the file is written");
    let path = file.path().to_str().expect("the path is UTF-8");
    let server = Server::start(&["--api-key", "first", "--api-key", "second", "--api-key-file", path]);
    let ask = |header: &str| server.open("GET", "/v1/models", header, b"").response().status;
    for header in
        ["Authorization: Bearer first\r\n", "x-api-key: second\r\n", "authorization: bearer third\r\n"]
    {
        assert_eq!(ask(header), 200, "{header}");
    }
    for header in ["", "x-api-key: # for the team\r\n", "x-api-key: \r\n", "Authorization: Bearer firs\r\n"] {
        assert_eq!(ask(header), 401, "{header}");
    }
    let open = ["/health", "/metrics"].map(|path| server.request("GET", path, "").status);
    assert_eq!(open, [200, 200]);
}

#[test]
fn wrong_flags_are_said_before_anything_is_loaded() {
    let empty = tempfile::NamedTempFile::new().expect("a temporary file");
    let empty = empty.path().to_str().expect("the path is UTF-8");
    for (flags, said) in [
        (["--api-key-file", "/nowhere"], "--api-key-file /nowhere cannot be read"),
        (["--api-key-file", empty], "holds no key"),
        (["--api-key", ""], "--api-key is empty"),
        (["--cors-origin", "chat.example"], "is no origin"),
        (["--log-level", "loud=loudly"], "--log-level"),
        (["--grace", "soon"], "--grace"),
    ] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_lily-server"));
        let output = process::run(command.args(["--port", "0"]).args(flags));
        let stderr = text(&output.stderr);
        assert!(!output.status.success() && stderr.contains(said), "{flags:?}: {stderr}");
    }
}

#[test]
fn pages_of_a_named_origin_may_read_answers_and_others_may_not() {
    let server = Server::start(&["--cors-origin", "https://chat.example"]);
    let preflight = |origin: &str| {
        let headers = format!(
            "Origin: {origin}\r\nAccess-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,content-type\r\n"
        );
        server.open("OPTIONS", CHAT, &headers, b"").response().headers
    };
    let allowed = preflight("https://chat.example");
    for header in [
        "access-control-allow-origin: https://chat.example",
        "access-control-allow-headers: authorization,content-type",
    ] {
        assert!(allowed.iter().any(|sent| sent == header), "{header} in {allowed:?}");
    }
    let allows = |header: &String| header.starts_with("access-control-allow-origin");
    assert!(!preflight("https://other.example").iter().any(allows));
    let sent = server.open("GET", "/v1/models", "Origin: https://chat.example\r\n", b"").response().headers;
    assert!(sent.iter().any(allows), "{sent:?}");
}

#[test]
fn as_many_run_and_wait_as_the_flags_say_and_one_more_is_told_when_to_return() {
    let server = Server::start(&["--max-concurrent", "1", "--max-queue", "1"]);
    let open = || server.open("POST", CHAT, "", endless().to_string().as_bytes());
    let mut running = open();
    // After a few tokens the engine has published what it holds.
    (0..4).for_each(|_| drop(running.first_event()));
    let waiting = open();
    server.wait_until("waiting", 1);
    let refused = server.chat(&question("hi"));
    assert_eq!(refused.status, 429, "{refused:?}");
    let after = refused.headers.iter().find_map(|header| header.strip_prefix("retry-after: "));
    let seconds: u64 = after.and_then(|seconds| seconds.parse().ok()).expect("whole seconds");
    assert!((1..=60).contains(&seconds), "{seconds}");
    let health = server.request("GET", "/health", "").json();
    assert_eq!((&health["running"], &health["waiting"]), (&json!(1), &json!(1)));
    let seen = figures(&server);
    assert_eq!((seen["vllm:num_requests_running"], seen["vllm:num_requests_waiting"]), (1.0, 1.0));
    assert!(seen["vllm:kv_cache_usage_perc"] > 0.0);
    drop((running, waiting));
    server.wait_until_running(0);
    assert_eq!(server.chat(&question("hi")).status, 200);
}

#[test]
fn what_comes_too_slowly_or_too_large_or_compressed_is_refused() {
    // Each server is impatient in one respect, so that a machine that is slow to send the rest does not come too late.
    let server = Server::start(&["--header-timeout", "1"]);
    let mut half_a_head = server.connect();
    half_a_head.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nHost: lily\r\n").expect("it is written");
    let server = [server, Server::start(&["--body-timeout", "1"])];
    let mut half_a_body = server[1].connect();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: lily\r\nContent-Length: 100\r\n\r\n{";
    half_a_body.write_all(head.as_bytes()).expect("it is written");
    let [rest, answer] = [half_a_head, half_a_body].map(|mut connection| {
        let mut answer = Vec::new();
        // A reset is how a server closes on what it did not read.
        let _ = connection.read_to_end(&mut answer);
        text(&answer)
    });
    assert!(!rest.contains("200 OK"), "{rest}");
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("request_timeout"), "{answer}");
    let server = Server::start(&["--max-body", "1KB"]);
    let large = server.request("POST", CHAT, &" ".repeat(1001));
    assert_eq!((large.status, &large.json()["error"]["code"]), (413, &json!("request_too_large")));
    let sum = question("What is 17 + 25?").to_string();
    let encoded = |name: &str| {
        server.open("POST", CHAT, &format!("Content-Encoding: {name}\r\n"), sum.as_bytes()).response()
    };
    let compressed = encoded("gzip");
    assert_eq!(compressed.status, 415);
    assert_eq!(compressed.json()["error"]["code"], "unsupported_content_encoding");
    assert_eq!(encoded("identity").status, 200);
}

#[test]
fn figures_are_those_of_the_requests_that_were_made() {
    let server = Server::start(&[]);
    let before = figures(&server);
    assert_eq!(before["vllm:request_success_total{finished_reason=\"stop\"}"], 0.0);
    let sum = question("What is 17 + 25?");
    let usages = [
        server.chat(&sum).json()["usage"].clone(),
        server.chat(&with(sum.clone(), json!({"max_tokens": 2}))).json()["usage"].clone(),
    ];
    let streamed =
        server.chat(&with(sum, json!({"stream": true, "stream_options": {"include_usage": true}})));
    let usages = [&usages[..], &[streamed.events().last().expect("usage")["usage"].clone()]].concat();
    let mut dropped = server.open("POST", CHAT, "", endless().to_string().as_bytes());
    (0..4).for_each(|_| drop(dropped.first_event()));
    assert_eq!(figures(&server)["vllm:num_requests_running"], 1.0);
    drop(dropped);
    server.wait_until_running(0);
    assert_eq!(server.chat(&question("hi")).status, 200);
    server.logged(|line| line.contains("abort"));
    server.wait_until_running(0);
    let seen = figures(&server);

    let total =
        |pointer: &str| usages.iter().filter_map(|usage| usage.pointer(pointer)?.as_f64()).sum::<f64>();
    let sums = |name: &str| seen[&format!("vllm:{name}_sum")];
    // The last answer, to `hi`, is in the histograms too; the one that was dropped is in the totals alone.
    let hi = |name: &str| {
        sums(name) - total(if name.contains("prompt") { "/prompt_tokens" } else { "/completion_tokens" })
    };
    assert!(hi("request_prompt_tokens") > 0.0 && hi("request_generation_tokens") > 0.0);
    assert!(seen["vllm:prompt_tokens_total"] > sums("request_prompt_tokens"));
    assert!(seen["vllm:generation_tokens_total"] >= sums("request_generation_tokens"));
    assert_eq!(seen["vllm:prefix_cache_queries_total"], seen["vllm:prompt_tokens_total"]);
    assert!(seen["vllm:prefix_cache_hits_total"] >= total("/prompt_tokens_details/cached_tokens"));
    assert!(total("/prompt_tokens_details/cached_tokens") > 0.0);
    for (finish, count) in [("stop", 3.0), ("length", 1.0), ("abort", 1.0), ("error", 0.0)] {
        assert_eq!(
            seen[&format!("vllm:request_success_total{{finished_reason=\"{finish}\"}}")],
            count,
            "{finish}"
        );
    }
    for (name, count) in [
        ("time_to_first_token_seconds", 5.0),
        ("e2e_request_latency_seconds", 4.0),
        ("request_prompt_tokens", 4.0),
        ("request_queue_time_seconds", 4.0),
    ] {
        assert_eq!(seen[&format!("vllm:{name}_count")], count, "{name}");
    }
    assert_eq!(
        seen["vllm:inter_token_latency_seconds_count"],
        seen["vllm:time_per_output_token_seconds_count"]
    );
    assert!(seen["vllm:inter_token_latency_seconds_count"] >= total("/completion_tokens") - 6.0);
    assert_eq!(seen["vllm:num_requests_running"], 0.0);
}

#[test]
fn the_log_has_a_line_for_each_request_and_no_text_unless_asked() {
    let secret = "What is 17 + 25?";
    let server = Server::start(&["--log-format", "json"]);
    let id = server.chat(&question(secret)).json()["id"].clone();
    let line: Value =
        serde_json::from_str(&server.logged(|line| line.contains("answered"))).expect("a line is JSON");
    assert_eq!((&line["id"], &line["finish"], &line["completion"]), (&id, &json!("stop"), &json!(3)));
    assert!(line["ttft_ms"].is_u64() && line["tokens_per_s"].is_f64() && line["cached"] == 0, "{line}");
    assert_eq!(server.chat(&with(question(secret), json!({"temperature": "hot"}))).status, 400);
    let refusal = server.logged(|line| line.contains("refused"));
    assert!(refusal.contains("\"field\":\"temperature\"") && refusal.contains("\"status\":400"), "{refusal}");
    assert!(!server.all_logged().contains("17 + 25"));

    let server = Server::start(&["--log-prompts", "--log-level", "info"]);
    server.chat(&question(secret));
    let line = server.logged(|line| line.contains("17 + 25"));
    assert!(line.contains("42") && line.contains("<|im_start|>"), "{line}");
}

#[test]
fn a_trace_holds_the_whole_exchange() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let traces = dir.path().join("traces");
    let server = Server::start(&["--trace-dir", traces.to_str().expect("the path is UTF-8")]);
    let reply = server.chat(&question("What is 17 + 25?")).json();
    let read = |id: &str| -> Value {
        let text = std::fs::read_to_string(traces.join(format!("{id}.json"))).expect("there is a trace");
        serde_json::from_str(&text).expect("it is JSON")
    };
    let trace = read(reply["id"].as_str().expect("an id"));
    assert!(trace["prompt"].as_str().is_some_and(|prompt| prompt.contains("What is 17 + 25?")), "{trace}");
    assert_eq!(
        trace["prompt_tokens"].as_array().map(Vec::len),
        reply["usage"]["prompt_tokens"].as_u64().map(|n| n as usize)
    );
    assert_eq!((&trace["answer"], &trace["finish"]), (&json!("42"), &json!("stop")));
    let parsed: String = (trace["steps"].as_array().expect("steps").iter())
        .flat_map(|step| step["parsed"].as_array().expect("a list"))
        .filter_map(|part| part["content"].as_str())
        .collect();
    assert_eq!(parsed, "42");
}

#[test]
fn what_is_not_done_when_the_grace_is_over_is_told_so_and_the_server_ends_with_success() {
    let mut server = Server::start(&["--grace", "0.2"]);
    let mut connection = server.open("POST", CHAT, "", endless().to_string().as_bytes());
    connection.first_event();
    server.terminate();
    let mut last = String::new();
    while let Some(line) = connection.line() {
        if line.starts_with("data: ") {
            last = line;
        }
    }
    assert!(last.contains("the engine has stopped"), "{last}");
    assert_eq!(server.exit_code(), Some(0));
}
