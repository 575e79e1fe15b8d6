//! `system` and `messages`: from content blocks to what the chat template renders.
//!
//! The template knows text, thinking, tool calls and tool results, each in its own place of a message.
//! Blocks of text that stand side by side are joined without a separator, as the template joins parts. What
//! the model cannot see (images, documents, results of tools that run elsewhere) is refused.

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::openai::fields::{Fields, missing, not_among, wrong_type};

/// How Claude Code begins a block of `system` that labels the request for billing. It differs from request to
/// request and is not meant for a model; in the prompt it would keep the prefix cache from ever hitting.
const BILLING_LABEL: &str = "x-anthropic-billing-header:";
/// What stands between a leading system message and the system text before it.
const SYSTEM_SEPARATOR: &str = "\n\n";
/// Tells the model what `is_error` tells a client; the chat format has no mark of its own for it.
const ERROR_MARK: &str = "Error: ";

/// A conversation in the template's form.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// All messages but an opening of the answer.
    pub messages: Vec<Value>,
    /// How the answer has to begin: the text of a last message that is the assistant's.
    pub opening: Option<String>,
}

/// Reads the conversation of a request.
pub fn read(body: &Fields<'_>) -> Result<Conversation, ApiError> {
    let mut reader = Reader::default();
    if let Some(system) = system(body)? {
        reader.system(&system);
    }
    let messages = body.list("messages")?.ok_or_else(|| missing("messages"))?;
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` must hold at least one message"));
    }
    for (index, message) in messages.iter().enumerate() {
        let fields = Fields::at(message, format!("{}[{index}]", body.path("messages")))?;
        reader.message(&fields)?;
    }
    Ok(reader.conversation())
}

fn system(body: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let Some(blocks) = blocks(body, "system")? else { return Ok(None) };
    let mut text = String::new();
    for block in &blocks {
        let part = block.text_block()?;
        if !part.starts_with(BILLING_LABEL) {
            text.push_str(part);
        }
    }
    Ok(Some(text).filter(|text| !text.is_empty()))
}

/// A content block, or a text that stands for one.
enum Block<'a> {
    Text(&'a str),
    Fields(Fields<'a>),
}

/// The blocks of the field `name`, which may be a plain text.
fn blocks<'a>(fields: &Fields<'a>, name: &str) -> Result<Option<Vec<Block<'a>>>, ApiError> {
    let path = fields.path(name);
    match fields.get(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(vec![Block::Text(text)])),
        Some(Value::Array(list)) => {
            let block = |(index, value)| Fields::at(value, format!("{path}[{index}]")).map(Block::Fields);
            list.iter().enumerate().map(block).collect::<Result<_, _>>().map(Some)
        }
        Some(other) => Err(wrong_type(path, "a string or a list of blocks", other)),
    }
}

impl<'a> Block<'a> {
    /// Its type; a plain text is a text block.
    fn kind(&self) -> Result<&'a str, ApiError> {
        match self {
            Block::Text(_) => Ok("text"),
            Block::Fields(fields) => fields.text("type")?.ok_or_else(|| missing(fields.path("type"))),
        }
    }

    /// Its text, where blocks of text are all that may stand there.
    fn text_block(&self) -> Result<&'a str, ApiError> {
        match (self, self.kind()?) {
            (Block::Text(text), _) => Ok(text),
            (Block::Fields(fields), "text") => required(fields, "text"),
            (Block::Fields(fields), other) => Err(unreadable(fields, other)),
        }
    }
}

fn required<'a>(fields: &Fields<'a>, name: &str) -> Result<&'a str, ApiError> {
    fields.text(name)?.ok_or_else(|| missing(fields.path(name)))
}

fn unreadable(fields: &Fields<'_>, kind: &str) -> ApiError {
    let path = fields.path("type");
    let message = match kind {
        "image" | "document" => format!("`{path}` is {kind:?}, and Lily reads text only"),
        _ => format!("`{path}` is {kind:?}, which is not supported in this place"),
    };
    ApiError::unsupported(path, message)
}

/// Takes messages one by one.
#[derive(Default)]
struct Reader {
    messages: Vec<Value>,
    /// Ids of the calls in the assistant's last turn.
    calls: Vec<String>,
}

impl Reader {
    fn system(&mut self, text: &str) {
        match self.messages.as_mut_slice() {
            [first] if first["role"] == "system" => {
                let both = [first["content"].as_str().unwrap_or_default(), text].join(SYSTEM_SEPARATOR);
                first["content"] = Value::String(both);
            }
            _ => self.messages.push(json!({"role": "system", "content": text})),
        }
    }

    fn message(&mut self, fields: &Fields<'_>) -> Result<(), ApiError> {
        let role = required(fields, "role")?;
        let blocks = blocks(fields, "content")?.ok_or_else(|| missing(fields.path("content")))?;
        match role {
            "user" => self.user(&blocks),
            "assistant" => self.assistant(&blocks),
            "system" => {
                let text = blocks.iter().map(Block::text_block).collect::<Result<String, _>>()?;
                self.system(&text);
                Ok(())
            }
            other => Err(not_among(fields.path("role"), &["user", "assistant"], other)),
        }
    }

    /// Text becomes a user message, each run of tool results as many tool messages.
    fn user(&mut self, blocks: &[Block<'_>]) -> Result<(), ApiError> {
        let mut text: Option<String> = None;
        let mut results: Vec<(usize, Value)> = Vec::new();
        for block in blocks {
            match (block, block.kind()?) {
                (Block::Fields(fields), "tool_result") => {
                    self.messages.extend(text.take().map(user_message));
                    results.push(self.tool_result(fields)?);
                }
                _ => {
                    let part = block.text_block()?;
                    self.put(&mut results);
                    text.get_or_insert_default().push_str(part);
                }
            }
        }
        self.put(&mut results);
        // A message of no blocks at all is an empty one.
        let empty = blocks.is_empty().then(String::new);
        self.messages.extend(text.or(empty).map(user_message));
        Ok(())
    }

    /// Puts results in the order of their calls: the model reads no ids, it goes by the order alone.
    fn put(&mut self, results: &mut Vec<(usize, Value)>) {
        results.sort_by_key(|&(place, _)| place);
        self.messages.extend(results.drain(..).map(|(_, message)| message));
    }

    /// A tool's result, and its call's place among the calls of the turn.
    fn tool_result(&self, fields: &Fields<'_>) -> Result<(usize, Value), ApiError> {
        let id = required(fields, "tool_use_id")?;
        let place = self.calls.iter().position(|call| call == id).ok_or_else(|| {
            let path = fields.path("tool_use_id");
            let message =
                format!("`{path}` is {id:?}, and no `tool_use` block of the turn before has this id");
            ApiError::invalid(path, message)
        })?;
        let blocks = blocks(fields, "content")?.unwrap_or_default();
        let text = blocks.iter().map(Block::text_block).collect::<Result<String, _>>()?;
        let mark = if fields.boolean("is_error")?.unwrap_or(false) { ERROR_MARK } else { "" };
        Ok((place, json!({"role": "tool", "content": format!("{mark}{text}")})))
    }

    fn assistant(&mut self, blocks: &[Block<'_>]) -> Result<(), ApiError> {
        if self.messages.last().is_none_or(|last| last["role"] != "assistant") {
            self.calls.clear();
        }
        let (mut text, mut thinking, mut calls) = (String::new(), String::new(), Vec::new());
        for block in blocks {
            match (block, block.kind()?) {
                (Block::Fields(fields), "thinking") => {
                    fields.text("signature")?;
                    thinking.push_str(required(fields, "thinking")?);
                }
                // Another server's thinking, which only that one can read.
                (Block::Fields(_), "redacted_thinking") => {}
                (Block::Fields(fields), "tool_use") => {
                    self.calls.push(required(fields, "id")?.to_string());
                    let name = required(fields, "name")?;
                    fields.object("input")?.ok_or_else(|| missing(fields.path("input")))?;
                    let arguments = fields.get("input");
                    calls.push(
                        json!({"type": "function", "function": {"name": name, "arguments": arguments}}),
                    );
                }
                _ => text.push_str(block.text_block()?),
            }
        }
        let mut message = json!({"role": "assistant", "content": text});
        if !thinking.is_empty() {
            message["reasoning_content"] = Value::String(thinking);
        }
        if !calls.is_empty() {
            message["tool_calls"] = Value::Array(calls);
        }
        self.messages.push(message);
        Ok(())
    }

    fn conversation(mut self) -> Conversation {
        // A last turn with calls or thinking is complete, or the model could not tell where it breaks off.
        let opens = self.messages.last().is_some_and(|last| {
            last["role"] == "assistant" && last.get("tool_calls").or(last.get("reasoning_content")).is_none()
        });
        let opening = if opens { self.messages.pop() } else { None };
        let opening = opening.and_then(|message| Some(message["content"].as_str()?.to_string()));
        Conversation { messages: self.messages, opening }
    }
}

fn user_message(text: String) -> Value {
    json!({"role": "user", "content": text})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conversation(body: Value) -> Result<Conversation, ApiError> {
        read(&Fields::body(&body).unwrap())
    }

    #[test]
    fn blocks_become_the_templates_messages() {
        let read = conversation(json!({
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f2e;"},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Weather "}, {"type": "text", "text": "there?"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "Two cities.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "AAAA"},
                    {"type": "text", "text": "I ask."},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
                    {"type": "tool_use", "id": "b", "name": "weather", "input": {}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "b", "is_error": true, "content": "which city?"},
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "sunny"}]},
                    {"type": "text", "text": "And?"}]},
            ]
        }))
        .unwrap();
        assert_eq!(
            Value::Array(read.messages),
            json!([
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Weather there?"},
                {"role": "assistant", "content": "I ask.", "reasoning_content": "Two cities.", "tool_calls": [
                    {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
                    {"type": "function", "function": {"name": "weather", "arguments": {}}}]},
                {"role": "tool", "content": "sunny"},
                {"role": "tool", "content": "Error: which city?"},
                {"role": "user", "content": "And?"},
            ])
        );
        assert_eq!(read.opening, None);
    }

    #[test]
    fn a_last_message_of_the_assistant_opens_the_answer() {
        let messages = json!([{"role": "user", "content": "A list?"}, {"role": "assistant", "content": "["}]);
        let read = conversation(json!({"messages": messages})).unwrap();
        assert_eq!(Value::Array(read.messages), json!([{"role": "user", "content": "A list?"}]));
        assert_eq!(read.opening.as_deref(), Some("["));
    }

    #[test]
    fn what_the_model_cannot_read_is_refused_where_it_stands() {
        let block = |role: &str, block: Value| json!([{"role": role, "content": [block]}]);
        let cases = [
            (json!([]), "messages"),
            (json!([{"content": "hi"}]), "messages[0].role"),
            (json!([{"role": "tool", "content": "hi"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": 5}]), "messages[0].content"),
            (block("user", json!("hi")), "messages[0].content[0]"),
            (block("user", json!({"type": "image", "source": {}})), "messages[0].content[0].type"),
            (block("user", json!({"type": "document", "source": {}})), "messages[0].content[0].type"),
            (block("user", json!({"type": "thinking", "thinking": "x"})), "messages[0].content[0].type"),
            (block("user", json!({"type": "tool_result"})), "messages[0].content[0].tool_use_id"),
            (
                block("user", json!({"type": "tool_result", "tool_use_id": "nobody's"})),
                "messages[0].content[0].tool_use_id",
            ),
            (block("assistant", json!({"type": "server_tool_use"})), "messages[0].content[0].type"),
            (
                block("assistant", json!({"type": "tool_use", "id": "a", "name": "f", "input": "{}"})),
                "messages[0].content[0].input",
            ),
        ];
        for (messages, expected) in cases {
            let error = conversation(json!({"messages": messages})).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(expected), "{}", error.message);
            assert!(error.message.contains(expected), "{}", error.message);
        }
    }
}
