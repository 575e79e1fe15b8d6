//! `messages`: from what clients send to what the chat template renders.
//!
//! The template knows the roles system (first only), user, assistant and tool, text content, and tool calls
//! whose arguments are an object. Clients send more shapes for the same things; they are brought to
//! that form here, and what the model cannot see (images, audio, files) is refused.

use serde_json::{Map, Value, json};

use super::fields::{Fields, missing, not_among, wrong_type};
use crate::conversation::{Call, Conversation, Turn};
use crate::error::ApiError;

/// Brings `messages` (at `path` in the body) into the form that the template renders.
pub fn normalise(messages: &[Value], path: &str) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid(path, format!("`{path}` must hold at least one message")));
    }
    let mut conversation = Conversation::default();
    for (index, message) in messages.iter().enumerate() {
        let fields = Fields::at(message, format!("{path}[{index}]"))?;
        put(&mut conversation, &fields)?;
    }
    Ok(conversation.finish())
}

fn put(conversation: &mut Conversation, fields: &Fields<'_>) -> Result<(), ApiError> {
    let role = fields.text("role")?.ok_or_else(|| missing(fields.path("role")))?;
    let content = content(fields)?;
    let text = |content: Option<String>| content.ok_or_else(|| missing(fields.path("content")));
    match role {
        "system" | "developer" => {
            refuse_name(fields)?;
            conversation.system(&text(content)?);
        }
        "user" => {
            refuse_name(fields)?;
            conversation.user(&text(content)?);
        }
        "assistant" => conversation.assistant(assistant(fields, content)?),
        "tool" => {
            let call = fields.text("tool_call_id")?.ok_or_else(|| missing(fields.path("tool_call_id")))?;
            conversation.result(call, &text(content)?);
        }
        other => {
            let roles = ["system", "developer", "user", "assistant", "tool"];
            return Err(not_among(fields.path("role"), &roles, other));
        }
    }
    Ok(())
}

fn assistant(fields: &Fields<'_>, content: Option<String>) -> Result<Turn, ApiError> {
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
    let reasoning = fields.text("reasoning_content")?.unwrap_or_default().to_string();
    Ok(Turn { id: None, reasoning, content: content.unwrap_or_default(), calls })
}

fn tool_call(call: &Value, path: String) -> Result<Call, ApiError> {
    let call = Fields::at(call, path)?;
    if let Some(other) = call.text("type")?.filter(|&kind| kind != "function") {
        let path = call.path("type");
        let message = format!("`{path}` must be \"function\", not {other:?}");
        return Err(ApiError::unsupported(path, message));
    }
    let function = call.object("function")?.ok_or_else(|| missing(call.path("function")))?;
    let name = function.text("name")?.ok_or_else(|| missing(function.path("name")))?;
    let arguments = match function.get("arguments") {
        None => json!({}),
        Some(object @ Value::Object(_)) => object.clone(),
        Some(Value::String(text)) => arguments(text, &function.path("arguments"))?,
        Some(other) => return Err(wrong_type(function.path("arguments"), "a string", other)),
    };
    let id = call.text("id")?.unwrap_or_default().to_string();
    Ok(Call { id, name: name.to_string(), arguments })
}

/// The arguments of a call, at `path`, which are an object written as text; empty text is an empty object.
pub(crate) fn arguments(text: &str, path: &str) -> Result<Value, ApiError> {
    if text.trim().is_empty() {
        return Ok(json!({}));
    }
    let object: Map<String, Value> = crate::body::parse(text.as_bytes()).map_err(|error| {
        ApiError::invalid(path, format!("`{path}` must be a JSON object written as a string: {error}"))
    })?;
    Ok(Value::Object(object))
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
                    {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]},
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
