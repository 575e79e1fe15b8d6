//! Chat templates render exactly as Python's Jinja2 renders them under Hugging Face's rules.
//!
//! What Python makes of each case was recorded by `oracle/chat_template_cases.py`.

use std::path::{Path, PathBuf};

use lily_model::chat_template::{ChatInput, ChatTemplate, TemplateError};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Names a folder of `NAME.jinja` files, for templates that are not part of this repository.
const TEMPLATE_DIR_VARIABLE: &str = "LILY_TEMPLATE_DIR";

fn recorded(file: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(file);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The outcome in the form in which Python's was recorded.
fn outcome(result: Result<String, TemplateError>) -> Value {
    match result {
        Ok(text) => json!({ "text": text }),
        Err(TemplateError::Refused(message)) => json!({ "refused": message }),
        Err(_) => json!({ "failed": true }),
    }
}

/// Renders every recorded conversation and reports all that differ from what `name` made of it in Python.
fn assert_renders_as_recorded(name: &str, template: &ChatTemplate) {
    let cases = recorded("chat_template_cases.json");
    let mut differing = Vec::new();
    for case in cases.as_array().unwrap() {
        let mut extra: Map<String, Value> = case["kwargs"].as_object().unwrap().clone();
        let input = ChatInput {
            messages: case["messages"].as_array().unwrap(),
            tools: case["tools"].as_array().unwrap(),
            add_generation_prompt: extra.remove("add_generation_prompt").unwrap().as_bool().unwrap(),
            enable_thinking: extra.remove("enable_thinking").map(|flag| flag.as_bool().unwrap()),
            extra,
        };
        let result = template.render(&input);
        let detail = result.as_ref().err().map(ToString::to_string);
        let (got, expected) = (outcome(result), &case["expected"][name]);
        if got != *expected {
            differing.push(format!(
                "{}\n   python: {expected}\n     rust: {got} {}",
                case["name"],
                detail.unwrap_or_default()
            ));
        }
    }
    assert!(differing.is_empty(), "{name} renders differently:\n{}", differing.join("\n"));
}

fn demo_source() -> String {
    std::fs::read_to_string(Path::new(REPOSITORY).join("demo/checkpoint/chat_template.jinja")).unwrap()
}

fn user(content: &str) -> Value {
    json!({ "role": "user", "content": content })
}

#[test]
fn the_demo_template_renders_every_conversation_as_python_does() {
    assert_renders_as_recorded("demo", &ChatTemplate::from_source(&demo_source()).unwrap());
}

#[test]
fn the_real_template_renders_every_conversation_as_python_does() {
    let name = "Qwen3.5-4B";
    let folder = std::env::var_os(TEMPLATE_DIR_VARIABLE)
        .map_or_else(|| Path::new(REPOSITORY).join("../shared/data/templates"), PathBuf::from);
    let path = folder.join(format!("{name}.jinja"));
    match std::fs::read_to_string(&path) {
        Ok(source) => assert_renders_as_recorded(name, &ChatTemplate::from_source(&source).unwrap()),
        Err(error) => eprintln!(
            "NOT COMPARED: the template of {name} is not part of this repository and not at {} ({error}); \
             set {TEMPLATE_DIR_VARIABLE} to a folder that holds {name}.jinja",
            path.display()
        ),
    }
}

#[test]
fn the_corners_of_python_that_templates_can_see_are_as_in_python() {
    let recorded = recorded("template_snippets.json");
    let variables = recorded["variables"].as_object().unwrap();
    let mut differing = Vec::new();
    for snippet in recorded["snippets"].as_array().unwrap() {
        let source = snippet["template"].as_str().unwrap();
        let input = ChatInput { extra: variables.clone(), ..ChatInput::default() };
        let result = ChatTemplate::from_source(source).and_then(|template| template.render(&input));
        let detail = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let (got, expected) = (outcome(result), &snippet["expected"]);
        if got != *expected {
            differing.push(format!("{source}\n   python: {expected}\n     rust: {got} {detail}"));
        }
    }
    assert!(differing.is_empty(), "snippets render differently:\n{}", differing.join("\n"));
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}\
                 {% endfor %}{% endfor %}{% endfor %}";
    let recursion = "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}";
    let input = ChatInput::default();
    let render = |source| ChatTemplate::from_source(source).unwrap().render(&input);
    assert!(matches!(render(loops), Err(TemplateError::Runaway(ChatTemplate::STEP_LIMIT))));
    assert!(matches!(render(recursion), Err(TemplateError::Failed(_))));
}

