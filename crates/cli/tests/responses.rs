//! OpenAI's Responses on the demo, over plain HTTP: what a client can rely on.

#[path = "support/http.rs"]
mod http;

use http::{Response, Server};
use serde_json::{Value, json};

const RESPONSES: &str = "/v1/responses";

fn create(server: &Server, body: &Value) -> Response {
    server.request("POST", RESPONSES, &body.to_string())
}

fn weather() -> Value {
    json!({"type": "function", "name": "get_weather", "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "The city."}},
            "required": ["city"]}})
}

/// The items of a response, without what differs from one to the next.
fn comparable(response: &Value) -> Value {
    let mut output = response["output"].clone();
    for item in output.as_array_mut().expect("output is a list") {
        item["id"] = Value::Null;
        item["call_id"] = Value::Null;
    }
    output
}

#[test]
fn what_codex_sends_is_answered() {
    let server = Server::start(&[]);
    let part = |text: &str| json!([{"type": "input_text", "text": text}]);
    let agents = json!({"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [
        {"type": "function", "name": "close", "description": "Close one.", "strict": false,
            "parameters": {"type": "object", "properties": {"target": {"type": "string", "maxLength": 8}},
                "required": ["target"], "additionalProperties": false}}]});
    let message = |role: &str, text: &str| json!({"type": "message", "role": role, "content": part(text)});
    let mut body = json!({
        "instructions": "You are a coding agent.",
        "input": [message("developer", "Be brief."), message("developer", "Be kind."),
            message("user", "<environment_context>"), message("user", "What is 17 + 25?")],
        "tools": [weather(), agents, {"type": "web_search", "external_web_access": false}],
        "tool_choice": "auto", "parallel_tool_calls": true, "reasoning": {"summary": "auto"}, "store": false,
        "stream": true, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
        "client_metadata": {"turn_id": "t"}, "max_output_tokens": 200,
    });
    let events = create(&server, &body).named_events();
    let (name, last) = events.last().expect("a stream has events");
    assert_eq!((name.as_str(), &last["response"]["status"]), ("response.completed", &json!("completed")));
    assert!(events.iter().enumerate().all(|(place, (_, data))| data["sequence_number"] == place));
    // A later instruction stays where it is, and a tool of a namespace is called by both its names.
    body["stream"] = json!(false);
    body["tool_choice"] = json!({"type": "function", "name": "close"});
    let input = body["input"].as_array_mut().expect("input is a list");
    input.push(message("assistant", "42"));
    input.push(message("developer", "Close the helper."));
    let call = create(&server, &body).json()["output"][0].clone();
    assert_eq!(
        (&call["type"], &call["namespace"], &call["name"]),
        (&json!("function_call"), &json!("agents"), &json!("close"))
    );
    let result =
        json!({"type": "function_call_output", "call_id": call["call_id"], "output": part("closed")});
    body["input"].as_array_mut().expect("input is a list").extend([call, result]);
    body["tool_choice"] = json!("none");
    assert_eq!(create(&server, &body).status, 200);
}

#[test]
fn a_conversation_goes_on_from_its_id_as_from_its_items() {
    let server = Server::start(&[]);
    let question = json!({"role": "user", "content": "What is the weather in Rome?"});
    let body = json!({"input": [question], "tools": [weather()], "instructions": "Be brief.", "max_output_tokens": 200});
    let first = create(&server, &body).json();
    let call = first["output"][0].clone();
    assert_eq!(call["arguments"], "{\"city\":\"Rome\"}", "{first}");
    let result = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "{\"temperature\": 21}"});

    let mut continued = body.clone();
    continued["input"] = json!([result]);
    continued["previous_response_id"] = first["id"].clone();
    let second = create(&server, &continued).json();
    let mut whole = body.clone();
    whole["input"] = json!([question, call, result]);
    let stateless = create(&server, &whole).json();
    assert_eq!(comparable(&second), comparable(&stateless));
    assert_eq!(second["usage"]["input_tokens"], stateless["usage"]["input_tokens"]);
    whole["input"] = json!([question, {"type": "item_reference", "id": call["id"]}, result]);
    assert_eq!(comparable(&create(&server, &whole).json()), comparable(&stateless));

    let id = second["id"].as_str().expect("an id");
    let page =
        |query: &str| server.request("GET", &format!("{RESPONSES}/{id}/input_items{query}"), "").json();
    let types = |page: &Value| -> Vec<Value> {
        page["data"].as_array().expect("items").iter().map(|item| item["type"].clone()).collect()
    };
    assert_eq!(types(&page("?order=asc")), ["message", "function_call", "function_call_output"]);
    let newest = page("?limit=1");
    assert_eq!((types(&newest), &newest["has_more"]), (vec![json!("function_call_output")], &json!(true)));
    let after = page(&format!("?limit=1&after={}", newest["last_id"].as_str().expect("an id")));
    assert_eq!(types(&after), ["function_call"]);

    // Without one of its links a chain cannot go on.
    let path = format!("{RESPONSES}/{}", first["id"].as_str().expect("an id"));
    assert_eq!(server.request("GET", &path, "").json(), first);
    assert_eq!(server.request("DELETE", &path, "").json()["deleted"], true);
    assert_eq!(server.request("GET", &path, "").status, 404);
    let mut third = body;
    third["previous_response_id"] = json!(id);
    let error = create(&server, &third);
    assert_eq!((error.status, &error.json()["error"]["code"]), (400, &json!("previous_response_not_found")));
}

#[test]
fn a_custom_tool_gets_the_text_that_its_grammar_allows() {
    let server = Server::start(&[]);
    let tool = json!({"type": "custom", "name": "dial", "description": "Dials a number.", "format":
        {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}-[0-9]{2}"}});
    let mut body = json!({"input": "Call Rome.", "tools": [tool], "tool_choice": {"type": "custom", "name": "dial"},
        "max_output_tokens": 300, "temperature": 2.0, "seed": 7});
    let call = create(&server, &body).json()["output"][0].clone();
    let input = call["input"].as_str().unwrap_or_else(|| panic!("{call}"));
    assert_eq!(
        (&call["type"], input.len(), input.find('-')),
        (&json!("custom_tool_call"), 6, Some(3)),
        "{call}"
    );
    body["stream"] = json!(true);
    let events = create(&server, &body).named_events();
    let done = events.iter().find(|(name, _)| name == "response.custom_tool_call_input.done");
    assert_eq!(done.expect("the input is told of").1["input"], input);
    let result = json!({"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "busy"});
    let next =
        json!({"input": [{"role": "user", "content": "Call Rome."}, call, result], "max_output_tokens": 4});
    assert_eq!(create(&server, &next).status, 200);
}
