//! What the model wrote, kept for when clients send it back.
//!
//! A client gets a turn taken apart and sends it back in words of its own: arguments parsed and printed again, white
//! space trimmed, reasoning left out. Rendered from those, the prompt parts from what the prefix cache holds at the
//! first difference, and everything behind it is computed again; the recurrent state makes that dear. So the tokens
//! of a turn stay here under its id, which is a part of the ids of its calls and items. A turn that comes back with
//! such an id, and says what the kept one says, is rendered as it was written, token for token. Every other turn,
//! one that a client changed above all, is rendered by the chat template from what the client sent.
//!
//! The template still decides what stays of a turn: it renders a mark in the turn's place, and where it left the
//! reasoning out, so is the reasoning of the kept turn.

use std::sync::{Arc, Mutex, PoisonError};

use lily_engine::output::Delta;
use lily_engine::reasoning::prompt_opens_reasoning;
use lily_model::tokenizer::Tokenizer;
use lily_model::tokenizer::markers::THINK_END;
use serde_json::{Value, json};

use crate::lru::Lru;
use crate::openai::assemble::secret_id;

/// Most bytes of turns that are kept: some thousands of them.
const MAX_BYTES: usize = 64 * 1024 * 1024;
/// What opens the model's turn in a rendered conversation.
const HEADER: &str = "<|im_start|>assistant\n";

/// A turn as the model wrote it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Written {
    /// The end of its prompt, from where the turn begins.
    pub opening: String,
    /// Every token chosen, the one that ended it excepted.
    pub tokens: Vec<u32>,
    /// Its reasoning, as the client got it.
    pub reasoning: String,
    /// Its text, as the client got it.
    pub content: String,
    /// Names and arguments of its calls.
    pub calls: Vec<(String, String)>,
}

impl Written {
    /// Takes in what became certain.
    pub fn hear(&mut self, deltas: &[Delta]) {
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) => self.reasoning.push_str(text),
                Delta::Content(text) => self.content.push_str(text),
                Delta::ToolCall { name } => self.calls.push((name.clone(), String::new())),
                Delta::Arguments(json) => {
                    if let Some((_, arguments)) = self.calls.last_mut() {
                        arguments.push_str(json);
                    }
                }
                Delta::ToolCallEnd => {}
            }
        }
    }

    /// Whether a message in the template's form says the same. Reasoning may be left out.
    fn is_said_by(&self, message: &Value) -> bool {
        let text = |name: &str| message[name].as_str().unwrap_or_default().trim();
        let reasoning = text("reasoning_content");
        let calls = message["tool_calls"].as_array().map(Vec::as_slice).unwrap_or_default();
        let same_call = |(call, (name, arguments)): (&Value, &(String, String))| {
            let function = &call["function"];
            let written = serde_json::from_str::<Value>(arguments);
            function["name"] == **name && written.is_ok_and(|written| alike(&written, &function["arguments"]))
        };
        text("content") == self.content.trim()
            && (reasoning.is_empty() || reasoning == self.reasoning.trim())
            && calls.len() == self.calls.len()
            && calls.iter().zip(&self.calls).all(same_call)
    }

    fn bytes(&self) -> usize {
        let calls =
            self.calls.iter().map(|(name, arguments)| name.len() + arguments.len() + size_of_val(name) * 2);
        let texts = self.opening.len() + self.reasoning.len() + self.content.len();
        size_of::<Written>() + size_of_val(&*self.tokens) + texts + calls.sum::<usize>()
    }

    /// The text behind the reasoning; `None` where the reasoning does not end.
    fn answer(&self, tokenizer: &Tokenizer) -> Option<String> {
        let text = tokenizer.decode_with_special(&self.tokens);
        if !prompt_opens_reasoning(&self.opening) {
            return Some(text);
        }
        text.split_once(THINK_END).map(|(_, answer)| answer.trim_start_matches('\n').to_string())
    }
}

/// Whether two JSON values are equal to a client: the order of keys and the spelling of numbers are not.
fn alike(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => {
            a == b || (a.is_f64() || b.is_f64()) && a.as_f64() == b.as_f64()
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| alike(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| alike(a, b)))
        }
        (a, b) => a == b,
    }
}

/// A new turn's id, which nobody can guess: whoever knows it can have the turn rendered.
pub fn new_id() -> String {
    secret_id("")
}

/// The turn's id in the id of one of its calls or items: what stands between the first `_` and the last.
fn turn_of(id: &str) -> Option<&str> {
    let (_, rest) = id.split_once('_')?;
    rest.rsplit_once('_').map(|(turn, _)| turn)
}

/// The turns of the last answers, within bounds; least recently used out first. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Turns(Arc<Mutex<Lru<Written>>>);

impl Turns {
    /// Keeps a turn.
    pub fn keep(&self, id: &str, written: Written) {
        let bytes = written.bytes();
        if bytes > MAX_BYTES {
            return;
        }
        self.with(|lru| {
            lru.insert(id, written, bytes);
            while lru.bytes() > MAX_BYTES {
                lru.remove_oldest();
            }
        });
    }

