//! Constrained answers on the demo: whatever the dice say, the answer follows its grammar.

mod common;

use std::sync::LazyLock;

use common::demo::Demo;
use common::{Outcome, outcome};
use lily_engine::constraint::{Constraint, Prose, ToolChoice};
use lily_engine::engine::{CacheOptions, Engine, FinishReason, Request};
use lily_engine::output::{Delta, OutputParser};
use lily_engine::sampler::SamplingParams;
use proptest::prelude::*;
use serde_json::{Value, json};

/// Tokens of an answer: enough for every value that the schemas here allow.
const ANSWER: usize = 1500;

struct World {
    demo: Demo,
    engine: Engine,
}

static WORLD: LazyLock<World> = LazyLock::new(|| {
    let demo = Demo::load();
    let engine = demo.engine(demo.backend(64 << 20), CacheOptions::default());
    World { demo, engine }
});

fn prompt(text: &str, thinking: bool) -> Vec<u32> {
    WORLD.demo.prompt(&[json!({"role": "user", "content": text})], &[], thinking)
}

fn request(text: &str, thinking: bool, constraint: Constraint) -> Request {
    Request { constraint: Some(constraint), max_tokens: Some(ANSWER), ..Request::new(prompt(text, thinking)) }
}

/// At temperature 2, by `seed`.
fn wild(request: Request, seed: u64) -> Request {
    let sampling = SamplingParams { temperature: 2.0, seed: Some(seed), ..SamplingParams::default() };
    Request { sampling, ..request }
}

fn answer(request: Request) -> Outcome {
    let outcome = outcome(WORLD.engine.submit(request).expect("the request is taken"));
    assert_eq!(outcome.failure, None);
    outcome
}

fn json(schema: Value) -> Constraint {
    Constraint::Json { schema, strict: true }
}

/// Whether `value` is one that `schema` allows, of the keywords that [`schemas`] makes.
fn is_valid(schema: &Value, value: &Value) -> bool {
    if let Some(options) = schema["anyOf"].as_array() {
        return options.iter().any(|option| is_valid(option, value));
    }
    if let Some(values) = schema["enum"].as_array() {
        return values.contains(value);
    }
    let within = |n: f64, least: &str, most: &str| {
        schema[least].as_f64().is_none_or(|least| n >= least)
            && schema[most].as_f64().is_none_or(|most| n <= most)
    };
    match (schema["type"].as_str(), value) {
        (Some("null"), Value::Null) | (Some("boolean"), Value::Bool(_)) => true,
        (Some("integer"), Value::Number(n)) => {
            n.as_f64().is_some_and(|n| n.fract() == 0.0 && within(n, "minimum", "maximum"))
        }
        (Some("number"), Value::Number(n)) => n.as_f64().is_some_and(|n| within(n, "minimum", "maximum")),
        (Some("string"), Value::String(text)) => {
            within(text.chars().count() as f64, "minLength", "maxLength")
        }
        (Some("array"), Value::Array(items)) => {
            within(items.len() as f64, "minItems", "maxItems")
                && items.iter().all(|item| is_valid(&schema["items"], item))
        }
        (Some("object"), Value::Object(members)) => {
            let required = schema["required"].as_array().into_iter().flatten();
            let properties = &schema["properties"];
            required.filter_map(Value::as_str).all(|key| members.contains_key(key))
                && members
                    .iter()
                    .all(|(key, value)| properties.get(key).is_some_and(|schema| is_valid(schema, value)))
        }
        _ => false,
    }
}

