//! The forward pass in plain f32: the stages' reference forms, one after the other.
//!
//! This is what every other path and every other backend is judged against. It allocates as it goes and reads
//! like the model. Products, states and rows of attention are shared out to the threads of the caller's
//! [`rayon`] pool, which changes no bits; otherwise it is not meant to be fast.

use lily_model::geometry::Geometry;
use lily_model::weights::{AttentionWeights, DeltaWeights, LayerWeights, Mixer, Weights};
use rayon::prelude::*;

use crate::segment::Segment;
use crate::stages::moe_route::Choice;
use crate::stages::{
    attn_core, attn_in, attn_out, delta_core, delta_in, delta_out, embed, head, moe_down, moe_route, moe_up,
};

/// Runs `tokens` through all layers and returns the residual stream `[tokens, hidden]`. Room for them must
/// have been reserved in the segments' sequences, whose `length` the caller advances afterwards.
pub fn forward(weights: &Weights, segments: &mut [Segment<'_>], tokens: &[u32]) -> Vec<f32> {
    let geometry = &weights.geometry;
    let mut x = vec![0.0; tokens.len() * geometry.hidden];
    embed::reference(&weights.embed_tokens.view(), tokens, &mut x);
    for (index, layer) in weights.layers.iter().enumerate() {
        match &layer.mixer {
            Mixer::Delta(mixer) => delta_layer(geometry, index, layer, mixer, segments, &mut x),
            Mixer::Attention(mixer) => attention_layer(geometry, index, layer, mixer, segments, &mut x),
        }
        experts(geometry, layer, &mut x);
    }
    x
}

/// Logits `[rows, vocab]` of rows of the residual stream.
pub fn logits(weights: &Weights, x: &[f32], out: &mut [f32]) {
    head::reference(&weights.lm_head.view(), &weights.norm, weights.geometry.rms_eps, x, out);
}

fn delta_layer(
    geometry: &Geometry,
    index: usize,
    layer: &LayerWeights,
    mixer: &DeltaWeights,
    segments: &mut [Segment<'_>],
    x: &mut [f32],
) {
    let delta = &geometry.delta;
    let tokens = x.len() / geometry.hidden;
    let (channels, width, heads) = (delta.conv_channels(), delta.value_width(), delta.value_heads);
    let (mut qkv, mut z) = (vec![0.0; tokens * channels], vec![0.0; tokens * width]);
    let (mut b, mut a) = (vec![0.0; tokens * heads], vec![0.0; tokens * heads]);
    let projections = delta_in::Projections { qkv: &mut qkv, z: &mut z, b: &mut b, a: &mut a };
    delta_in::reference(mixer, &layer.input_norm, geometry.rms_eps, x, projections);

    let mut core = vec![0.0; tokens * width];
    for Segment { sequence, rows } in segments {
        let of = |width: usize| rows.start * width..rows.end * width;
        let state = sequence.layers[index].delta_mut();
        delta_core::reference(
            delta,
            mixer,
            geometry.rms_eps,
            delta_core::Inputs {
                qkv: &qkv[of(channels)],
                z: &z[of(width)],
                b: &b[of(heads)],
                a: &a[of(heads)],
            },
            &mut state.recurrent,
            &mut state.tail,
            &mut core[of(width)],
        );
    }
    delta_out::reference(mixer, &core, x);
}

fn attention_layer(
    geometry: &Geometry,
    index: usize,
    layer: &LayerWeights,
    mixer: &AttentionWeights,
    segments: &mut [Segment<'_>],
    x: &mut [f32],
) {
    let attention = &geometry.attention;
    let tokens = x.len() / geometry.hidden;
    let (width, kv_width) = (attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim);
    let mut angles = vec![0.0; tokens * attention.rotary_dim];
    attn_in::rotary_angles_of(attention, segments, &mut angles);
    let (mut q, mut gate) = (vec![0.0; tokens * width], vec![0.0; tokens * width]);
    let (mut k, mut v) = (vec![0.0; tokens * kv_width], vec![0.0; tokens * kv_width]);
    let projections = attn_in::Projections { q: &mut q, gate: &mut gate, k: &mut k, v: &mut v };
    attn_in::reference(attention, mixer, &layer.input_norm, geometry.rms_eps, x, &angles, projections);

    attn_in::write_cache(attention, index, segments, &k, &v);
    let mut core = vec![0.0; tokens * width];
    for Segment { sequence, rows } in segments.iter() {
        let start = sequence.length;
        let cache = sequence.layers[index].attention();
        let core = &mut core[rows.start * width..rows.end * width];
        core.par_chunks_exact_mut(width).zip(rows.clone()).enumerate().for_each(|(offset, (core, row))| {
            let range = row * width..(row + 1) * width;
            attn_core::reference(
                attention,
                start + offset,
                &q[range.clone()],
                &gate[range],
                |position, head| cache.key(position, head),
                |position, head| cache.value(position, head),
                core,
            );
        });
    }
    attn_out::reference(mixer, &core, x);
}

fn experts(geometry: &Geometry, layer: &LayerWeights, x: &mut [f32]) {
    let moe = &geometry.moe;
    let tokens = x.len() / geometry.hidden;
    let mut normed = vec![0.0; x.len()];
    let mut choices = vec![Choice::default(); tokens * moe.top_k];
    let mut shared_factor = vec![0.0; tokens];
    moe_route::reference(
        moe,
        &layer.moe,
        &layer.post_norm,
        geometry.rms_eps,
        x,
        &mut normed,
        &mut choices,
        &mut shared_factor,
    );
    let mut routed = vec![0.0; tokens * moe.top_k * moe.expert_width];
    let mut shared = vec![0.0; tokens * moe.shared_width];
    moe_up::reference(moe, &layer.moe, &normed, &choices, &mut routed, &mut shared);
    moe_down::reference(moe, &layer.moe, &routed, &shared, &choices, &shared_factor, x);
}
