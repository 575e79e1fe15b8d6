//! Tool calls in the model's XML form, taken out of the text while it arrives.
//!
//! ```text
//! <tool_call>
//! <function=get_weather>
//! <parameter=city>
//! Paris
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! A call is handed over when its last tag is complete; until then its text is held back. As soon as the text
//! cannot become a call any more, or when it ends too early, all of it is given back as text: nothing is lost.
//! Whitespace directly before and after a call belongs to the format and is dropped with it. How the text is
//! cut into pieces changes nothing.
//!
//! A parameter ends at the `</parameter>` that another `<parameter=` or `</function>` follows, so a value may
//! hold any text, other tags included. One newline at each end of a value is the format's. How a value becomes
//! JSON is the subject of [`arguments`](self#arguments):
//!
//! # Arguments
//!
//! The model writes strings as they are and everything else as JSON, so only the tool's schema tells `5` from
//! `"5"`. A value whose schema allows a type other than string, and which is JSON of that type, is taken over
//! as written, digits and all; every other value is a string. Where the schema names no type, only objects
//! and arrays are taken as JSON.

mod schema;

use serde_json::Value;

use crate::tags::{Tag, partial_tag, starts_with_tag};
use schema::ToolSchemas;

const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

/// One complete call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The function's name as the model wrote it; whether it was declared is for the caller to judge.
    pub name: String,
    /// A JSON object, its members in the order of the text.
    pub arguments: String,
}

/// A part of the text, in its order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Text that belongs to no call; never empty.
    Text(String),
    /// A call.
    Call(ToolCall),
}

/// How far into a call the text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Outside.
    Text,
    /// After `<tool_call>`.
    Function,
    /// Inside `<function=…>`.
    Name,
    /// Between parameters.
    Parameter,
    /// Inside `<parameter=…>`.
    Key,
    /// Inside a parameter.
    Value,
    /// After `</function>`.
    End,
}

/// What one step of the parser came to.
enum Step {
    /// It advanced, and another step may be possible.
    Advanced,
    /// More text is needed.
    Wait,
    /// This is no call.
    Malformed,
}

/// Finds the calls in one answer.
#[derive(Clone, Debug)]
pub struct ToolCallParser {
    schemas: ToolSchemas,
    stage: Stage,
    /// Text not yet given out. Inside a call it begins with the whitespace before `<tool_call>`.
    held: String,
    /// In `held`: where `<tool_call>` ends.
    call_from: usize,
    /// In `held`: where the present stage begins.
    at: usize,
    /// In `held`: from where the end of the present stage is still to be looked for.
    searched: usize,
    /// Whether nothing but whitespace has come since the last call.
    after_call: bool,
    name: String,
    key: String,
    /// Parameters and their values as JSON.
    arguments: Vec<(String, String)>,
}

impl ToolCallParser {
    /// `tools`: the request's declarations, `{"type": "function", "function": {"name", "parameters"}}` or the
    /// inner object alone. They are needed for the types of arguments only.
    pub fn new(tools: &[Value]) -> ToolCallParser {
        ToolCallParser {
            schemas: ToolSchemas::new(tools),
            stage: Stage::Text,
            held: String::new(),
            call_from: 0,
            at: 0,
            searched: 0,
            after_call: false,
            name: String::new(),
            key: String::new(),
            arguments: Vec::new(),
        }
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, piece: &str) -> Vec<Piece> {
        self.held.push_str(piece);
        let mut pieces = Vec::new();
        loop {
            let step = match self.stage {
                Stage::Text => self.text(&mut pieces),
                Stage::Function => self.tags([(FUNCTION, Stage::Name)]),
                Stage::Name => self.name(),
                Stage::Parameter => self.tags([(PARAMETER, Stage::Key), (FUNCTION_END, Stage::End)]),
                Stage::Key => self.key(),
                Stage::Value => self.value(),
                Stage::End => self.end(&mut pieces),
            };
            match step {
                Step::Advanced => {}
                Step::Wait => return pieces,
                Step::Malformed => {
                    // The tag was only text; what follows it may hold a call all the same.
                    let tag: String = self.held.drain(..self.call_from).collect();
                    push_text(&mut pieces, &tag);
                    self.stage = Stage::Text;
                    self.after_call = false;
                }
            }
        }
    }

    /// The text that was held back, when nothing follows: an unfinished call is text.
    pub fn finish(&mut self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        push_text(&mut pieces, &std::mem::take(&mut self.held));
        self.stage = Stage::Text;
        pieces
    }

