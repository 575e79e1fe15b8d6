//! The fast path computes what the plain f32 one does, up to the rounding of activations and of the KV cache.

mod common;

use common::{Random, backend, extend, random_weights, small_geometry};
use lily_cpu::isa::Isa;
use lily_cpu::{CpuBackend, CpuOptions, Numerics};
use lily_engine::backend::{Backend, Want};
use lily_model::weights::{Blob, Format, Matrix, Mixer, Weights};
use std::sync::Arc;

const PROMPT: usize = 200;

/// The relative error of logits (length of the difference over length) in the median row.
///
/// The median, because a token whose experts are nearly tied may go to another one after the smallest rounding,
/// and from there on its row says something else: that is the model's doing.
fn median_error(vocab: usize, reference: &[f32], other: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let rows = reference.chunks_exact(vocab).zip(other.chunks_exact(vocab));
    let mut errors: Vec<f64> = rows
        .map(|(reference, other)| {
            let difference: f64 = reference.iter().zip(other).map(|(r, o)| square(r - o)).sum();
            (difference / reference.iter().map(|&r| square(r)).sum::<f64>()).sqrt()
        })
        .collect();
    errors.sort_by(f64::total_cmp);
    errors[errors.len() / 2]
}

fn all_logits(backend: &mut CpuBackend, tokens: &[u32]) -> Vec<f32> {
    let sequence = backend.open(None).unwrap();
    extend(backend, sequence, tokens, Want::AllLogits).logits
}

/// The same weights, expanded to f32: what the fast path multiplies without rounding anything to int8.
fn expanded(mut weights: Weights) -> Weights {
    let expand = |matrix: &mut Matrix| {
        let mut data = Vec::new();
        let mut row = vec![0.0; matrix.cols];
        for index in 0..matrix.count {
            for r in 0..matrix.rows {
                lily_cpu::plain::dequantize_row(&matrix.at(index), r, &mut row);
                data.extend(row.iter().flat_map(|w| w.to_le_bytes()));
            }
        }
        let empty = || Blob::new(Arc::new(Vec::new()));
        matrix.format = Format::F32;
        matrix.data_stride = matrix.rows * matrix.cols * size_of::<f32>();
        matrix.data = Blob::new(Arc::new(data));
        (matrix.scales, matrix.biases) = (empty(), empty());
    };
    expand(&mut weights.embed_tokens);
    expand(&mut weights.lm_head);
    for layer in &mut weights.layers {
        match &mut layer.mixer {
            Mixer::Delta(m) => {
                let matrices = [
                    &mut m.in_proj_qkv,
                    &mut m.in_proj_z,
                    &mut m.in_proj_b,
                    &mut m.in_proj_a,
                    &mut m.out_proj,
                ];
                matrices.into_iter().for_each(expand);
            }
            Mixer::Attention(m) => {
                [&mut m.q_proj, &mut m.k_proj, &mut m.v_proj, &mut m.o_proj].into_iter().for_each(expand);
            }
        }
        let m = &mut layer.moe;
        let matrices = [
            &mut m.gate,
            &mut m.gate_proj,
            &mut m.up_proj,
            &mut m.down_proj,
            &mut m.shared_gate_proj,
            &mut m.shared_up_proj,
            &mut m.shared_down_proj,
            &mut m.shared_expert_gate,
        ];
        matrices.into_iter().for_each(expand);
    }
    weights
}

/// Without int8 only the KV cache is rounded, to f16 or to 8 bits: this is what remains of the difference between the
/// fast stages and the plain ones, and an error in any of them would be far larger.
#[test]
fn on_unquantized_weights_the_fast_path_is_the_plain_one() {
    let weights = random_weights(&small_geometry(), 31);
    let vocab = weights.geometry.vocab;
    let tokens = Random::new(32).tokens(PROMPT, vocab);
    let plain = all_logits(&mut backend(&weights, Numerics::F32, 2), &tokens);
    let expanded = expanded(weights);
    for (numerics, most) in [(Numerics::Int8, 1e-3), (Numerics::Int8KvQ8, 1e-2)] {
        let fast = all_logits(&mut backend(&expanded, numerics, 2), &tokens);
        let error = median_error(vocab, &plain, &fast);
        println!("{numerics:?}: relative error of logits {error:.2e}");
        assert!(error < most, "{numerics:?}: {error:.2e}");
    }
}

#[test]
fn rounding_activations_to_int8_moves_logits_little() {
    for seed in [33, 34, 35] {
        let weights = random_weights(&small_geometry(), seed);
        let vocab = weights.geometry.vocab;
        let tokens = Random::new(seed).tokens(PROMPT, vocab);
        let plain = all_logits(&mut backend(&weights, Numerics::F32, 2), &tokens);
        let fast = all_logits(&mut backend(&weights, Numerics::Int8, 2), &tokens);
        let error = median_error(vocab, &plain, &fast);
        println!("relative error of logits: {error:.2e}");
        assert!(error < 8e-2, "{error:.2e}");
    }
}

#[test]
fn every_instruction_set_of_this_machine_gives_the_same_bits() {
    let weights = random_weights(&small_geometry(), 36);
    let tokens = Random::new(37).tokens(PROMPT, weights.geometry.vocab);
    for numerics in [Numerics::Int8, Numerics::Int8KvQ8] {
        let of = |isa| {
            let options = CpuOptions { threads: Some(2), isa: Some(isa), numerics, ..CpuOptions::default() };
            all_logits(&mut CpuBackend::new(weights.clone(), options).unwrap(), &tokens)
        };
        let portable = of(Isa::Portable);
        for isa in Isa::available() {
            assert!(of(isa) == portable, "{numerics:?}: {isa} differs from portable code");
        }
    }
}
