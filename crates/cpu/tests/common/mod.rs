//! Small random models with the real head sizes, and the few calls that tests make of a backend.

#![allow(dead_code, reason = "each test program uses a part")]

use std::sync::Arc;

use lily_cpu::{CpuBackend, CpuOptions, Numerics};
use lily_engine::backend::{Backend, SequenceId, StepOutput, Want};
use lily_model::geometry::{AttentionGeometry, DeltaGeometry, Geometry, LayerKind, MoeGeometry};
use lily_model::weights::{
    AttentionWeights, Blob, DeltaWeights, Format, GROUP_SIZE, LayerWeights, Matrix, Mixer, MoeWeights,
    Weights,
};

/// A model of a few layers whose heads are as large as the real model's.
pub fn small_geometry() -> Geometry {
    Geometry {
        hidden: 256,
        vocab: 320,
        layers: vec![LayerKind::Delta, LayerKind::Attention, LayerKind::Delta, LayerKind::Attention],
        attention: AttentionGeometry {
            heads: 8,
            kv_heads: 2,
            head_dim: 256,
            rotary_dim: 64,
            rope_theta: 1e7,
        },
        delta: DeltaGeometry { key_heads: 2, value_heads: 4, key_dim: 128, value_dim: 128, conv_width: 4 },
        moe: MoeGeometry { experts: 16, top_k: 4, expert_width: 64, shared_width: 128 },
        rms_eps: 1e-6,
        max_context: 4096,
        tied_head: false,
    }
}

/// All that a backend can compute with.
pub const NUMERICS: [Numerics; 3] = [Numerics::F32, Numerics::Int8, Numerics::Int8KvQ8];

/// A small seeded generator (SplitMix64): tests need variety, not quality.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `low..high`.
    pub fn uniform(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    pub fn vector(&mut self, len: usize, low: f32, high: f32) -> Vec<f32> {
        (0..len).map(|_| self.uniform(low, high)).collect()
    }

    pub fn tokens(&mut self, count: usize, vocab: usize) -> Vec<u32> {
        (0..count).map(|_| (self.next() % vocab as u64) as u32).collect()
    }

    /// A stack of matrices whose products neither grow nor shrink what they are given.
    pub fn matrix(&mut self, count: usize, rows: usize, cols: usize, format: Format) -> Matrix {
        let bytes = rows * format.row_bytes(cols);
        let levels = match format {
            Format::Affine4 => 15.0,
            Format::Affine8 => 255.0,
            other => panic!("these tests build affine matrices, not {other:?}"),
        };
        let data: Vec<u8> = (0..count * bytes).map(|_| self.next() as u8).collect();
        let groups = count * rows * cols / GROUP_SIZE;
        let (mut scales, mut biases) = (Vec::new(), Vec::new());
        for _ in 0..groups {
            let scale = 3.4 * self.uniform(0.5, 1.5) / (levels * (cols as f32).sqrt());
            scales.extend(half::bf16::from_f32(scale).to_le_bytes());
            biases.extend(half::bf16::from_f32(-scale * levels / 2.0).to_le_bytes());
        }
        let blob = |bytes: Vec<u8>| Blob::new(Arc::new(bytes));
        Matrix {
            count,
            rows,
            cols,
            format,
            data: blob(data),
            data_stride: bytes,
            scales: blob(scales),
            biases: blob(biases),
        }
    }
}

