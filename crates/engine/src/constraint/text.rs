//! What the value of a tool's parameter may be: text as it is, or JSON.
//!
//! The model writes strings without quotes, so a schema for a string becomes a regular expression over the text
//! between the tags. Which values are strings is decided as the parser decides it, by the types that the schema
//! names. A value ends at the first `</parameter>`.

use serde_json::{Map, Value};

use crate::tool_calls::schema::{declared_types, resolve};

/// Any text, up to its end.
const ANY: &str = r"/(?s:.*)<\/parameter>/";

/// The end of a value that is not just any text.
const END: &str = r#""\n</parameter>" & ~/(?s:.*)<\/parameter>(?s:.+)/"#;

/// How many references and alternatives may be nested.
const MAX_DEPTH: usize = 8;

/// How a value is written.
pub(super) enum Form {
    /// As text; a terminal of Lark's for it and for the tag after it.
    Text(String),
    /// As JSON of this schema.
    Json(Value),
}

/// The form of a parameter of this schema, whose references lead into `root`.
pub(super) fn form(root: &Value, schema: &Value, strict: bool) -> Result<Form, String> {
    let types = declared_types(root, schema);
    if types.is_empty() {
        let is_note = |key: &String| matches!(key.as_str(), "title" | "description" | "default" | "examples");
        return match schema.as_object() {
            Some(members) if strict && !members.keys().all(is_note) => {
                Err("a strict schema has to name a type".to_owned())
            }
            _ => Ok(Form::Text(ANY.to_owned())),
        };
    }
    if !types.contains(&"string") {
        return Ok(Form::Json(with_definitions(root, schema)));
    }
    let mut texts = Vec::new();
    collect(root, schema, strict, MAX_DEPTH, &mut texts)?;
    if texts.iter().any(Option::is_none) {
        return Ok(Form::Text(ANY.to_owned()));
    }
    let texts: Vec<String> = texts.into_iter().flatten().collect();
    if texts.is_empty() {
        return Err("it allows no text, though its type is string".to_owned());
    }
    Ok(Form::Text(format!("({}) {END}", texts.join(" | "))))
}

/// `schema` as a document of its own.
fn with_definitions(root: &Value, schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Value::Object(members) = &mut schema {
        for name in ["$defs", "definitions"] {
            if let (Some(definitions), None) = (root.get(name), members.get(name)) {
                members.insert(name.to_owned(), definitions.clone());
            }
        }
    }
    schema
}

/// Terminals of the texts that `schema` allows; `None` for any text. Alternatives that are neither strings nor
/// null are left out: next to a string they would be read as one.
fn collect(
    root: &Value,
    schema: &Value,
    strict: bool,
    depth: usize,
    texts: &mut Vec<Option<String>>,
) -> Result<(), String> {
    if depth == 0 {
        return Err("its references and alternatives are nested too deeply".to_owned());
    }
    let schema = resolve(root, schema);
    let Some(members) = schema.as_object() else { return Ok(()) };
    for key in ["anyOf", "oneOf", "allOf"] {
        if let Some(parts) = members.get(key).and_then(Value::as_array) {
            if key == "allOf" && parts.len() > 1 {
                return if strict {
                    Err("allOf of several schemas is not enforced for strings".to_owned())
                } else {
                    texts.push(None);
                    Ok(())
                };
            }
            return parts.iter().try_for_each(|part| collect(root, part, strict, depth - 1, texts));
        }
    }
    let literals = members.get("enum").and_then(Value::as_array).cloned();
    if let Some(values) = literals.or_else(|| members.get("const").map(|value| vec![value.clone()])) {
        texts.extend(values.iter().filter_map(|value| match value {
            // Two slashes would begin a comment.
            Value::String(text) if text.is_empty() => Some(Some("\"\"".to_owned())),
            Value::String(text) => Some(Some(format!("/{}/", escape(text)))),
            Value::Null => Some(Some("/null/".to_owned())),
            _ => None,
        }));
        return Ok(());
    }
    let types = declared_types(root, schema);
    if types.contains(&"null") {
        texts.push(Some("/null/".to_owned()));
    }
    if types.contains(&"string") {
        texts.push(string(members, strict));
    }
    Ok(())
}

/// A terminal for strings of a schema; `None` for any string.
fn string(schema: &Map<String, Value>, strict: bool) -> Option<String> {
    let length = |key| schema.get(key).and_then(Value::as_u64);
    let mut conditions = Vec::new();
    if let (least, Some(most)) = (length("minLength").unwrap_or(0), length("maxLength")) {
        conditions.push(format!("/(?s:.{{{least},{most}}})/"));
    } else if let Some(least) = length("minLength").filter(|&least| least > 0) {
        conditions.push(format!("/(?s:.{{{least},}})/"));
    }
    // Other dialects of regular expressions than this one exist, so only who asks for strictness is refused.
    if let (true, Some(pattern)) = (strict, schema.get("pattern").and_then(Value::as_str)) {
        conditions.push(format!("/{}/", searched(pattern)));
    }
    (!conditions.is_empty()).then(|| format!("({})", conditions.join(" & ")))
}

/// A pattern of JSON Schema, which matches anywhere in a string, as one that matches all of it.
fn searched(pattern: &str) -> String {
    let (head, rest) = pattern.strip_prefix('^').map_or(("(?s:.*)", pattern), |rest| ("", rest));
    let anchored = rest.strip_suffix('$').filter(|rest| !rest.ends_with('\\'));
    let (rest, tail) = anchored.map_or((rest, "(?s:.*)"), |rest| (rest, ""));
    format!("{head}(?:{}){tail}", llguidance::regex_to_lark(rest, "dw"))
}

/// A regular expression, between slashes, for this text alone.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' | '.' | '+' | '*' | '?' | '(' | ')' | '|' | '[' | ']' | '{' | '}' | '^' | '$' | '#'
            | '&' | '-' | '~' | '/' => {
                escaped.push('\\');
                escaped.push(c);
            }
            c if c.is_control() => escaped.push_str(&format!("\\x{{{:x}}}", u32::from(c))),
            c => escaped.push(c),
        }
    }
    escaped
}
