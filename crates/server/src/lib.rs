//! HTTP over the engine: OpenAI's Chat Completions protocol.
//!
//! **In**: a [`chat_model::ChatModel`] (engine, tokenizer, chat template) and HTTP requests, trusted in nothing.
//! **Out**: answers, whole or streamed as server-sent events, and errors in OpenAI's shape. The crate knows no
//! tensor and no device; what it needs of the model is text to tokens and a queue of requests.
//!
//! ```text
//! body ─▶ openai::request ─▶ chat_model (template, tokens, sampling) ─▶ engine
//!                                                                        │ events
//! response ◀─ openai::assemble ◀─ answer (reasoning, content, calls) ◀───┘
//! ```
//!
//! Every field of the protocol is honoured or refused by name; an answer is the same streamed or whole; a
//! client that goes away takes its work with it.
//!
//! Read first: [`app`], the paths; then [`chat`], the one handler that matters; then [`openai::request`], what a
//! client may ask. [`chat_model`] and [`answer`] know no protocol: `lily chat` runs on them too.

pub mod answer;
pub mod app;
pub mod auth;
pub mod chat;
pub mod chat_model;
pub mod error;
pub mod health;
pub mod models;
pub mod openai;
pub mod serve;
