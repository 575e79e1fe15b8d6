//! `config.json` of a checkpoint into a [`Geometry`] and a [`Quantization`]; what Lily cannot run is refused.
//!
//! Field names and defaults are those of `transformers` (`models/qwen3_5_moe/configuration_qwen3_5_moe.py`)
//! and, for `quantization`, of `mlx-lm` (`utils.py`). A size has no default here: the two references disagree
//! on some, so a config that leaves one out is refused rather than guessed. All refusals are collected before
//! any is reported.

mod fields;
mod quantization;

use serde_json::{Map, Value};

use crate::error::{ModelError, Refusal};
use crate::geometry::{AttentionGeometry, DeltaGeometry, Geometry, LayerKind, MoeGeometry};
use crate::weights::GROUP_SIZE;
use fields::{Fields, show};

pub use quantization::Quantization;

/// What `config.json` says, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The file's `model_type`.
    pub model_type: String,
    /// Sizes.
    pub geometry: Geometry,
    /// Which modules are quantized, and how.
    pub quantization: Quantization,
    /// `eos_token_id`: one or several, or none.
    pub eos_token_ids: Vec<u32>,
}

const MODEL_TYPES: [&str; 2] = ["qwen3_5_moe", "qwen3_5_moe_text"];

/// Bounds that no sibling of this architecture comes near, and under which no product of sizes that Lily
/// forms (bytes of a stack of experts, elements of a state) leaves 63 bits.
mod bound {
    pub const WIDTH: u64 = 1 << 18;
    pub const VOCAB: u64 = 1 << 22;
    pub const LAYERS: u64 = 1024;
    pub const HEADS: u64 = 1024;
    pub const HEAD_DIM: u64 = 1024;
    pub const EXPERTS: u64 = 1 << 14;
    pub const CONTEXT: u64 = 1 << 27;
}

/// Default of `partial_rotary_factor` in `transformers` and in `mlx-lm`.
const DEFAULT_ROTARY_FACTOR: f64 = 0.25;
/// How far from a whole number rounding of the factor may leave the product of head size and factor.
const ROTARY_TOLERANCE: f64 = 1e-6;
/// Default of `rms_norm_eps` in `transformers` and in `mlx-lm`.
const DEFAULT_RMS_EPS: f64 = 1e-6;
/// Default of `full_attention_interval` in `transformers` and in `mlx-lm`.
const DEFAULT_ATTENTION_INTERVAL: u64 = 4;

/// Reads the text of `config.json`.
///
/// # Errors
/// [`ModelError::File`] where it is not a JSON object, [`ModelError::Refused`] with everything in it that Lily
/// cannot run.
pub fn parse_config_text(text: &[u8]) -> Result<ModelConfig, ModelError> {
    let value: Value = serde_json::from_slice(text)
        .map_err(|e| ModelError::file("config.json", format!("this is not valid JSON ({e})")))?;
    parse_config(&value)
}

