//! `delta_core`: convolution, gates, the gated delta rule, and the gated norm of each head.
//!
//! Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv:2412.06464), in the recurrent form
//! of `torch_recurrent_gated_delta_rule` in transformers' `modeling_qwen3_5_moe.py`. The recurrence is run
//! token by token in prefill too: the chunked form adds in another order, and then an answer would depend on
//! how a prompt is cut.

use lily_model::geometry::DeltaGeometry;
use lily_model::weights::DeltaWeights;
use rayon::prelude::*;

use crate::fast::{Activations, ActivationsWriter, Machine};
use crate::isa::Isa;
use crate::kernels::OutRows;
use crate::kernels::delta::{DeltaTokens, Strided, delta_rule};
use crate::kernels::f32_ops;
use crate::kernels::simd::prefetch;
use crate::kernels::tile::LINE;
use crate::memory::Buffer;
use crate::plain::{TASK, add_scaled, dot, rms_norm_in_place, sigmoid, silu, softplus};
use crate::segment::Segment;

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
        let (queries, keys, values) = (&*queries, &*keys, &*values);
        let per_head = geometry.value_dim * geometry.key_dim;
        let states = state.par_chunks_exact_mut(per_head);
        let of_heads = states.zip(out.par_chunks_exact_mut(geometry.value_dim)).enumerate();
        of_heads.with_min_len(TASK.div_ceil(PASSES * per_head)).for_each(|(head, (state, output))| {
            let key_head = head * geometry.key_heads / heads;
            let key_range = key_head * geometry.key_dim..(key_head + 1) * geometry.key_dim;
            let value_range = head * geometry.value_dim..(head + 1) * geometry.value_dim;
            recur(
                state,
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
        });
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

/// How often [`recur`] goes over a state: decay, recall, correction, answer.
const PASSES: usize = 4;

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

/// Most taps of a convolution that the fast form takes.
pub const MAX_TAPS: usize = 8;
/// Tokens that a task convolves before their states are advanced: their q, k and v stay in the L2 cache.
const TOKEN_BLOCK: usize = 32;
/// Tokens ahead whose inputs are asked for: a head's channels of one token are eight lines, and those of the next
/// one lie a whole row further.
const TOKENS_AHEAD: usize = 4;

/// The checkpoint's taps `[conv_channels, conv_width]` as the fast form reads them: for each head of q, k and v
/// in turn `[conv_width, head elements]`.
pub fn taps_by_head(taps: &[f32], geometry: &DeltaGeometry) -> Vec<f32> {
    let width = geometry.conv_width;
    let mut by_head = Vec::with_capacity(taps.len());
    let heads = std::iter::repeat_n(geometry.key_dim, 2 * geometry.key_heads)
        .chain(std::iter::repeat_n(geometry.value_dim, geometry.value_heads));
    let mut first = 0;
    for elements in heads {
        for age in 0..width {
            by_head.extend((first..first + elements).map(|channel| taps[channel * width + age]));
        }
        first += elements;
    }
    by_head
}

/// The weights of the fast form.
#[derive(Clone, Copy)]
pub struct FastWeights<'a> {
    /// As the checkpoint has them.
    pub weights: &'a DeltaWeights,
    /// See [`taps_by_head`].
    pub taps: &'a [f32],
    /// Epsilon of the gated norm.
    pub eps: f32,
}

