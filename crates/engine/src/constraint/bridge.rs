//! The model's vocabulary in the form that grammars are matched against: a trie over the bytes of its tokens.

use lily_model::tokenizer::Tokenizer;
use llguidance::toktrie::{TokRxInfo, TokTrie, TokenId, TokenizerEnv};

/// A vocabulary and its tokenizer.
pub(super) struct Bridge {
    trie: TokTrie,
    tokenizer: Tokenizer,
}

impl Bridge {
    /// `vocab`: length of a row of logits. `eos`: tokens that end an answer; those outside the vocabulary are
    /// left out.
    pub(super) fn new(tokenizer: Tokenizer, vocab: usize, eos: &[u32]) -> Bridge {
        let mut words: Vec<Vec<u8>> = (0..vocab as u32).map(|id| word(&tokenizer, id)).collect();
        let mut eos: Vec<u32> = eos.iter().copied().filter(|&id| (id as usize) < vocab).collect();
        if eos.is_empty() {
            // The trie needs one. It lies behind the row, so it is never chosen.
            eos.push(vocab as u32);
            words.push(vec![TokTrie::SPECIAL_TOKEN_MARKER]);
        }
        let info = TokRxInfo::new(words.len() as u32, eos[0]);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(&eos);
        Bridge { trie, tokenizer }
    }
}

/// The bytes of a token: empty where it may never occur, marked where it is no text.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    match tokenizer.token_bytes(id) {
        Some(bytes) if tokenizer.is_added(id) => {
            [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes.as_slice()].concat()
        }
        // A byte that no UTF-8 text holds stands for the mark.
        Some(bytes) if !bytes.starts_with(&[TokTrie::SPECIAL_TOKEN_MARKER]) => bytes,
        _ => Vec::new(),
    }
}

impl TokenizerEnv for Bridge {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        // The tokenizer may normalise what it reads; then its tokens are not those of these bytes.
        let exact = |ids: &Vec<u32>| {
            let spelled = ids.iter().flat_map(|&id| self.tokenizer.token_bytes(id).unwrap_or_default());
            spelled.eq(bytes.iter().copied())
        };
        let text = std::str::from_utf8(bytes).ok();
        let ids = text.map(|text| self.tokenizer.encode_plain(text)).filter(exact);
        ids.unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }
}
