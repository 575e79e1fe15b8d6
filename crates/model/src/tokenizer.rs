//! Text to token ids and back, over `tokenizer.json`.
//!
//! The model family uses byte-level BPE: the vocabulary spells each byte of UTF-8 as one printable
//! character, so a token is an exact run of bytes, possibly ending inside a character. Lily depends on
//! that (see [`crate::detokenizer`]), so [`Tokenizer::from_bytes`] refuses any other kind. Reading,
//! normalising and merging is the `tokenizers` crate's; what is added here is the byte spelling of single
//! tokens, encoding that treats markers as plain text, and answers instead of panics for hostile input.

use std::panic::catch_unwind;
use std::sync::Arc;

use tokenizers::tokenizer::{
    Model, NormalizedString, Normalizer, OffsetType, PreTokenizedString, PreTokenizer,
};
use tokenizers::{
    DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
};

/// Markers of the wire format that other parts of Lily look up with [`Tokenizer::token_id`].
pub mod markers {
    /// Opens a message; the role follows.
    pub const IM_START: &str = "<|im_start|>";
    /// Closes a message: the end of a turn.
    pub const IM_END: &str = "<|im_end|>";
    /// Ends a document: the end of plain text.
    pub const END_OF_TEXT: &str = "<|endoftext|>";
    /// Opens a reasoning block.
    pub const THINK_START: &str = "<think>";
    /// Closes a reasoning block.
    pub const THINK_END: &str = "</think>";
    /// Opens a tool call.
    pub const TOOL_CALL_START: &str = "<tool_call>";
    /// Closes a tool call.
    pub const TOOL_CALL_END: &str = "</tool_call>";
}

/// Why a `tokenizer.json` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// Not a tokenizer file, or one that contradicts itself.
    #[error("tokenizer.json cannot be read: {0}; take the file from the model's repository again")]
    Malformed(String),
    /// Another kind of tokenizer than the model family's.
    #[error(
        "tokenizer.json has {part} {found}; Lily reads byte-level BPE \
         (model BPE, decoder ByteLevel, normalizer NFC or none, pre-tokenizers Split and ByteLevel)"
    )]
    Unsupported {
        /// The section of the file.
        part: &'static str,
        /// What it holds.
        found: String,
    },
    /// Some byte has no token of its own, so some texts could not be encoded.
    #[error("tokenizer.json has no token for byte 0x{0:02X}; a byte-level vocabulary spells all 256")]
    MissingByte(u8),
}

/// A tokenizer; clones share one vocabulary.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    tokenizer: tokenizers::Tokenizer,
    /// The token of each single byte.
    byte_ids: [u32; 256],
}

impl Tokenizer {
    /// Reads the contents of a `tokenizer.json`.
    ///
    /// Padding, truncation and the post-processor that the file may ask for are dropped: a prompt is
    /// encoded whole and exactly as the chat template rendered it.
    pub fn from_bytes(json: &[u8]) -> Result<Tokenizer, TokenizerError> {
        // The library asserts where a file breaks its expectations; to the caller that is one more way for
        // a file to be malformed.
        let mut tokenizer = catch_unwind(|| tokenizers::Tokenizer::from_bytes(json))
            .map_err(|_| TokenizerError::Malformed("the tokenizer library rejects its contents".to_string()))?
            .map_err(|error| TokenizerError::Malformed(error.to_string()))?;

        check_parts(&tokenizer)?;
        let mut byte_ids = [0; 256];
        for (byte, id) in (0..=u8::MAX).zip(&mut byte_ids) {
            let spelled = CHAR_OF_BYTE[usize::from(byte)].to_string();
            *id = tokenizer.get_model().token_to_id(&spelled).ok_or(TokenizerError::MissingByte(byte))?;
        }

        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(None)
            .map_err(|error| TokenizerError::Malformed(error.to_string()))?
            .with_post_processor(None::<PostProcessorWrapper>);
        Ok(Tokenizer { inner: Arc::new(Inner { tokenizer, byte_ids }) })
    }

