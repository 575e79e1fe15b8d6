//! `system` and `messages`: from content blocks to what the chat template renders.
//!
//! The template knows text, thinking, tool calls and tool results, each in its own place of a message.
//! Blocks of text that stand side by side are joined without a separator, as the template joins parts. What
//! the model cannot see (images, documents, results of tools that run elsewhere) is refused.

use serde_json::Value;

use crate::conversation::{Call, Conversation, Turn};
use crate::error::ApiError;
use crate::openai::fields::{Fields, missing, not_among, wrong_type};

/// How Claude Code begins a block of `system` that labels the request for billing. It differs from request to
/// request and is not meant for a model; in the prompt it would keep the prefix cache from ever hitting.
const BILLING_LABEL: &str = "x-anthropic-billing-header:";
/// Tells the model what `is_error` tells a client; the chat format has no mark of its own for it.
const ERROR_MARK: &str = "Error: ";

/// A conversation in the template's form.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Read {
    /// All messages but an opening of the answer.
    pub messages: Vec<Value>,
    /// How the answer has to begin: the text of a last message that is the assistant's.
    pub opening: Option<String>,
}

/// Reads the conversation of a request.
pub fn read(body: &Fields<'_>) -> Result<Read, ApiError> {
    let mut reader = Reader::default();
    if let Some(system) = system(body)? {
        reader.0.system(&system);
    }
    let messages = body.list("messages")?.ok_or_else(|| missing("messages"))?;
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` must hold at least one message"));
    }
    for (index, message) in messages.iter().enumerate() {
        let fields = Fields::at(message, format!("{}[{index}]", body.path("messages")))?;
        reader.message(&fields)?;
    }
    Ok(reader.finish())
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
struct Reader(Conversation);

impl Reader {
    fn message(&mut self, fields: &Fields<'_>) -> Result<(), ApiError> {
        let role = required(fields, "role")?;
        let blocks = blocks(fields, "content")?.ok_or_else(|| missing(fields.path("content")))?;
        match role {
            "user" => self.user(&blocks),
            "assistant" => self.assistant(&blocks),
            "system" => {
                let text = blocks.iter().map(Block::text_block).collect::<Result<String, _>>()?;
                self.0.system(&text);
                Ok(())
            }
            other => Err(not_among(fields.path("role"), &["user", "assistant"], other)),
        }
    }

    /// Text becomes a user message, each tool result a tool message. As in Anthropic's own API, turns of the user
    /// that follow one another are one.
    fn user(&mut self, blocks: &[Block<'_>]) -> Result<(), ApiError> {
        // A message of no blocks at all is an empty one.
        let mut text: Option<String> = blocks.is_empty().then(String::new);
        for block in blocks {
            match (block, block.kind()?) {
                (Block::Fields(fields), "tool_result") => {
                    if let Some(text) = text.take() {
                        self.0.user_joined(&text);
                    }
                    self.tool_result(fields)?;
                }
                _ => text.get_or_insert_default().push_str(block.text_block()?),
            }
        }
        if let Some(text) = text {
            self.0.user_joined(&text);
        }
        Ok(())
    }

    fn tool_result(&mut self, fields: &Fields<'_>) -> Result<(), ApiError> {
        let id = required(fields, "tool_use_id")?;
        if !self.0.has_call(id) {
            let path = fields.path("tool_use_id");
            let message =
                format!("`{path}` is {id:?}, and no `tool_use` block of the turn before has this id");
            return Err(ApiError::invalid(path, message));
        }
        let blocks = blocks(fields, "content")?.unwrap_or_default();
        let text = blocks.iter().map(Block::text_block).collect::<Result<String, _>>()?;
        let mark = if fields.boolean("is_error")?.unwrap_or(false) { ERROR_MARK } else { "" };
        self.0.result(id, &format!("{mark}{text}"));
        Ok(())
    }

    fn assistant(&mut self, blocks: &[Block<'_>]) -> Result<(), ApiError> {
        let mut turn = Turn::default();
        for block in blocks {
            match (block, block.kind()?) {
                (Block::Fields(fields), "thinking") => {
                    fields.text("signature")?;
                    turn.reasoning.push_str(required(fields, "thinking")?);
                }
                // Another server's thinking, which only that one can read.
                (Block::Fields(_), "redacted_thinking") => {}
                (Block::Fields(fields), "tool_use") => {
                    fields.object("input")?.ok_or_else(|| missing(fields.path("input")))?;
                    turn.calls.push(Call {
                        id: required(fields, "id")?.to_string(),
                        name: required(fields, "name")?.to_string(),
                        arguments: fields.get("input").cloned().unwrap_or_default(),
                    });
                }
                _ => turn.content.push_str(block.text_block()?),
            }
        }
        self.0.assistant(turn);
        Ok(())
    }

    fn finish(self) -> Read {
        let mut messages = self.0.finish();
        // A last turn with calls or thinking is complete, or the model could not tell where it breaks off.
        let opens = messages.last().is_some_and(|last| {
            last["role"] == "assistant" && last.get("tool_calls").or(last.get("reasoning_content")).is_none()
        });
        let opening = if opens { messages.pop() } else { None };
        let opening = opening.and_then(|message| Some(message["content"].as_str()?.to_string()));
        Read { messages, opening }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn conversation(body: Value) -> Result<Read, ApiError> {
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
                    {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
                    {"id": "b", "type": "function", "function": {"name": "weather", "arguments": {}}}]},
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
