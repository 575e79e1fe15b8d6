//! Answers that follow a grammar: JSON of a schema, a regular expression, a Lark grammar, calls of declared tools.
//!
//! A [`Constraint`] is part of a request. It is compiled before the request is queued, so that a grammar that
//! cannot be enforced is refused at once, with a sentence that says what is wrong with it. From then on each
//! step knows the set of tokens that keep the answer inside the grammar; the sampler sees only those. An answer
//! ends when its grammar leaves nothing more to say; where the grammar could end or go on, end-of-sequence
//! tokens are among the allowed ones.
//!
//! ```text
//! submit:   Constraint ──compile──▶ Guide ─────────────┐
//! step n:   token chosen ──▶ Guide::accept ──▶ helper thread computes the next set
//!                                                      │      meanwhile the device computes step n+1
//! step n+1: logits ──▶ bias, penalties ──▶ set ──▶ temperature, filters, choice
//! ```
//!
//! The grammars are `llguidance`'s, a parser over bytes with a trie of the vocabulary. What is decided here:
//!
//! - **The vocabulary as bytes.** A set is built from the bytes of each token, so a token may cross the borders
//!   of the grammar's words. Markers (`<|im_end|>`, `<think>`, `<tool_call>`) are no text: they occur in an
//!   answer only where the grammar names them, which tool calls do.
//! - **Forced text is tokenized as the model would.** Where the grammar leaves one continuation, the tokens are
//!   those of the tokenizer, which is what the model was trained on.
//! - **White space in JSON is bounded.** A schema allows any amount between two values, and a model that finds
//!   nothing to say can spend its whole answer on it.
//! - **Bounds.** The size of a grammar's text, what it may hold (`bounds.rs`), the work of compiling it, the work per
//!   step and the memory of an answer are limited; beyond them the grammar is refused, or the request fails with a
//!   sentence.
//!
//! Reasoning comes before the grammar: where the prompt ends inside a reasoning block, the text is free until
//! the block closes, and the grammar begins after it.

mod bounds;
mod bridge;
mod compile;
mod guide;
mod text;
mod tools;

use serde_json::Value;

pub(crate) use compile::Grammars;
pub(crate) use guide::{Allowed, Guide};

/// What an answer must look like.
#[derive(Clone, Debug, PartialEq)]
pub enum Constraint {
    /// A JSON value that the schema allows.
    Json {
        /// The JSON Schema; `{"type": "object"}` for any object.
        schema: Value,
        /// Whether a keyword that cannot be enforced is an error; otherwise it is left unenforced.
        strict: bool,
    },
    /// A text that the regular expression matches from its beginning to its end (Rust's syntax, no look-around).
    Regex(String),
    /// A text that the grammar derives from its rule `start`: see `llguidance`'s variant of Lark's syntax.
    Lark(String),
    /// Calls of tools in the model's own form, with arguments that their schemas allow.
    Tools(ToolChoice),
}

/// Which tools an answer may or must call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolChoice {
    /// The tools that may be called, as in [`ToolCallParser::new`](crate::tool_calls::ToolCallParser::new).
    pub tools: Vec<Value>,
    /// What may stand in the answer instead of calls, or before them.
    pub prose: Prose,
    /// Whether more than one call may follow.
    pub parallel: bool,
}

/// What an answer may hold beside calls.
#[derive(Clone, Debug, PartialEq)]
pub enum Prose {
    /// Nothing: it begins with a call.
    None,
    /// Any text, and then calls or none.
    Free,
    /// JSON of this schema instead of calls.
    Json {
        /// The schema.
        schema: Value,
        /// As in [`Constraint::Json`].
        strict: bool,
    },
}

/// A constraint that cannot be enforced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{subject} cannot be enforced: {reason}")]
pub struct ConstraintError {
    /// The kind of constraint.
    pub subject: Subject,
    /// What is wrong with it.
    pub reason: String,
}

/// The kinds of constraints, for error messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// [`Constraint::Json`], or the schema of [`Prose::Json`].
    JsonSchema,
    /// [`Constraint::Regex`].
    Regex,
    /// [`Constraint::Lark`].
    Grammar,
    /// All tools together.
    Tools,
    /// This tool of [`ToolChoice::tools`].
    Tool {
        /// Its place in the list.
        index: usize,
        /// Its name.
        name: String,
    },
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Subject::JsonSchema => f.write_str("the JSON schema"),
            Subject::Regex => f.write_str("the regular expression"),
            Subject::Grammar => f.write_str("the grammar"),
            Subject::Tools => f.write_str("the choice of tools"),
            Subject::Tool { name, .. } => write!(f, "the schema of tool {name:?}"),
        }
    }
}

impl Constraint {
    /// Any JSON object.
    pub fn json_object() -> Constraint {
        Constraint::Json { schema: serde_json::json!({"type": "object"}), strict: true }
    }

    pub(crate) fn subject(&self) -> Subject {
        match self {
            Constraint::Json { .. } => Subject::JsonSchema,
            Constraint::Regex(_) => Subject::Regex,
            Constraint::Lark(_) => Subject::Grammar,
            Constraint::Tools(_) => Subject::Tools,
        }
    }
}