/// Reads the value of `config.json`.
///
/// # Errors
/// As [`parse_config_text`].
pub fn parse_config(value: &Value) -> Result<ModelConfig, ModelError> {
    let Some(root) = value.as_object() else {
        return Err(ModelError::file("config.json", "this is not a JSON object"));
    };
    let mut refusals = Vec::new();
    let (text, prefix) = match root.get("text_config") {
        Some(Value::Object(text)) => (text, "text_config."),
        Some(other) if !other.is_null() => {
            refusals.push(Refusal::Field {
                field: "text_config".into(),
                found: show(other),
                supported: "an object, or a flat config without it".into(),
            });
            (root, "")
        }
        _ => (root, ""),
    };
    let mut fields = Fields { object: text, prefix, refusals };
    let model_type = model_type(root, &mut fields);
    if !MODEL_TYPES.contains(&model_type.as_str()) {
        // The other fields of another architecture mean other things: naming them would only confuse.
        return Err(ModelError::Refused(fields.refusals));
    }
    refuse_variants(&mut fields);
    let tied = match text.get("tie_word_embeddings") {
        None if !prefix.is_empty() => root.get("tie_word_embeddings").and_then(Value::as_bool),
        _ => fields.bool("tie_word_embeddings"),
    };
    let geometry = geometry(&mut fields, tied.unwrap_or(false));
    let quantization = quantization::read(root, text, &mut fields.refusals);
    let eos = text.get("eos_token_id").filter(|v| !v.is_null()).or_else(|| root.get("eos_token_id"));
    let eos_token_ids = match eos {
        Some(Value::Array(ids)) => ids.iter().filter_map(token_id).collect(),
        Some(id) => token_id(id).into_iter().collect(),
        None => Vec::new(),
    };
    let mut refusals = fields.refusals;
    if refusals.is_empty() {
        refusals = constraints(&geometry);
    }
    if refusals.is_empty() {
        Ok(ModelConfig { model_type, geometry, quantization, eos_token_ids })
    } else {
        Err(ModelError::Refused(refusals))
    }
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn model_type(root: &Map<String, Value>, fields: &mut Fields) -> String {
    match root.get("model_type") {
        Some(Value::String(t)) if MODEL_TYPES.contains(&t.as_str()) => t.clone(),
        found => {
            let found = found.map_or("missing".into(), show);
            let supported = format!("\"{}\" and \"{}\"", MODEL_TYPES[0], MODEL_TYPES[1]);
            fields.refusals.push(Refusal::Field { field: "model_type".into(), found, supported });
            String::new()
        }
    }
}

/// Switches of the architecture of which Lily implements one position.
fn refuse_variants(fields: &mut Fields) {
    fields.only("hidden_act", &Value::from("silu"));
    fields.only("attention_bias", &Value::from(false));
    fields.only("norm_topk_prob", &Value::from(true));
    fields.only("attn_output_gate", &Value::from(true));
    fields.only("decoder_sparse_step", &Value::from(1));
    fields.only("mlp_only_layers", &Value::Array(Vec::new()));
    fields.only("use_sliding_window", &Value::from(false));
}

fn geometry(fields: &mut Fields, tied_head: bool) -> Geometry {
    let layers = layers(fields);
    let head_dim = fields.size("head_dim", bound::HEAD_DIM);
    let (rope_theta, rotary_dim) = rotary(fields, head_dim);
    let eps = fields.number("rms_norm_eps").unwrap_or(DEFAULT_RMS_EPS);
    if !(eps > 0.0 && eps < 1.0) {
        fields.refuse("rms_norm_eps", eps.to_string(), "a positive number below 1");
    }
    Geometry {
        hidden: fields.size("hidden_size", bound::WIDTH),
        vocab: fields.size("vocab_size", bound::VOCAB),
        layers,
        attention: AttentionGeometry {
            heads: fields.size("num_attention_heads", bound::HEADS),
            kv_heads: fields.size("num_key_value_heads", bound::HEADS),
            head_dim,
            rotary_dim,
            rope_theta,
        },
        delta: DeltaGeometry {
            key_heads: fields.size("linear_num_key_heads", bound::HEADS),
            value_heads: fields.size("linear_num_value_heads", bound::HEADS),
            key_dim: fields.size("linear_key_head_dim", bound::HEAD_DIM),
            value_dim: fields.size("linear_value_head_dim", bound::HEAD_DIM),
            conv_width: fields.size("linear_conv_kernel_dim", bound::HEAD_DIM),
        },
        moe: MoeGeometry {
            experts: fields.size("num_experts", bound::EXPERTS),
            top_k: fields.size("num_experts_per_tok", bound::EXPERTS),
            expert_width: fields.size("moe_intermediate_size", bound::WIDTH),
            shared_width: fields.size("shared_expert_intermediate_size", bound::WIDTH),
        },
        rms_eps: eps as f32,
        max_context: fields.size("max_position_embeddings", bound::CONTEXT),
        tied_head,
    }
}

fn layers(fields: &mut Fields) -> Vec<LayerKind> {
    let count = fields.size("num_hidden_layers", bound::LAYERS);
    let Some(types) = fields.get("layer_types") else {
        let interval = match fields.get("full_attention_interval") {
            None => DEFAULT_ATTENTION_INTERVAL as usize,
            Some(_) => fields.size("full_attention_interval", bound::LAYERS),
        };
        let kind = |i: usize| match i.checked_rem(interval) {
            Some(0) => LayerKind::Attention,
            _ => LayerKind::Delta,
        };
        return (1..=count).map(kind).collect();
    };
    let kinds: Option<Vec<LayerKind>> = types.as_array().and_then(|types| {
        let kind = |t: &Value| match t.as_str()? {
            "linear_attention" => Some(LayerKind::Delta),
            "full_attention" => Some(LayerKind::Attention),
            _ => None,
        };
        types.iter().map(kind).collect()
    });
    match kinds {
        Some(kinds) if kinds.len() == count => kinds,
        Some(kinds) => {
            let found = format!("a list of {}", kinds.len());
            fields.refuse("layer_types", found, &format!("one entry per layer, {count} of them"));
            Vec::new()
        }
        None => {
            let found = show(types);
            fields.refuse("layer_types", found, "a list of \"linear_attention\" and \"full_attention\"");
            Vec::new()
        }
    }
}

/// `rope_theta` and the rotated elements of a head. `transformers` 5 and MLX write `rope_parameters`; older
/// writers put the same fields beside the sizes, with `rope_scaling` null.
fn rotary(fields: &mut Fields, head_dim: usize) -> (f64, usize) {
    let holder = ["rope_parameters", "rope_scaling"].into_iter().find(|name| fields.get(name).is_some());
    let mut theta = fields.number("rope_theta");
    let mut factor = fields.number("partial_rotary_factor");
    if let Some(holder) = holder {
        let Some(Value::Object(object)) = fields.get(holder) else {
            let found = fields.get(holder).map_or("missing".into(), show);
            fields.refuse(holder, found, "an object");
            return (1.0, 0);
        };
        let prefix = format!("{}{holder}.", fields.prefix);
        let mut rope = Fields { object, prefix: &prefix, refusals: Vec::new() };
        rope.only("rope_type", &Value::from("default"));
        rope.only("type", &Value::from("default"));
        theta = rope.number("rope_theta").or(theta);
        factor = rope.number("partial_rotary_factor").or(factor);
        fields.refusals.append(&mut rope.refusals);
    }
    let theta_field =
        if holder == Some("rope_parameters") { "rope_parameters.rope_theta" } else { "rope_theta" };
    let theta = match theta {
        Some(theta) if theta.is_finite() && theta >= 1.0 => theta,
        found => {
            let found = found.map_or("missing".into(), |v| v.to_string());
            fields.refuse(theta_field, found, "a number of at least 1");
            1.0
        }
    };
    let factor = factor.unwrap_or(DEFAULT_ROTARY_FACTOR);
    let product = head_dim as f64 * factor;
    let dim = product.round();
    let whole = (product - dim).abs() < ROTARY_TOLERANCE;
    if head_dim > 0 && !(whole && dim >= 2.0 && dim <= head_dim as f64 && dim % 2.0 == 0.0) {
        let supported = format!("factors that turn an even number of the {head_dim} elements of a head");
        fields.refuse("partial_rotary_factor", factor.to_string(), &supported);
        return (theta, 0);
    }
    (theta, dim as usize)
}

/// What the kernels require of a geometry beyond each size being in its range.
pub fn constraints(g: &Geometry) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    let mut require = |holds: bool, field: &str, found: usize, supported: String| {
        if !holds {
            let field = field.into();
            refusals.push(Refusal::Field { field, found: found.to_string(), supported });
        }
    };
    let (attention, delta, moe) = (&g.attention, &g.delta, &g.moe);
    for (field, size) in [
        ("hidden_size", g.hidden),
        ("moe_intermediate_size", moe.expert_width),
        ("shared_expert_intermediate_size", moe.shared_width),
        ("head_dim", attention.head_dim),
        ("linear_key_head_dim", delta.key_dim),
        ("linear_value_head_dim", delta.value_dim),
    ] {
        let whole = size > 0 && size.is_multiple_of(GROUP_SIZE);
        require(whole, field, size, format!("multiples of {GROUP_SIZE}"));
    }
    let serves = |heads: usize, of: usize| of > 0 && heads > 0 && heads.is_multiple_of(of);
    require(
        serves(attention.heads, attention.kv_heads),
        "num_attention_heads",
        attention.heads,
        format!("multiples of `num_key_value_heads` ({})", attention.kv_heads),
    );
    require(
        serves(delta.value_heads, delta.key_heads),
        "linear_num_value_heads",
        delta.value_heads,
        format!("multiples of `linear_num_key_heads` ({})", delta.key_heads),
    );
    let conv_widths = 2..=8;
    require(
        conv_widths.contains(&delta.conv_width),
        "linear_conv_kernel_dim",
        delta.conv_width,
        format!("{} to {}", conv_widths.start(), conv_widths.end()),
    );
    require(
        moe.top_k >= 1 && moe.top_k <= moe.experts,
        "num_experts_per_tok",
        moe.top_k,
        format!("1 to `num_experts` ({})", moe.experts),
    );
    require(
        g.count(LayerKind::Delta) > 0,
        "layer_types",
        g.layers.len(),
        "at least one \"linear_attention\" layer, whose conv1d tells MLX's layout from Hugging Face's".into(),
    );
    refusals
}