/// Random weights of `geometry` in the checkpoint's formats: 4-bit, and 8-bit for the routers.
pub fn random_weights(geometry: &Geometry, seed: u64) -> Weights {
    let mut random = Random::new(seed);
    let r = &mut random;
    let hidden = geometry.hidden;
    let mut layers = Vec::new();
    for kind in &geometry.layers {
        let mixer = match kind {
            LayerKind::Delta => {
                let d = &geometry.delta;
                Mixer::Delta(DeltaWeights {
                    in_proj_qkv: r.matrix(1, d.conv_channels(), hidden, Format::Affine4),
                    in_proj_z: r.matrix(1, d.value_width(), hidden, Format::Affine4),
                    in_proj_b: r.matrix(1, d.value_heads, hidden, Format::Affine4),
                    in_proj_a: r.matrix(1, d.value_heads, hidden, Format::Affine4),
                    conv1d: r.vector(d.conv_channels() * d.conv_width, -0.8, 0.8),
                    a_log: r.vector(d.value_heads, -4.0, 2.7),
                    dt_bias: r.vector(d.value_heads, -4.0, 1.0),
                    norm: r.vector(d.value_dim, 0.8, 1.2),
                    out_proj: r.matrix(1, hidden, d.value_width(), Format::Affine4),
                })
            }
            LayerKind::Attention => {
                let a = &geometry.attention;
                Mixer::Attention(AttentionWeights {
                    q_proj: r.matrix(1, a.heads * 2 * a.head_dim, hidden, Format::Affine4),
                    k_proj: r.matrix(1, a.kv_heads * a.head_dim, hidden, Format::Affine4),
                    v_proj: r.matrix(1, a.kv_heads * a.head_dim, hidden, Format::Affine4),
                    o_proj: r.matrix(1, hidden, a.heads * a.head_dim, Format::Affine4),
                    q_norm: r.vector(a.head_dim, 0.8, 1.2),
                    k_norm: r.vector(a.head_dim, 0.8, 1.2),
                })
            }
        };
        let m = &geometry.moe;
        layers.push(LayerWeights {
            input_norm: r.vector(hidden, 0.8, 1.2),
            mixer,
            post_norm: r.vector(hidden, 0.8, 1.2),
            moe: MoeWeights {
                gate: r.matrix(1, m.experts, hidden, Format::Affine8),
                gate_proj: r.matrix(m.experts, m.expert_width, hidden, Format::Affine4),
                up_proj: r.matrix(m.experts, m.expert_width, hidden, Format::Affine4),
                down_proj: r.matrix(m.experts, hidden, m.expert_width, Format::Affine4),
                shared_gate_proj: r.matrix(1, m.shared_width, hidden, Format::Affine4),
                shared_up_proj: r.matrix(1, m.shared_width, hidden, Format::Affine4),
                shared_down_proj: r.matrix(1, hidden, m.shared_width, Format::Affine4),
                shared_expert_gate: r.matrix(1, 1, hidden, Format::Affine8),
            },
        });
    }
    Weights {
        geometry: geometry.clone(),
        embed_tokens: r.matrix(1, geometry.vocab, hidden, Format::Affine4),
        layers,
        norm: r.vector(hidden, 0.8, 1.2),
        lm_head: r.matrix(1, geometry.vocab, hidden, Format::Affine4),
    }
}

/// A backend over `weights` with a context of 2,048 tokens.
pub fn backend(weights: &Weights, numerics: Numerics, threads: usize) -> CpuBackend {
    backend_with_context(weights, numerics, threads, 2048)
}

/// A backend over `weights` with the context given.
pub fn backend_with_context(
    weights: &Weights,
    numerics: Numerics,
    threads: usize,
    ctx_len: usize,
) -> CpuBackend {
    let options = CpuOptions { threads: Some(threads), ctx_len, numerics, ..CpuOptions::default() };
    CpuBackend::new(weights.clone(), options).expect("the small model is one that the backend runs")
}

/// Extends by `tokens` and returns what came back.
pub fn extend(backend: &mut CpuBackend, sequence: SequenceId, tokens: &[u32], want: Want) -> StepOutput {
    let ticket = backend.extend(sequence, tokens, want).expect("the tokens fit");
    backend.collect(ticket).expect("the ticket is fresh").remove(0)
}

/// Last-row logits of a prompt on a fresh sequence.
pub fn logits_of(backend: &mut CpuBackend, tokens: &[u32]) -> Vec<f32> {
    let sequence = backend.open(None).expect("memory for a small sequence");
    let logits = extend(backend, sequence, tokens, Want::Logits).logits;
    backend.close(sequence);
    logits
}
