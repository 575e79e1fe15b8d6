//! HTTP over the engine: OpenAI's Chat Completions, Completions and Responses, and Anthropic's Messages.
//!
//! **In**: a [`chat_model::ChatModel`] (engine, tokenizer, chat template) and HTTP requests, trusted in nothing.
//! **Out**: answers, whole or streamed as server-sent events, and errors in each protocol's own shape. The crate
//! knows no tensor and no device; what it needs of the model is text to tokens and a queue of requests.
//!
//! ```text
//! body ─▶ openai::request ────┬─▶ chat_model (template, tokens, sampling) ─▶ engine
//!         responses::request ─┤                                                │ events
//!         anthropic::request ─┘                                                │
//! response ◀─ openai::assemble ──┬─ answer (reasoning, content, calls) ◀───────┘
//!             responses::items ──┤
//!             anthropic::blocks ─┘
//! ```
//!
//! Every field of the protocol is honoured or refused by name; an answer is the same streamed or whole; a
//! client that goes away takes its work with it.
//!
//! Around all of it stands [`gate`], which is there before the model is; [`record`] writes down what happens.
//!
//! Read first: [`app`], the paths; then [`chat`], the handler that the others resemble; then [`openai::request`],
//! what a client may ask; then [`responses`] and [`anthropic`]. [`chat_model`], [`answer`] and [`turns`] know no protocol: `lily chat` runs
//! on them too.

pub mod answer;
pub mod anthropic;
pub mod app;
pub mod auth;
pub mod body;
pub mod chat;
pub mod chat_model;
pub mod completions;
pub mod conversation;
pub mod error;
pub mod gate;
pub mod health;
mod lru;
pub mod metrics;
pub mod models;
pub mod openai;
pub mod openapi;
pub mod page;
pub mod path;
pub mod record;
pub mod request_id;
pub mod responses;
pub mod serve;
pub mod sse;
pub mod tokenize;
pub mod turns;
