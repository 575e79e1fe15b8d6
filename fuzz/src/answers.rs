//! The model's text, taken apart into reasoning, content and tool calls.
//!
//! The bytes are the text. Whatever it is: every way of cutting it into pieces gives the same, which is what a
//! second reading of the whole text gives; and what comes out is all that went in, once and in order, but for the
//! tags and the white space around them.

use std::sync::LazyLock;

use lily_engine::output::{Delta, OutputParser};
use lily_engine::tool_calls::{Piece, ToolCallParser};
use serde_json::{Map, Value, json};

/// The longest text that is read, in characters: it is read once for every one of them.
const LONGEST: usize = 600;
/// Characters of the pieces of further cuts.
const STRIDES: [usize; 4] = [1, 2, 3, 7];
/// What ends a call, and may be missing where one goes wrong.
const CLOSERS: [&str; 2] = ["</function>", "</tool_call>"];

/// What of Python is taken for JSON.
const SPELLINGS: [(&str, &str); 3] = [("True", "true"), ("False", "false"), ("None", "null")];

/// Which delta a text is.
type Kind = fn(String) -> Delta;

static TOOLS: LazyLock<Vec<Value>> = LazyLock::new(|| {
    vec![json!({"type": "function", "function": {"name": "f", "parameters": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "i": {"type": "integer"},
            "n": {"type": "number"},
            "b": {"type": "boolean"},
            "a": {"type": "array"},
            "o": {"type": "object"},
            "m": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "sn": {"type": ["string", "null"]},
            "u": {},
        },
    }}})]
});

/// See the module's page.
pub fn check(data: &[u8]) {
    let text: String = String::from_utf8_lossy(data).chars().take(LONGEST).collect();
    let text = text.as_str();
    for opened in [false, true] {
        let (reasoning, content) = halves(opened, text);
        for tools in [&[], TOOLS.as_slice()] {
            let mut expected = Vec::new();
            if tools.is_empty() {
                add(&mut expected, Delta::Reasoning(reasoning.to_string()));
                add(&mut expected, Delta::Content(content.to_string()));
            } else {
                let kinds: [Kind; 2] = [Delta::Reasoning, Delta::Content];
                for (text, kind) in [reasoning, content].into_iter().zip(kinds) {
                    let pieces = pieces(tools, text);
                    account(text, &pieces);
                    pieces.into_iter().for_each(|piece| add(&mut expected, delta(piece, kind)));
                }
            }
            for cut in cuts(text) {
                let read = read(opened, tools, &cut);
                assert_eq!(read, expected, "{text:?} cut into {cut:?}, reasoning opened: {opened}");
            }
        }
    }
}

/// Reasoning and content, as the module `reasoning` describes them.
fn halves(opened: bool, text: &str) -> (&str, &str) {
    let inside = if opened { Some(text) } else { text.trim_start().strip_prefix("<think>") };
    match inside {
        None => ("", text),
        Some(inside) => {
            let (reasoning, content) = inside.split_once("</think>").unwrap_or((inside, ""));
            (reasoning.trim_matches('\n'), content.trim_start_matches('\n'))
        }
    }
}

/// The text whole, in two pieces at every place, and in pieces of some lengths.
fn cuts(text: &str) -> impl Iterator<Item = Vec<&str>> {
    let bounds: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let halves = bounds.clone().into_iter().map(move |at| vec![&text[..at], &text[at..]]);
    let pieces = STRIDES.map(|stride| {
        let ends = bounds.iter().copied().step_by(stride).chain([text.len()]);
        let ends: Vec<usize> = ends.collect();
        ends.windows(2).map(|ends| &text[ends[0]..ends[1]]).collect::<Vec<&str>>()
    });
    halves.chain(pieces)
}

/// What comes out, joined where it can be.
fn read(opened: bool, tools: &[Value], cut: &[&str]) -> Vec<Delta> {
    let mut parser = OutputParser::new(opened, tools);
    let mut read = Vec::new();
    for piece in cut {
        for delta in parser.push(piece) {
            assert!(!is_empty(&delta), "an empty {delta:?}");
            add(&mut read, delta);
        }
    }
    parser.finish().into_iter().for_each(|delta| add(&mut read, delta));
    read
}

fn is_empty(delta: &Delta) -> bool {
    match delta {
        Delta::Reasoning(text) | Delta::Content(text) | Delta::Arguments(text) => text.is_empty(),
        Delta::ToolCall { .. } | Delta::ToolCallEnd => false,
    }
}

fn add(read: &mut Vec<Delta>, delta: Delta) {
    match (read.last_mut(), delta) {
        (_, delta) if is_empty(&delta) => {}
        (Some(Delta::Reasoning(last)), Delta::Reasoning(text)) => last.push_str(&text),
        (Some(Delta::Content(last)), Delta::Content(text)) => last.push_str(&text),
        (Some(Delta::Arguments(last)), Delta::Arguments(json)) => last.push_str(&json),
        (_, delta) => read.push(delta),
    }
}

