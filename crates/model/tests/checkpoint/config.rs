//! `config.json`: the forms that are read, and everything that is refused.

use lily_model::config::parse_config;
use lily_model::error::{ModelError, Refusal};
use lily_model::geometry::{Geometry, LayerKind};
use lily_model::weights::Format;
use serde_json::{Value, json};

use crate::files::{tiny, tiny_config};

/// `config` with the fields of `changes` put in; null takes a field away.
fn with(mut config: Value, changes: Value) -> Value {
    for (field, value) in changes.as_object().unwrap() {
        config[field] = value.clone();
    }
    config
}

/// The refusals of a config as (field, found, supported).
fn refusals(config: &Value) -> Vec<(String, String, String)> {
    let Err(ModelError::Refused(refusals)) = parse_config(config) else {
        panic!("expected refusals of {config}")
    };
    let fields = refusals.into_iter().map(|refusal| match refusal {
        Refusal::Field { field, found, supported } => (field, found, supported),
        Refusal::Tensor { .. } => unreachable!("a config has no tensors"),
    });
    fields.collect()
}

#[test]
fn the_published_config_gives_the_published_geometry() {
    let text = json!({
        "model_type": "qwen3_5_moe_text",
        "attention_bias": false,
        "attn_output_gate": true,
        "dtype": "bfloat16",
        "eos_token_id": 248_044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262_144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": true,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "rope_type": "default"
        },
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": false,
        "vocab_size": 248_320
    });
    let nested = json!({
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "vision_config": {"hidden_act": "gelu_pytorch_tanh"},
        "tie_word_embeddings": false,
        "quantization": {
            "group_size": 64,
            "bits": 4,
            "mode": "affine",
            "language_model.model.layers.0.mlp.gate": {"group_size": 64, "bits": 8}
        }
    });
    let config = parse_config(&nested).unwrap();
    assert_eq!(config.geometry, Geometry::qwen3_6_35b_a3b());
    assert_eq!(config.eos_token_ids, [248_044]);
    assert_eq!(config.quantization.of("model.layers.0.mlp.gate"), Some(Format::Affine8));
    assert_eq!(config.quantization.of("model.layers.1.mlp.gate"), Some(Format::Affine4));
    assert_eq!(parse_config(&text).unwrap().geometry, config.geometry);
}

#[test]
fn layers_and_rotary_are_read_in_every_form_that_writers_use() {
    let expected = tiny();
    assert_eq!(parse_config(&tiny_config()).unwrap().geometry, expected);
    let same = [
        json!({"layer_types": null, "full_attention_interval": 2}),
        json!({"rope_parameters": null, "rope_theta": 1e7}),
        json!({"rope_parameters": {"type": "default", "rope_theta": 1e7}}),
        json!({"rope_parameters": null, "rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_scaling": null}),
        json!({"rope_parameters": {"rope_theta": 1e7}, "partial_rotary_factor": 0.25}),
    ];
    for changes in same {
        assert_eq!(
            parse_config(&with(tiny_config(), changes.clone())).unwrap().geometry,
            expected,
            "{changes}"
        );
    }
    let every_fourth = with(tiny_config(), json!({"layer_types": null, "num_hidden_layers": 4}));
    let kinds = parse_config(&every_fourth).unwrap().geometry.layers;
    assert_eq!(kinds, [LayerKind::Delta, LayerKind::Delta, LayerKind::Delta, LayerKind::Attention]);
}

#[test]
fn overrides_are_honoured_under_every_prefix() {
    let quantization = json!({
        "bits": 8,
        "group_size": 64,
        "language_model.model.layers.0.mlp.gate": {"bits": 4, "group_size": 64, "mode": "affine"},
        "model.layers.1.mlp.gate": {"bits": 4, "group_size": 64},
        "model.language_model.layers.0.linear_attn.in_proj_a": false,
        "language_model.lm_head": false,
        "model.embed_tokens": true,
        "vision_tower.blocks.0": {"bits": 3, "group_size": 32}
    });
    for field in ["quantization", "quantization_config"] {
        let config = with(tiny_config(), json!({field: quantization}));
        let found = parse_config(&config).unwrap().quantization;
        assert_eq!(found.of("model.layers.0.mlp.gate"), Some(Format::Affine4));
        assert_eq!(found.of("model.layers.1.mlp.gate"), Some(Format::Affine4));
        assert_eq!(found.of("model.layers.0.linear_attn.in_proj_a"), None);
        assert_eq!(found.of("lm_head"), None);
        assert_eq!(found.of("model.embed_tokens"), Some(Format::Affine8));
        assert_eq!(found.of("model.layers.0.mlp.shared_expert_gate"), Some(Format::Affine8));
    }
}