    fn text(&mut self, pieces: &mut Vec<Piece>) -> Step {
        if self.after_call {
            self.held = self.held.trim_start().to_owned();
            if self.held.is_empty() {
                return Step::Wait;
            }
        }
        let call = self.held.find(CALL);
        let end = call.unwrap_or_else(|| self.held.len() - partial_tag(&self.held, CALL));
        let certain = self.held[..end].trim_end().len();
        push_text(pieces, &self.held[..certain]);
        self.after_call &= certain == 0;
        self.held.drain(..certain);
        match call {
            Some(call) => {
                self.call_from = call - certain + CALL.len();
                self.arguments.clear();
                self.enter(Stage::Function, self.call_from)
            }
            None => Step::Wait,
        }
    }

    fn enter(&mut self, stage: Stage, at: usize) -> Step {
        (self.stage, self.at, self.searched) = (stage, at, at);
        Step::Advanced
    }

    /// Expects one of `tags` after whitespace, and the stage that it leads to.
    fn tags<const N: usize>(&mut self, tags: [(&str, Stage); N]) -> Step {
        let rest = self.held[self.at..].trim_start();
        let at = self.held.len() - rest.len();
        let found = tags.map(|(tag, stage)| (starts_with_tag(rest, tag), at + tag.len(), stage));
        if let Some(&(_, at, stage)) = found.iter().find(|(tag, ..)| *tag == Tag::Here) {
            self.enter(stage, at)
        } else if found.iter().any(|(tag, ..)| *tag == Tag::Perhaps) {
            Step::Wait
        } else {
            Step::Malformed
        }
    }

    /// The word that ends at `>`, once it is there.
    fn word(&mut self) -> Result<(String, usize), Step> {
        let ends = |c: char| c == '>' || c == '<' || c.is_whitespace();
        let Some(end) = self.held[self.searched..].find(ends).map(|i| self.searched + i) else {
            self.searched = self.held.len();
            return Err(Step::Wait);
        };
        if end == self.at || !self.held[end..].starts_with('>') {
            return Err(Step::Malformed);
        }
        Ok((self.held[self.at..end].to_owned(), end + 1))
    }

    fn name(&mut self) -> Step {
        match self.word() {
            Ok((name, after)) => {
                self.name = name;
                self.enter(Stage::Parameter, after)
            }
            Err(step) => step,
        }
    }

    fn key(&mut self) -> Step {
        match self.word() {
            // One name cannot stand for two values.
            Ok((key, _)) if self.arguments.iter().any(|(k, _)| *k == key) => Step::Malformed,
            Ok((key, after)) => {
                self.key = key;
                self.enter(Stage::Value, after)
            }
            Err(step) => step,
        }
    }

    fn value(&mut self) -> Step {
        while let Some(end) = self.held[self.searched..].find(PARAMETER_END).map(|i| self.searched + i) {
            let after = end + PARAMETER_END.len();
            let rest = self.held[after..].trim_start();
            let next = [PARAMETER, FUNCTION_END].map(|tag| starts_with_tag(rest, tag));
            if next.contains(&Tag::Here) {
                let value = &self.held[self.at..end];
                let value = value.strip_prefix('\n').unwrap_or(value);
                let value = value.strip_suffix('\n').unwrap_or(value);
                let json = self.schemas.to_json(&self.name, &self.key, value);
                self.arguments.push((std::mem::take(&mut self.key), json));
                return self.enter(Stage::Parameter, after);
            }
            if next.contains(&Tag::Perhaps) {
                self.searched = end;
                return Step::Wait;
            }
            self.searched = after;
        }
        self.searched = self.searched.max(self.held.len() - partial_tag(&self.held, PARAMETER_END));
        Step::Wait
    }

    fn end(&mut self, pieces: &mut Vec<Piece>) -> Step {
        let step = self.tags([(CALL_END, Stage::Text)]);
        if matches!(step, Step::Advanced) {
            self.held.drain(..self.at);
            self.after_call = true;
            let members: Vec<String> = std::mem::take(&mut self.arguments)
                .into_iter()
                .map(|(key, json)| format!("{}:{json}", Value::String(key)))
                .collect();
            let arguments = format!("{{{}}}", members.join(","));
            pieces.push(Piece::Call(ToolCall { name: std::mem::take(&mut self.name), arguments }));
        }
        step
    }
}

fn push_text(pieces: &mut Vec<Piece>, text: &str) {
    match pieces.last_mut() {
        _ if text.is_empty() => {}
        Some(Piece::Text(last)) => last.push_str(text),
        _ => pieces.push(Piece::Text(text.to_owned())),
    }
}
