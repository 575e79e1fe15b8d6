//! The demo: a small trained checkpoint of the real architecture and file layout, held by the binary.
//!
//! `demo/README.md` says how it was made. It goes through the same code as a directory on disk.

use crate::checkpoint::{CONFIG_FILE, GENERATION_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE};
use crate::safetensors::SINGLE_FILE;
use crate::source::Source;

/// What the demo is called.
pub const NAME: &str = "lily-demo";

macro_rules! file {
    ($name:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../demo/checkpoint/", $name))
    };
}

/// Names and contents of the demo's files.
pub static FILES: &[(&str, &[u8])] = &[
    (CONFIG_FILE, file!("config.json")),
    (SINGLE_FILE, file!("model.safetensors")),
    (TOKENIZER_FILE, file!("tokenizer.json")),
    (TOKENIZER_CONFIG_FILE, file!("tokenizer_config.json")),
    (TEMPLATE_FILE, file!("chat_template.jinja")),
    (GENERATION_FILE, file!("generation_config.json")),
];

/// The demo's files.
pub fn source() -> Source {
    Source::Embedded { name: NAME, files: FILES }
}
