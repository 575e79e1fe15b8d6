//! Small checkpoints as files, for the tests beside this one.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use lily_model::affine::dequantize_row;
use lily_model::geometry::{AttentionGeometry, DeltaGeometry, Geometry, LayerKind, MoeGeometry};
use lily_model::safetensors::{INDEX_FILE, SINGLE_FILE, Tensors};
use lily_model::source::Source;
use lily_model::weights::{Matrix, Mixer, Weights};
use serde_json::{Map, Value, json};

/// One layer of each kind, every size as small as Lily allows; the vocabulary holds the demo's tokenizer.
pub fn tiny() -> Geometry {
    Geometry {
        hidden: 64,
        vocab: 4096,
        layers: vec![LayerKind::Delta, LayerKind::Attention],
        attention: AttentionGeometry { heads: 2, kv_heads: 1, head_dim: 64, rotary_dim: 16, rope_theta: 1e7 },
        delta: DeltaGeometry { key_heads: 1, value_heads: 2, key_dim: 64, value_dim: 64, conv_width: 4 },
        moe: MoeGeometry { experts: 4, top_k: 2, expert_width: 64, shared_width: 128 },
        rms_eps: 1e-6,
        max_context: 1024,
        tied_head: false,
    }
}

/// The `config.json` of [`tiny`], unquantized and flat.
pub fn tiny_config() -> Value {
    json!({
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 64,
        "vocab_size": 4096,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "hidden_act": "silu"
    })
}

/// A tensor as a file stores it.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Stored {
    /// An f32 tensor.
    pub fn f32(shape: &[usize], values: &[f32]) -> Stored {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Stored { dtype: "F32".into(), shape: shape.to_vec(), bytes }
    }

    /// The values of an f32 tensor.
    pub fn values(&self) -> Vec<f32> {
        assert_eq!(self.dtype, "F32");
        self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

/// Tensors by name.
pub type Model = BTreeMap<String, Stored>;

/// The unquantized tensors of [`tiny`] in MLX's layout with text-only names, all values different.
pub fn tiny_model() -> Model {
    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".into(), vec![4096, 64]),
        ("model.norm.weight".into(), vec![64]),
        ("lm_head.weight".into(), vec![4096, 64]),
    ];
    let mixers: [&[(&str, &[usize])]; 2] = [
        &[
            ("linear_attn.in_proj_qkv.weight", &[256, 64]),
            ("linear_attn.in_proj_z.weight", &[128, 64]),
            ("linear_attn.in_proj_b.weight", &[2, 64]),
            ("linear_attn.in_proj_a.weight", &[2, 64]),
            ("linear_attn.conv1d.weight", &[256, 4, 1]),
            ("linear_attn.A_log", &[2]),
            ("linear_attn.dt_bias", &[2]),
            ("linear_attn.norm.weight", &[64]),
            ("linear_attn.out_proj.weight", &[64, 128]),
        ],
        &[
            ("self_attn.q_proj.weight", &[256, 64]),
            ("self_attn.k_proj.weight", &[64, 64]),
            ("self_attn.v_proj.weight", &[64, 64]),
            ("self_attn.o_proj.weight", &[64, 128]),
            ("self_attn.q_norm.weight", &[64]),
            ("self_attn.k_norm.weight", &[64]),
        ],
    ];
    let common: [(&str, &[usize]); 10] = [
        ("input_layernorm.weight", &[64]),
        ("post_attention_layernorm.weight", &[64]),
        ("mlp.gate.weight", &[4, 64]),
        ("mlp.switch_mlp.gate_proj.weight", &[4, 64, 64]),
        ("mlp.switch_mlp.up_proj.weight", &[4, 64, 64]),
        ("mlp.switch_mlp.down_proj.weight", &[4, 64, 64]),
        ("mlp.shared_expert.gate_proj.weight", &[128, 64]),
        ("mlp.shared_expert.up_proj.weight", &[128, 64]),
        ("mlp.shared_expert.down_proj.weight", &[64, 128]),
        ("mlp.shared_expert_gate.weight", &[1, 64]),
    ];
    for (i, mixer) in mixers.iter().enumerate() {
        for (name, shape) in mixer.iter().chain(&common) {
            shapes.push((format!("model.layers.{i}.{name}"), shape.to_vec()));
        }
    }
    let mut counter = 0u32;
    let mut value = || {
        counter += 1;
        // In 0.5..1.5, where subtracting 1 and adding it again loses nothing.
        0.5 + (counter.wrapping_mul(2_654_435_761) >> 9) as f32 / (1 << 23) as f32
    };
    shapes
        .into_iter()
        .map(|(name, shape)| {
            let values: Vec<f32> = (0..shape.iter().product()).map(|_| value()).collect();
            (name, Stored::f32(&shape, &values))
        })
        .collect()
}

