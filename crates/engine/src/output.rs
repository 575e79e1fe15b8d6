//! The model's text taken apart for a chat protocol: reasoning, content and tool calls in one stream.
//!
//! [`ReasoningSplitter`] comes first, then a [`ToolCallParser`] over each of its halves: the model sometimes
//! calls a tool before it closes its reasoning, and such a call is a call all the same.

use serde_json::Value;

use crate::reasoning::ReasoningSplitter;
use crate::tool_calls::{Piece, ToolCallParser};

/// The next part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// More reasoning; never empty.
    Reasoning(String),
    /// More content; never empty.
    Content(String),
    /// A call of this function begins; what follows is its arguments.
    ToolCall {
        /// The function's name as the model wrote it.
        name: String,
    },
    /// More of the arguments of the call under way, a JSON object as text; never empty.
    Arguments(String),
    /// The call is complete, and so are its arguments. It does not come where the answer was cut off in a call.
    ToolCallEnd,
}

/// Takes one answer apart.
#[derive(Clone, Debug)]
pub struct OutputParser {
    splitter: ReasoningSplitter,
    /// Over the reasoning and over the content; `None` where the request declared no tools.
    calls: Option<[ToolCallParser; 2]>,
}

impl OutputParser {
    /// `reasoning_opened`: whether the prompt ends inside a `<think>` block. `tools`: the request's
    /// declarations; without any, text in the form of a call is text.
    pub fn new(reasoning_opened: bool, tools: &[Value]) -> OutputParser {
        let parser = || ToolCallParser::new(tools);
        OutputParser {
            splitter: ReasoningSplitter::new(reasoning_opened),
            calls: (!tools.is_empty()).then(|| [parser(), parser()]),
        }
    }

    /// Whether the text so far ends inside the reasoning.
    pub fn in_reasoning(&self) -> bool {
        self.splitter.in_reasoning()
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, piece: &str) -> Vec<Delta> {
        let split = self.splitter.push(piece);
        let mut deltas = self.reasoning(&split.reasoning);
        // Before the reasoning, and once it is over, nothing is held back of it. One piece may hold all of it.
        if !self.in_reasoning() {
            deltas.extend(self.finish_reasoning());
        }
        deltas.extend(self.content(&split.content));
        deltas
    }

    /// What was held back, when nothing follows.
    pub fn finish(&mut self) -> Vec<Delta> {
        let split = self.splitter.finish();
        let mut deltas = self.reasoning(&split.reasoning);
        deltas.extend(self.finish_reasoning());
        deltas.extend(self.content(&split.content));
        if let Some([_, content]) = &mut self.calls {
            deltas.extend(content.finish().into_iter().map(|piece| delta(piece, Delta::Content)));
        }
        deltas
    }

    fn reasoning(&mut self, text: &str) -> Vec<Delta> {
        parse(self.calls.as_mut().map(|[reasoning, _]| reasoning), text, Delta::Reasoning)
    }

    fn content(&mut self, text: &str) -> Vec<Delta> {
        parse(self.calls.as_mut().map(|[_, content]| content), text, Delta::Content)
    }

    fn finish_reasoning(&mut self) -> Vec<Delta> {
        let pieces = self.calls.as_mut().map(|[reasoning, _]| reasoning.finish()).unwrap_or_default();
        pieces.into_iter().map(|piece| delta(piece, Delta::Reasoning)).collect()
    }
}

fn parse(parser: Option<&mut ToolCallParser>, text: &str, kind: fn(String) -> Delta) -> Vec<Delta> {
    match parser {
        Some(parser) => parser.push(text).into_iter().map(|piece| delta(piece, kind)).collect(),
        None if text.is_empty() => Vec::new(),
        None => vec![kind(text.to_owned())],
    }
}

fn delta(piece: Piece, kind: fn(String) -> Delta) -> Delta {
    match piece {
        Piece::Text(text) => kind(text),
        Piece::Start(name) => Delta::ToolCall { name },
        Piece::Arguments(json) => Delta::Arguments(json),
        Piece::End => Delta::ToolCallEnd,
    }
}
