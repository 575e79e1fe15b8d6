//! Anthropic's Messages protocol: what a client may send ([`request`]) and what it gets back ([`response`]).
//!
//! The conversation is brought into the form that the chat template renders ([`conversation`], [`tools`]); an
//! answer is cut into content blocks ([`blocks`]), sent as events or joined, so that it is the same streamed
//! or whole.
//!
//! Every field of the protocol is honoured or refused by name. Labels (`metadata`, `betas`, …) and
//! `cache_control` change nothing that a client could see and are accepted: the prefix cache needs no marks,
//! and `usage` says what it had. Fields outside the protocol are ignored, but for Lily's own, which are those
//! of Chat Completions: `min_p`, `seed`, the penalties and `logit_bias`.

use axum::http::HeaderMap;

pub mod blocks;
pub mod conversation;
pub mod error;
pub mod handlers;
pub mod request;
pub mod response;
pub mod tools;

/// The header in which a client says which version of the protocol it speaks.
const VERSION: &str = "anthropic-version";

/// Whether a client speaks this protocol, on paths that it shares with OpenAI's.
pub fn speaks(headers: &HeaderMap) -> bool {
    headers.contains_key(VERSION)
}