/// `model` under the names that `rename` gives.
pub fn renamed(model: &Model, rename: impl Fn(&str) -> String) -> Model {
    model.iter().map(|(name, tensor)| (rename(name), tensor.clone())).collect()
}

/// The bytes of a safetensors file.
pub fn safetensors(model: &Model) -> Vec<u8> {
    let mut header = Map::new();
    let mut body = Vec::new();
    for (name, tensor) in model {
        let start = body.len();
        body.extend_from_slice(&tensor.bytes);
        let entry = json!({
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [start, body.len()],
        });
        header.insert(name.clone(), entry);
    }
    with_header(&Value::Object(header).to_string(), &body)
}

/// A file of this header and this body.
pub fn with_header(header: &str, body: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), body].concat()
}

/// Writes a checkpoint in one file, without the text side.
pub fn write_single(dir: &Path, config: &Value, model: &Model) {
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    fs::write(dir.join(SINGLE_FILE), safetensors(model)).unwrap();
}

/// Writes a checkpoint in `shards` files and an index.
pub fn write_sharded(dir: &Path, config: &Value, model: &Model, shards: usize) {
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut parts = vec![Model::new(); shards];
    let mut weight_map = Map::new();
    for (i, (name, tensor)) in model.iter().enumerate() {
        parts[i % shards].insert(name.clone(), tensor.clone());
        weight_map.insert(name.clone(), json!(format!("part-{}.safetensors", i % shards)));
    }
    for (i, part) in parts.iter().enumerate() {
        fs::write(dir.join(format!("part-{i}.safetensors")), safetensors(part)).unwrap();
    }
    fs::write(dir.join(INDEX_FILE), json!({"weight_map": weight_map}).to_string()).unwrap();
}

/// All stored tensors of the checkpoint in `dir`.
pub fn read(dir: &Path) -> Model {
    let tensors = Tensors::open(&Source::directory(dir).unwrap()).unwrap();
    let stored = |t: &lily_model::safetensors::Tensor| Stored {
        dtype: t.dtype.to_string(),
        shape: t.shape.clone(),
        bytes: t.data.to_vec(),
    };
    tensors.iter().map(|(name, tensor)| (name.to_owned(), stored(tensor))).collect()
}

/// Every weight as f32, in a fixed order.
pub fn flatten(weights: &Weights) -> Vec<Vec<f32>> {
    let mut all = vec![rows(&weights.embed_tokens), weights.norm.clone(), rows(&weights.lm_head)];
    for layer in &weights.layers {
        all.push(layer.input_norm.clone());
        all.push(layer.post_norm.clone());
        match &layer.mixer {
            Mixer::Delta(d) => {
                all.extend([&d.in_proj_qkv, &d.in_proj_z, &d.in_proj_b, &d.in_proj_a, &d.out_proj].map(rows));
                all.extend([&d.conv1d, &d.a_log, &d.dt_bias, &d.norm].map(Clone::clone));
            }
            Mixer::Attention(a) => {
                all.extend([&a.q_proj, &a.k_proj, &a.v_proj, &a.o_proj].map(rows));
                all.extend([&a.q_norm, &a.k_norm].map(Clone::clone));
            }
        }
        let m = &layer.moe;
        all.extend([&m.gate, &m.gate_proj, &m.up_proj, &m.down_proj].map(rows));
        let shared = [&m.shared_gate_proj, &m.shared_up_proj, &m.shared_down_proj, &m.shared_expert_gate];
        all.extend(shared.map(rows));
    }
    all
}

/// All elements of a stack.
pub fn rows(matrix: &Matrix) -> Vec<f32> {
    let mut all = Vec::new();
    let mut row = vec![0.0; matrix.cols];
    for i in 0..matrix.count {
        for r in 0..matrix.rows {
            dequantize_row(matrix.at(i), r, &mut row);
            all.extend_from_slice(&row);
        }
    }
    all
}
