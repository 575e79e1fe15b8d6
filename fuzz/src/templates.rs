//! The demo's chat template: every list of messages becomes a text, or an error with its reason.
//!
//! Bytes that begin with `{` are JSON with the members `messages`, `tools`, `thinking`, `open` and `extra`; of others
//! such a conversation is made up. The text has all that the user said in it, in order, and the tokens of it are the text again. That a user's text
//! holds no markers is nothing that rendering promises: see `README.md`.

use std::sync::LazyLock;

use arbitrary::{Result, Unstructured};
use lily_model::chat_template::{ChatInput, ChatTemplate, TemplateError};
use lily_model::checkpoint::Checkpoint;
use lily_model::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

use super::json::{text, value};

/// Most messages, tools, parts and calls.
const MOST: usize = 5;
/// How a rendered conversation ends that waits for the model.
const OPENINGS: [&str; 2] =
    ["<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"];

static MODEL: LazyLock<(ChatTemplate, Tokenizer)> = LazyLock::new(|| {
    let checkpoint = Checkpoint::demo().expect("the demo is there");
    let template = checkpoint.chat_template().expect("the demo has a chat template");
    (template, checkpoint.tokenizer().expect("the demo has a tokenizer"))
});

struct Conversation {
    messages: Vec<Value>,
    tools: Vec<Value>,
    thinking: Option<bool>,
    open: bool,
    extra: Map<String, Value>,
}

/// See the module's page.
pub fn check(data: &[u8]) {
    let conversation = match data.first() {
        Some(b'{') => written(data),
        // It gives what there is and goes on with zeros.
        _ => made_up(&mut Unstructured::new(data)).ok(),
    };
    let Some(conversation) = conversation else { return };
    let (template, tokenizer) = &*MODEL;
    let rendered = template.render(&ChatInput {
        messages: &conversation.messages,
        tools: &conversation.tools,
        add_generation_prompt: conversation.open,
        enable_thinking: conversation.thinking,
        extra: conversation.extra.clone(),
    });
    let rendered = match rendered {
        Ok(rendered) => rendered,
        Err(TemplateError::Refused(why) | TemplateError::Failed(why)) => return assert!(!why.is_empty()),
        Err(error) => panic!("{error} with {:?}", conversation.messages),
    };
    let mut rest = rendered.as_str();
    for message in conversation.messages.iter().filter(|message| message["role"] == "user") {
        if let Some(said) = message["content"].as_str() {
            let said = said.trim_matches(|c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c));
            let (_, after) =
                rest.split_once(said).unwrap_or_else(|| panic!("{said:?} is not in {rendered:?}"));
            rest = after;
        }
    }
    if conversation.open {
        let opening = OPENINGS[usize::from(conversation.thinking == Some(false))];
        assert!(rendered.ends_with(opening), "{rendered:?} does not end with {opening:?}");
    }
    let read = tokenizer.decode_with_special(&tokenizer.encode(&rendered));
    // Other texts may be spelled in another way that means the same.
    assert!(!rendered.is_ascii() || read == rendered, "{rendered:?} was encoded as {read:?}");
}

fn written(data: &[u8]) -> Option<Conversation> {
    let value: Value = serde_json::from_slice(data).ok()?;
    let list = |name: &str| value[name].as_array().cloned().unwrap_or_default();
    Some(Conversation {
        messages: list("messages"),
        tools: list("tools"),
        thinking: value["thinking"].as_bool(),
        open: value["open"].as_bool().unwrap_or(false),
        extra: value["extra"].as_object().cloned().unwrap_or_default(),
    })
}

fn made_up(u: &mut Unstructured<'_>) -> Result<Conversation> {
    let messages = many(u, message)?;
    let tools = many(u, |u| {
        let parameters = value(u, 0)?;
        if u.ratio(1, 8)? {
            Ok(parameters)
        } else {
            Ok(json!({"type": "function", "function": {"name": text(u)?, "parameters": parameters}}))
        }
    })?;
    let mut extra = Map::new();
    for _ in 0..u.int_in_range(0..=2)? {
        extra.insert(text(u)?, value(u, 0)?);
    }
    Ok(Conversation { messages, tools, thinking: u.arbitrary()?, open: u.arbitrary()?, extra })
}

fn many(u: &mut Unstructured<'_>, one: fn(&mut Unstructured<'_>) -> Result<Value>) -> Result<Vec<Value>> {
    (0..u.int_in_range(0..=MOST)?).map(|_| one(u)).collect()
}

fn message(u: &mut Unstructured<'_>) -> Result<Value> {
    if u.ratio(1, 16)? {
        return value(u, 0);
    }
    let role = *u.choose(&["user", "assistant", "tool", "user", "system", "developer"])?;
    let mut message = json!({"role": role, "content": content(u)?});
    if role == "assistant" {
        if u.arbitrary()? {
            message["reasoning_content"] = content(u)?;
        }
        if u.arbitrary()? {
            message["tool_calls"] = Value::Array(many(u, call)?);
        }
    }
    Ok(message)
}

fn content(u: &mut Unstructured<'_>) -> Result<Value> {
    Ok(match u.int_in_range(0..=7)? {
        0 => value(u, 0)?,
        1 => Value::Array(many(u, |u| Ok(json!({"type": "text", "text": value(u, 0)?})))?),
        _ => Value::String(text(u)?),
    })
}

fn call(u: &mut Unstructured<'_>) -> Result<Value> {
    let function = json!({"name": text(u)?, "arguments": value(u, 0)?});
    Ok(match u.int_in_range(0..=7)? {
        0 => value(u, 0)?,
        1 => function,
        _ => json!({"type": "function", "id": "call_1", "function": function}),
    })
}