    /// Encodes `text`; markers and other added tokens that occur in it become their own ids. For rendered
    /// chat templates.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        self.encode_pieces(text, &|piece| {
            let encoding = self.inner.tokenizer.encode_fast(piece, false)?;
            Ok(encoding.get_ids().to_vec())
        })
    }

    /// Encodes `text` as nothing but text: a marker in it is spelled out in ordinary tokens and cannot act
    /// as one.
    pub fn encode_plain(&self, text: &str) -> Vec<u32> {
        let tokenizer = &self.inner.tokenizer;
        self.encode_pieces(text, &|piece| {
            let mut normalized = NormalizedString::from(piece);
            if let Some(normalizer) = tokenizer.get_normalizer() {
                normalizer.normalize(&mut normalized)?;
            }
            let mut words = PreTokenizedString::from(normalized);
            if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut words)?;
            }
            words.tokenize(|word| tokenizer.get_model().tokenize(word.get()))?;
            Ok(words.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
        })
    }

    /// Encodes the pieces of [`without_long_spaces`] one by one. A vocabulary that spells all bytes encodes
    /// every text; should the file contradict that elsewhere, the bytes themselves are the encoding.
    fn encode_pieces(&self, text: &str, encode: &dyn Fn(&str) -> tokenizers::Result<Vec<u32>>) -> Vec<u32> {
        let mut ids = Vec::new();
        for piece in without_long_spaces(text) {
            match encode(piece) {
                Ok(encoded) => ids.extend(encoded),
                Err(_) => ids.extend(piece.bytes().map(|byte| self.inner.byte_ids[usize::from(byte)])),
            }
        }
        ids
    }

    /// The text of `ids`. Special tokens (`<|im_end|>` and the like) and unknown ids are left out; bytes
    /// that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let text = ids.iter().filter(|&&id| !self.is_special(id));
        let bytes: Vec<u8> = text.filter_map(|&id| self.token_bytes(id)).flatten().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// As [`Tokenizer::decode`], with special tokens spelled out.
    pub fn decode_with_special(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().filter_map(|&id| self.token_bytes(id)).flatten().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The id of the token that is written `token` in the vocabulary; for markers, their own text.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.tokenizer.token_to_id(token)
    }

    /// Whether `id` is a token that never belongs to the answer's text. Markers that a client may want to
    /// see, such as `<think>` and `<tool_call>`, are not special in this sense.
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.inner.tokenizer.get_added_vocabulary();
        added.simple_id_to_token(id).is_some_and(|token| added.is_special_token(&token))
    }

    /// Whether `id` is a marker of the wire format, special or not: one that the vocabulary holds beside the tokens
    /// of ordinary text.
    pub fn is_added(&self, id: u32) -> bool {
        self.inner.tokenizer.get_added_vocabulary().simple_id_to_token(id).is_some()
    }

    /// The bytes that token `id` stands for, which may begin or end inside a UTF-8 character; `None` for
    /// ids that the vocabulary does not have.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let token = self.inner.tokenizer.id_to_token(id)?;
        let bytes = token.chars().map(byte_of_char).collect::<Option<Vec<u8>>>();
        // An added token with characters outside the byte alphabet stands for its own text.
        Some(bytes.unwrap_or_else(|| token.into_bytes()))
    }

    /// One more than the largest id. The embedding table may have more rows.
    pub fn vocab_size(&self) -> usize {
        let added = self.inner.tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        let after_added = added.keys().max().map_or(0, |&id| id as usize + 1);
        after_added.max(self.inner.tokenizer.get_vocab_size(false))
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.vocab_size())
    }
}

/// Refuses what is not byte-level BPE over Unicode text split by regular expressions. Apart from meaning
/// something else, other parts of the library assert on parameters that the file may get wrong.
fn check_parts(tokenizer: &tokenizers::Tokenizer) -> Result<(), TokenizerError> {
    if !matches!(tokenizer.get_model(), ModelWrapper::BPE(_)) {
        return Err(unsupported("a model", tokenizer.get_model()));
    }
    match tokenizer.get_decoder() {
        Some(DecoderWrapper::ByteLevel(_)) => {}
        other => return Err(unsupported("a decoder", &other)),
    }
    match tokenizer.get_normalizer() {
        None | Some(NormalizerWrapper::NFC(_)) => {}
        other => return Err(unsupported("a normalizer", &other)),
    }
    let pre_tokenizers = match tokenizer.get_pre_tokenizer() {
        Some(PreTokenizerWrapper::Sequence(sequence)) => sequence.as_ref(),
        Some(single) => std::slice::from_ref(single),
        None => &[],
    };
    for part in pre_tokenizers {
        if !matches!(part, PreTokenizerWrapper::ByteLevel(_) | PreTokenizerWrapper::Split(_)) {
            return Err(unsupported("a pre-tokenizer", part));
        }
    }
    Ok(())
}

