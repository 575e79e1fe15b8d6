//! What the model is: its shape, its weights where they lie, its tokens and its chat format.
//!
//! This crate turns a checkpoint, a directory of files or the demo that the binary embeds, into things that
//! the rest of Lily uses without knowing a file format. It computes nothing of the forward pass.
//!
//! **In**: `config.json`, safetensors in one file or in shards, `tokenizer.json`, a chat template,
//! `generation_config.json`. All of it comes from outside and is checked: a damaged file or a model that Lily
//! does not run is an error that names the file, field or tensor, what was found, and what would be read.
//!
//! **Out**: a [`geometry::Geometry`] (every size), [`weights::Weights`] (matrices in place in the mapped
//! files, 4- or 8-bit affine or unquantized; small vectors as f32), and the text side.
//!
//! Read first: [`geometry`], then [`weights`], the two contracts with the backends; then [`checkpoint`], the
//! way in. Behind it stand, in the order in which a checkpoint passes through them:
//!
//! | module | does |
//! |---|---|
//! | [`source`] | named files, mapped from disk or embedded |
//! | [`config`] | `config.json` to geometry and quantization; refusals |
//! | [`safetensors`] | headers, shards, byte ranges |
//! | [`names`] | one spelling for tensor names |
//! | [`load`] | tensors to weights, MLX's layout or Hugging Face's |
//! | [`affine`] | what the quantized formats mean |
//! | [`quantize`] | floats into them |
//! | [`tokenizer`], [`detokenizer`] | text to token ids, and back as they stream in |
//! | [`chat_template`] | a conversation to the text that the model reads |
//! | [`generation_config`] | where answers end, recommended sampling |
//! | [`populate`] | mapped bytes entered into the page tables ahead of their use |
//! | [`inspect`] | everything that is in a directory, and everything that would be refused |
//! | [`cost`] | bytes and operations that a token needs at the least |
//! | [`demo`] | the checkpoint that the binary embeds |
//! | [`layout`], [`shards`] | the 4-bit checkpoint that is written: its modules, its files |
//! | [`convert`] | an unquantized checkpoint into a 4-bit one |
//! | [`synth`] | random weights of any geometry, for measuring |
//! | [`error`] | the crate's errors |

pub mod affine;
pub mod chat_template;
pub mod checkpoint;
pub mod config;
pub mod convert;
pub mod cost;
pub mod demo;
pub mod detokenizer;
pub mod error;
pub mod generation_config;
pub mod geometry;
pub mod inspect;
pub mod layout;
pub mod load;
pub mod names;
pub mod populate;
pub mod quantize;
pub mod safetensors;
pub mod shards;
pub mod source;
pub mod synth;
pub mod tokenizer;
pub mod weights;
