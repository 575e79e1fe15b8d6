//! OpenAI's Responses: `POST /v1/responses` and what belongs to it.
//!
//! A request's input is a list of items: messages, calls of tools, their results, reasoning. So is the answer's
//! output, and what a client gets it may send back as it is. [`input`] brings items into the chat template's form,
//! [`items`] writes an answer down as items and as events, [`store`] keeps what `previous_response_id` continues.
//!
//! Every field of the protocol is honoured or refused by name. Fields that only label a request (`metadata`, `user`,
//! `prompt_cache_key`, …) change nothing that a client could see beside their echo; fields outside the protocol are
//! ignored, but for Lily's own, which are those of [a chat](crate::openai).
//!
//! **Reasoning** is text that nobody is kept from: it comes as `reasoning_text`, or, where the request asks for a
//! summary, as that summary, whole; and `encrypted_content`, where asked for, holds it once more in a form that
//! clients hand back without looking ([`reasoning`]).
//!
//! Read first: [`handlers`]; then [`request`].

pub mod events;
pub mod handlers;
pub mod input;
pub mod items;
pub mod reasoning;
pub mod request;
pub mod response;
pub mod store;
pub mod stored;
pub mod tools;
