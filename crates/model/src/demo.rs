//! The demo: a small trained checkpoint of the real architecture and file layout, held by the binary.
//!
//! `demo/README.md` says how it was made. It goes through the same code as a directory on disk.

use crate::checkpoint::{TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE};
use crate::source::Source;

/// What the demo is called.
pub const NAME: &str = "lily-demo";

macro_rules! file {
    ($name:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../demo/checkpoint/", $name))
    };
}

const FILES: &[(&str, &[u8])] = &[
    (TOKENIZER_FILE, file!("tokenizer.json")),
    (TOKENIZER_CONFIG_FILE, file!("tokenizer_config.json")),
    (TEMPLATE_FILE, file!("chat_template.jinja")),
];

/// The demo's files.
pub fn source() -> Source {
    Source::Embedded { name: NAME, files: FILES }
}
