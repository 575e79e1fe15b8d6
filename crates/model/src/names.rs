//! Names of modules and tensors in the spellings that checkpoints use, brought to one.
//!
//! `mlx-lm` and `mlx-vlm` write `language_model.model.layers…` and `language_model.lm_head…`, Hugging Face
//! writes `model.language_model.layers…` and `lm_head…`, text-only checkpoints of both write `model.layers…`.
//! The last is what Lily calls them.

use std::borrow::Cow;

/// Why a tensor is left in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skipped {
    /// Part of the vision tower.
    Vision,
    /// Part of the multi-token-prediction head.
    Mtp,
}

/// Whether `name` belongs to a part of the checkpoint that Lily leaves out.
pub fn skipped(name: &str) -> Option<Skipped> {
    name.split('.').find_map(|part| match part {
        "mtp" => Some(Skipped::Mtp),
        "vision_tower" | "visual" => Some(Skipped::Vision),
        _ => None,
    })
}

/// `name` without the prefixes that multimodal checkpoints add: `model.layers.0.mlp.gate`, `lm_head.weight`.
pub fn canonical(name: &str) -> Cow<'_, str> {
    if let Some(rest) = name.strip_prefix("language_model.") {
        rest.into()
    } else if let Some(rest) = name.strip_prefix("model.language_model.") {
        format!("model.{rest}").into()
    } else {
        name.into()
    }
}
