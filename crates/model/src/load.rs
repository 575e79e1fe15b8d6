//! Stored tensors into [`Weights`]: found by name, checked against the geometry, left in place.
//!
//! Two layouts are read. **MLX**: experts stacked in `mlp.switch_mlp`, norms in the form that is multiplied.
//! **Hugging Face**: `mlp.experts.gate_up_proj` holds gate and up of each expert one after the other, and
//! norms are zero-centred (the model multiplies by `1 + w`), all but the gated norm of the DeltaNet. Which one
//! it is shows in the convolution, `[channels, width, 1]` in MLX and `[channels, 1, width]` in Hugging Face, as
//! in `mlx-lm`'s `sanitize` (`models/qwen3_5.py`, `models/qwen3_5_moe.py`). In memory both are the same.
//!
//! Everything that is wrong is collected before it is reported.

use std::collections::{BTreeMap, BTreeSet};

use crate::affine;
use crate::config::{ModelConfig, Quantization};
use crate::error::{ModelError, Refusal};
use crate::geometry::{Geometry, LayerKind};
use crate::names::{self, Skipped};
use crate::safetensors::{Dtype, Tensor, Tensors};
use crate::weights::{
    AttentionWeights, Blob, DeltaWeights, Format, GROUP_SIZE, LayerWeights, Matrix, Mixer, MoeWeights,
    Weights,
};

/// What loading made of the checkpoint's tensors.
#[derive(Clone, Debug, Default)]
pub struct LoadReport {
    /// Bytes of the tensors that the weights refer to.
    pub used_bytes: u64,
    /// Names in the files of the tensors that the weights refer to.
    pub used: Vec<String>,
    /// Tensors of parts that Lily leaves out.
    pub skipped: Vec<(String, Skipped)>,
    /// Tensors that this architecture does not have; a checkpoint with some is probably not what it says.
    pub unknown: Vec<String>,
    /// Whether norms are stored minus one, as Hugging Face's layout has them.
    pub zero_centred: bool,
}

/// Finds and checks every tensor that `config` calls for. The report is complete also where the weights are
/// refused.
pub fn load(config: &ModelConfig, tensors: &Tensors) -> (LoadReport, Result<Weights, ModelError>) {
    let mut loader = Loader::new(config, tensors);
    let weights = loader.weights(&config.geometry);
    let (report, refusals) = loader.finish();
    let result = if refusals.is_empty() { Ok(weights) } else { Err(ModelError::Refused(refusals)) };
    (report, result)
}

/// How norms and experts are stored.
#[derive(Clone, Copy, PartialEq)]
enum Layout {
    Mlx,
    HuggingFace,
}

/// Which form a norm's weights have in Hugging Face's layout; in MLX's all are plain.
#[derive(Clone, Copy, PartialEq)]
enum Centre {
    Zero,
    Plain,
}

struct Loader<'a> {
    quantization: &'a Quantization,
    /// Canonical name to name in the files and tensor.
    tensors: BTreeMap<String, (&'a str, &'a Tensor)>,
    layout: Layout,
    used: BTreeSet<String>,
    skipped: Vec<(String, Skipped)>,
    refusals: Vec<Refusal>,
}