fn unsupported(part: &'static str, found: &impl serde::Serialize) -> TokenizerError {
    let written = serde_json::to_value(found).unwrap_or_default();
    let found = match written.get("type").and_then(|name| name.as_str()) {
        Some(name) => format!("of type {name}"),
        None => "missing".to_string(),
    };
    TokenizerError::Unsupported { part, found }
}

/// Characters of white space in a row that the pre-tokenizer's regular expression is given at most.
///
/// It searches such a run backwards for a line end and silently gives up after a million steps
/// (`fancy-regex`), which leaves the rest of the text unsplit. A quarter of that is safe, and far longer than
/// any token, so that a cut there makes no other tokens.
const LONGEST_SPACE: usize = 1 << 18;

/// `text` in pieces, cut inside every run of white space longer than [`LONGEST_SPACE`] and nowhere else: no
/// word and no marker is torn.
fn without_long_spaces(text: &str) -> Vec<&str> {
    if text.len() <= LONGEST_SPACE {
        return vec![text];
    }
    let mut pieces = Vec::new();
    let mut start = 0;
    let mut run = 0;
    for (at, c) in text.char_indices() {
        run = if c.is_whitespace() { run + 1 } else { 0 };
        if run > LONGEST_SPACE {
            pieces.push(&text[start..at]);
            start = at;
            run = 1;
        }
    }
    pieces.push(&text[start..]);
    pieces
}

/// Characters that spell the bytes which cannot stand for themselves start here, in the order of those
/// bytes (Radford et al. 2019, GPT-2's byte-level BPE).
const FIRST_STAND_IN: u32 = 256;

/// Whether a byte is spelled by the Latin-1 character of its own value: those that print visibly.
const fn spells_itself(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

const CHAR_OF_BYTE: [char; 256] = {
    let mut table = ['\0'; 256];
    let mut stand_in = FIRST_STAND_IN;
    let mut byte = 0;
    while byte < table.len() {
        table[byte] = if spells_itself(byte as u8) {
            byte as u8 as char
        } else {
            stand_in += 1;
            match char::from_u32(stand_in - 1) {
                Some(c) => c,
                None => panic!("stand-ins lie below the surrogates"),
            }
        };
        byte += 1;
    }
    table
};

/// The byte that `c` spells in a byte-level vocabulary.
fn byte_of_char(c: char) -> Option<u8> {
    const SPELLINGS: usize = 512;
    const BYTE_OF_CHAR: [Option<u8>; SPELLINGS] = {
        let mut table = [None; SPELLINGS];
        let mut byte = 0;
        while byte < CHAR_OF_BYTE.len() {
            table[CHAR_OF_BYTE[byte] as usize] = Some(byte as u8);
            byte += 1;
        }
        table
    };
    BYTE_OF_CHAR.get(c as usize).copied().flatten()
}

#[cfg(test)]
mod tests {
    use super::{LONGEST_SPACE, without_long_spaces};

    #[test]
    fn text_is_cut_only_inside_white_space_that_is_too_long() {
        let words = "one two\n".repeat(LONGEST_SPACE);
        assert_eq!(without_long_spaces(&words), [words.as_str()]);
        let space = "\u{3000}".repeat(2 * LONGEST_SPACE + 3);
        let text = format!("a{space}b");
        let lengths = without_long_spaces(&text).into_iter().map(|piece| piece.chars().count());
        assert_eq!(lengths.collect::<Vec<_>>(), [1 + LONGEST_SPACE, LONGEST_SPACE, 3 + 1]);
    }
}
