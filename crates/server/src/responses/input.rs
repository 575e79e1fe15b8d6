//! `input`: items, from what clients send to what the chat template renders.
//!
//! The protocol has no turns. Reasoning, text and calls that stand side by side are one turn of the model's, in
//! that order; an item that cannot continue a turn begins the next one. Items of tools that Lily does not have,
//! images, audio and files are refused.

use serde_json::{Value, json};

use super::reasoning;
use super::tools::Offered;
use crate::conversation::{Call, Conversation, Turn};
use crate::error::ApiError;
use crate::openai::assemble::unique_id;
use crate::openai::fields::{Fields, missing, not_among, wrong_type};
use crate::openai::messages::arguments;

/// The field's items, each with an id. A text is one message of the user's.
pub fn items(body: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    match body.get("input") {
        None => Err(missing("input")),
        Some(Value::String(text)) => {
            let content = json!([{"type": "input_text", "text": text}]);
            let id = unique_id("msg_");
            Ok(vec![json!({"id": id, "type": "message", "role": "user", "content": content})])
        }
        Some(Value::Array(list)) if list.is_empty() => {
            Err(ApiError::invalid("input", "`input` must hold at least one item"))
        }
        Some(Value::Array(list)) => list.iter().enumerate().map(|(index, item)| named(item, index)).collect(),
        Some(other) => Err(wrong_type("input", "a string or a list of items", other)),
    }
}

/// An item with its type and an id, which clients may leave out.
fn named(item: &Value, index: usize) -> Result<Value, ApiError> {
    let fields = Fields::at(item, format!("input[{index}]"))?;
    let kind = kind(&fields)?;
    let mut item = item.clone();
    item["type"] = Value::from(kind);
    if fields.text("id")?.is_none() && kind != "item_reference" {
        let prefix = match kind {
            "message" => "msg_",
            "reasoning" => "rs_",
            "function_call" | "function_call_output" => "fc_",
            _ => "item_",
        };
        item["id"] = Value::String(unique_id(prefix));
    }
    Ok(item)
}

/// The type of an item: what has a role is a message, what has an id alone refers to an item.
fn kind<'a>(item: &Fields<'a>) -> Result<&'a str, ApiError> {
    match item.text("type")? {
        Some(kind) => Ok(kind),
        None if item.get("role").is_some() => Ok("message"),
        None if item.entries().all(|(name, _)| name == "id") && item.get("id").is_some() => {
            Ok("item_reference")
        }
        None => Err(missing(item.path("type"))),
    }
}

/// Reads a conversation: `instructions`, the items `before` this request's own, and those. `offered` names the tools
/// as the model knows them.
pub fn conversation(
    instructions: Option<&str>,
    before: &[Value],
    items: &[Value],
    offered: &Offered,
) -> Result<Vec<Value>, ApiError> {
    let mut reader = Reader { conversation: Conversation::default(), turn: None, offered };
    if let Some(instructions) = instructions.filter(|text| !text.is_empty()) {
        reader.conversation.system(instructions);
    }
    for item in before {
        reader.item(&Fields::at(item, "previous_response_id")?)?;
    }
    for (index, item) in items.iter().enumerate() {
        reader.item(&Fields::at(item, format!("input[{index}]"))?)?;
    }
    reader.end_turn();
    Ok(reader.conversation.finish())
}

/// Takes items one by one.
struct Reader<'a> {
    conversation: Conversation,
    /// The model's turn that is not complete yet.
    turn: Option<Turn>,
    offered: &'a Offered,
}

impl Reader<'_> {
    fn item(&mut self, item: &Fields<'_>) -> Result<(), ApiError> {
        match kind(item)? {
            "message" => self.message(item),
            "reasoning" => {
                let text = reasoning::text(item)?;
                let begun = |turn: &Turn| !turn.content.is_empty() || !turn.calls.is_empty();
                self.turn(begun).reasoning.push_str(&text);
                Ok(())
            }
            "function_call" => {
                let path = item.path("arguments");
                let arguments = arguments(required(item, "arguments")?, &path)?;
                self.call(item, arguments)
            }
            "custom_tool_call" => self.call(item, json!({"input": required(item, "input")?})),
            "function_call_output" | "custom_tool_call_output" => self.output(item),
            other => {
                let path = item.path("type");
                let message = format!("`{path}` is {other:?}, an item that Lily does not read");
                Err(ApiError::unsupported(path, message))
            }
        }
    }

    /// The model's turn that goes on, or a new one where what it holds is `complete`.
    fn turn(&mut self, complete: impl Fn(&Turn) -> bool) -> &mut Turn {
        if self.turn.as_ref().is_some_and(complete) {
            self.end_turn();
        }
        self.turn.get_or_insert_default()
    }

    fn end_turn(&mut self) {
        if let Some(turn) = self.turn.take() {
            self.conversation.assistant(turn);
        }
    }

    fn message(&mut self, item: &Fields<'_>) -> Result<(), ApiError> {
        let text = content(item, "content")?.ok_or_else(|| missing(item.path("content")))?;
        match required(item, "role")? {
            "assistant" => {
                let id = item.text("id")?.map(str::to_string);
                let turn = self.turn(|turn| !turn.content.is_empty() || !turn.calls.is_empty());
                turn.id = id;
                turn.content = text;
            }
            "user" => {
                self.end_turn();
                self.conversation.user(&text);
            }
            "system" | "developer" => {
                self.end_turn();
                self.conversation.system(&text);
            }
            other => {
                let roles = ["user", "assistant", "system", "developer"];
                return Err(not_among(item.path("role"), &roles, other));
            }
        }
        Ok(())
    }

    fn call(&mut self, item: &Fields<'_>, arguments: Value) -> Result<(), ApiError> {
        let id = required(item, "call_id")?.to_string();
        let name = self.offered.known_as(required(item, "name")?, item.text("namespace")?);
        self.turn(|_| false).calls.push(Call { id, name, arguments });
        Ok(())
    }

    fn output(&mut self, item: &Fields<'_>) -> Result<(), ApiError> {
        self.end_turn();
        let call = required(item, "call_id")?;
        if !self.conversation.has_call(call) {
            let path = item.path("call_id");
            let message = format!("`{path}` is {call:?}, and no call of the turn before has this id");
            return Err(ApiError::invalid(path, message));
        }
        let text = content(item, "output")?.ok_or_else(|| missing(item.path("output")))?;
        self.conversation.result(call, &text);
        Ok(())
    }
}

fn required<'a>(fields: &Fields<'a>, name: &str) -> Result<&'a str, ApiError> {
    fields.text(name)?.ok_or_else(|| missing(fields.path(name)))
}

/// A text, or parts of one, which are joined without a separator.
fn content(item: &Fields<'_>, name: &str) -> Result<Option<String>, ApiError> {
    let path = item.path(name);
    match item.get(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for (index, part) in parts.iter().enumerate() {
                text.push_str(part_text(&Fields::at(part, format!("{path}[{index}]"))?)?);
            }
            Ok(Some(text))
        }
        Some(other) => Err(wrong_type(path, "a string or a list of parts", other)),
    }
}

fn part_text<'a>(part: &Fields<'a>) -> Result<&'a str, ApiError> {
    match required(part, "type")? {
        "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text" => required(part, "text"),
        "refusal" => required(part, "refusal"),
        other => {
            let path = part.path("type");
            let message = format!("`{path}` is {other:?}, and Lily reads text only");
            Err(ApiError::unsupported(path, message))
        }
    }
}