impl<'a> Loader<'a> {
    fn new(config: &'a ModelConfig, stored: &'a Tensors) -> Loader<'a> {
        let mut tensors = BTreeMap::new();
        let (mut skipped, mut refusals) = (Vec::new(), Vec::new());
        for (name, tensor) in stored.iter() {
            if let Some(reason) = names::skipped(name) {
                skipped.push((name.to_owned(), reason));
            } else if let Some((other, _)) =
                tensors.insert(names::canonical(name).into_owned(), (name, tensor))
            {
                refusals.push(Refusal::Tensor {
                    name: name.to_owned(),
                    found: format!("there, and so is `{other}`"),
                    expected: "one spelling of each tensor's name".into(),
                });
            }
        }
        let is_conv = |(name, _): &(&String, _)| name.ends_with(".linear_attn.conv1d.weight");
        let hugging_face =
            tensors.iter().find(is_conv).is_some_and(|(_, (_, conv))| conv.shape.last() != Some(&1));
        let layout = if hugging_face { Layout::HuggingFace } else { Layout::Mlx };
        let quantization = &config.quantization;
        Loader { quantization, tensors, layout, used: BTreeSet::new(), skipped, refusals }
    }

    fn finish(self) -> (LoadReport, Vec<Refusal>) {
        let zero_centred = self.layout == Layout::HuggingFace;
        let mut report = LoadReport { skipped: self.skipped, zero_centred, ..LoadReport::default() };
        for (canonical, (name, tensor)) in &self.tensors {
            if self.used.contains(canonical) {
                report.used_bytes += tensor.data.len() as u64;
                report.used.push((*name).to_owned());
            } else {
                report.unknown.push((*name).to_owned());
            }
        }
        (report, self.refusals)
    }

    fn weights(&mut self, g: &Geometry) -> Weights {
        let embed_tokens = self.matrix("model.embed_tokens", g.vocab, g.hidden);
        let layers = g.layers.iter().enumerate().map(|(i, &kind)| self.layer(g, i, kind)).collect();
        let norm = self.norm("model.norm", g.hidden, Centre::Zero);
        let lm_head =
            if g.tied_head { embed_tokens.clone() } else { self.matrix("lm_head", g.vocab, g.hidden) };
        Weights { geometry: g.clone(), embed_tokens, layers, norm, lm_head }
    }

    fn layer(&mut self, g: &Geometry, index: usize, kind: LayerKind) -> LayerWeights {
        let path = format!("model.layers.{index}");
        LayerWeights {
            input_norm: self.norm(&format!("{path}.input_layernorm"), g.hidden, Centre::Zero),
            mixer: match kind {
                LayerKind::Delta => Mixer::Delta(self.delta(g, &format!("{path}.linear_attn"))),
                LayerKind::Attention => Mixer::Attention(self.attention(g, &format!("{path}.self_attn"))),
            },
            post_norm: self.norm(&format!("{path}.post_attention_layernorm"), g.hidden, Centre::Zero),
            moe: self.moe(g, &format!("{path}.mlp")),
        }
    }

    fn delta(&mut self, g: &Geometry, path: &str) -> DeltaWeights {
        let d = &g.delta;
        let (channels, taps) = (d.conv_channels(), d.conv_width);
        let conv_shape = match self.layout {
            Layout::Mlx => [channels, taps, 1],
            Layout::HuggingFace => [channels, 1, taps],
        };
        DeltaWeights {
            in_proj_qkv: self.matrix(&format!("{path}.in_proj_qkv"), channels, g.hidden),
            in_proj_z: self.matrix(&format!("{path}.in_proj_z"), d.value_width(), g.hidden),
            in_proj_b: self.matrix(&format!("{path}.in_proj_b"), d.value_heads, g.hidden),
            in_proj_a: self.matrix(&format!("{path}.in_proj_a"), d.value_heads, g.hidden),
            conv1d: self.floats(&format!("{path}.conv1d.weight"), &conv_shape),
            a_log: self.floats(&format!("{path}.A_log"), &[d.value_heads]),
            dt_bias: self.floats(&format!("{path}.dt_bias"), &[d.value_heads]),
            norm: self.norm(&format!("{path}.norm"), d.value_dim, Centre::Plain),
            out_proj: self.matrix(&format!("{path}.out_proj"), g.hidden, d.value_width()),
        }
    }

    fn attention(&mut self, g: &Geometry, path: &str) -> AttentionWeights {
        let a = &g.attention;
        let (queries, keys) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        AttentionWeights {
            q_proj: self.matrix(&format!("{path}.q_proj"), 2 * queries, g.hidden),
            k_proj: self.matrix(&format!("{path}.k_proj"), keys, g.hidden),
            v_proj: self.matrix(&format!("{path}.v_proj"), keys, g.hidden),
            o_proj: self.matrix(&format!("{path}.o_proj"), g.hidden, queries),
            q_norm: self.norm(&format!("{path}.q_norm"), a.head_dim, Centre::Zero),
            k_norm: self.norm(&format!("{path}.k_norm"), a.head_dim, Centre::Zero),
        }
    }

    fn moe(&mut self, g: &Geometry, path: &str) -> MoeWeights {
        let m = &g.moe;
        let fused = format!("{path}.experts.gate_up_proj");
        let (gate_proj, up_proj, down_proj) = if self.tensors.contains_key(&fused) {
            let (gate, up) = self.gate_up(&fused, m.experts, m.expert_width, g.hidden);
            let down = format!("{path}.experts.down_proj");
            (gate, up, self.plain(&down, &[m.experts, g.hidden, m.expert_width]))
        } else {
            let up = [m.experts, m.expert_width, g.hidden];
            let down = [m.experts, g.hidden, m.expert_width];
            let path = format!("{path}.switch_mlp");
            (
                self.stored(&format!("{path}.gate_proj"), &up),
                self.stored(&format!("{path}.up_proj"), &up),
                self.stored(&format!("{path}.down_proj"), &down),
            )
        };
        let shared = format!("{path}.shared_expert");
        MoeWeights {
            gate: self.matrix(&format!("{path}.gate"), m.experts, g.hidden),
            gate_proj,
            up_proj,
            down_proj,
            shared_gate_proj: self.matrix(&format!("{shared}.gate_proj"), m.shared_width, g.hidden),
            shared_up_proj: self.matrix(&format!("{shared}.up_proj"), m.shared_width, g.hidden),
            shared_down_proj: self.matrix(&format!("{shared}.down_proj"), g.hidden, m.shared_width),
            shared_expert_gate: self.matrix(&format!("{path}.shared_expert_gate"), 1, g.hidden),
        }
    }

    /// The projection `module`, `[rows, cols]`, quantized or not.
    fn matrix(&mut self, module: &str, rows: usize, cols: usize) -> Matrix {
        self.stored(module, &[rows, cols])
    }

    /// The projection or stack of projections `module`, of logical shape `shape`, quantized or not.
    fn stored(&mut self, module: &str, shape: &[usize]) -> Matrix {
        let name = format!("{module}.weight");
        let packed = self.tensors.get(&name).is_some_and(|(_, t)| t.dtype == Dtype::U32);
        let scaled = self.tensors.contains_key(&format!("{module}.scales"));
        if packed || scaled { self.affine(module, &name, shape) } else { self.plain(&name, shape) }
    }

    /// A quantized projection or stack. Elements, scales and biases must be what `quantization` declares.
    fn affine(&mut self, module: &str, name: &str, shape: &[usize]) -> Matrix {
        let Some(format) = self.quantization.of(module) else {
            let expected = "BF16, F16 or F32, because `quantization` in config.json does not list its module";
            self.refuse(name, expected.into());
            return Matrix::none();
        };
        let (count, rows, cols) = dims(shape);
        let words = format.row_bytes(cols) / size_of::<u32>();
        let lead = &shape[..shape.len() - 1];
        let bits = format.row_bytes(cols) * 8 / cols;
        let note =
            format!(" ({bits}-bit in groups of {GROUP_SIZE}, as `quantization` in config.json declares)");
        let groups = [lead, &[cols / GROUP_SIZE]].concat();
        let data = self.tensor(name, &[Dtype::U32], &[lead, &[words]].concat(), &note);
        let scales = self.tensor(&format!("{module}.scales"), &[Dtype::Bf16], &groups, &note);
        let biases = self.tensor(&format!("{module}.biases"), &[Dtype::Bf16], &groups, &note);
        let (Some(data), Some(scales), Some(biases)) = (data, scales, biases) else {
            return Matrix::none();
        };
        Matrix {
            count,
            rows,
            cols,
            format,
            data: data.data.clone(),
            data_stride: rows * format.row_bytes(cols),
            scales: scales.data.clone(),
            biases: biases.data.clone(),
        }
    }

    /// An unquantized projection or stack.
    fn plain(&mut self, name: &str, shape: &[usize]) -> Matrix {
        let Some(tensor) = self.tensor(name, &FLOATS, shape, "") else { return Matrix::none() };
        let (count, rows, cols) = dims(shape);
        let format = float_format(&tensor.dtype);
        Matrix {
            count,
            rows,
            cols,
            format,
            data: tensor.data.clone(),
            data_stride: rows * format.row_bytes(cols),
            scales: Blob::empty(),
            biases: Blob::empty(),
        }
    }

    /// Gate and up projections of all experts from Hugging Face's `[experts, 2 * rows, cols]`.
    fn gate_up(&mut self, name: &str, experts: usize, rows: usize, cols: usize) -> (Matrix, Matrix) {
        let fused = self.plain(name, &[experts, 2 * rows, cols]);
        let half = rows * fused.format.row_bytes(cols);
        let part = |start: usize| Matrix {
            rows,
            data: fused.data.slice(start..fused.data.len()).unwrap_or_else(Blob::empty),
            ..fused.clone()
        };
        (part(0), part(half))
    }

    /// A norm's weights in the form that is multiplied.
    fn norm(&mut self, module: &str, width: usize, centre: Centre) -> Vec<f32> {
        let mut weights = self.floats(&format!("{module}.weight"), &[width]);
        if self.layout == Layout::HuggingFace && centre == Centre::Zero {
            weights.iter_mut().for_each(|w| *w += 1.0);
        }
        weights
    }

    /// A small tensor as f32.
    fn floats(&mut self, name: &str, shape: &[usize]) -> Vec<f32> {
        match self.tensor(name, &FLOATS, shape, "") {
            Some(tensor) => {
                let mut floats = vec![0.0; shape.iter().product()];
                affine::read_floats(float_format(&tensor.dtype), &tensor.data, &mut floats);
                floats
            }
            None => Vec::new(),
        }
    }

    /// The tensor `name`, where it is there with one of `dtypes` and with `shape`.
    fn tensor(&mut self, name: &str, dtypes: &[Dtype], shape: &[usize], note: &str) -> Option<&'a Tensor> {
        self.used.insert(name.to_owned());
        match self.tensors.get(name) {
            Some((_, tensor)) if dtypes.contains(&tensor.dtype) && tensor.shape == shape => Some(tensor),
            _ => {
                let dtypes: Vec<String> = dtypes.iter().map(Dtype::to_string).collect();
                self.refuse(name, format!("{} {shape:?}{note}", dtypes.join(" or ")));
                None
            }
        }
    }

    fn refuse(&mut self, name: &str, expected: String) {
        self.used.insert(name.to_owned());
        let (name, found) = match self.tensors.get(name) {
            Some((stored, tensor)) => (*stored, format!("{} {:?}", tensor.dtype, tensor.shape)),
            None => (name, "missing".to_owned()),
        };
        self.refusals.push(Refusal::Tensor { name: name.to_owned(), found, expected });
    }
}

/// Types of unquantized tensors.
const FLOATS: [Dtype; 3] = [Dtype::Bf16, Dtype::F16, Dtype::F32];

/// Matrices, rows and columns of `[rows, cols]` or `[count, rows, cols]`.
fn dims(shape: &[usize]) -> (usize, usize, usize) {
    match *shape {
        [count, rows, cols] => (count, rows, cols),
        [rows, cols] => (1, rows, cols),
        _ => unreachable!("projections have two or three dimensions"),
    }
}

/// How a matrix of these unquantized elements is read.
pub(crate) fn float_format(dtype: &Dtype) -> Format {
    match dtype {
        Dtype::F16 => Format::F16,
        Dtype::F32 => Format::F32,
        _ => Format::Bf16,
    }
}
