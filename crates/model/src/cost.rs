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
pub const OPS_PER_PRODUCT: u64 = 2;

/// What one token costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Bytes of matrices that one decoded token reads.
    pub weight_bytes: u64,
    /// The part of them that each token reads for itself: its row of the embedding table.
    pub row_bytes: u64,
    /// The part of them that is the routed experts' of one token, each layer's `top_k`.
    pub routed_bytes: u64,
    /// Routed experts of a layer, and how many of them a token uses.
    pub experts: (usize, usize),
    /// Bytes of recurrent state and convolution tails that one decoded token reads and writes: both counted.
    pub state_bytes: u64,
    /// Matrix operations of one prefilled token, the head left out; multiplication and addition are two.
    pub layer_ops: u64,
    /// Matrix operations of the head for one token.
    pub head_ops: u64,
}

impl Cost {
    /// The cost of a token of the model with these weights.
    pub fn of(weights: &Weights) -> Cost {
        let geometry = &weights.geometry;
        let delta = &geometry.delta;
        let (mut weight_bytes, mut routed_bytes, mut layer_products) = (0, 0, 0);
        for layer in &weights.layers {
            let mixer: &[&Matrix] = match &layer.mixer {
                Mixer::Delta(w) => &[&w.in_proj_qkv, &w.in_proj_z, &w.in_proj_b, &w.in_proj_a, &w.out_proj],
                Mixer::Attention(w) => &[&w.q_proj, &w.k_proj, &w.v_proj, &w.o_proj],
            };
            let always = mixer.iter().copied().chain(always_used(&layer.moe)).map(|matrix| (matrix, 1));
            let experts = routed(&layer.moe).into_iter().map(|matrix| (matrix, geometry.moe.top_k));
            routed_bytes += routed(&layer.moe)
                .map(|matrix| geometry.moe.top_k as u64 * matrix_bytes(matrix))
                .iter()
                .sum::<u64>();
            for (matrix, times) in always.chain(experts) {
                weight_bytes += times as u64 * matrix_bytes(matrix);
                layer_products += times as u64 * products(matrix);
            }
        }
        let row_bytes = row_bytes(&weights.embed_tokens);
        weight_bytes += matrix_bytes(&weights.lm_head) + row_bytes;
        let state = (delta.state_elements() + delta.conv_tail_elements()) * size_of::<f32>();
        Cost {
            weight_bytes,
            row_bytes,
            routed_bytes,
            experts: (geometry.moe.experts, geometry.moe.top_k),
            state_bytes: (2 * geometry.count(LayerKind::Delta) * state) as u64,
            layer_ops: OPS_PER_PRODUCT * layer_products,
            head_ops: OPS_PER_PRODUCT * products(&weights.lm_head),
        }
    }

    /// Bytes that decoding one token moves where `depth` tokens stand before it and the KV cache has `kv_bytes` for
    /// each.
    pub fn decode_bytes(&self, depth: usize, kv_bytes: u64) -> u64 {
        self.weight_bytes + self.state_bytes + depth as u64 * kv_bytes
    }

    /// Bytes that decoding one token of each of `batch` sequences in one step moves, each with `depth` tokens
    /// before it, of which the KV cache has `kv_bytes` for each. An expert that several of them use is read once; how
    /// many are used is the expectation for routers that choose evenly.
    pub fn batch_bytes(&self, batch: usize, depth: usize, kv_bytes: u64) -> u64 {
        let (experts, top_k) = self.experts;
        let used = used_experts(experts, top_k, batch) / top_k as f64;
        let shared = self.weight_bytes - self.routed_bytes - self.row_bytes;
        let own = self.row_bytes + self.state_bytes + depth as u64 * kv_bytes;
        shared + (self.routed_bytes as f64 * used) as u64 + batch as u64 * own
    }

    /// Matrix operations of a prompt of `tokens`, of which the last one goes through the head.
    pub fn prefill_ops(&self, tokens: usize) -> u64 {
        tokens as u64 * self.layer_ops + self.head_ops
    }
}

/// Experts that at least one of `tokens` tokens uses, each `top_k` of `experts`: the expectation for routers that
/// choose evenly and independently.
pub fn used_experts(experts: usize, top_k: usize, tokens: usize) -> f64 {
    let missed = 1.0 - top_k as f64 / experts as f64;
    experts as f64 * (1.0 - missed.powi(i32::try_from(tokens).unwrap_or(i32::MAX)))
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

    #[test]
    fn a_token_of_the_full_model_costs_what_the_design_says() {
        let cost = Cost::of(&Weights::outline(&Geometry::qwen3_6_35b_a3b()));
        let near = |value: u64, stated: f64, digit: f64| (value as f64 - stated).abs() <= digit / 2.0;
        assert!(near(cost.weight_bytes, 1.67e9, 0.01e9), "{cost:?}");
        assert!(near(cost.state_bytes, 0.13e9, 0.01e9), "{cost:?}");
        assert!(near(cost.layer_ops, 4.9e9, 0.1e9), "{cost:?}");
        assert_eq!(cost.prefill_ops(3), 3 * cost.layer_ops + cost.head_ops);
        // A batch of one is a token, a batch of many has every expert in use.
        let (one, token) = (cost.batch_bytes(1, 256, 20 * 1024), cost.decode_bytes(256, 20 * 1024));
        assert!(one.abs_diff(token) <= 1, "{one} and {token}");
        assert_eq!(used_experts(256, 8, 1), 8.0);
        assert!((used_experts(256, 8, 1000) - 256.0).abs() < 1e-6);
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
