//! The tensors of a quantized checkpoint, in order, with what random weights hold in each.

use crate::geometry::{Geometry, LayerKind};
use crate::safetensors::Dtype;
use crate::weights::{Format, GROUP_SIZE};

use super::fill::{Fill, word};

/// Standard deviation of the router's logits: the last of the eight experts weighs a fiftieth of the first, so that it
/// matters little which it is.
const ROUTER_DEVIATION: f64 = 4.0;

/// One tensor to be written.
#[derive(Debug)]
pub struct Spec {
    /// Its name, as `mlx-lm` writes it.
    pub name: String,
    /// Its type.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its contents.
    pub fill: Fill,
}

impl Spec {
    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        let element = if matches!(self.dtype, Dtype::Bf16) { size_of::<u16>() } else { size_of::<u32>() };
        (self.shape.iter().product::<usize>() * element) as u64
    }
}

/// Every tensor of `geometry`.
pub fn list(geometry: &Geometry, seed: u64) -> Vec<Spec> {
    // As in GPT-2: what all layers add together has the variance of one that is not scaled.
    let added = (2.0 * geometry.layers.len() as f64).sqrt().recip();
    let mut list = List { specs: Vec::new(), seed, streams: 0, added };
    list.all(geometry);
    list.specs
}

/// Modules that are 8-bit where the rest is 4-bit: those whose error would move tokens between experts.
pub fn eight_bit_modules(geometry: &Geometry) -> impl Iterator<Item = String> {
    (0..geometry.layers.len())
        .flat_map(|i| ["gate", "shared_expert_gate"].map(|gate| format!("{}.mlp.{gate}", layer(i))))
}

fn layer(index: usize) -> String {
    format!("language_model.model.layers.{index}")
}

struct List {
    specs: Vec<Spec>,
    seed: u64,
    streams: u64,
    /// Standard deviation of what one projection adds to the residual stream, relative to its inputs'.
    added: f64,
}

impl List {
    fn stream(&mut self) -> u64 {
        self.streams += 1;
        word(self.seed, self.streams)
    }

    fn push(&mut self, name: String, dtype: Dtype, shape: &[usize], fill: Fill) {
        self.specs.push(Spec { name, dtype, shape: shape.to_vec(), fill });
    }

    /// A projection or a stack of them. Elements are uniform with a standard deviation of `gain / sqrt(inputs)`,
    /// so that inputs of unit variance give outputs of standard deviation `gain`.
    fn matrix(&mut self, module: &str, format: Format, shape: &[usize], gain: f64) {
        let (lead, cols) = (&shape[..shape.len() - 1], shape[shape.len() - 1]);
        let max = if format == Format::Affine8 { 255.0 } else { 15.0 };
        // Standard deviation of whole numbers uniform in 0..=max.
        let deviation = ((max + 1.0) * (max + 1.0) - 1.0_f64).sqrt() / 12f64.sqrt();
        let typical = gain / (deviation * (cols as f64).sqrt());
        let words = [lead, &[format.row_bytes(cols) / size_of::<u32>()]].concat();
        let groups = [lead, &[cols / GROUP_SIZE]].concat();
        let packed = self.stream();
        let stream = self.stream();
        self.push(format!("{module}.weight"), Dtype::U32, &words, Fill::Packed { stream: packed });
        self.push(format!("{module}.scales"), Dtype::Bf16, &groups, Fill::Scales { stream, typical });
        self.push(format!("{module}.biases"), Dtype::Bf16, &groups, Fill::Biases { stream, typical, max });
    }

    fn linear(&mut self, module: &str, rows: usize, cols: usize) {
        self.matrix(module, Format::Affine4, &[rows, cols], 1.0);
    }

    /// A projection whose outputs are added to the residual stream.
    fn adding(&mut self, module: &str, rows: usize, cols: usize) {
        self.matrix(module, Format::Affine4, &[rows, cols], self.added);
    }

    fn norm(&mut self, module: &str, width: usize) {
        let stream = self.stream();
        self.push(format!("{module}.weight"), Dtype::Bf16, &[width], Fill::Norm { stream });
    }

