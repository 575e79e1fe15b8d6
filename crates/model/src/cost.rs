//! What a pass over the model costs at the least: bytes that must be read, operations that must be done.
//!
//! Divided by what a machine can read and compute in a second (the engine measures it), these are the floors
//! that speeds are quoted against. They follow from the [`Weights`]' shapes and formats alone:
//!
//! - **Decode** reads every matrix once, of the experts the `top_k` that a token uses, of the embedding table one
//!   row; it reads and writes the recurrent state, and reads the KV cache. Vectors (norms, convolution taps) are
//!   left out: they are under half a percent.
//! - **Prefill** multiplies every token with the same matrices; only the last token meets the head. Attention's
//!   own products and the recurrence are left out: they are f32 work, and short prompts have little of it.

use crate::geometry::LayerKind;
use crate::weights::{GROUP_SIZE, Matrix, Mixer, MoeWeights, Weights};

/// Bytes of a bf16 scale and a bf16 bias.
const SCALE_AND_BIAS: usize = 4;
/// A multiplication and an addition.
const OPS_PER_PRODUCT: u64 = 2;

/// What one token costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Bytes of matrices that one decoded token reads.
    pub weight_bytes: u64,
    /// Bytes of recurrent state and convolution tails that one decoded token reads and writes: both counted.
    pub state_bytes: u64,
    /// Elements that each position of context adds to the KV cache, keys and values of all layers.
    pub kv_elements: u64,
    /// Matrix operations of one prefilled token, the head left out; multiplication and addition are two.
    pub layer_ops: u64,
    /// Matrix operations of the head for one token.
    pub head_ops: u64,
}

impl Cost {
    /// The cost of a token of the model with these weights.
    pub fn of(weights: &Weights) -> Cost {
        let geometry = &weights.geometry;
        let (attention, delta) = (&geometry.attention, &geometry.delta);
        let (mut weight_bytes, mut layer_products) = (0, 0);
        for layer in &weights.layers {
            let mixer: &[&Matrix] = match &layer.mixer {
                Mixer::Delta(w) => &[&w.in_proj_qkv, &w.in_proj_z, &w.in_proj_b, &w.in_proj_a, &w.out_proj],
                Mixer::Attention(w) => &[&w.q_proj, &w.k_proj, &w.v_proj, &w.o_proj],
            };
            let always = mixer.iter().copied().chain(always_used(&layer.moe)).map(|matrix| (matrix, 1));
            let experts = routed(&layer.moe).into_iter().map(|matrix| (matrix, geometry.moe.top_k));
            for (matrix, times) in always.chain(experts) {
                weight_bytes += times as u64 * matrix_bytes(matrix);
                layer_products += times as u64 * products(matrix);
            }
        }
        weight_bytes += matrix_bytes(&weights.lm_head) + row_bytes(&weights.embed_tokens);
        let state = (delta.state_elements() + delta.conv_tail_elements()) * size_of::<f32>();
        let kv = 2 * attention.kv_heads * attention.head_dim;
        Cost {
            weight_bytes,
            state_bytes: (2 * geometry.count(LayerKind::Delta) * state) as u64,
            kv_elements: (geometry.count(LayerKind::Attention) * kv) as u64,
            layer_ops: OPS_PER_PRODUCT * layer_products,
            head_ops: OPS_PER_PRODUCT * products(&weights.lm_head),
        }
    }

    /// Bytes that decoding one token moves where `depth` tokens stand before it and the KV cache has
    /// `kv_element_bytes` for each element.
    pub fn decode_bytes(&self, depth: usize, kv_element_bytes: usize) -> u64 {
        self.weight_bytes + self.state_bytes + (depth * kv_element_bytes) as u64 * self.kv_elements
    }

    /// Matrix operations of a prompt of `tokens`, of which the last one goes through the head.
    pub fn prefill_ops(&self, tokens: usize) -> u64 {
        tokens as u64 * self.layer_ops + self.head_ops
    }
}

/// What every token uses of a mixture of experts.
fn always_used(moe: &MoeWeights) -> [&Matrix; 5] {
    let shared = [&moe.shared_gate_proj, &moe.shared_up_proj, &moe.shared_down_proj];
    [&moe.gate, shared[0], shared[1], shared[2], &moe.shared_expert_gate]
}

/// The stacks of which every token uses `top_k`.
fn routed(moe: &MoeWeights) -> [&Matrix; 3] {
    [&moe.gate_proj, &moe.up_proj, &moe.down_proj]
}

fn row_bytes(matrix: &Matrix) -> u64 {
    let groups = if matrix.format.is_affine() { matrix.cols / GROUP_SIZE } else { 0 };
    (matrix.format.row_bytes(matrix.cols) + groups * SCALE_AND_BIAS) as u64
}

/// Bytes of one matrix of the stack.
fn matrix_bytes(matrix: &Matrix) -> u64 {
    matrix.rows as u64 * row_bytes(matrix)
}

