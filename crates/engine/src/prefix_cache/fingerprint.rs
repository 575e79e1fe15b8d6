//! A name for weights that two sets of weights do not share.
//!
//! The state of a sequence means something to the very weights that computed it. Reading 20 GB to be sure of
//! them would cost more than the cache saves, so a sample has to do: every vector whole and a part of every
//! matrix. Training that leaves all of those as they are is not known.

use lily_model::weights::{Matrix, Mixer, Weights};
use xxhash_rust::xxh3::Xxh3;

/// Bytes of a matrix that are looked at: from its middle, in one page of the file.
const SAMPLE: usize = 256;

/// The name of `weights`: 32 hexadecimal digits.
pub fn fingerprint(weights: &Weights) -> String {
    let mut hash = Xxh3::new();
    hash.update(format!("{:?}", weights.geometry).as_bytes());
    let mut vector = |values: &[f32]| values.iter().for_each(|value| hash.update(&value.to_le_bytes()));
    vector(&weights.norm);
    let mut matrices = vec![&weights.embed_tokens, &weights.lm_head];
    for layer in &weights.layers {
        vector(&layer.input_norm);
        vector(&layer.post_norm);
        match &layer.mixer {
            Mixer::Delta(delta) => {
                [&delta.conv1d, &delta.a_log, &delta.dt_bias, &delta.norm]
                    .into_iter()
                    .for_each(|v| vector(v));
                matrices.extend([&delta.in_proj_qkv, &delta.in_proj_z, &delta.out_proj]);
            }
            Mixer::Attention(attention) => {
                [&attention.q_norm, &attention.k_norm].into_iter().for_each(|v| vector(v));
                matrices.extend([&attention.q_proj, &attention.k_proj, &attention.v_proj, &attention.o_proj]);
            }
        }
        let moe = &layer.moe;
        matrices.extend([&moe.gate, &moe.gate_proj, &moe.up_proj, &moe.down_proj, &moe.shared_down_proj]);
    }
    matrices.into_iter().for_each(|matrix| sample(&mut hash, matrix));
    format!("{:032x}", hash.digest128())
}

fn sample(hash: &mut Xxh3, matrix: &Matrix) {
    hash.update(format!("{} {} {} {}", matrix.count, matrix.rows, matrix.cols, matrix.format).as_bytes());
    for bytes in [&*matrix.data, &*matrix.scales] {
        let start = bytes.len() / 2 - (bytes.len() / 2).min(SAMPLE / 2);
        hash.update(&bytes[start..bytes.len().min(start + SAMPLE)]);
    }
}
