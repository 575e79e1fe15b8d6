//! Tool calls out of text: exact, typed, and without losing a character, however the text is cut.

use lily_engine::output::{Delta, OutputParser};
use lily_engine::tool_calls::{Piece, ToolCall, ToolCallParser};
use proptest::prelude::*;
use serde_json::{Value, json};

fn tools() -> Vec<Value> {
    vec![json!({"type": "function", "function": {"name": "f", "parameters": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "i": {"type": "integer"},
            "n": {"type": "number"},
            "b": {"type": "boolean"},
            "a": {"type": "array", "items": {"type": "integer"}},
            "o": {"$ref": "#/$defs/Object"},
            "m": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "sn": {"type": ["string", "null"]},
            "u": {},
            "loop": {"$ref": "#/$defs/Loop"},
            "e": {"enum": [1, 2, null]},
        },
        "$defs": {"Object": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}},
    }}})]
}

/// What an answer holds.
#[derive(Clone, Debug, PartialEq)]
enum Part {
    Text(String),
    Call(ToolCall),
    /// One that was cut off.
    Begun(ToolCall),
}

fn parse<'a>(pieces: impl IntoIterator<Item = &'a str>) -> Vec<Part> {
    let mut parser = ToolCallParser::new(&tools());
    let mut found: Vec<Part> = Vec::new();
    let mut take = |pieces: Vec<Piece>| {
        for piece in pieces {
            match (found.last_mut(), piece) {
                (Some(Part::Text(last)), Piece::Text(text)) => last.push_str(&text),
                (_, Piece::Text(text)) => found.push(Part::Text(text)),
                (_, Piece::Start(name)) => {
                    found.push(Part::Begun(ToolCall { name, arguments: String::new() }))
                }
                (Some(Part::Begun(call)), Piece::Arguments(json)) => {
                    assert!(!json.is_empty());
                    call.arguments.push_str(&json);
                }
                (Some(last), Piece::End) => match last.clone() {
                    Part::Begun(call) => *last = Part::Call(call),
                    other => panic!("{other:?} ends"),
                },
                (last, piece) => panic!("{piece:?} after {last:?}"),
            }
        }
    };
    pieces.into_iter().for_each(|piece| take(parser.push(piece)));
    take(parser.finish());
    found
}

fn text(text: &str) -> Part {
    Part::Text(text.to_owned())
}

fn call(name: &str, arguments: &str) -> Part {
    Part::Call(ToolCall { name: name.to_owned(), arguments: arguments.to_owned() })
}

