//! `delta_core`: convolution, gates, the gated delta rule, and the gated norm of each head.
//!
//! Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv:2412.06464), in the recurrent form
//! of `torch_recurrent_gated_delta_rule` in transformers' `modeling_qwen3_5_moe.py`. The recurrence is run
//! token by token in prefill too: the chunked form adds in another order, and then an answer would depend on
//! how a prompt is cut.

use lily_model::geometry::DeltaGeometry;
use lily_model::weights::DeltaWeights;

use crate::plain::{add_scaled, dot, rms_norm_in_place, sigmoid, silu, softplus};

/// Added to the sum of squares before queries and keys are scaled to length one.
pub const L2_EPS: f32 = 1e-6;

/// What `delta_in` produced for some consecutive tokens of one sequence; every slice is `[tokens, width]`.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// `[tokens, conv_channels]`.
    pub qkv: &'a [f32],
    /// `[tokens, value_width]`.
    pub z: &'a [f32],
    /// `[tokens, value_heads]`.
    pub b: &'a [f32],
    /// `[tokens, value_heads]`.
    pub a: &'a [f32],
}

/// Plain form for consecutive tokens of one sequence.
///
/// `state` `[value_heads, value_dim, key_dim]` and `tail` `[conv_width - 1, conv_channels]` (the last inputs
/// of the convolution, oldest first) are advanced; `out` is `[tokens, value_width]`.
pub fn reference(
    geometry: &DeltaGeometry,
    weights: &DeltaWeights,
    eps: f32,
    inputs: Inputs<'_>,
    state: &mut [f32],
    tail: &mut [f32],
    out: &mut [f32],
) {
    let channels = geometry.conv_channels();
    let heads = geometry.value_heads;
    let width = geometry.value_width();
    let mut mixed = vec![0.0; channels];
    for (t, out) in out.chunks_exact_mut(width).enumerate() {
        convolve(geometry, &weights.conv1d, tail, &inputs.qkv[t * channels..(t + 1) * channels], &mut mixed);
        let (queries, rest) = mixed.split_at_mut(geometry.key_heads * geometry.key_dim);
        let (keys, values) = rest.split_at_mut(geometry.key_heads * geometry.key_dim);
        for query in queries.chunks_exact_mut(geometry.key_dim) {
            scale_to_length(query, 1.0 / (geometry.key_dim as f32).sqrt());
        }
        for key in keys.chunks_exact_mut(geometry.key_dim) {
            scale_to_length(key, 1.0);
        }
        for head in 0..heads {
            let key_head = head * geometry.key_heads / heads;
            let key_range = key_head * geometry.key_dim..(key_head + 1) * geometry.key_dim;
            let value_range = head * geometry.value_dim..(head + 1) * geometry.value_dim;
            let per_head = geometry.value_dim * geometry.key_dim;
            let output = &mut out[value_range.clone()];
            recur(
                &mut state[head * per_head..(head + 1) * per_head],
                &queries[key_range.clone()],
                &keys[key_range],
                &values[value_range.clone()],
                decay(inputs.a[t * heads + head], weights.a_log[head], weights.dt_bias[head]),
                sigmoid(inputs.b[t * heads + head]),
                output,
            );
            rms_norm_in_place(output, &weights.norm, eps);
            for (o, z) in output.iter_mut().zip(&inputs.z[t * width..][value_range]) {
                *o *= silu(*z);
            }
        }
    }
}

/// Causal depthwise convolution of one token, then SiLU; `tail` moves on by one token.
fn convolve(geometry: &DeltaGeometry, taps: &[f32], tail: &mut [f32], input: &[f32], out: &mut [f32]) {
    let channels = input.len();
    let past = geometry.conv_width - 1;
    for channel in 0..channels {
        let taps = &taps[channel * geometry.conv_width..(channel + 1) * geometry.conv_width];
        let mut sum = 0.0;
        for age in 0..past {
            sum += taps[age] * tail[age * channels + channel];
        }
        out[channel] = silu(sum + taps[past] * input[channel]);
    }
    tail.copy_within(channels.., 0);
    let newest = tail.len() - channels;
    tail[newest..].copy_from_slice(input);
}

/// `x *= factor / |x|`.
fn scale_to_length(x: &mut [f32], factor: f32) {
    let scale = factor / (dot(x, x) + L2_EPS).sqrt();
    x.iter_mut().for_each(|x| *x *= scale);
}

/// What the state of a head keeps of its past at one token: `exp(-exp(A_log) * softplus(a + dt_bias))`.
pub fn decay(a: f32, a_log: f32, dt_bias: f32) -> f32 {
    (-a_log.exp() * softplus(a + dt_bias)).exp()
}

/// One token of the gated delta rule for one head, whose `state` is `[value_dim, key_dim]`.
fn recur(
    state: &mut [f32],
    query: &[f32],
    key: &[f32],
    value: &[f32],
    decay: f32,
    write_strength: f32,
    out: &mut [f32],
) {
    for ((row, &value), out) in state.chunks_exact_mut(key.len()).zip(value).zip(out) {
        row.iter_mut().for_each(|s| *s *= decay);
        let delta = (value - dot(row, key)) * write_strength;
        add_scaled(row, delta, key);
        *out = dot(row, query);
    }
}
