//! A conversation while it is read from a request, in the form that the chat template renders.
//!
//! Protocols differ in how they write turns; what the template can take is the same for all of them: one system
//! text at the beginning, tool results behind the turn that called, in the order of its calls. Ids of turns and
//! calls stay in the messages. The template prints none, but they tell which turns were written here.

use serde_json::{Value, json};

/// What stands between texts that the template takes as one: leading system messages, and turns of one side.
const SEPARATOR: &str = "\n\n";

/// Takes a conversation's messages one by one.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    messages: Vec<Value>,
    /// Ids of the calls that wait for results: those of the last turn, or of the turns since the user spoke.
    calls: Vec<String>,
    /// Results that are not put in order yet, each with its call's place.
    results: Vec<(usize, Value)>,
}

/// One turn of the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Turn {
    /// Its id, where the protocol gives turns one.
    pub id: Option<String>,
    /// Its thinking; empty where there is none, or where the client did not keep it.
    pub reasoning: String,
    /// Its text.
    pub content: String,
    /// Its calls.
    pub calls: Vec<Call>,
}

/// One call of a tool.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// Its id.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// The arguments, an object.
    pub arguments: Value,
}

impl Conversation {
    /// A system text. The template knows one, at the beginning, so that leading ones are joined; one that comes
    /// later is a turn of the user's, which keeps it in its place.
    pub fn system(&mut self, text: &str) {
        self.put_results();
        match self.messages.as_mut_slice() {
            [] => self.messages.push(json!({"role": "system", "content": text})),
            [first] if first["role"] == "system" => append(first, text),
            _ => self.user(text),
        }
    }

    /// A turn of the user's.
    pub fn user(&mut self, text: &str) {
        self.put_results();
        self.messages.push(json!({"role": "user", "content": text}));
    }

    /// A turn of the user's, made one with the turn before where that is the user's too.
    pub fn user_joined(&mut self, text: &str) {
        self.put_results();
        match self.messages.last_mut() {
            Some(last) if last["role"] == "user" => append(last, text),
            _ => self.user(text),
        }
    }

    /// A turn of the model's.
    pub fn assistant(&mut self, turn: Turn) {
        self.put_results();
        if self.messages.last().is_none_or(|last| last["role"] != "assistant") {
            self.calls.clear();
        }
        let mut message = json!({"role": "assistant", "content": turn.content});
        if let Some(id) = turn.id {
            message["id"] = Value::String(id);
        }
        if !turn.reasoning.is_empty() {
            message["reasoning_content"] = Value::String(turn.reasoning);
        }
        if !turn.calls.is_empty() {
            let call = |Call { id, name, arguments }: Call| {
                self.calls.push(id.clone());
                json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            };
            message["tool_calls"] = turn.calls.into_iter().map(call).collect();
        }
        self.messages.push(message);
    }

    /// Whether a call of this id waits for its result.
    pub fn has_call(&self, id: &str) -> bool {
        self.calls.iter().any(|call| call == id)
    }

    /// The result of a tool. Results come in the order of their calls, wherever they stand among themselves: the
    /// model reads no ids, it goes by the order alone. One whose call is unknown comes after the others.
    pub fn result(&mut self, call: &str, text: &str) {
        let place = self.calls.iter().position(|id| id == call).unwrap_or(usize::MAX);
        self.results.push((place, json!({"role": "tool", "content": text})));
    }

    fn put_results(&mut self) {
        self.results.sort_by_key(|&(place, _)| place);
        self.messages.extend(self.results.drain(..).map(|(_, message)| message));
    }

    /// The messages.
    pub fn finish(mut self) -> Vec<Value> {
        self.put_results();
        self.messages
    }
}

fn append(message: &mut Value, text: &str) {
    let before = message["content"].as_str().unwrap_or_default();
    message["content"] = Value::String([before, text].join(SEPARATOR));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(id: &str) -> Call {
        Call { id: id.to_string(), name: "f".to_string(), arguments: json!({}) }
    }

    fn said(messages: &[Value]) -> Vec<(&str, &str)> {
        messages.iter().map(|m| (m["role"].as_str().unwrap(), m["content"].as_str().unwrap())).collect()
    }

    #[test]
    fn leading_system_texts_are_one_and_later_ones_stay_in_their_place() {
        let mut conversation = Conversation::default();
        conversation.system("Be brief.");
        conversation.system("Be kind.");
        conversation.user("Hello!");
        conversation.system("It is late.");
        let messages = conversation.finish();
        let expected = [("system", "Be brief.\n\nBe kind."), ("user", "Hello!"), ("user", "It is late.")];
        assert_eq!(said(&messages), expected);
    }

    #[test]
    fn results_come_in_the_order_of_their_calls() {
        let mut conversation = Conversation::default();
        conversation.user("Both?");
        conversation.assistant(Turn { calls: vec![call("a"), call("b")], ..Turn::default() });
        assert!(conversation.has_call("b") && !conversation.has_call("c"));
        conversation.result("b", "second");
        conversation.result("unknown", "last");
        conversation.result("a", "first");
        conversation.user("And?");
        conversation.result("a", "too late to be put in order");
        let messages = conversation.finish();
        let texts: Vec<&str> = said(&messages).into_iter().map(|(_, text)| text).collect();
        let expected = ["Both?", "", "first", "second", "last", "And?", "too late to be put in order"];
        assert_eq!(texts, expected);
    }

    #[test]
    fn turns_of_the_user_are_joined_where_the_protocol_joins_them() {
        let mut conversation = Conversation::default();
        conversation.user_joined("One.");
        conversation.user_joined("Two.");
        conversation.assistant(Turn { content: "Three.".to_string(), ..Turn::default() });
        conversation.user_joined("Four.");
        let messages = conversation.finish();
        assert_eq!(said(&messages), [("user", "One.\n\nTwo."), ("assistant", "Three."), ("user", "Four.")]);
    }
}
