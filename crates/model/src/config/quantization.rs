//! The `quantization` of `config.json`: which modules are packed, and how.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::fields::show;
use crate::error::Refusal;
use crate::names;
use crate::weights::{Format, GROUP_SIZE};

/// Formats of the quantized modules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quantization {
    /// Format of modules without an override; `None` where the checkpoint is not quantized.
    pub default: Option<Format>,
    /// Formats by module path (`model.layers.0.mlp.gate`: no `language_model.`); `None` is "not quantized".
    pub overrides: BTreeMap<String, Option<Format>>,
}

impl Quantization {
    /// The format declared for `module`, or `None` where it is not quantized.
    pub fn of(&self, module: &str) -> Option<Format> {
        self.overrides.get(module).copied().unwrap_or(self.default)
    }
}

/// `bits` of a quantization entry without the field; `mlx.nn` takes the same.
const DEFAULT_BITS: u64 = 4;

/// Reads `quantization`, or `quantization_config` where that is the name, of a config and its `text_config`.
pub fn read(
    root: &Map<String, Value>,
    text: &Map<String, Value>,
    refusals: &mut Vec<Refusal>,
) -> Quantization {
    let mut found = None;
    for field in ["quantization", "quantization_config"] {
        for object in [root, text] {
            if found.is_none() {
                found = object.get(field).filter(|v| !v.is_null()).map(|v| (field, v));
            }
        }
    }
    let Some((field, value)) = found else { return Quantization::default() };
    let mut refuse = |path: String, found: &Value, supported: &str| {
        let found = show(found);
        refusals.push(Refusal::Field { field: path, found, supported: supported.into() });
    };
    let Some(object) = value.as_object() else {
        refuse(field.into(), value, "an object with `group_size` and `bits`");
        return Quantization::default();
    };
    if let Some(method) = object.get("quant_method") {
        refuse(format!("{field}.quant_method"), method, "MLX's affine format, which has no such field");
        return Quantization::default();
    }
    let default = format_of(field, object, &mut refuse);
    let mut overrides = BTreeMap::new();
    for (path, entry) in object {
        if matches!(path.as_str(), "group_size" | "bits" | "mode") || names::skipped(path).is_some() {
            continue;
        }
        let format = match entry {
            Value::Bool(false) => None,
            Value::Bool(true) => default,
            Value::Object(entry) => format_of(&format!("{field}.{path}"), entry, &mut refuse),
            other => {
                refuse(format!("{field}.{path}"), other, "an object with `group_size` and `bits`, or false");
                None
            }
        };
        overrides.insert(names::canonical(path).to_string(), format);
    }
    Quantization { default, overrides }
}

/// The format of one quantization entry; what Lily does not read is passed to `refuse`.
fn format_of(
    path: &str,
    entry: &Map<String, Value>,
    refuse: &mut impl FnMut(String, &Value, &str),
) -> Option<Format> {
    let group = entry.get("group_size").filter(|v| !v.is_null());
    if let Some(other) = group.filter(|v| v.as_u64() != Some(GROUP_SIZE as u64)) {
        refuse(format!("{path}.group_size"), other, &GROUP_SIZE.to_string());
    }
    let mode = entry.get("mode").filter(|v| !v.is_null());
    if let Some(other) = mode.filter(|v| v.as_str() != Some("affine")) {
        refuse(format!("{path}.mode"), other, "\"affine\"");
    }
    let bits = entry.get("bits").filter(|v| !v.is_null()).cloned().unwrap_or(DEFAULT_BITS.into());
    match bits.as_u64() {
        Some(4) => Some(Format::Affine4),
        Some(8) => Some(Format::Affine8),
        _ => {
            refuse(format!("{path}.bits"), &bits, "4 and 8");
            None
        }
    }
}
