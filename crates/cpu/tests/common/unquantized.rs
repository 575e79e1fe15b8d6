//! The unquantized checkpoint that the 4-bit demo means, written in Hugging Face's layout.
//!
//! What `oracle/dequantize.py` does for `transformers`, here for Lily's own loader and its converter: f32 or bf16
//! projections under Hugging Face's names, gate and up of the experts fused, norms minus one, taps as `[channels, 1, width]`.

use std::path::Path;

use half::bf16;
use lily_model::affine::dequantize_row;
use lily_model::weights::{Matrix, Mixer, Weights};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::Value;

/// Writes `weights` to `dir` as `dtype`, F32 or BF16, with the sizes of `config`, the checkpoint's `config.json`.
pub fn write(weights: &Weights, mut config: Value, dtype: Dtype, dir: &Path) {
    let fields = config.as_object_mut().expect("config.json is an object");
    fields.remove("quantization");
    fields.remove("quantization_config");
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();

    let mut writer = Writer { dtype, tensors: Vec::new() };
    writer.matrix("model.language_model.embed_tokens.weight", &weights.embed_tokens);
    writer.zero_centred("model.language_model.norm", &weights.norm);
    if !weights.geometry.tied_head {
        writer.matrix("lm_head.weight", &weights.lm_head);
    }
    for (index, layer) in weights.layers.iter().enumerate() {
        let path = format!("model.language_model.layers.{index}");
        writer.zero_centred(&format!("{path}.input_layernorm"), &layer.input_norm);
        writer.zero_centred(&format!("{path}.post_attention_layernorm"), &layer.post_norm);
        match &layer.mixer {
            Mixer::Delta(delta) => {
                let path = format!("{path}.linear_attn");
                writer.matrix(&format!("{path}.in_proj_qkv.weight"), &delta.in_proj_qkv);
                writer.matrix(&format!("{path}.in_proj_z.weight"), &delta.in_proj_z);
                writer.matrix(&format!("{path}.in_proj_b.weight"), &delta.in_proj_b);
                writer.matrix(&format!("{path}.in_proj_a.weight"), &delta.in_proj_a);
                let width = weights.geometry.delta.conv_width;
                let taps = [delta.conv1d.len() / width, 1, width];
                writer.floats(format!("{path}.conv1d.weight"), &taps, delta.conv1d.iter().copied());
                for (name, values) in
                    [("A_log", &delta.a_log), ("dt_bias", &delta.dt_bias), ("norm.weight", &delta.norm)]
                {
                    writer.floats(format!("{path}.{name}"), &[values.len()], values.iter().copied());
                }
                writer.matrix(&format!("{path}.out_proj.weight"), &delta.out_proj);
            }
            Mixer::Attention(attention) => {
                let path = format!("{path}.self_attn");
                writer.matrix(&format!("{path}.q_proj.weight"), &attention.q_proj);
                writer.matrix(&format!("{path}.k_proj.weight"), &attention.k_proj);
                writer.matrix(&format!("{path}.v_proj.weight"), &attention.v_proj);
                writer.matrix(&format!("{path}.o_proj.weight"), &attention.o_proj);
                writer.zero_centred(&format!("{path}.q_norm"), &attention.q_norm);
                writer.zero_centred(&format!("{path}.k_norm"), &attention.k_norm);
            }
        }
        let (path, moe) = (format!("{path}.mlp"), &layer.moe);
        writer.matrix(&format!("{path}.gate.weight"), &moe.gate);
        writer.experts(&format!("{path}.experts.gate_up_proj"), &[&moe.gate_proj, &moe.up_proj]);
        writer.experts(&format!("{path}.experts.down_proj"), &[&moe.down_proj]);
        writer.matrix(&format!("{path}.shared_expert.gate_proj.weight"), &moe.shared_gate_proj);
        writer.matrix(&format!("{path}.shared_expert.up_proj.weight"), &moe.shared_up_proj);
        writer.matrix(&format!("{path}.shared_expert.down_proj.weight"), &moe.shared_down_proj);
        writer.matrix(&format!("{path}.shared_expert_gate.weight"), &moe.shared_expert_gate);
    }
    writer.finish(&dir.join("model.safetensors"));
}

struct Writer {
    dtype: Dtype,
    tensors: Vec<(String, Vec<usize>, Vec<u8>)>,
}

impl Writer {
    fn floats(&mut self, name: String, shape: &[usize], values: impl Iterator<Item = f32>) {
        let bytes = match self.dtype {
            Dtype::BF16 => values.flat_map(|w| bf16::from_f32(w).to_le_bytes()).collect(),
            _ => values.flat_map(f32::to_le_bytes).collect(),
        };
        self.tensors.push((name, shape.to_vec(), bytes));
    }

    fn zero_centred(&mut self, module: &str, norm: &[f32]) {
        self.floats(format!("{module}.weight"), &[norm.len()], norm.iter().map(|w| w - 1.0));
    }

    fn matrix(&mut self, name: &str, matrix: &Matrix) {
        self.floats(name.to_owned(), &[matrix.rows, matrix.cols], rows(matrix, 0).into_iter());
    }

    /// Stacks over experts, the matrices of one expert one below the other.
    fn experts(&mut self, name: &str, parts: &[&Matrix]) {
        let (count, cols) = (parts[0].count, parts[0].cols);
        let height = parts.iter().map(|part| part.rows).sum();
        let values = (0..count).flat_map(|expert| parts.iter().flat_map(move |part| rows(part, expert)));
        self.floats(name.to_owned(), &[count, height, cols], values);
    }

    fn finish(self, path: &Path) {
        let views = self.tensors.iter().map(|(name, shape, bytes)| {
            (name, TensorView::new(self.dtype, shape.clone(), bytes).expect("bytes for the shape"))
        });
        safetensors::serialize_to_file(views, None, path).unwrap();
    }
}

/// The weights of matrix `index` of a stack, row by row.
fn rows(matrix: &Matrix, index: usize) -> Vec<f32> {
    let view = matrix.at(index);
    let mut out = vec![0.0; view.rows * view.cols];
    for (row, out) in out.chunks_exact_mut(view.cols).enumerate() {
        dequantize_row(view, row, out);
    }
    out
}