fn products(matrix: &Matrix) -> u64 {
    matrix.rows as u64 * matrix.cols as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Checkpoint;
    use crate::geometry::Geometry;
    use crate::synth;
    use crate::weights::{AttentionWeights, Blob, DeltaWeights, Format, LayerWeights};

    fn stack(count: usize, rows: usize, cols: usize, format: Format) -> Matrix {
        let (data, scales, biases) = (Blob::empty(), Blob::empty(), Blob::empty());
        Matrix { count, rows, cols, format, data, data_stride: 0, scales, biases }
    }

    fn matrix(rows: usize, cols: usize) -> Matrix {
        stack(1, rows, cols, Format::Affine4)
    }

    /// The shapes of the published 4-bit checkpoint, without its bytes.
    fn full_model() -> Weights {
        let geometry = Geometry::qwen3_6_35b_a3b();
        let (hidden, moe) = (geometry.hidden, &geometry.moe);
        let (delta, attention) = (&geometry.delta, &geometry.attention);
        let width = attention.heads * attention.head_dim;
        let kv_width = attention.kv_heads * attention.head_dim;
        let layer = |kind: &LayerKind| LayerWeights {
            input_norm: Vec::new(),
            mixer: match kind {
                LayerKind::Delta => Mixer::Delta(DeltaWeights {
                    in_proj_qkv: matrix(delta.conv_channels(), hidden),
                    in_proj_z: matrix(delta.value_width(), hidden),
                    in_proj_b: matrix(delta.value_heads, hidden),
                    in_proj_a: matrix(delta.value_heads, hidden),
                    conv1d: Vec::new(),
                    a_log: Vec::new(),
                    dt_bias: Vec::new(),
                    norm: Vec::new(),
                    out_proj: matrix(hidden, delta.value_width()),
                }),
                LayerKind::Attention => Mixer::Attention(AttentionWeights {
                    q_proj: matrix(2 * width, hidden),
                    k_proj: matrix(kv_width, hidden),
                    v_proj: matrix(kv_width, hidden),
                    o_proj: matrix(hidden, width),
                    q_norm: Vec::new(),
                    k_norm: Vec::new(),
                }),
            },
            post_norm: Vec::new(),
            moe: MoeWeights {
                gate: stack(1, moe.experts, hidden, Format::Affine8),
                gate_proj: stack(moe.experts, moe.expert_width, hidden, Format::Affine4),
                up_proj: stack(moe.experts, moe.expert_width, hidden, Format::Affine4),
                down_proj: stack(moe.experts, hidden, moe.expert_width, Format::Affine4),
                shared_gate_proj: matrix(moe.shared_width, hidden),
                shared_up_proj: matrix(moe.shared_width, hidden),
                shared_down_proj: matrix(hidden, moe.shared_width),
                shared_expert_gate: stack(1, 1, hidden, Format::Affine8),
            },
        };
        Weights {
            layers: geometry.layers.iter().map(layer).collect(),
            embed_tokens: matrix(geometry.vocab, hidden),
            norm: Vec::new(),
            lm_head: matrix(geometry.vocab, hidden),
            geometry,
        }
    }

    #[test]
    fn a_token_of_the_full_model_costs_what_the_design_says() {
        let cost = Cost::of(&full_model());
        let near = |value: u64, stated: f64, digit: f64| (value as f64 - stated).abs() <= digit / 2.0;
        assert!(near(cost.weight_bytes, 1.67e9, 0.01e9), "{cost:?}");
        assert!(near(cost.state_bytes, 0.13e9, 0.01e9), "{cost:?}");
        assert!(near(cost.layer_ops, 4.9e9, 0.1e9), "{cost:?}");
        // 20 KB for each token of context, in half precision.
        assert_eq!(cost.decode_bytes(1, 2) - cost.decode_bytes(0, 2), 20 * 1024);
        assert_eq!(cost.prefill_ops(3), 3 * cost.layer_ops + cost.head_ops);
    }

    #[test]
    fn with_all_experts_in_use_every_stored_matrix_is_read() {
        let mut geometry = Checkpoint::demo().unwrap().geometry().clone();
        geometry.moe.top_k = geometry.moe.experts;
        geometry.tied_head = false;
        let dir = tempfile::tempdir().unwrap();
        synth::write(dir.path(), &geometry, 1, &|_, _| {}).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let weights = checkpoint.weights().unwrap();
        let cost = Cost::of(&weights);
        let is_matrix = |name: &str| !name.contains("norm") && !name.contains("conv1d");
        let is_vector = |name: &str| name.ends_with("A_log") || name.ends_with("dt_bias");
        let stored: u64 = checkpoint
            .tensors()
            .iter()
            .filter(|(name, _)| is_matrix(name) && !is_vector(name) && !name.contains("embed_tokens"))
            .map(|(_, tensor)| tensor.data.len() as u64)
            .sum();
        assert_eq!(cost.weight_bytes, stored + row_bytes(&weights.embed_tokens));
    }
}
