//! The modules of a 4-bit checkpoint as `mlx-lm` writes it: names, logical shapes, formats, in order.
//!
//! What is written follows this list, [`crate::synth`] and [`crate::convert`] alike; [`crate::load`] reads more
//! spellings and layouts than this one.

use serde_json::{Map, Value, json};

use crate::geometry::{Geometry, LayerKind};
use crate::safetensors::Dtype;
use crate::shards::StoredTensor;
use crate::weights::{Format, GROUP_SIZE};

/// What a module holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A projection `[rows, cols]`, or a stack of one for each expert `[count, rows, cols]`, affine.
    Matrix(Format),
    /// The weights of an RMS norm that Hugging Face's layout stores minus one.
    CentredNorm,
    /// The weights of an RMS norm that both layouts store as they are multiplied.
    PlainNorm,
    /// Taps of the convolution, `[channels, width, 1]`.
    Conv,
    /// Logarithms of the decay rates, one for each value head.
    ALog,
    /// Biases of the decay's step, one for each value head.
    DtBias,
}

/// One module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// Its path, as `mlx-lm` calls it: `language_model.model.layers.0.mlp.gate`.
    pub path: String,
    /// What it holds.
    pub kind: Kind,
    /// Its logical shape.
    pub shape: Vec<usize>,
}

impl Module {
    /// Its tensors: packed elements, scales and biases of a matrix, one tensor of anything else.
    pub fn tensors(&self) -> Vec<StoredTensor> {
        let tensor = |suffix: &str, dtype, shape: &[usize]| StoredTensor {
            name: format!("{}{suffix}", self.path),
            dtype,
            shape: shape.to_vec(),
        };
        match self.kind {
            Kind::Matrix(format) => {
                let (lead, cols) = (&self.shape[..self.shape.len() - 1], self.cols());
                let words = [lead, &[format.row_bytes(cols) / size_of::<u32>()]].concat();
                let groups = [lead, &[cols / GROUP_SIZE]].concat();
                vec![
                    tensor(".weight", Dtype::U32, &words),
                    tensor(".scales", Dtype::Bf16, &groups),
                    tensor(".biases", Dtype::Bf16, &groups),
                ]
            }
            Kind::CentredNorm | Kind::PlainNorm | Kind::Conv => {
                vec![tensor(".weight", Dtype::Bf16, &self.shape)]
            }
            Kind::ALog => vec![tensor("", Dtype::F32, &self.shape)],
            Kind::DtBias => vec![tensor("", Dtype::Bf16, &self.shape)],
        }
    }

    /// Elements of a row: its last size.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

/// Every module of `geometry`.
pub fn modules(geometry: &Geometry) -> Vec<Module> {
    let mut list = List(Vec::new());
    list.all(geometry);
    list.0
}

/// The `quantization` of `config.json` for these modules: 4-bit, and by name those that are 8-bit.
pub fn quantization(modules: &[Module]) -> Map<String, Value> {
    let mut quantization = Map::new();
    quantization.insert("group_size".into(), json!(GROUP_SIZE));
    quantization.insert("bits".into(), json!(4));
    quantization.insert("mode".into(), json!("affine"));
    for module in modules.iter().filter(|module| module.kind == Kind::Matrix(Format::Affine8)) {
        quantization.insert(module.path.clone(), json!({"group_size": GROUP_SIZE, "bits": 8}));
    }
    quantization
}

struct List(Vec<Module>);

impl List {
    fn push(&mut self, path: String, kind: Kind, shape: &[usize]) {
        self.0.push(Module { path, kind, shape: shape.to_vec() });
    }

    fn linear(&mut self, path: String, rows: usize, cols: usize) {
        self.push(path, Kind::Matrix(Format::Affine4), &[rows, cols]);
    }

    fn all(&mut self, g: &Geometry) {
        self.linear("language_model.model.embed_tokens".into(), g.vocab, g.hidden);
        for (i, kind) in g.layers.iter().enumerate() {
            let path = format!("language_model.model.layers.{i}");
            self.push(format!("{path}.input_layernorm"), Kind::CentredNorm, &[g.hidden]);
            match kind {
                LayerKind::Delta => self.delta(g, &format!("{path}.linear_attn")),
                LayerKind::Attention => self.attention(g, &format!("{path}.self_attn")),
            }
            self.push(format!("{path}.post_attention_layernorm"), Kind::CentredNorm, &[g.hidden]);
            self.moe(g, &format!("{path}.mlp"));
        }
        self.push("language_model.model.norm".into(), Kind::CentredNorm, &[g.hidden]);
        if !g.tied_head {
            self.linear("language_model.lm_head".into(), g.vocab, g.hidden);
        }
    }

    fn delta(&mut self, g: &Geometry, path: &str) {
        let d = &g.delta;
        self.linear(format!("{path}.in_proj_qkv"), d.conv_channels(), g.hidden);
        self.linear(format!("{path}.in_proj_z"), d.value_width(), g.hidden);
        self.linear(format!("{path}.in_proj_b"), d.value_heads, g.hidden);
        self.linear(format!("{path}.in_proj_a"), d.value_heads, g.hidden);
        self.push(format!("{path}.conv1d"), Kind::Conv, &[d.conv_channels(), d.conv_width, 1]);
        self.push(format!("{path}.A_log"), Kind::ALog, &[d.value_heads]);
        self.push(format!("{path}.dt_bias"), Kind::DtBias, &[d.value_heads]);
        self.push(format!("{path}.norm"), Kind::PlainNorm, &[d.value_dim]);
        self.linear(format!("{path}.out_proj"), g.hidden, d.value_width());
    }

    fn attention(&mut self, g: &Geometry, path: &str) {
        let a = &g.attention;
        let (queries, keys) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        self.linear(format!("{path}.q_proj"), 2 * queries, g.hidden);
        self.linear(format!("{path}.k_proj"), keys, g.hidden);
        self.linear(format!("{path}.v_proj"), keys, g.hidden);
        self.linear(format!("{path}.o_proj"), g.hidden, queries);
        self.push(format!("{path}.q_norm"), Kind::CentredNorm, &[a.head_dim]);
        self.push(format!("{path}.k_norm"), Kind::CentredNorm, &[a.head_dim]);
    }

    /// The gates are 8-bit: their error would move tokens between experts.
    fn moe(&mut self, g: &Geometry, path: &str) {
        let m = &g.moe;
        self.push(format!("{path}.gate"), Kind::Matrix(Format::Affine8), &[m.experts, g.hidden]);
        let (up, down) = ([m.experts, m.expert_width, g.hidden], [m.experts, g.hidden, m.expert_width]);
        self.push(format!("{path}.switch_mlp.gate_proj"), Kind::Matrix(Format::Affine4), &up);
        self.push(format!("{path}.switch_mlp.up_proj"), Kind::Matrix(Format::Affine4), &up);
        self.push(format!("{path}.switch_mlp.down_proj"), Kind::Matrix(Format::Affine4), &down);
        self.linear(format!("{path}.shared_expert.gate_proj"), m.shared_width, g.hidden);
        self.linear(format!("{path}.shared_expert.up_proj"), m.shared_width, g.hidden);
        self.linear(format!("{path}.shared_expert.down_proj"), g.hidden, m.shared_width);
        self.push(format!("{path}.shared_expert_gate"), Kind::Matrix(Format::Affine8), &[1, g.hidden]);
    }
}