    fn all(&mut self, g: &Geometry) {
        // A row is the residual stream itself, which starts with unit variance.
        let unit = (g.hidden as f64).sqrt();
        self.matrix("language_model.model.embed_tokens", Format::Affine4, &[g.vocab, g.hidden], unit);
        for (i, kind) in g.layers.iter().enumerate() {
            let path = layer(i);
            self.norm(&format!("{path}.input_layernorm"), g.hidden);
            match kind {
                LayerKind::Delta => self.delta(g, &format!("{path}.linear_attn")),
                LayerKind::Attention => self.attention(g, &format!("{path}.self_attn")),
            }
            self.norm(&format!("{path}.post_attention_layernorm"), g.hidden);
            self.moe(g, &format!("{path}.mlp"));
        }
        self.norm("language_model.model.norm", g.hidden);
        if !g.tied_head {
            self.linear("language_model.lm_head", g.vocab, g.hidden);
        }
    }

    fn delta(&mut self, g: &Geometry, path: &str) {
        let d = &g.delta;
        self.linear(&format!("{path}.in_proj_qkv"), d.conv_channels(), g.hidden);
        self.linear(&format!("{path}.in_proj_z"), d.value_width(), g.hidden);
        self.linear(&format!("{path}.in_proj_b"), d.value_heads, g.hidden);
        self.linear(&format!("{path}.in_proj_a"), d.value_heads, g.hidden);
        // Taps of variance 1 / width keep the variance of what they sum.
        let bound = (3.0 / d.conv_width as f64).sqrt();
        let conv = Fill::Uniform { stream: self.stream(), bound };
        let conv_shape = [d.conv_channels(), d.conv_width, 1];
        self.push(format!("{path}.conv1d.weight"), Dtype::Bf16, &conv_shape, conv);
        let a_log = Fill::ALog { stream: self.stream() };
        self.push(format!("{path}.A_log"), Dtype::F32, &[d.value_heads], a_log);
        let dt_bias = Fill::DtBias { stream: self.stream() };
        self.push(format!("{path}.dt_bias"), Dtype::Bf16, &[d.value_heads], dt_bias);
        self.norm(&format!("{path}.norm"), d.value_dim);
        self.adding(&format!("{path}.out_proj"), g.hidden, d.value_width());
    }

    fn attention(&mut self, g: &Geometry, path: &str) {
        let a = &g.attention;
        let (queries, keys) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        self.linear(&format!("{path}.q_proj"), 2 * queries, g.hidden);
        self.linear(&format!("{path}.k_proj"), keys, g.hidden);
        self.linear(&format!("{path}.v_proj"), keys, g.hidden);
        self.adding(&format!("{path}.o_proj"), g.hidden, queries);
        self.norm(&format!("{path}.q_norm"), a.head_dim);
        self.norm(&format!("{path}.k_norm"), a.head_dim);
    }

    fn moe(&mut self, g: &Geometry, path: &str) {
        let m = &g.moe;
        self.matrix(&format!("{path}.gate"), Format::Affine8, &[m.experts, g.hidden], ROUTER_DEVIATION);
        let up = [m.experts, m.expert_width, g.hidden];
        self.matrix(&format!("{path}.switch_mlp.gate_proj"), Format::Affine4, &up, 1.0);
        self.matrix(&format!("{path}.switch_mlp.up_proj"), Format::Affine4, &up, 1.0);
        let down = [m.experts, g.hidden, m.expert_width];
        self.matrix(&format!("{path}.switch_mlp.down_proj"), Format::Affine4, &down, self.added);
        self.linear(&format!("{path}.shared_expert.gate_proj"), m.shared_width, g.hidden);
        self.linear(&format!("{path}.shared_expert.up_proj"), m.shared_width, g.hidden);
        self.adding(&format!("{path}.shared_expert.down_proj"), g.hidden, m.shared_width);
        self.matrix(&format!("{path}.shared_expert_gate"), Format::Affine8, &[1, g.hidden], 1.0);
    }
}