/// A call as the model writes it.
fn written(name: &str, arguments: &[(&str, &str)]) -> String {
    let parameters: String =
        arguments.iter().map(|(key, value)| format!("<parameter={key}>\n{value}\n</parameter>\n")).collect();
    format!("<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
}

/// The JSON that `value` becomes as parameter `key` of `f`.
fn argument(key: &str, value: &str) -> String {
    match parse([written("f", &[(key, value)]).as_str()]).as_slice() {
        [Part::Call(call)] => call
            .arguments
            .strip_prefix(&format!("{{\"{key}\":"))
            .unwrap()
            .strip_suffix('}')
            .unwrap()
            .to_owned(),
        other => panic!("no call: {other:?}"),
    }
}

#[test]
fn text_calls_and_text_come_out_in_order() {
    let answer = format!(
        "Let me look.\n\n{}\n{}\n\nDone.\n",
        written("f", &[("s", "Paris"), ("i", "3")]),
        written("g", &[])
    );
    assert_eq!(
        parse([answer.as_str()]),
        [text("Let me look."), call("f", r#"{"s":"Paris","i":3}"#), call("g", "{}"), text("Done.\n")]
    );
}

#[test]
fn values_take_the_type_of_the_schema() {
    assert_eq!(argument("s", "5"), r#""5""#);
    assert_eq!(argument("s", "{\"a\": 1}"), r#""{\"a\": 1}""#);
    assert_eq!(argument("i", "5"), "5");
    assert_eq!(argument("i", "5.5"), r#""5.5""#);
    assert_eq!(argument("i", "123456789012345678901234567890"), "123456789012345678901234567890");
    assert_eq!(argument("n", " 1.50 "), "1.50");
    assert_eq!(argument("b", "true"), "true");
    assert_eq!(argument("b", "False"), "false");
    assert_eq!(argument("b", "maybe"), r#""maybe""#);
    assert_eq!(argument("a", "[1, 2]"), "[1, 2]");
    assert_eq!(argument("a", "[1, 2"), r#""[1, 2""#);
    assert_eq!(argument("o", "{\"x\": [true]}"), "{\"x\": [true]}");
    assert_eq!(argument("m", "null"), "null");
    assert_eq!(argument("m", "7"), "7");
    assert_eq!(argument("sn", "null"), "null");
    assert_eq!(argument("sn", "7"), r#""7""#);
    assert_eq!(argument("u", "7"), r#""7""#);
    assert_eq!(argument("u", "[7]"), "[7]");
    assert_eq!(argument("undeclared", "[7]"), "[7]");
    assert_eq!(argument("loop", "7"), r#""7""#);
    assert_eq!(argument("e", "2"), "2");
}

#[test]
fn strings_keep_newlines_quotes_and_tags() {
    let value = "\n  if a < b {\n    \"</parameter>\" </function> <tool_call>\n\u{1}";
    assert_eq!(argument("s", value), Value::from(value).to_string());
    assert_eq!(argument("s", ""), r#""""#);
}

#[test]
fn what_only_looks_like_a_call_is_text() {
    for not_a_call in [
        "the <tool_call> tag",
        "<tool_call>\n{\"name\": \"f\"}\n</tool_call>",
        "<tool_call>\n<function=two words>\n",
        "<tool_call><function=>",
        "<tool_call><function=f>stray</function></tool_call>",
        "<tool_call><function=f></function>stray</tool_call>",
        "a \n<tool_ca",
    ] {
        assert_eq!(parse([not_a_call]), [text(not_a_call)]);
    }
}

#[test]
fn a_call_that_goes_wrong_ends_there_and_the_rest_is_text() {
    assert_eq!(
        parse(["<tool_call><function=f><parameter=i>1</parameter> <parameter=two words></tool_call>"]),
        [call("f", r#"{"i":1}"#), text("<parameter=two words></tool_call>")]
    );
    assert_eq!(
        parse(["<tool_call><function=f><parameter=i>1</parameter><parameter=i>2</parameter></function>"]),
        [call("f", r#"{"i":1}"#), text("<parameter=i>2</parameter></function>")]
    );
    assert_eq!(
        parse(["<tool_call><function=f><parameter=i>1</parameter></function> and more"]),
        [call("f", r#"{"i":1}"#), text("and more")]
    );
}

#[test]
fn a_call_that_is_cut_off_is_text_or_the_beginning_of_a_call() {
    let whole = written("f", &[("s", "Par\"is\n</p"), ("a", "[3, 4]"), ("u", "é")]);
    let arguments = r#"{"s":"Par\"is\n</p","a":[3, 4],"u":"é"}"#;
    let mut longest = 0;
    for end in (1..whole.len()).filter(|&i| whole.is_char_boundary(i)) {
        match parse([&whole[..end]]).as_slice() {
            [Part::Text(shown)] => assert!(longest == 0 && shown == &whole[..end], "{shown}"),
            [Part::Begun(begun)] => {
                assert!(arguments.starts_with(&begun.arguments) && begun.arguments != arguments, "{begun:?}");
                assert!(begun.arguments.len() >= longest, "{begun:?} is shorter than one with less text");
                longest = begun.arguments.len();
            }
            // Only its last tag is missing.
            [Part::Call(call)] => {
                assert!(call.arguments == arguments && whole[end..].len() <= 13, "{call:?}")
            }
            other => panic!("{other:?}"),
        }
    }
    let late = format!("<tool_call> {whole}");
    assert_eq!(parse([late.as_str()]), [text("<tool_call>"), call("f", arguments)]);
}

#[test]
fn a_value_that_is_cut_off_does_not_end_the_arguments() {
    let cut_off = |key: &str, value: &str| {
        let answer = written("f", &[(key, value)]);
        match parse([answer.split_once("\n</parameter>").unwrap().0]).as_slice() {
            [Part::Begun(call)] => call.arguments.clone(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(cut_off("i", "12"), r#"{"i":12"#);
    assert_eq!(cut_off("i", "12}"), r#"{"i":"12}"#);
    assert_eq!(cut_off("a", "[1, "), r#"{"a":[1,"#);
    assert_eq!(cut_off("u", r#"{"x": 1}}"#), r#"{"u":"{\"x\": 1}}"#);
}

#[test]
fn arguments_are_not_nested_deeper_than_readers_go() {
    let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    for (depth, taken_over) in [(126, true), (127, false)] {
        let answer = written("f", &[("a", &nested(depth))]);
        let [Part::Call(call)] = &parse([answer.as_str()])[..] else { panic!("no call") };
        let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
        assert_eq!(arguments["a"].is_array(), taken_over, "{depth}");
    }
}

#[test]
fn a_string_comes_as_it_is_written() {
    let mut parser = ToolCallParser::new(&tools());
    let arguments = |json: &str| Piece::Arguments(json.to_owned());
    assert_eq!(parser.push("<tool_call>\n<function=f>\n<parameter=s"), []);
    assert_eq!(parser.push(">\n"), [Piece::Start("f".into()), arguments(r#"{"s":""#)]);
    assert_eq!(parser.push("fn main() {\n"), [arguments("fn main() {")]);
    assert_eq!(parser.push("    \"a\" </par"), [arguments(r#"\n    \"a\" "#)]);
    assert_eq!(parser.push("a>\n</parameter>"), [arguments("</para>")]);
    assert_eq!(parser.push("\n<parameter=i>\n1"), [arguments(r#"","i":"#)]);
    assert_eq!(parser.push("2\n</parameter>\n</func"), []);
    assert_eq!(parser.push("tion>"), [arguments("12}"), Piece::End]);
    assert_eq!(parser.push("\n</tool_call>"), []);
    assert_eq!(parser.finish(), []);
}

#[test]
fn text_that_cannot_become_a_call_is_not_held_back() {
    let mut parser = ToolCallParser::new(&[]);
    let text = |text: &str| Piece::Text(text.to_owned());
    assert_eq!(parser.push("a < b <tool"), [text("a < b")]);
    assert_eq!(parser.push("s> and "), [text(" <tools> and")]);
    assert_eq!(parser.push("<tool_call> I mean"), [text(" <tool_call> I mean")]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn every_cut_gives_the_same(
        parts in prop::collection::vec(prop::sample::select(vec![
            "<tool_call>", "\n", "<function=f>", "<parameter=s>", "</parameter>", "</function>", "</tool_call>",
            "<tool", "<parameter=", "x", " é ", "1",
            "<parameter=i>", "<parameter=u>", "[1]", "null", "<parameter=sn>",
            "<tool_call>\n<function=f>\n<parameter=s>\nv", "\n</parameter>\n</function>\n</tool_call>",
        ]), 0..14),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let answer = parts.concat();
        let mut cuts: Vec<usize> =
            cuts.iter().map(|i| i.index(answer.len() + 1)).filter(|&i| answer.is_char_boundary(i)).collect();
        cuts.extend([0, answer.len()]);
        cuts.sort();
        let found = parse(cuts.windows(2).map(|w| &answer[w[0]..w[1]]));
        prop_assert_eq!(&found, &parse([answer.as_str()]));
        for part in &found {
            if let Part::Call(call) = part {
                prop_assert!(serde_json::from_str::<Value>(&call.arguments).is_ok(), "{:?}", call);
            }
        }
        if !found.iter().any(|part| !matches!(part, Part::Text(_))) && !answer.is_empty() {
            prop_assert_eq!(found, [text(&answer)]);
        }
    }

    #[test]
    fn a_call_written_and_read_is_the_same(
        before in "[a-z<>/_ ]{0,12}",
        values in prop::collection::vec("[ -~\n]{0,20}", 0..4),
    ) {
        prop_assume!(!before.contains("<tool_call>"));
        let keys = ["k0", "k1", "k2", "k3"];
        let arguments: Vec<(&str, &str)> = keys.iter().copied().zip(values.iter().map(String::as_str)).collect();
        // Without a schema, what is written as an array or object is one, whatever space stands before it.
        prop_assume!(values.iter().all(|v| !v.trim_start().starts_with(['[', '{'])));
        let answer = format!("{before}{}", written("f", &arguments));
        let members: serde_json::Map<String, Value> =
            arguments.iter().map(|&(k, v)| (k.to_owned(), Value::from(v))).collect();
        let mut expected = vec![];
        if !before.trim_end().is_empty() {
            expected.push(text(before.trim_end()));
        }
        expected.push(call("f", &Value::Object(members).to_string()));
        prop_assert_eq!(parse([answer.as_str()]), expected);
    }
}

fn deltas(opened: bool, tools: &[Value], pieces: &[&str]) -> Vec<Delta> {
    let mut parser = OutputParser::new(opened, tools);
    let mut all: Vec<Delta> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    all.extend(parser.finish());
    all
}

#[test]
fn calls_are_found_in_content_and_in_reasoning() {
    let written = written("f", &[("i", "1")]);
    let call = || {
        let arguments = Delta::Arguments(r#"{"i":1}"#.into());
        [Delta::ToolCall { name: "f".into() }, arguments, Delta::ToolCallEnd]
    };
    let after = format!("Hm <tool\n</think>\n\nLook:\n{written}");
    assert_eq!(
        deltas(true, &tools(), &[&after]),
        [
            vec![
                Delta::Reasoning("Hm".into()),
                Delta::Reasoning(" <tool".into()),
                Delta::Content("Look:".into())
            ],
            call().to_vec()
        ]
        .concat()
    );
    let inside = format!("I need f.\n{written}");
    assert_eq!(
        deltas(true, &tools(), &[&inside]),
        [vec![Delta::Reasoning("I need f.".into())], call().to_vec()].concat()
    );
}

#[test]
fn without_declared_tools_a_call_is_text() {
    let written = written("f", &[]);
    assert_eq!(deltas(false, &[], &[&written]), [Delta::Content(written.clone())]);
}