/// Schemas of bounded values.
fn schemas() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!({"type": "null"})),
        Just(json!({"type": "boolean"})),
        (-20i64..20, 0i64..40).prop_map(|(least, more)| json!(
            {"type": "integer", "minimum": least, "maximum": least + more})),
        Just(json!({"type": "number", "minimum": 0, "maximum": 1})),
        (0usize..4, 0usize..12).prop_map(|(least, more)| json!(
            {"type": "string", "minLength": least, "maxLength": least + more})),
        Just(json!({"enum": ["red", "a \"quoted\" one", 7, null, "é\n"]})),
    ];
    leaf.prop_recursive(3, 10, 3, |inner| {
        prop_oneof![
            (inner.clone(), 0usize..2, 0usize..3).prop_map(|(items, least, more)| json!(
                {"type": "array", "items": items, "minItems": least, "maxItems": least + more})),
            (prop::collection::vec((inner.clone(), any::<bool>()), 0..4)).prop_map(|members| {
                let names = ["alpha", "b c", "d\"q", "é"];
                let required: Vec<&str> =
                    members.iter().zip(names).filter(|((_, r), _)| *r).map(|(_, name)| name).collect();
                let properties: serde_json::Map<String, Value> = members
                    .iter()
                    .zip(names)
                    .map(|((schema, _), name)| (name.to_owned(), schema.clone()))
                    .collect();
                json!({"type": "object", "properties": properties, "required": required,
                    "additionalProperties": false})
            }),
            prop::collection::vec(inner, 1..3).prop_map(|options| json!({"anyOf": options})),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn json_of_any_schema_parses_and_is_valid(schema in schemas(), seed: u64) {
        let outcome = answer(wild(request("Give me JSON.", false, json(schema.clone())), seed));
        prop_assert_eq!(outcome.reason, Some(FinishReason::EndOfSequence), "{}: {}", schema, outcome.text);
        let value: Value = serde_json::from_str(&outcome.text)
            .map_err(|error| TestCaseError::fail(format!("{error} in {:?}", outcome.text)))?;
        prop_assert!(is_valid(&schema, &value), "{} for {}", value, schema);
    }
}

#[test]
fn expressions_and_grammars_are_followed_to_their_end() {
    let date = regex(r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]");
    let sums = Constraint::Lark("start: NUMBER (\" + \" NUMBER){1,4} \";\"\nNUMBER: /[0-9]{1,3}/\n".into());
    for seed in 0..4 {
        let text = answer(wild(request("When?", false, date.clone()), seed)).text;
        assert_eq!(text.len(), "2026-01-31".len(), "{text}");
        let text = answer(wild(request("A sum?", false, sums.clone()), seed)).text;
        assert!(text.ends_with(';') && text.contains(" + "), "{text}");
    }
    // The grammar allows a single text: all of it comes, whatever the model wants, and nothing after it.
    let outcome = answer(request("What is 17 + 25?", false, regex("(the one|the one) text")));
    assert_eq!(outcome.text, "the one text");
    assert_eq!(outcome.reason, Some(FinishReason::EndOfSequence));
    // What the model would say anyway is not changed.
    assert_eq!(answer(request("What is 17 + 25?", false, regex("[0-9]+"))).text, "42");
}

fn regex(regex: &str) -> Constraint {
    Constraint::Regex(regex.to_owned())
}

#[test]
fn bias_penalties_and_end_tokens_cannot_leave_the_grammar() {
    let eos = WORLD.demo.eos[0];
    let sampling = SamplingParams {
        logit_bias: vec![(eos, 100.0)],
        presence_penalty: 2.0,
        repetition_penalty: 2.0,
        ..SamplingParams::default()
    };
    let outcome =
        answer(Request { sampling, ignore_eos: true, ..request("Say ab.", false, regex("(ab){3,}")) });
    assert_eq!(outcome.text, "ababab");
    assert_eq!(outcome.reason, Some(FinishReason::EndOfSequence));
}

#[test]
fn an_answer_that_is_cut_off_says_so() {
    let outcome = answer(Request { max_tokens: Some(3), ..request("Hi", false, regex("[a-z]{100}")) });
    assert_eq!(outcome.reason, Some(FinishReason::Length));
    assert!(outcome.text.bytes().all(|byte| byte.is_ascii_lowercase()), "{}", outcome.text);
}

#[test]
fn the_grammar_begins_after_the_reasoning() {
    let schema = json!({"type": "object", "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 999}},
        "required": ["answer"], "additionalProperties": false});
    let outcome = answer(request("What is 17 + 25?", true, json(schema.clone())));
    let (reasoning, content) = outcome.text.split_once("\n</think>\n\n").expect("the block is closed");
    assert!(!reasoning.is_empty());
    assert!(is_valid(&schema, &serde_json::from_str(content).expect("JSON follows")), "{content}");
    for seed in 0..5 {
        let request = request("What is 17 + 25?", true, json(schema.clone()));
        let outcome = answer(wild(Request { thinking_budget: Some(40), ..request }, seed));
        let (_, content) = outcome.text.split_once("</think>\n\n").expect("the block is closed");
        assert!(is_valid(&schema, &serde_json::from_str(content).expect("JSON follows")), "{content}");
    }
}

#[test]
fn a_budget_closes_the_reasoning_in_the_words_of_the_template() {
    let ask = |budget| {
        let request = Request::new(prompt("What is 17 + 25?", true));
        answer(Request { thinking_budget: Some(budget), max_tokens: Some(200), ..request })
    };
    let free = ask(1000);
    let (reasoning, content) = free.text.split_once("\n</think>\n\n").expect("the block is closed");
    assert_eq!(content, "42");
    let closing = WORLD.demo.tokenizer.encode("\n</think>\n\n");
    let spent = free.tokens.len() - WORLD.demo.tokenizer.encode(content).len() - closing.len();
    for budget in [0, 1, spent / 2] {
        let outcome = ask(budget);
        assert_eq!(outcome.tokens[..budget], free.tokens[..budget]);
        assert_eq!(outcome.tokens[budget..budget + closing.len()], closing);
        let (cut, content) = outcome.text.split_once("\n</think>\n\n").expect("the block is closed");
        assert!(reasoning.starts_with(cut) && !content.contains("think"), "{}", outcome.text);
        assert_eq!(outcome.reason, Some(FinishReason::EndOfSequence));
    }
    // Without a block there is nothing to close.
    let plain = Request { thinking_budget: Some(0), ..Request::new(prompt("What is 17 + 25?", false)) };
    assert_eq!(answer(plain).text, "42");
}

fn tools() -> Vec<Value> {
    vec![
        json!({"type": "function", "function": {"name": "get_weather", "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "minLength": 2, "maxLength": 12},
                "unit": {"enum": ["C", "F", "a < b"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "who": {"anyOf": [{"$ref": "#/$defs/Who"}, {"type": "null"}]},
            },
            "required": ["city", "days"],
            "$defs": {"Who": {"type": "string", "enum": ["me", "you"]}},
        }}}),
        json!({"type": "function", "function": {"name": "get", "strict": true, "parameters": {
            "type": "object",
            "properties": {
                "id": {"type": "string", "pattern": "^[A-F]{2}-[0-9]+$", "maxLength": 8},
                "parts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            },
            "required": ["id", "parts"],
        }}}),
    ]
}

/// Calls and the text beside them.
fn calls(text: &str, reasoning: bool) -> (String, Vec<(String, Value)>) {
    let mut parser = OutputParser::new(reasoning, &tools());
    let mut deltas = parser.push(text);
    deltas.extend(parser.finish());
    let (mut content, mut calls) = (String::new(), Vec::<(String, String)>::new());
    for delta in deltas {
        match delta {
            Delta::Content(text) => content += &text,
            Delta::ToolCall { name } => calls.push((name, String::new())),
            Delta::Arguments(json) => calls.last_mut().expect("a call was begun").1 += &json,
            Delta::Reasoning(_) | Delta::ToolCallEnd => {}
        }
    }
    let parsed = |(name, arguments): (String, String)| {
        let value = serde_json::from_str(&arguments).unwrap_or_else(|error| panic!("{error}: {arguments}"));
        (name, value)
    };
    (content, calls.into_iter().map(parsed).collect())
}

fn assert_valid(name: &str, arguments: &Value) {
    let members = arguments.as_object().expect("arguments are an object");
    match name {
        "get_weather" => {
            let city = members["city"].as_str().expect("a city").chars().count();
            assert!((2..=12).contains(&city), "{arguments}");
            assert!((1..=9).contains(&members["days"].as_i64().expect("an integer")), "{arguments}");
            assert!(
                members.get("unit").is_none_or(|u| *u == "C" || *u == "F" || *u == "a < b"),
                "{arguments}"
            );
            assert!(
                members.get("who").is_none_or(|w| w.is_null() || *w == "me" || *w == "you"),
                "{arguments}"
            );
        }
        "get" => {
            let (letters, digits) = members["id"].as_str().and_then(|id| id.split_once('-')).expect("an id");
            assert!(letters.len() == 2 && letters.bytes().all(|b| (b'A'..=b'F').contains(&b)), "{arguments}");
            assert!(
                (1..=5).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit()),
                "{arguments}"
            );
            let parts = members["parts"].as_array().expect("a list");
            assert!(parts.len() <= 3 && parts.iter().all(Value::is_boolean), "{arguments}");
        }
        other => panic!("{other} was not declared"),
    }
}

#[test]
fn forced_calls_are_calls_with_valid_arguments() {
    for thinking in [false, true] {
        for seed in 0..5 {
            for (prose, parallel) in [(Prose::None, false), (Prose::None, true), (Prose::Free, false)] {
                let choice = ToolChoice { tools: tools(), prose: prose.clone(), parallel };
                let messages = [json!({"role": "user", "content": "What is the weather in Rome?"})];
                let request = Request {
                    constraint: Some(Constraint::Tools(choice)),
                    max_tokens: Some(if parallel || prose == Prose::Free { 120 } else { ANSWER }),
                    thinking_budget: Some(30),
                    ..Request::new(WORLD.demo.prompt(&messages, &tools(), thinking))
                };
                let outcome = answer(wild(request, seed));
                if outcome.reason == Some(FinishReason::Length) {
                    // Free text has no end of its own, nor have calls.
                    assert!(parallel || prose == Prose::Free, "{}", outcome.text);
                    continue;
                }
                let (content, calls) = calls(&outcome.text, thinking);
                calls.iter().for_each(|(name, arguments)| assert_valid(name, arguments));
                if prose == Prose::None {
                    assert!(content.is_empty() && !calls.is_empty(), "{}", outcome.text);
                }
                assert!(parallel || calls.len() <= 1, "{}", outcome.text);
            }
        }
    }
}

/// Definitions of which each refers to the next, all of them `levels` lists deep.
fn chain(length: usize, levels: usize) -> Value {
    let nested =
        |schema: Value| (0..levels).fold(schema, |inner, _| json!({"type": "array", "items": inner}));
    let definition = |n: usize| (format!("d{n}"), nested(json!({"$ref": format!("#/$defs/d{}", n + 1)})));
    let mut definitions: serde_json::Map<String, Value> = (0..length).map(definition).collect();
    definitions.insert(format!("d{length}"), json!({"type": "null"}));
    json!({"$ref": "#/$defs/d0", "$defs": definitions})
}

#[test]
fn grammars_that_would_take_the_machine_are_refused_before_they_do() {
    let properties = |count: usize| {
        let member = |n: usize| (format!("p{n}"), json!({"type": "null"}));
        let members: serde_json::Map<String, Value> = (0..count).map(member).collect();
        json!({"type": "object", "properties": members})
    };
    let rules = |length: usize| {
        let rules: String = (0..length).map(|n| format!("r{n}: r{}\n", n + 1)).collect();
        format!("start: r0\n{rules}r{length}: \"a\"\n")
    };
    let alternatives = |n: usize| {
        let member = |m: usize| json!({"properties": {format!("p{n}_{m}"): {"type": "integer"}}});
        json!({"anyOf": (0..10).map(member).collect::<Vec<_>>()})
    };
    let embedded = format!("start: %json {}", json!({"type": "integer", "multipleOf": 99_999}));
    for (constraint, expected) in [
        // Chains overflow the compiler's stack, which would end the process.
        (json(chain(5_000, 2)), "lead too deep"),
        (json(chain(100, 100)), "lead too deep"),
        (Constraint::Lark(rules(9_000)), "longer than"),
        (json(properties(5_000)), "too many properties"),
        (json(json!({"type": "integer", "multipleOf": 1_000_003})), "multipleOf"),
        (json(json!({"type": "number", "multipleOf": 1.000_003})), "multipleOf"),
        (Constraint::Lark(embedded), "multipleOf"),
        (json(json!({"allOf": (0..8).map(alternatives).collect::<Vec<_>>()})), "too large"),
    ] {
        let error = WORLD.engine.submit(request("Hi", false, constraint)).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
    let tool = json!({"name": "f", "parameters": {"type": "object", "properties": {"a": chain(5_000, 2)}}});
    let choice = ToolChoice { tools: vec![tool], prose: Prose::None, parallel: true };
    assert!(WORLD.engine.submit(request("Hi", false, Constraint::Tools(choice))).is_err());
}

#[test]
fn grammars_at_the_bounds_are_compiled_and_an_answer_comes_to_an_end() {
    let rules = "((a{1,1000}){1,1000}){1,1000}";
    let words: Vec<String> = (0..2_000).map(|n| format!("word {n}")).collect();
    for constraint in [
        json(chain(2_600, 1)),
        json(json!({"enum": words})),
        json(json!({"type": "string", "maxLength": 1_000_000_000})),
        json(json!({"type": "array", "items": {"type": "null"}, "minItems": 1_000_000})),
        regex(rules),
        regex("(.{1,1000}b){1,1000}"),
        regex(".*a.{40}"),
    ] {
        // It may fail on the way, with a sentence; what it may not do is to go on for ever.
        if let Ok(generation) =
            WORLD.engine.submit(wild(Request { max_tokens: Some(20), ..request("Hi", false, constraint) }, 1))
        {
            let outcome = outcome(generation);
            assert!(outcome.reason.is_some() || outcome.failure.is_some());
        }
    }
}

#[test]
fn what_cannot_be_enforced_is_refused_with_the_reason() {
    let refused = |constraint: Constraint| {
        let refused = WORLD.engine.submit(request("Hi", false, constraint.clone()));
        refused.err().unwrap_or_else(|| panic!("{constraint:?} was taken")).to_string()
    };
    for (constraint, expected) in [
        (json(json!({"type": "strin"})), "the JSON schema cannot be enforced: "),
        (json(json!({"type": "array", "uniqueItems": true})), "uniqueItems"),
        (json(json!(7)), "a schema is a JSON object"),
        (json(json!({"$ref": "#"})), "it allows no text at all"),
        (
            json(json!({"type": "integer", "minimum": 5, "maximum": 4})),
            "the JSON schema cannot be enforced: ",
        ),
        (regex("a("), "the regular expression cannot be enforced: "),
        (regex(&"a".repeat(1 << 20)), "longer than"),
        (Constraint::Lark("begin: \"a\"".into()), "the grammar cannot be enforced: "),
        (Constraint::Lark("(".repeat(100_000)), "the grammar cannot be enforced: "),
        (Constraint::Lark("start: other".into()), "other"),
    ] {
        let message = refused(constraint);
        assert!(message.contains(expected) && message.len() < 500, "{message}");
    }
    let tool = json!({"name": "two words", "parameters": {}});
    let choice = ToolChoice { tools: vec![tool], prose: Prose::None, parallel: true };
    assert!(refused(Constraint::Tools(choice)).contains("two words"));
}
