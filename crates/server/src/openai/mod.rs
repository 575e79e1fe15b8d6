//! OpenAI's Chat Completions protocol: what a client may send ([`request`]) and what it gets back
//! ([`response`]); and the older Completions ([`completion_request`], [`completion_response`]).
//!
//! Every field of the protocol is honoured or refused by name. Fields that only label a request (`user`,
//! `metadata`, …) change nothing that a client could see and are accepted; fields outside the protocol
//! are ignored, but for Lily's own: `top_k`, `min_p`, `repetition_penalty`, `ignore_eos`, `enable_thinking`,
//! `thinking_budget`, `chat_template_kwargs`, and those of [`constraints`].

pub mod assemble;
pub mod completion_request;
pub mod completion_response;
pub mod constraints;
pub mod fields;
pub mod messages;
pub mod request;
pub mod response;
pub mod tools;