#[test]
fn what_lily_cannot_run_is_refused_by_field_value_and_alternative() {
    let huge = u64::MAX;
    let cases = [
        (json!({"model_type": "llama"}), "model_type", "\"llama\"", "qwen3_5_moe"),
        (json!({"model_type": null}), "model_type", "null", "qwen3_5_moe"),
        (json!({"hidden_act": "gelu"}), "hidden_act", "\"gelu\"", "\"silu\""),
        (json!({"attention_bias": true}), "attention_bias", "true", "false"),
        (json!({"norm_topk_prob": false}), "norm_topk_prob", "false", "true"),
        (json!({"attn_output_gate": false}), "attn_output_gate", "false", "true"),
        (json!({"decoder_sparse_step": 2}), "decoder_sparse_step", "2", "1"),
        (json!({"mlp_only_layers": [0]}), "mlp_only_layers", "[0]", "[]"),
        (json!({"use_sliding_window": true}), "use_sliding_window", "true", "false"),
        (json!({"hidden_size": 96}), "hidden_size", "96", "multiples of 64"),
        (json!({"hidden_size": 0}), "hidden_size", "0", "from 1"),
        (json!({"hidden_size": huge}), "hidden_size", "18446744073709551615", "from 1 to"),
        (json!({"hidden_size": -64}), "hidden_size", "-64", "from 1"),
        (json!({"hidden_size": 64.5}), "hidden_size", "64.5", "whole numbers"),
        (json!({"hidden_size": "64"}), "hidden_size", "\"64\"", "whole numbers"),
        (json!({"hidden_size": null}), "hidden_size", "missing", "from 1"),
        (json!({"vocab_size": 0}), "vocab_size", "0", "from 1"),
        (json!({"num_hidden_layers": huge}), "num_hidden_layers", "18446744073709551615", "from 1"),
        (json!({"num_hidden_layers": 3}), "layer_types", "a list of 2", "3 of them"),
        (json!({"layer_types": ["linear_attention", "sliding"]}), "layer_types", "sliding", "full_attention"),
        (json!({"layer_types": "linear_attention"}), "layer_types", "linear_attention", "a list"),
        (
            json!({"layer_types": ["full_attention", "full_attention"]}),
            "layer_types",
            "2",
            "linear_attention",
        ),
        (
            json!({"layer_types": null, "full_attention_interval": 0}),
            "full_attention_interval",
            "0",
            "from 1",
        ),
        (
            json!({"num_attention_heads": 3, "num_key_value_heads": 2}),
            "num_attention_heads",
            "3",
            "multiples",
        ),
        (json!({"num_key_value_heads": 0}), "num_key_value_heads", "0", "from 1"),
        (json!({"head_dim": 80}), "head_dim", "80", "multiples of 64"),
        (
            json!({"linear_num_value_heads": 3, "linear_num_key_heads": 2}),
            "linear_num_value_heads",
            "3",
            "multiples",
        ),
        (json!({"linear_key_head_dim": 32}), "linear_key_head_dim", "32", "multiples of 64"),
        (json!({"linear_value_head_dim": 100}), "linear_value_head_dim", "100", "multiples of 64"),
        (json!({"linear_conv_kernel_dim": 1}), "linear_conv_kernel_dim", "1", "2 to 8"),
        (json!({"linear_conv_kernel_dim": 9}), "linear_conv_kernel_dim", "9", "2 to 8"),
        (json!({"num_experts": 0}), "num_experts", "0", "from 1"),
        (json!({"num_experts_per_tok": 5}), "num_experts_per_tok", "5", "1 to `num_experts` (4)"),
        (json!({"moe_intermediate_size": 63}), "moe_intermediate_size", "63", "multiples of 64"),
        (json!({"shared_expert_intermediate_size": 0}), "shared_expert_intermediate_size", "0", "from 1"),
        (json!({"rms_norm_eps": 0}), "rms_norm_eps", "0", "positive"),
        (json!({"rms_norm_eps": "small"}), "rms_norm_eps", "\"small\"", "a number"),
        (json!({"max_position_embeddings": null}), "max_position_embeddings", "missing", "from 1"),
        (json!({"tie_word_embeddings": "no"}), "tie_word_embeddings", "\"no\"", "true and false"),
        (
            json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}),
            "rope_parameters.rope_type",
            "\"yarn\"",
            "\"default\"",
        ),
        (
            json!({"rope_parameters": {"type": "linear", "rope_theta": 1e7}}),
            "rope_parameters.type",
            "\"linear\"",
            "\"default\"",
        ),
        (
            json!({"rope_scaling": {"rope_type": "dynamic"}, "rope_parameters": null, "rope_theta": 1e4}),
            "rope_scaling.rope_type",
            "\"dynamic\"",
            "\"default\"",
        ),
        (json!({"rope_parameters": []}), "rope_parameters", "[]", "an object"),
        (json!({"rope_parameters": null}), "rope_theta", "missing", "at least 1"),
        (json!({"rope_parameters": {"rope_theta": 0}}), "rope_parameters.rope_theta", "0", "at least 1"),
        (
            json!({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 2}}),
            "partial_rotary_factor",
            "2",
            "even number",
        ),
        (
            json!({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.3}}),
            "partial_rotary_factor",
            "0.3",
            "even number",
        ),
        (json!({"quantization": {"group_size": 32, "bits": 4}}), "quantization.group_size", "32", "64"),
        (json!({"quantization": {"group_size": 64, "bits": 3}}), "quantization.bits", "3", "4 and 8"),
        (
            json!({"quantization": {"group_size": 64, "bits": 4, "mode": "mxfp4"}}),
            "quantization.mode",
            "\"mxfp4\"",
            "\"affine\"",
        ),
        (
            json!({"quantization": {"group_size": 64, "bits": 4, "model.norm": {"group_size": 64, "bits": 6}}}),
            "quantization.model.norm.bits",
            "6",
            "4 and 8",
        ),
        (
            json!({"quantization": {"group_size": 64, "bits": 4, "lm_head": {"group_size": 128, "bits": 4}}}),
            "quantization.lm_head.group_size",
            "128",
            "64",
        ),
        (
            json!({"quantization": {"group_size": 64, "bits": 4, "lm_head": 4}}),
            "quantization.lm_head",
            "4",
            "an object",
        ),
        (json!({"quantization": true}), "quantization", "true", "an object"),
        (
            json!({"quantization_config": {"quant_method": "fp8"}}),
            "quantization_config.quant_method",
            "\"fp8\"",
            "affine",
        ),
    ];
    for (changes, field, found, supported) in cases {
        let refusals = refusals(&with(tiny_config(), changes.clone()));
        let named = refusals.iter().any(|(f, v, s)| f == field && v.contains(found) && s.contains(supported));
        assert!(named, "{changes} gave {refusals:?}");
    }
}

#[test]
fn all_refusals_come_at_once_and_say_where() {
    let broken = with(tiny_config(), json!({"hidden_act": "relu", "head_dim": null, "vocab_size": 0}));
    let nested = json!({"model_type": "qwen3_5_moe", "text_config": broken});
    let fields: Vec<String> = refusals(&nested).into_iter().map(|(field, ..)| field).collect();
    for field in ["text_config.hidden_act", "text_config.head_dim", "text_config.vocab_size"] {
        assert!(fields.iter().any(|f| f == field), "{field} in {fields:?}");
    }
    let message = parse_config(&nested).unwrap_err().to_string();
    assert!(message.contains("`text_config.hidden_act` is \"relu\"; Lily supports \"silu\""), "{message}");
    assert!(parse_config(&json!([1])).unwrap_err().to_string().contains("not a JSON object"));
}