/// What the sequences of a pass bring to it: empty between passes, kept for its memory.
#[derive(Default)]
pub struct WorkList(Vec<Work<'static>>);

impl WorkList {
    /// Lets `body` work with `work`.
    fn with<'a>(&mut self, work: impl Iterator<Item = Work<'a>>, body: impl FnOnce(&[Work<'a>])) {
        // What a panic may have left behind.
        self.0.clear();
        // SAFETY: what is put in here is taken out again below, or else before anything else is looked at.
        self.0.extend(work.map(|work| unsafe { std::mem::transmute::<Work<'a>, Work<'static>>(work) }));
        body(&self.0);
        self.0.clear();
    }
}

/// What one sequence brings to a pass.
struct Work<'a> {
    rows: std::ops::Range<usize>,
    /// Row h: the states of the value heads that read key head h.
    states: OutRows<'a>,
    tail: &'a [f32],
}

/// Fast form for all sequences of a pass: one task per sequence and key head convolves, normalises and runs the
/// recurrence for the value heads that read it.
///
/// Advances the states of layer `layer` in `segments`; `out` `[rows, value_width]` is the result, `list` scratch.
#[allow(clippy::too_many_arguments, reason = "one argument per tensor of the stage")]
pub fn fast(
    machine: &Machine,
    geometry: &DeltaGeometry,
    weights: FastWeights<'_>,
    inputs: Inputs<'_>,
    layer: usize,
    segments: &mut [Segment<'_>],
    list: &mut WorkList,
    out: &mut Activations,
) {
    let per_key_head = geometry.state_elements() / geometry.key_heads;
    let work = segments.iter_mut().map(|Segment { sequence, rows }| {
        let state = sequence.layers[layer].delta_mut();
        let states = OutRows::new(&mut state.recurrent, per_key_head);
        Work { rows: rows.clone(), states, tail: &state.tail }
    });
    let out = out.writer();
    list.with(work, |work| {
        machine.pool.for_each(work.len() * geometry.key_heads, |task| {
            let work = &work[task / geometry.key_heads];
            // SAFETY: each sequence's key head, its states and its columns of the result are one task's.
            unsafe { advance(machine.isa, geometry, weights, inputs, work, task % geometry.key_heads, &out) };
        });
    });
    for Segment { sequence, rows } in segments {
        let channels = geometry.conv_channels();
        let tail = &mut sequence.layers[layer].delta_mut().tail;
        move_tail(tail, &inputs.qkv[rows.start * channels..rows.end * channels]);
    }
}

/// `tail` becomes the last rows of itself followed by `inputs`.
fn move_tail(tail: &mut [f32], inputs: &[f32]) {
    if inputs.len() >= tail.len() {
        tail.copy_from_slice(&inputs[inputs.len() - tail.len()..]);
    } else {
        tail.copy_within(inputs.len().., 0);
        let kept = tail.len() - inputs.len();
        tail[kept..].copy_from_slice(inputs);
    }
}

/// The buffers of one task: q, k, v, decays, write strengths and results of [`TOKEN_BLOCK`] tokens.
type Scratch = [Buffer<f32>; 6];

thread_local! {
    static SCRATCH: std::cell::RefCell<Scratch> = const { std::cell::RefCell::new([const { Buffer::new() }; 6]) };
}

/// One key head of one sequence, all its tokens.
///
/// # Safety
/// This call alone touches the states of `key_head` and the columns of its value heads in `out`.
unsafe fn advance(
    isa: Isa,
    geometry: &DeltaGeometry,
    weights: FastWeights<'_>,
    inputs: Inputs<'_>,
    work: &Work<'_>,
    key_head: usize,
    out: &ActivationsWriter<'_>,
) {
    let (key_dim, value_dim) = (geometry.key_dim, geometry.value_dim);
    let ratio = geometry.value_heads / geometry.key_heads;
    let first_value_head = key_head * ratio;
    let key_width = geometry.key_heads * key_dim;
    let heads = geometry.value_heads;
    let mut scratch = SCRATCH.take();
    let [queries, keys, values, decays, strengths, recalled] = &mut scratch;
    for (buffer, width) in [
        (&mut *queries, key_dim),
        (keys, key_dim),
        (values, ratio * value_dim),
        (decays, ratio),
        (strengths, ratio),
        (recalled, ratio * value_dim),
    ] {
        buffer.resize(TOKEN_BLOCK * width);
    }
    let [queries, keys, values, decays, strengths, recalled] = &mut scratch;
    let conv = Convolution { geometry, taps: weights.taps, inputs: inputs.qkv, work };
    for start in (0..work.rows.len()).step_by(TOKEN_BLOCK) {
        let tokens = TOKEN_BLOCK.min(work.rows.len() - start);
        for t in 0..tokens {
            let token = start + t;
            for first in [key_head * key_dim, key_width + key_head * key_dim] {
                conv.ask(token + TOKENS_AHEAD, first, key_dim);
            }
            conv.ask(token + TOKENS_AHEAD, 2 * key_width + first_value_head * value_dim, ratio * value_dim);
            let query = &mut queries[t * key_dim..(t + 1) * key_dim];
            conv.head(isa, token, key_head * key_dim, query);
            let factor = 1.0 / (key_dim as f32).sqrt();
            f32_ops::scale(isa, factor / (f32_ops::dot(isa, query, query) + L2_EPS).sqrt(), query);
            let key = &mut keys[t * key_dim..(t + 1) * key_dim];
            conv.head(isa, token, key_width + key_head * key_dim, key);
            f32_ops::scale(isa, 1.0 / (f32_ops::dot(isa, key, key) + L2_EPS).sqrt(), key);
            for i in 0..ratio {
                let head = first_value_head + i;
                let value = &mut values[(t * ratio + i) * value_dim..(t * ratio + i + 1) * value_dim];
                conv.head(isa, token, 2 * key_width + head * value_dim, value);
                let at = (work.rows.start + token) * heads + head;
                let w = weights.weights;
                decays[t * ratio + i] = decay(inputs.a[at], w.a_log[head], w.dt_bias[head]);
                strengths[t * ratio + i] = sigmoid(inputs.b[at]);
            }
        }
        for i in 0..ratio {
            let per_head = value_dim * key_dim;
            // SAFETY: by contract.
            let state = unsafe { work.states.row(key_head, i * per_head..(i + 1) * per_head) };
            let tokens = DeltaTokens {
                tokens,
                queries: Strided { data: queries, stride: key_dim },
                keys: Strided { data: keys, stride: key_dim },
                values: Strided { data: &values[i * value_dim..], stride: ratio * value_dim },
                decays: Strided { data: &decays[i..], stride: ratio },
                write_strengths: Strided { data: &strengths[i..], stride: ratio },
            };
            let out = OutRows::new(recalled, ratio * value_dim);
            // SAFETY: the scratch is this thread's.
            unsafe { delta_rule(isa, key_dim, state, &tokens, out, i * value_dim) };
        }
        let first_col = first_value_head * value_dim;
        for (t, recalled) in recalled.chunks_exact(ratio * value_dim).take(tokens).enumerate() {
            let row = work.rows.start + start + t;
            let ahead = (row + TOKENS_AHEAD) * geometry.value_width() + first_col;
            ask(inputs.z.as_ptr().wrapping_add(ahead), ratio * value_dim);
            let gates = &inputs.z[row * geometry.value_width() + first_col..][..ratio * value_dim];
            let write = |out: &mut [f32]| {
                let heads = recalled.chunks_exact(value_dim).zip(gates.chunks_exact(value_dim));
                for (out, (recalled, gate)) in out.chunks_exact_mut(value_dim).zip(heads) {
                    f32_ops::rms_norm(isa, recalled, &weights.weights.norm, weights.eps, out);
                    f32_ops::silu_gate(isa, gate, out);
                }
            };
            // SAFETY: by contract.
            unsafe { out.fill(isa, row, first_col..first_col + ratio * value_dim, write) };
        }
    }
    SCRATCH.set(scratch);
}

/// The convolution of one sequence's rows.
struct Convolution<'a> {
    geometry: &'a DeltaGeometry,
    taps: &'a [f32],
    inputs: &'a [f32],
    work: &'a Work<'a>,
}

/// Asks the cache for `count` elements from `first` on, which need not exist.
fn ask(first: *const f32, count: usize) {
    for at in (0..count * size_of::<f32>()).step_by(LINE) {
        prefetch(first.cast::<u8>().wrapping_add(at));
    }
}

impl Convolution<'_> {
    /// Asks the cache for `count` channels from `first` on of the sequence's row `token`.
    fn ask(&self, token: usize, first: usize, count: usize) {
        let at = (self.work.rows.start + token) * self.geometry.conv_channels() + first;
        ask(self.inputs.as_ptr().wrapping_add(at), count);
    }

    /// Channels `first..first + out.len()`, one head, of the sequence's row `token`.
    fn head(&self, isa: Isa, token: usize, first: usize, out: &mut [f32]) {
        let (width, channels) = (self.geometry.conv_width, self.geometry.conv_channels());
        let past = width - 1;
        let mut rows = [&[][..]; MAX_TAPS];
        for (age, row) in rows[..width].iter_mut().enumerate() {
            let at = token + age;
            *row = if at < past {
                &self.work.tail[at * channels + first..][..out.len()]
            } else {
                &self.inputs[(self.work.rows.start + at - past) * channels + first..][..out.len()]
            };
        }
        let taps = &self.taps[first * width..(first + out.len()) * width];
        f32_ops::conv_silu(isa, taps, &rows[..width], out);
    }
}
