//! A Lark grammar for calls of declared tools, in the form that [`crate::tool_calls`] reads.
//!
//! Parameters come in the order of their declaration, required ones always, others if the model wants them;
//! names that are not declared do not come at all. What a value may be is the subject of `text.rs`.

use std::fmt::Write;

use lily_model::tokenizer::markers::{TOOL_CALL_END, TOOL_CALL_START};
use serde_json::Value;

use super::bounds;
use super::compile::{check_schema, with_options};
use super::text::{Form, form};
use super::{ConstraintError, Prose, Subject, ToolChoice};
use crate::tool_calls::schema::resolve;

/// Text before a call, which does not hold the tag of one.
const TEXT: &str = r"TEXT: /(?s:.+)/ & ~/(?s:.*)<tool_call>(?s:.*)/";

/// The grammar of `choice`. `marker` finds the token of a marker.
pub(super) fn grammar(
    choice: &ToolChoice,
    marker: &dyn Fn(&str) -> Option<u32>,
) -> Result<String, ConstraintError> {
    let fail = |reason: &str| ConstraintError { subject: Subject::Tools, reason: reason.to_owned() };
    if choice.tools.is_empty() {
        return Err(fail("there is no tool to call"));
    }
    let tag = |tag: &str| marker(tag).map(|id| format!("<[{id}]>"));
    let (Some(open), Some(close)) = (tag(TOOL_CALL_START), tag(TOOL_CALL_END)) else {
        return Err(fail("the model's tokenizer has no markers for calls"));
    };
    let start = match &choice.prose {
        Prose::None => "start: calls".to_owned(),
        Prose::Free => format!("start: TEXT? calls?\n{TEXT}"),
        Prose::Json { schema, strict } => {
            check_schema(schema)?;
            format!("start: calls | answer\nanswer: %json {}", with_options(schema, *strict))
        }
    };
    let calls = if choice.parallel { "call (\"\\n\" call)*" } else { "call" };
    let functions: Vec<String> = (0..choice.tools.len()).map(|index| format!("f{index}")).collect();
    let mut text = format!(
        "{start}\ncalls: {calls}\ncall: {open} \"\\n<function=\" ({}) \"</function>\\n\" {close}\n",
        functions.join(" | ")
    );
    for (index, tool) in choice.tools.iter().enumerate() {
        let function = tool.get("function").unwrap_or(tool);
        let name = function.get("name").and_then(Value::as_str).unwrap_or_default();
        let subject = || Subject::Tool { index, name: name.to_owned() };
        write_function(&mut text, index, name, function)
            .map_err(|reason| ConstraintError { subject: subject(), reason })?;
    }
    Ok(text)
}

fn write_function(text: &mut String, index: usize, name: &str, function: &Value) -> Result<(), String> {
    if !is_word(name) {
        return Err(format!("the name {name:?} cannot be written in a call"));
    }
    let strict = function.get("strict").and_then(Value::as_bool).unwrap_or(false);
    let nothing = Value::Null;
    let root = function.get("parameters").unwrap_or(&nothing);
    bounds::check_schema(root)?;
    let schema = resolve(root, root);
    let required: Vec<&str> = match schema.get("required").and_then(Value::as_array) {
        Some(names) => names.iter().filter_map(Value::as_str).collect(),
        None => Vec::new(),
    };
    let properties = schema.get("properties").and_then(Value::as_object);
    if let Some(undeclared) =
        required.iter().find(|&&key| properties.is_none_or(|properties| !properties.contains_key(key)))
    {
        return Err(format!("it requires {undeclared:?}, which its properties do not declare"));
    }
    let mut rule = format!("f{index}: {}", literal(&format!("{name}>\n")));
    let mut values = String::new();
    for (place, (key, schema)) in properties.into_iter().flatten().enumerate() {
        let is_required = required.contains(&key.as_str());
        if !is_word(key) {
            if is_required {
                return Err(format!("the parameter name {key:?} cannot be written in a call"));
            }
            continue;
        }
        let (parameter, value) = (format!("p{index}_{place}"), format!("v{index}_{place}"));
        let _ = write!(rule, " {parameter}{}", if is_required { "" } else { "?" });
        let opening = literal(&format!("<parameter={key}>\n"));
        let of_key = |reason| format!("parameter {key:?}: {reason}");
        let _ = match form(root, schema, strict).map_err(of_key)? {
            Form::Text(terminal) => {
                write!(values, "{parameter}: {opening} {value} \"\\n\"\n{value}[lazy]: {terminal}\n")
            }
            Form::Json(schema) => {
                let schema = with_options(&schema, strict);
                writeln!(values, "{parameter}: {opening} %json {schema} \"\\n</parameter>\\n\"")
            }
        };
    }
    let _ = write!(text, "{rule}\n{values}");
    Ok(())
}

/// Whether the parser reads `word` back as it is.
fn is_word(word: &str) -> bool {
    !word.is_empty() && !word.contains(|c: char| c == '<' || c == '>' || c.is_whitespace())
}

/// A string of Lark's, which is written as in JSON.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
