//! Tells reasoning from content while the text arrives.
//!
//! The model reasons at most once per turn, at its start: `<think>\n…\n</think>\n\n` and then content. Its
//! chat template usually ends a prompt with `<think>\n` already, so that the answer begins inside the block.
//! The tags and the newlines around them belong to the format: reasoning comes out without newlines at either
//! end, content without newlines at its start. A `<think>` anywhere later is content. Everything else comes
//! out unchanged and as early as it is certain, however the text is cut.

use crate::tags::{Tag, partial_tag, starts_with_tag};

const OPEN: &str = "<think>";
pub(crate) const CLOSE: &str = "</think>";

/// Text that became certain; either part may be empty. The reasoning comes before the content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Split {
    /// More of the reasoning.
    pub reasoning: String,
    /// More of the content.
    pub content: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing but whitespace or a part of `<think>` yet.
    Start,
    /// Inside the block, nothing but newlines yet.
    ReasoningStart,
    Reasoning,
    /// After the block, nothing but newlines yet.
    ContentStart,
    Content,
}

/// Splits one answer.
#[derive(Clone, Debug)]
pub struct ReasoningSplitter {
    state: State,
    held: String,
}

impl ReasoningSplitter {
    /// `opened`: whether the prompt ended inside a `<think>` block: see [`prompt_opens_reasoning`].
    pub fn new(opened: bool) -> ReasoningSplitter {
        let state = if opened { State::ReasoningStart } else { State::Start };
        ReasoningSplitter { state, held: String::new() }
    }

    /// Whether the text so far ends inside the block.
    pub fn in_reasoning(&self) -> bool {
        matches!(self.state, State::ReasoningStart | State::Reasoning)
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, piece: &str) -> Split {
        self.held.push_str(piece);
        let mut split = Split::default();
        if self.state == State::Start {
            let text = self.held.trim_start();
            match starts_with_tag(text, OPEN) {
                Tag::Here => {
                    self.held = text[OPEN.len()..].to_owned();
                    self.state = State::ReasoningStart;
                }
                Tag::Perhaps => return split,
                Tag::Absent => self.state = State::Content,
            }
        }
        if self.in_reasoning() {
            self.push_reasoning(&mut split);
        }
        if self.state == State::ContentStart {
            self.held = self.held.trim_start_matches('\n').to_owned();
            if !self.held.is_empty() {
                self.state = State::Content;
            }
        }
        if self.state == State::Content {
            split.content = std::mem::take(&mut self.held);
        }
        split
    }

    fn push_reasoning(&mut self, split: &mut Split) {
        if self.state == State::ReasoningStart {
            self.held = self.held.trim_start_matches('\n').to_owned();
            if self.held.is_empty() {
                return;
            }
            self.state = State::Reasoning;
        }
        let close = self.held.find(CLOSE);
        let end = close.unwrap_or_else(|| self.held.len() - partial_tag(&self.held, CLOSE));
        // Newlines before the tag are the format's, so they wait until something else follows them.
        let certain = self.held[..end].trim_end_matches('\n').len();
        split.reasoning = self.held[..certain].to_owned();
        match close {
            Some(close) => {
                self.held.drain(..close + CLOSE.len());
                self.state = State::ContentStart;
            }
            None => {
                self.held.drain(..certain);
            }
        }
    }

    /// The text that was held back, when nothing follows.
    pub fn finish(&mut self) -> Split {
        let held = std::mem::take(&mut self.held);
        if self.in_reasoning() {
            Split { reasoning: held.trim_end_matches('\n').to_owned(), content: String::new() }
        } else {
            Split { reasoning: String::new(), content: held }
        }
    }
}

/// Whether a rendered prompt ends inside a `<think>` block.
pub fn prompt_opens_reasoning(prompt: &str) -> bool {
    prompt.trim_end().ends_with(OPEN)
}
