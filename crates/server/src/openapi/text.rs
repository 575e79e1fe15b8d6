//! What `POST /tokenize` and `POST /detokenize` take.

use utoipa::ToSchema;

use super::chat::Turn;

/// A text or a conversation, one of the two. A conversation may have the other fields of a chat.
#[derive(ToSchema)]
#[schema(as = TokenizeRequest)]
pub struct Tokenize {
    /// The model's name; the one that is served where absent.
    pub model: Option<String>,
    /// A text.
    pub prompt: Option<String>,
    /// A conversation.
    #[schema(min_items = 1)]
    pub messages: Option<Vec<Turn>>,
    /// Whether a conversation ends where the model's turn begins; true where absent.
    pub add_generation_prompt: Option<bool>,
    /// A chat's last message is always complete: false.
    pub continue_final_message: Option<bool>,
    /// Without effect: the model's tokenizer adds none.
    pub add_special_tokens: Option<bool>,
    /// Whether each token's text comes, too.
    pub return_token_strs: Option<bool>,
}

/// Tokens.
#[derive(ToSchema)]
#[schema(as = DetokenizeRequest)]
pub struct Detokenize {
    /// The model's name; the one that is served where absent.
    pub model: Option<String>,
    /// Ids of tokens.
    pub tokens: Vec<u32>,
}
