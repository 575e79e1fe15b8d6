//! `messages`: from what clients send to what the chat template renders.
//!
//! The template knows the roles system (first only), user, assistant and tool, text content, and tool calls
//! whose arguments are an object. Clients send more shapes for the same things; they are brought to
//! that form here, and what the model cannot see (images, audio, files) is refused.

use serde_json::{Map, Value, json};

use super::fields::{Fields, missing, wrong_type};
use crate::error::ApiError;

/// What stands between leading system messages that are joined to one.
const SYSTEM_SEPARATOR: &str = "\n\n";

/// Brings `messages` (at `path` in the body) into the form that the template renders.
pub fn normalise(messages: &[Value], path: &str) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid(path, format!("`{path}` must hold at least one message")));
    }
    let mut out: Vec<Value> = Vec::with_capacity(messages.len());
    for (index, message) in messages.iter().enumerate() {
        let fields = Fields::at(message, format!("{path}[{index}]"))?;
        let message = one(&fields)?;
        if !joined_to_system(&mut out, &message) {
            out.push(message);
        }
    }
    Ok(out)
}

/// Appends a system message to the one before it where that is the conversation's first; the template
/// takes a single system text.
fn joined_to_system(out: &mut [Value], message: &Value) -> bool {
    if message["role"] != "system" {
        return false;
    }
    let [first] = out else { return false };
    if first["role"] != "system" {
        return false;
    }
    let both = [text_of(first), text_of(message)].join(SYSTEM_SEPARATOR);
    first["content"] = Value::String(both);
    true
}

fn text_of(message: &Value) -> &str {
    message["content"].as_str().unwrap_or_default()
}

fn one(fields: &Fields<'_>) -> Result<Value, ApiError> {
    let role = fields.text("role")?.ok_or_else(|| missing(fields.path("role")))?;
    let content = content(fields)?;
    match role {
        "system" | "developer" | "user" => {
            refuse_name(fields)?;
            let content = content.ok_or_else(|| missing(fields.path("content")))?;
            let role = if role == "developer" { "system" } else { role };
            Ok(json!({"role": role, "content": content}))
        }
        "assistant" => assistant(fields, content),
        "tool" => {
            fields.text("tool_call_id")?.ok_or_else(|| missing(fields.path("tool_call_id")))?;
            let content = content.ok_or_else(|| missing(fields.path("content")))?;
            Ok(json!({"role": role, "content": content}))
        }
        other => {
            let path = fields.path("role");
            let message =
                format!("`{path}` must be system, developer, user, assistant or tool, not {other:?}");
            Err(ApiError::invalid(path, message))
        }
    }
}

fn assistant(fields: &Fields<'_>, content: Option<String>) -> Result<Value, ApiError> {
    refuse_name(fields)?;
    for (name, reason) in [
        ("audio", "Lily reads text only"),
        ("function_call", "it is the old form; send `tool_calls`"),
        ("refusal", "the model has no refusals apart from its text; send it as `content`"),
    ] {
        if fields.get(name).is_some() {
            let path = fields.path(name);
            let message = format!("`{path}` is not supported: {reason}");
            return Err(ApiError::unsupported(path, message));
        }
    }
    let calls = match fields.list("tool_calls")? {
        Some(calls) => calls
            .iter()
            .enumerate()
            .map(|(index, call)| tool_call(call, format!("{}[{index}]", fields.path("tool_calls"))))
            .collect::<Result<Vec<_>, _>>()?,
        None => Vec::new(),
    };
    if content.is_none() && calls.is_empty() {
        return Err(missing(fields.path("content")));
    }
    let mut message = json!({"role": "assistant", "content": content.unwrap_or_default()});
    if let Some(reasoning) = fields.text("reasoning_content")? {
        message["reasoning_content"] = Value::String(reasoning.to_string());
    }
    if !calls.is_empty() {
        message["tool_calls"] = Value::Array(calls);
    }
    Ok(message)
}