fn pieces(tools: &[Value], text: &str) -> Vec<Piece> {
    let mut parser = ToolCallParser::new(tools);
    let mut pieces = parser.push(text);
    pieces.extend(parser.finish());
    pieces
}

fn delta(piece: Piece, kind: Kind) -> Delta {
    match piece {
        Piece::Text(text) => kind(text),
        Piece::Start(name) => Delta::ToolCall { name },
        Piece::Arguments(json) => Delta::Arguments(json),
        Piece::End => Delta::ToolCallEnd,
    }
}

/// Writes `pieces` down in the model's form again, which must be `text`, white space and closing tags aside. Of a
/// call that was cut off, the beginning of a tag may be missing at the end.
fn account(text: &str, pieces: &[Piece]) {
    let mut written = String::new();
    let mut arguments: Option<String> = None;
    for piece in pieces {
        match piece {
            Piece::Text(more) => written.push_str(more),
            Piece::Start(name) => {
                assert!(arguments.is_none(), "a call begins inside another: {pieces:?}");
                arguments = Some(String::new());
                written.push_str(&format!("<tool_call><function={name}>"));
            }
            Piece::Arguments(json) => {
                arguments
                    .as_mut()
                    .unwrap_or_else(|| panic!("arguments of no call: {pieces:?}"))
                    .push_str(json);
            }
            Piece::End => {
                let json = arguments.take().unwrap_or_else(|| panic!("no call ends: {pieces:?}"));
                let whole = serde_json::from_str::<Map<String, Value>>(&json);
                assert!(whole.is_ok(), "a complete call has the arguments {json:?}: {whole:?}");
                written.push_str(&parameters(&json, true));
            }
        }
    }
    let cut_off = arguments.is_some();
    if let Some(json) = arguments {
        assert!(
            serde_json::from_str::<Value>(&json).is_err(),
            "{json:?} was cut off and looks complete: {text:?}"
        );
        written.push_str(&parameters(&json, false));
    }
    let (given, written) = (squeezed(text), squeezed(&written));
    let rest = given.strip_prefix(&written);
    let rest = rest.unwrap_or_else(|| panic!("{given:?} was read as {written:?}, of {text:?}: {pieces:?}"));
    let lost = match pieces.last() {
        _ if cut_off => rest.strip_prefix("</parameter>").unwrap_or(rest).contains('>'),
        Some(Piece::End) => !"</tool_call>".starts_with(rest),
        _ => !rest.is_empty(),
    };
    assert!(!lost, "{rest:?} of {text:?} is lost: {pieces:?}");
}

/// Text without white space, [`CLOSERS`] and [`SPELLINGS`].
fn squeezed(text: &str) -> String {
    let text = text.split_whitespace().collect::<String>();
    let text = CLOSERS.iter().fold(text, |text, closer| text.replace(closer, ""));
    SPELLINGS.iter().fold(text, |text, (python, json)| text.replace(python, json))
}

/// Arguments in the model's form; the last one without its end where they are not `complete`.
fn parameters(json: &str, complete: bool) -> String {
    let mut written = String::new();
    let mut rest = json.strip_prefix('{').unwrap_or_default();
    while let Some(key) = rest.strip_prefix(',').unwrap_or(rest).strip_prefix('"') {
        let (key, after) = key.split_at(end_of_text(key));
        let (value, after) =
            after[1..].split_at_checked(1).map_or(("", ""), |(_, after)| after.split_at(end_of_value(after)));
        written.push_str(&format!("<parameter={}>{}", unescaped(key), text_of(value)));
        if complete || !after.is_empty() {
            written.push_str("</parameter>");
        }
        rest = after;
    }
    written
}

/// Where a JSON text ends whose first quote was read.
fn end_of_text(json: &str) -> usize {
    let mut escaped = false;
    let end = json.bytes().position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    end.unwrap_or(json.len())
}

/// Where a member's value ends.
fn end_of_value(json: &str) -> usize {
    let (mut depth, mut at) = (0usize, 0);
    while let Some(&byte) = json.as_bytes().get(at) {
        match byte {
            b'"' => at += 1 + end_of_text(&json[at + 1..]),
            b'{' | b'[' => depth += 1,
            b',' | b'}' if depth == 0 => return at,
            b'}' | b']' => depth -= 1,
            _ => {}
        }
        at += 1;
    }
    json.len()
}

/// A value as the model wrote it: a text is a text, everything else is what it is.
fn text_of(value: &str) -> String {
    match value.strip_prefix('"') {
        Some(text) => {
            unescaped(text.strip_suffix('"').filter(|whole| end_of_text(text) == whole.len()).unwrap_or(text))
        }
        None => value.to_string(),
    }
}

fn unescaped(text: &str) -> String {
    serde_json::from_str(&format!("\"{text}\""))
        .unwrap_or_else(|error| panic!("{text:?} is no JSON text: {error}"))
}
