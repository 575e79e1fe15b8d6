//! Token ids to text, one token at a time.
//!
//! A token of byte-level BPE is a run of bytes that may end inside a character. The detokenizer appends the
//! bytes of each token and gives out every character as soon as its last byte is there: nothing is decoded
//! twice, no half character is given out, and at most the three bytes that begin an unfinished character are
//! held back. Bytes that can no longer become UTF-8 are given out as U+FFFD at once, by the rule of
//! [`String::from_utf8_lossy`], so the pieces joined are exactly [`Tokenizer::decode`] of all tokens.

use crate::tokenizer::Tokenizer;

/// Turns one sequence's tokens into text. Special tokens are left out, as in [`Tokenizer::decode`].
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    /// The first bytes of a character whose rest has not come yet.
    held: Vec<u8>,
}

impl Detokenizer {
    /// A detokenizer at the start of a text.
    pub fn new(tokenizer: Tokenizer) -> Detokenizer {
        Detokenizer { tokenizer, held: Vec::new() }
    }

    /// Whether the text so far ends with a whole character.
    pub fn is_whole(&self) -> bool {
        self.held.is_empty()
    }

    /// Appends a token and returns the text that it completed, which is empty for special tokens, for ids
    /// outside the vocabulary and where a character is still unfinished.
    pub fn push(&mut self, token: u32) -> String {
        if self.tokenizer.is_special(token) {
            return String::new();
        }
        let Some(bytes) = self.tokenizer.token_bytes(token) else { return String::new() };
        self.held.extend(bytes);
        let mut text = String::with_capacity(self.held.len());
        let mut rest = self.held.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                }
                Err(error) => {
                    let (valid, bad) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    match error.error_len() {
                        Some(length) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            rest = &bad[length..];
                            continue;
                        }
                        None => rest = bad,
                    }
                }
            }
            break;
        }
        self.held = rest.to_vec();
        text
    }

    /// Ends the text: what was held back becomes one U+FFFD. The detokenizer is then at a new start.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        text
    }
}