    /// The kept turn that a message in the template's form is, if it is one.
    fn find(&self, message: &Value) -> Option<Arc<Written>> {
        let id = message["tool_calls"][0]["id"].as_str().or(message["id"].as_str())?;
        let turn = turn_of(id)?;
        let written = self.with(|lru| lru.get(turn))?;
        written.is_said_by(message).then_some(written)
    }

    fn with<T>(&self, work: impl FnOnce(&mut Lru<Written>) -> T) -> T {
        // Every change is complete before anything that could panic.
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Puts marks in the place of turns that are kept; `None` where there are none.
    pub fn mark(&self, messages: &[Value]) -> Option<Marked> {
        let mut marked = Marked { messages: Vec::new(), turns: Vec::new() };
        for (index, message) in messages.iter().enumerate() {
            let kept = if message["role"] == "assistant" { self.find(message) } else { None };
            let Some(written) = kept else { continue };
            if marked.messages.is_empty() {
                marked.messages = messages.to_vec();
            }
            let mark = secret_id("turn");
            let mut message = json!({"role": "assistant", "content": mark});
            // Templates may ask whether there is reasoning before they decide what to print around it.
            if !written.reasoning.is_empty() {
                message["reasoning_content"] = Value::String(written.reasoning.clone());
            }
            marked.messages[index] = message;
            marked.turns.push((mark, written));
        }
        (!marked.turns.is_empty()).then_some(marked)
    }
}

/// A conversation with marks in the place of kept turns.
#[derive(Clone, Debug)]
pub struct Marked {
    /// The messages, ready for the template.
    pub messages: Vec<Value>,
    /// The marks and what they stand for, in order.
    turns: Vec<(String, Arc<Written>)>,
}

impl Marked {
    /// What `rendered` stands for: tokens up to the end of the last kept turn, and the text after it. `None` where
    /// the template did not print a turn as expected.
    pub fn resolve(&self, rendered: &str, tokenizer: &Tokenizer) -> Option<(Vec<u32>, String)> {
        let (mut tokens, mut text, mut rest) = (Vec::new(), String::new(), rendered);
        for (mark, written) in &self.turns {
            let (before, after) = rest.split_once(&**mark)?;
            let (before, opening) = before.rsplit_once(HEADER)?;
            text.push_str(before);
            text.push_str(HEADER);
            if opening.is_empty() {
                text.push_str(&written.answer(tokenizer)?);
            } else {
                text.push_str(&written.opening);
                tokens.extend(tokenizer.encode(&text));
                tokens.extend_from_slice(&written.tokens);
                text.clear();
            }
            rest = after;
        }
        text.push_str(rest);
        Some((tokens, text))
    }
}

/// What stands behind the last header of a prompt: how the model's turn begins.
pub fn opening(prompt: &str) -> String {
    prompt.rsplit_once(HEADER).map(|(_, opening)| opening.to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(content: &str, arguments: &str) -> Written {
        let calls = vec![("f".to_string(), arguments.to_string())];
        Written { content: content.to_string(), reasoning: "Hm.".to_string(), calls, ..Written::default() }
    }

    fn message(id: &str, content: &str, arguments: Value) -> Value {
        json!({"role": "assistant", "content": content, "tool_calls":
            [{"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}]})
    }

    #[test]
    fn a_turn_is_known_by_what_it_says_and_not_by_how_that_is_written() {
        let turns = Turns::default();
        turns.keep("t", written(" I look. ", r#"{"a": 1.50,  "b":[1e2]}"#));
        let found = |message: &Value| turns.find(message).is_some();
        let mut same = message("call_t_0", "I look.", json!({"b": [100], "a": 1.5}));
        assert!(found(&same));
        same["reasoning_content"] = json!("Hm.");
        assert!(found(&same));
        same["reasoning_content"] = json!("Aha.");
        assert!(!found(&same));
        for other in [
            message("call_u_0", "I look.", json!({"b": [100], "a": 1.5})),
            message("t", "I look.", json!({"b": [100], "a": 1.5})),
            message("call_t_0", "I looked.", json!({"b": [100], "a": 1.5})),
            message("call_t_0", "I look.", json!({"b": [100], "a": 1.25})),
            message("call_t_0", "I look.", json!({"b": [100], "a": 1.5, "c": null})),
            json!({"role": "assistant", "content": "I look.", "id": "msg_t_0"}),
        ] {
            assert!(!found(&other), "{other}");
        }
    }

    #[test]
    fn turns_are_bounded_in_bytes_and_those_not_used_go_first() {
        let turns = Turns::default();
        let quarter = "x".repeat(MAX_BYTES / 4);
        for id in ["a", "b", "c"] {
            turns.keep(id, written(&quarter, "{}"));
        }
        let find = |id: &str| turns.find(&message(&format!("call_{id}_0"), &quarter, json!({}))).is_some();
        assert!(find("a"));
        turns.keep("d", written(&quarter, "{}"));
        assert!(find("a") && !find("b") && find("c") && find("d"));
    }
}