fn tool_call(call: &Value, path: String) -> Result<Value, ApiError> {
    let call = Fields::at(call, path)?;
    if let Some(other) = call.text("type")?.filter(|&kind| kind != "function") {
        let path = call.path("type");
        let message = format!("`{path}` must be \"function\", not {other:?}");
        return Err(ApiError::unsupported(path, message));
    }
    let function = call.object("function")?.ok_or_else(|| missing(call.path("function")))?;
    let name = function.text("name")?.ok_or_else(|| missing(function.path("name")))?;
    let arguments = match function.get("arguments") {
        None => Map::new(),
        Some(Value::Object(map)) => map.clone(),
        Some(Value::String(text)) if text.trim().is_empty() => Map::new(),
        Some(Value::String(text)) => serde_json::from_str(text).map_err(|error| {
            let path = function.path("arguments");
            let message = format!("`{path}` must be a JSON object written as a string: {error}");
            ApiError::invalid(path, message)
        })?,
        Some(other) => return Err(wrong_type(function.path("arguments"), "a string", other)),
    };
    Ok(json!({"type": "function", "function": {"name": name, "arguments": arguments}}))
}

/// `content` as one text; parts are joined without a separator, as the template does.
fn content(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let path = fields.path("content");
    match fields.get("content") {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for (index, value) in parts.iter().enumerate() {
                let part = Fields::at(value, format!("{path}[{index}]"))?;
                text.push_str(text_part(&part)?);
            }
            Ok(Some(text))
        }
        Some(other) => Err(wrong_type(path, "a string or a list of parts", other)),
    }
}

fn text_part<'a>(part: &Fields<'a>) -> Result<&'a str, ApiError> {
    match part.text("type")?.ok_or_else(|| missing(part.path("type")))? {
        "text" => part.text("text")?.ok_or_else(|| missing(part.path("text"))),
        other => {
            let path = part.path("type");
            let message = format!("`{path}` is {other:?}, and Lily reads parts of type \"text\" only");
            Err(ApiError::unsupported(path, message))
        }
    }
}

fn refuse_name(fields: &Fields<'_>) -> Result<(), ApiError> {
    match fields.text("name")? {
        None | Some("") => Ok(()),
        Some(_) => {
            let path = fields.path("name");
            let message = format!(
                "`{path}` is not supported: the model's chat format has no participant names; put the name into the text"
            );
            Err(ApiError::unsupported(path, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normalised(messages: Value) -> Vec<Value> {
        normalise(messages.as_array().unwrap(), "messages").unwrap()
    }

    fn refused(messages: Value) -> (String, String) {
        let error = normalise(messages.as_array().unwrap(), "messages").unwrap_err();
        (error.param.unwrap(), error.message)
    }

    #[test]
    fn clients_shapes_become_the_templates_shapes() {
        let messages = normalised(json!([
            {"role": "developer", "content": "Be brief."},
            {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{\"city\":\"Rome\"}"}}]},
            {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        ]));
        assert_eq!(
            Value::Array(messages),
            json!([
                {"role": "system", "content": "Be brief.\n\nBe kind."},
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": "", "tool_calls": [
                    {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]},
                {"role": "tool", "content": "sunny"},
            ])
        );
    }

    #[test]
    fn what_the_model_cannot_read_is_refused_where_it_stands() {
        let image = json!([{"role": "user", "content": [
            {"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "x"}}]}]);
        let (param, message) = refused(image);
        assert_eq!(param, "messages[0].content[1].type");
        assert!(message.contains("image_url"), "{message}");

        let cases = [
            (json!([]), "messages"),
            (json!([{"content": "hi"}]), "messages[0].role"),
            (json!([{"role": "robot", "content": "hi"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": 5}]), "messages[0].content"),
            (json!([{"role": "user", "content": "hi", "name": "Ann"}]), "messages[0].name"),
            (json!([{"role": "tool", "content": "hi"}]), "messages[0].tool_call_id"),
            (json!(["hi"]), "messages[0]"),
            (
                json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]),
                "messages[0].tool_calls[0].function.arguments",
            ),
        ];
        for (messages, expected) in cases {
            assert_eq!(refused(messages).0, expected);
        }
    }
}