#[test]
fn a_template_that_fills_the_context_is_not_stopped() {
    // The shortest message takes five tokens of the 262,144.
    let messages: Vec<Value> = (0..50_000).map(|_| user("a")).collect();
    let template = ChatTemplate::from_source(&demo_source()).unwrap();
    assert!(template.render(&ChatInput { messages: &messages, ..ChatInput::default() }).is_ok());
}

#[test]
fn a_damaged_template_is_an_error_with_its_place() {
    for source in
        ["{% if %}", "{{ 'a", "{% for x in y %}", "{% include 'other' %}{% endblock %}", "{{ x | nofilter("]
    {
        let error = ChatTemplate::from_source(source).unwrap_err();
        assert!(matches!(error, TemplateError::Syntax(_)), "{error}");
        assert!(error.to_string().contains("chat template:1"), "{error}");
    }
}

proptest! {
    #[test]
    fn a_template_with_pieces_exchanged_renders_or_is_refused(
        swaps in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..6),
    ) {
        let source = demo_source();
        let mut pieces: Vec<&str> = source.split_inclusive(|c: char| !c.is_alphanumeric()).collect();
        for (a, b) in swaps {
            let (a, b) = (a.index(pieces.len()), b.index(pieces.len()));
            pieces.swap(a, b);
        }
        let call = json!({ "function": { "name": "f", "arguments": { "a": [1, 2.5, { "x": null }] } } });
        let messages = [user("Hi"), json!({ "role": "assistant", "content": null, "tool_calls": [call] })];
        let input = ChatInput { messages: &messages, tools: &messages, ..ChatInput::default() };
        // Either outcome is right: what is tested is that there is one.
        let _ = ChatTemplate::from_source(&pieces.concat()).and_then(|template| template.render(&input));
    }
}

#[test]
fn an_expression_that_the_library_stumbles_over_is_an_error() {
    let template = ChatTemplate::from_source("{{ ''[::-1] }}").unwrap();
    assert!(matches!(template.render(&ChatInput::default()), Err(TemplateError::Failed(_))));
}

#[test]
fn the_file_goes_before_the_configuration_and_a_named_default_is_found() {
    let messages = [user("Hi")];
    let render = |jinja: Option<&str>, config: Option<Value>| {
        let config = config.map(|value| value.to_string());
        let template = ChatTemplate::from_files(jinja, config.as_deref())?;
        template.render(&ChatInput { messages: &messages, ..ChatInput::default() })
    };
    let tokens = json!({
        "eos_token": "<|im_end|>",
        "pad_token": { "content": "<pad>", "special": true },
        "bos_token": null,
        "chat_template": "{{ eos_token }}{{ pad_token }}{{ bos_token is defined }}{{ messages[0].content }}",
    });
    assert_eq!(render(None, Some(tokens.clone())).unwrap(), "<|im_end|><pad>FalseHi");
    assert_eq!(render(Some("file {{ eos_token }}"), Some(tokens)).unwrap(), "file <|im_end|>");
    assert_eq!(render(Some("file"), None).unwrap(), "file");

    let named = json!({ "chat_template": [
        { "name": "tool_use", "template": "tools" }, { "name": "default", "template": "plain" },
    ] });
    assert_eq!(render(None, Some(named)).unwrap(), "plain");

    assert!(matches!(render(None, None), Err(TemplateError::Missing)));
    assert!(matches!(render(None, Some(json!({ "chat_template": null }))), Err(TemplateError::Missing)));
    for broken in [json!({ "chat_template": 5 }), json!({ "chat_template": [{ "name": "x" }] }), json!([])] {
        assert!(matches!(render(None, Some(broken)), Err(TemplateError::Config(_))));
    }
    assert!(matches!(ChatTemplate::from_files(None, Some("{")), Err(TemplateError::Config(_))));
}
