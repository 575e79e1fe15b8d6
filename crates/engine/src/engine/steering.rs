//! What overrules the sampler: a budget that closes the reasoning, and a grammar that the rest has to follow.
//!
//! ```text
//! prompt … <think>\n │ reasoning, free │ \n</think>\n\n │ the answer, by its grammar │
//!                      at most `budget`   forced at its end,
//!                      tokens             or what the model leaves out of it
//! ```
//!
//! The text that closes a block is the chat template's, token for token, so that the model reads on from what it
//! was trained on. Where a grammar follows, the reasoning may end only by closing its block: end-of-sequence
//! tokens and the marker of a tool call are not chosen in it, nor a spelling of `</think>` in ordinary tokens,
//! after which it would be unclear which bytes belong to the grammar.

use std::collections::VecDeque;

use lily_model::tokenizer::Tokenizer;
use lily_model::tokenizer::markers::{THINK_END, TOOL_CALL_START};

use crate::constraint::{Allowed, Guide};
use crate::reasoning::{CLOSE, prompt_opens_reasoning};
use crate::tags::partial_tag;

/// What the template writes between reasoning and answer.
const CLOSING: &str = "\n</think>\n\n";
/// The same after a line end.
const CLOSING_LINE: &str = "</think>\n\n";
/// The same after the tag.
const AFTER_TAG: &str = "\n\n";

/// Tokens at the end of a prompt that can tell whether it ends inside a reasoning block.
const PROMPT_END: usize = 4;

/// Tokens beyond the budget that an unfinished character may take before it is torn.
const TO_WHOLE_CHARACTER: usize = 4;

/// See the module's page.
pub(super) struct Steering {
    tokenizer: Tokenizer,
    /// `None` outside of a reasoning block.
    reasoning: Option<Reasoning>,
    /// Tokens that come next, whatever the model thinks.
    forced: VecDeque<u32>,
    /// Whether the token under way is one of those.
    imposed: bool,
    /// The grammar of what comes after.
    guide: Option<Guide>,
    /// Tokens that end an answer.
    eos: Vec<u32>,
}

/// An open reasoning block.
struct Reasoning {
    budget: Option<usize>,
    spent: usize,
    /// The end of its text: as much as can be a part of the tag that closes it.
    tail: String,
}

/// What became of an answer with a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Course {
    /// It goes on under control.
    Steered,
    /// It goes on, and there is nothing more to control.
    Free,
    /// Nothing can follow.
    Complete,
}

impl std::fmt::Debug for Steering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (reasoning, grammar) = (self.reasoning.is_some(), self.guide.is_some());
        write!(f, "Steering {{ reasoning: {reasoning}, grammar: {grammar} }}")
    }
}

impl Steering {
    /// `None` where a request leaves everything to the model: no grammar, and no budget or no reasoning that it
    /// could bound.
    pub(super) fn new(
        tokenizer: &Tokenizer,
        eos: &[u32],
        prompt: &[u32],
        budget: Option<usize>,
        guide: Option<Guide>,
    ) -> Option<Steering> {
        let end = &prompt[prompt.len().saturating_sub(PROMPT_END)..];
        let open = prompt_opens_reasoning(&tokenizer.decode_with_special(end));
        if guide.is_none() && (budget.is_none() || !open) {
            return None;
        }
        let reasoning = open.then(|| Reasoning { budget, spent: 0, tail: String::new() });
        let (tokenizer, eos) = (tokenizer.clone(), eos.to_vec());
        let mut steering =
            Steering { tokenizer, reasoning, forced: VecDeque::new(), imposed: false, guide, eos };
        steering.close_at_budget(true);
        Some(steering)
    }

    /// Begins what can be computed before the first token.
    pub(super) fn prepare(&mut self) {
        if let Some(guide) = &mut self.guide {
            guide.prepare();
        }
    }

    /// Whether a choice needs logits, rather than the device's own token.
    pub(super) fn needs_logits(&self) -> bool {
        self.guide.is_some()
    }

    /// Whether an end-of-sequence token ends the answer even where a request ignores those.
    pub(super) fn ends_answer(&self) -> bool {
        self.guide.is_some() && self.reasoning.is_none()
    }

    /// The token that comes next, where there is no choice.
    pub(super) fn forced(&mut self) -> Option<u32> {
        let token = self.forced.pop_front();
        self.imposed = token.is_some();
        token
    }

    /// The tokens that may come next; `None` for all.
    pub(super) fn allowed(&mut self) -> Result<Option<Allowed>, String> {
        let Some(guide) = &mut self.guide else { return Ok(None) };
        match &self.reasoning {
            None => guide.allowed().map(Some),
            Some(reasoning) => Ok(Some(Allowed::AllBut(self.kept_out(reasoning)))),
        }
    }

    /// Tokens that may not end the reasoning before a grammar.
    fn kept_out(&self, reasoning: &Reasoning) -> Vec<u32> {
        let mut tokens = self.eos.clone();
        tokens.extend(self.tokenizer.token_id(TOOL_CALL_START));
        let begun = partial_tag(&reasoning.tail, CLOSE);
        // Where the tag has no token of its own, its spelling is all there is.
        if begun > 0 && self.tokenizer.token_id(THINK_END).is_some() {
            let rest = &CLOSE.as_bytes()[begun..];
            let all = 0..self.tokenizer.vocab_size() as u32;
            tokens.extend(
                all.filter(|&id| self.tokenizer.token_bytes(id).is_some_and(|bytes| bytes.starts_with(rest))),
            );
        }
        tokens
    }

    /// Takes in the token that was chosen, whose text is `piece`; `whole`: the text ends with a whole character.
    pub(super) fn accept(&mut self, token: u32, piece: &str, whole: bool) -> Result<Course, String> {
        let imposed = std::mem::take(&mut self.imposed);
        if let Some(reasoning) = &mut self.reasoning {
            reasoning.spent += 1;
            reasoning.tail.push_str(piece);
            if reasoning.tail.contains(CLOSE) {
                self.reasoning = None;
                // The model would write this itself; a grammar cannot leave it the choice.
                if self.guide.is_some() && self.forced.is_empty() {
                    self.force(AFTER_TAG);
                }
            } else {
                let mut keep = reasoning.tail.len().saturating_sub(CLOSE.len());
                while !reasoning.tail.is_char_boundary(keep) {
                    keep += 1;
                }
                reasoning.tail.drain(..keep);
                self.close_at_budget(whole);
            }
        } else if let (Some(guide), false) = (&mut self.guide, imposed) {
            if guide.accept(token)? {
                return Ok(Course::Complete);
            }
            guide.prepare();
        }
        let free = self.reasoning.is_none() && self.forced.is_empty() && self.guide.is_none();
        Ok(if free { Course::Free } else { Course::Steered })
    }

    fn force(&mut self, text: &str) {
        self.forced.extend(self.tokenizer.encode(text));
    }

    /// Closes the block where its budget is spent.
    fn close_at_budget(&mut self, whole: bool) {
        let Some(reasoning) = &self.reasoning else { return };
        let Some(over) = reasoning.budget.and_then(|budget| reasoning.spent.checked_sub(budget)) else {
            return;
        };
        if self.forced.is_empty() && (whole || over >= TO_WHOLE_CHARACTER) {
            let at_line = reasoning.tail.ends_with('\n');
            self.force(if at_line { CLOSING_LINE } else { CLOSING });
        }
    }
}
