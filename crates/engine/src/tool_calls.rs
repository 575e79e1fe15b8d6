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
//! A call is given out in pieces: its name, then the text of its arguments, a JSON object, as far as it is known.
//! Strings come as they are written, other values when they are complete. Until the first parameter begins, or a
//! call without parameters ends, it may still be text: then it is held back, and given back as text where the
//! text cannot become a call or ends too early. From then on it is a call: what does not fit ends it, and is text
//! again. A call that the text leaves unfinished gets no [`Piece::End`], and its arguments are a beginning of a
//! JSON object: nothing that was cut off looks complete.
//!
//! Whitespace directly before and after a call belongs to the format and is dropped with it, as are the tags. How
//! the text is cut into pieces changes nothing but the places where the pieces given out are cut.
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

pub(crate) mod schema;

use serde_json::Value;

use crate::tags::{Tag, partial_tag, starts_with_tag};
use schema::{Spelling, ToolSchemas};

const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

/// One complete call, for whoever has collected its pieces.
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
    /// A call of this function begins.
    Start(String),
    /// More of the arguments' JSON text; never empty.
    Arguments(String),
    /// The call is complete.
    End,
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
    /// This is no call, or none any more.
    Malformed,
}

/// Finds the calls in one answer.
#[derive(Clone, Debug)]
pub struct ToolCallParser {
    schemas: ToolSchemas,
    stage: Stage,
    /// Text not yet given out. Before a call is known to be one, it begins with the whitespace before
    /// `<tool_call>`.
    held: String,
    /// In `held`: where `<tool_call>` ends.
    call_from: usize,
    /// In `held`: where the tag begins that led to the present stage.
    tag: usize,
    /// In `held`: where the present stage begins.
    at: usize,
    /// In `held`: from where the end of the present stage is still to be looked for.
    searched: usize,
    /// Whether nothing but whitespace has come since the last call.
    after_call: bool,
    /// Whether the call under way was begun to be given out.
    started: bool,
    name: String,
    key: String,
    /// Parameters that the call has.
    keys: Vec<String>,
    /// The present value is a string, of which everything before `at` was given out.
    streaming: bool,
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
            tag: 0,
            at: 0,
            searched: 0,
            after_call: false,
            started: false,
            name: String::new(),
            key: String::new(),
            keys: Vec::new(),
            streaming: false,
        }
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, piece: &str) -> Vec<Piece> {
        self.held.push_str(piece);
        let mut pieces = Pieces::default();
        loop {
            let step = match self.stage {
                Stage::Text => self.text(&mut pieces),
                Stage::Function => self.tags([(FUNCTION, Stage::Name)]),
                Stage::Name => self.name(),
                Stage::Parameter => self.parameter(&mut pieces),
                Stage::Key => self.key(&mut pieces),
                Stage::Value => self.value(&mut pieces),
                Stage::End => self.end(&mut pieces),
            };
            match step {
                Step::Advanced => {}
                Step::Wait => return pieces.0,
                Step::Malformed => self.give_up(&mut pieces),
            }
        }
    }

    /// What was held back, when nothing follows. A call that is not known to be one is text. Of one that is, the
    /// value that was cut off is given out as far as it goes, without the beginning of a tag.
    pub fn finish(&mut self) -> Vec<Piece> {
        let mut pieces = Pieces::default();
        let held = std::mem::take(&mut self.held);
        match self.stage {
            Stage::Value => {
                // Not the newline that may be the format's, nor the beginning of a tag.
                let value = &held[self.at..self.searched];
                let value = value.strip_suffix('\n').unwrap_or(value);
                let whole = value.strip_prefix('\n').unwrap_or(value);
                match self.schemas.spelling(&self.name, &self.key, whole) {
                    _ if self.streaming => pieces.string(value),
                    Spelling::Json | Spelling::Open if may_become_json(whole) => {
                        pieces.arguments(whole.trim())
                    }
                    _ => pieces.arguments(&format!("\"{}", inside(whole))),
                }
            }
            _ if self.started => {}
            // After a call, nothing but its last tag was held.
            Stage::End if self.after_call => {}
            _ => pieces.text(&held),
        }
        self.stage = Stage::Text;
        self.started = false;
        pieces.0
    }

    /// What was taken for a call is none: its first tag is text. One that was given out in part ends here.
    fn give_up(&mut self, pieces: &mut Pieces) {
        if self.started {
            pieces.arguments("}");
            pieces.0.push(Piece::End);
            self.held.drain(..self.tag);
            self.after_call = true;
        } else if self.after_call {
            self.held.drain(..self.at);
        } else {
            let tag: String = self.held.drain(..self.call_from).collect();
            pieces.text(&tag);
        }
        self.started = false;
        self.stage = Stage::Text;
    }

    fn text(&mut self, pieces: &mut Pieces) -> Step {
        if self.after_call {
            self.held = self.held.trim_start().to_owned();
            if self.held.is_empty() {
                return Step::Wait;
            }
        }
        let call = self.held.find(CALL);
        let end = call.unwrap_or_else(|| self.held.len() - partial_tag(&self.held, CALL));
        let certain = self.held[..end].trim_end().len();
        pieces.text(&self.held[..certain]);
        self.after_call &= certain == 0;
        self.held.drain(..certain);
        match call {
            Some(call) => {
                self.call_from = call - certain + CALL.len();
                self.after_call = false;
                self.keys.clear();
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
        self.tag = at;
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

    fn parameter(&mut self, pieces: &mut Pieces) -> Step {
        let step = self.tags([(PARAMETER, Stage::Key), (FUNCTION_END, Stage::End)]);
        if self.stage == Stage::End && self.started {
            pieces.arguments("}");
            pieces.0.push(Piece::End);
            self.forget(self.at);
            (self.started, self.after_call) = (false, true);
        }
        step
    }

    fn key(&mut self, pieces: &mut Pieces) -> Step {
        match self.word() {
            // One name cannot stand for two values.
            Ok((key, _)) if self.keys.contains(&key) => Step::Malformed,
            Ok((key, after)) => {
                if !self.started {
                    self.started = true;
                    pieces.0.push(Piece::Start(self.name.clone()));
                }
                let before = if self.keys.is_empty() { "{" } else { "," };
                pieces.arguments(&format!("{before}{}:", Value::from(key.as_str())));
                self.keys.push(key.clone());
                self.key = key;
                self.streaming = false;
                self.enter(Stage::Value, after);
                self.forget(after);
                Step::Advanced
            }
            Err(step) => step,
        }
    }

    fn value(&mut self, pieces: &mut Pieces) -> Step {
        while let Some(end) = self.held[self.searched..].find(PARAMETER_END).map(|i| self.searched + i) {
            let after = end + PARAMETER_END.len();
            let rest = self.held[after..].trim_start();
            let next = [PARAMETER, FUNCTION_END].map(|tag| starts_with_tag(rest, tag));
            if next.contains(&Tag::Here) {
                let value = &self.held[self.at..end];
                if self.streaming {
                    pieces.string(value.strip_suffix('\n').unwrap_or(value));
                    pieces.arguments("\"");
                } else {
                    let value = value.strip_prefix('\n').unwrap_or(value);
                    let value = value.strip_suffix('\n').unwrap_or(value);
                    pieces.arguments(&self.schemas.to_json(&self.name, &self.key, value));
                }
                self.enter(Stage::Parameter, after);
                self.forget(after);
                return Step::Advanced;
            }
            if next.contains(&Tag::Perhaps) {
                self.searched = end;
                self.stream(pieces);
                return Step::Wait;
            }
            self.searched = after;
        }
        self.searched = self.searched.max(self.held.len() - partial_tag(&self.held, PARAMETER_END));
        self.stream(pieces);
        Step::Wait
    }

    /// Gives out what is known of a string.
    fn stream(&mut self, pieces: &mut Pieces) {
        let value = &self.held[self.at..self.searched];
        if !self.streaming {
            // The newline that is the format's may still come.
            let text = value.strip_prefix('\n').unwrap_or(value);
            if value.is_empty() || self.schemas.spelling(&self.name, &self.key, text) != Spelling::String {
                return;
            }
            let format = value.len() - text.len();
            self.streaming = true;
            pieces.arguments("\"");
            self.forget(self.at + format);
        }
        // So may the one before the tag.
        let value = &self.held[self.at..self.searched];
        let certain = value.strip_suffix('\n').unwrap_or(value).len();
        pieces.string(&value[..certain]);
        self.forget(self.at + certain);
    }

    /// Drops the text before `at`, where the present stage begins.
    fn forget(&mut self, at: usize) {
        self.held.drain(..at);
        self.searched = self.searched.saturating_sub(at);
        (self.at, self.tag) = (0, 0);
    }

    fn end(&mut self, pieces: &mut Pieces) -> Step {
        let step = self.tags([(CALL_END, Stage::Text)]);
        if matches!(step, Step::Advanced) {
            if !self.after_call {
                pieces.0.push(Piece::Start(std::mem::take(&mut self.name)));
                pieces.arguments("{}");
                pieces.0.push(Piece::End);
                self.after_call = true;
            }
            self.forget(self.at);
        }
        step
    }
}

/// Pieces in the order of the text, joined where they can be.
#[derive(Default)]
struct Pieces(Vec<Piece>);

impl Pieces {
    fn text(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Text(last)) => last.push_str(text),
            _ => self.0.push(Piece::Text(text.to_owned())),
        }
    }

    fn arguments(&mut self, json: &str) {
        match self.0.last_mut() {
            _ if json.is_empty() => {}
            Some(Piece::Arguments(last)) => last.push_str(json),
            _ => self.0.push(Piece::Arguments(json.to_owned())),
        }
    }

    /// A part of a string.
    fn string(&mut self, text: &str) {
        self.arguments(&inside(text));
    }
}

/// Whether `text` is JSON or the beginning of some. What is neither would have become a string, and as it is it could
/// end the arguments: `1}`.
fn may_become_json(text: &str) -> bool {
    serde_json::from_str::<Value>(text.trim()).map_or_else(|error| error.is_eof(), |_| true)
}

/// `text` as it stands between the quotes of a JSON string.
fn inside(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}
