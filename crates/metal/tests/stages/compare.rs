//! A pass, stage by stage, beside the plain f32 forms of `lily-cpu`.
//!
//! Before a stage its inputs are read back, after it its outputs; the f32 form is given the same inputs. So an error shows
//! in the stage that makes it, and nowhere else.
//!
//! Products of a prompt round their inputs (`kernels/gemm.h`). The f32 form then is given the inputs as they are rounded there, so that what a
//! stage may differ stays that of sums in another order; what the rounding itself costs is another test's (`tests/emulator/gemm.rs`).

use lily_cpu::kernels::attention::quantize_row;
use lily_cpu::plain::{norm_rows, project, rms_norm_in_place, sigmoid};
use lily_cpu::stages::{
    attn_core, attn_in, attn_out, delta_core, delta_out, embed, head, moe_down, moe_route, moe_up, sample,
};
use lily_gpu::layout::KvFormat;
use lily_model::geometry::AttentionGeometry;
use lily_model::weights::{AttentionWeights, DeltaWeights, LayerWeights, Matrix, Mixer, Weights};

use crate::gpu::{Gpu, State};

/// What a stage's outputs may differ, of the largest of them: both sides are f32 and add in different orders.
const ROUNDING: f32 = 1e-5;
/// The same where a number is stored as f16.
const HALF: f32 = 1e-3;
/// The same where it is stored in 8 bits: half a scale, of which 127 are the largest number of a row.
const HALF_A_SCALE: f32 = 0.5 / 127.0;

/// Runs the pass that `gpu` was told of and compares each stage; panics where one differs. `case` is for messages.
/// `router` changes the router's logits, `[rows, experts]`, before anyone reads them.
pub fn stages(gpu: &mut Gpu, weights: &Weights, case: &str, router: Option<Router>) {
    let mut trace = Trace { gpu, weights, case, router };
    trace.embed();
    for (index, layer) in weights.layers.iter().enumerate() {
        match &layer.mixer {
            Mixer::Delta(mixer) => trace.delta(index, layer, mixer),
            Mixer::Attention(mixer) => trace.attention(index, layer, mixer),
        }
        trace.experts(index, layer);
    }
    trace.head();
}

/// See [`stages`].
pub type Router = fn(row: usize, expert: usize, logit: f32) -> f32;

/// Inputs that share a power of two in a prompt's products, and what the largest of them becomes, at most.
const GROUP: usize = 64;
const LARGEST_BITS: i32 = 11;

/// Inputs as a prompt's products round them: to multiples of a power of two for each group, which makes the largest 1,024 to 2,048 of them.
fn rounded(x: &[f32]) -> Vec<f32> {
    let group = |group: &[f32]| {
        let largest = group.iter().fold(0f32, |most, x| most.max(x.abs()));
        let exponent = (largest.to_bits() >> 23) as i32 - 127;
        let power = 2f32.powi((exponent - LARGEST_BITS + 1).max(-126));
        group.iter().map(|x| (x / power).round_ties_even() * power).collect::<Vec<f32>>()
    };
    x.chunks_exact(GROUP).flat_map(group).collect()
}

struct Trace<'a> {
    gpu: &'a mut Gpu,
    weights: &'a Weights,
    case: &'a str,
    router: Option<Router>,
}

/// Positions from which on the plain form of attention, which adds in f32 one number after the other, is off by more than
/// [`ROUNDING`] itself.
const MANY: usize = 1 << 15;

/// The plain form of attention with sums in f64.
fn attention_in_f64<'r>(
    attention: &AttentionGeometry,
    position: usize,
    (q, gate): (&[f32], &[f32]),
    key: impl Fn(usize, usize) -> &'r [f32],
    value: impl Fn(usize, usize) -> &'r [f32],
) -> Vec<f32> {
    let dim = attention.head_dim;
    let head = |head: usize| {
        let (of, kv_head) = (head * dim..(head + 1) * dim, head * attention.kv_heads / attention.heads);
        let product = |key: &[f32]| -> f64 {
            q[of.clone()].iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum()
        };
        let scores: Vec<f64> =
            (0..=position).map(|p| product(key(p, kv_head)) / (dim as f64).sqrt()).collect();
        let most = scores.iter().fold(f64::NEG_INFINITY, |most, score| most.max(*score));
        let (mut total, mut sums) = (0.0, vec![0.0; dim]);
        for (p, score) in scores.iter().enumerate() {
            let weight = (score - most).exp();
            total += weight;
            sums.iter_mut().zip(value(p, kv_head)).for_each(|(sum, v)| *sum += weight * f64::from(*v));
        }
        let gates = gate[of].iter().map(|gate| 1.0 / (1.0 + f64::from(-gate).exp()));
        sums.into_iter().zip(gates).map(move |(sum, gate)| (sum / total * gate) as f32)
    };
    (0..attention.heads).flat_map(head).collect()
}

/// Columns `from..from + width` of rows that are `stride` wide.
fn columns(values: &[f32], stride: usize, from: usize, width: usize) -> Vec<f32> {
    values.chunks_exact(stride).flat_map(|row| &row[from..from + width]).copied().collect()
}

impl Trace<'_> {
    fn compare(&self, stage: &str, found: &[f32], expected: &[f32], most: f32) {
        assert_eq!(found.len(), expected.len(), "{stage}, {}", self.case);
        let largest = expected.iter().fold(f32::MIN_POSITIVE, |most, value| most.max(value.abs()));
        for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
            let error = (found - expected).abs() / largest;
            assert!(
                error <= most,
                "{stage}, {}: number {at} is {found} and should be {expected}, {error} off",
                self.case
            );
        }
    }

    /// What a product multiplies where it is given `x`.
    fn multiplied(&self, x: &[f32]) -> Vec<f32> {
        if self.gpu.is_prompt { rounded(x) } else { x.to_vec() }
    }

    /// The same of the norm of `x`, whose `1 / rms` a prompt's products apply afterwards.
    fn normed(&self, x: &[f32], weight: &[f32]) -> Vec<f32> {
        if !self.gpu.is_prompt {
            return norm_rows(x, weight, self.eps());
        }
        let row = |row: &[f32]| {
            let squares: f64 = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
            let inverse = (squares / row.len() as f64 + f64::from(self.eps())).sqrt().recip() as f32;
            let weighted: Vec<f32> = row.iter().zip(weight).map(|(x, weight)| x * weight).collect();
            rounded(&weighted).into_iter().map(|x| x * inverse).collect::<Vec<f32>>()
        };
        x.chunks_exact(weight.len()).flat_map(row).collect()
    }

    fn eps(&self) -> f32 {
        self.weights.geometry.rms_eps
    }

    fn embed(&mut self) {
        let tokens: Vec<u32> = self.gpu.parts.iter().flat_map(|part| part.tokens.clone()).collect();
        self.gpu.until("embed");
        let mut expected = vec![0.0; tokens.len() * self.weights.geometry.hidden];
        embed::reference(&self.weights.embed_tokens.view(), &tokens, &mut expected);
        self.compare("embed", &self.gpu.x(), &expected, ROUNDING);
    }

    fn head(&mut self) {
        let (rows, x, vocab) = (self.gpu.head_rows(), self.gpu.x(), self.weights.geometry.vocab);
        let x = &x[x.len() - rows * self.weights.geometry.hidden..];
        self.gpu.until("sample");
        let mut expected = vec![0.0; rows * vocab];
        let weights = self.weights;
        head::reference(&weights.lm_head.view(), &weights.norm, self.eps(), x, &mut expected);
        let logits = self.gpu.floats("logits", rows * vocab);
        self.compare("head", &logits, &expected, ROUNDING);
        let greedy: Vec<u32> = logits.chunks_exact(vocab).map(sample::greedy).collect();
        assert_eq!(self.gpu.words("tokens", rows), greedy, "sample, {}", self.case);
    }

    /// The products of the norm of `x` with `matrices`, as they stand beside each other in `projected`.
    fn projections<const N: usize>(&self, rows: usize, matrices: [&Matrix; N]) -> [Vec<f32>; N] {
        let stride = matrices.iter().map(|matrix| matrix.rows).sum::<usize>().next_multiple_of(16);
        let all = self.gpu.floats("projected", rows * stride);
        // Columns beyond the last row of the last matrix are nobody's.
        let mut from = 0;
        matrices.map(|matrix| {
            from += matrix.rows;
            columns(&all, stride, from - matrix.rows, matrix.rows)
        })
    }

    fn delta(&mut self, index: usize, layer: &LayerWeights, mixer: &DeltaWeights) {
        let (rows, x) = (self.gpu.rows(), self.gpu.x());
        let matrices = [&mixer.in_proj_qkv, &mixer.in_proj_z, &mixer.in_proj_b, &mixer.in_proj_a];
        let before = self.gpu.states(index);
        self.gpu.until("delta_in");
        let found = self.projections(rows, matrices);
        let normed = self.normed(&x, &layer.input_norm);
        for (found, matrix) in found.iter().zip(matrices) {
            let mut expected = vec![0.0; rows * matrix.rows];
            project(&matrix.view(), &normed, &mut expected);
            self.compare("delta_in", found, &expected, ROUNDING);
        }

        self.gpu.until("delta_core");
        let (mixed, states) = self.recurrence(mixer, &found, before);
        let core = self.gpu.floats("mixed", mixed.len());
        self.compare("delta_core", &core, &mixed, ROUNDING);
        for ((found, _), (expected, _)) in self.gpu.states(index).iter().zip(&states) {
            self.compare("delta_core's state", found, expected, ROUNDING);
        }

        self.gpu.until("delta_out");
        let mut expected = x;
        delta_out::reference(mixer, &self.multiplied(&core), &mut expected);
        self.compare("delta_out", &self.gpu.x(), &expected, ROUNDING);
        for ((_, found), (_, expected)) in self.gpu.states(index).iter().zip(&states) {
            assert_eq!(found, expected, "delta_out's tails, {}", self.case);
        }
    }

    fn recurrence(
        &self,
        mixer: &DeltaWeights,
        [qkv, z, b, a]: &[Vec<f32>; 4],
        mut states: Vec<State>,
    ) -> (Vec<f32>, Vec<State>) {
        let delta = &self.weights.geometry.delta;
        let (channels, width, heads) = (delta.conv_channels(), delta.value_width(), delta.value_heads);
        let mut mixed = vec![0.0; self.gpu.rows() * width];
        for ((state, tail), part) in states.iter_mut().zip(self.gpu.ranges()) {
            let of = |width: usize| part.start * width..part.end * width;
            let inputs = delta_core::Inputs {
                qkv: &qkv[of(channels)],
                z: &z[of(width)],
                b: &b[of(heads)],
                a: &a[of(heads)],
            };
            delta_core::reference(delta, mixer, self.eps(), inputs, state, tail, &mut mixed[of(width)]);
        }
        (mixed, states)
    }

    fn attention(&mut self, index: usize, layer: &LayerWeights, mixer: &AttentionWeights) {
        let (rows, x) = (self.gpu.rows(), self.gpu.x());
        let matrices = [&mixer.q_proj, &mixer.k_proj, &mixer.v_proj];
        self.gpu.until("attn_in");
        let found = self.projections(rows, matrices);
        let normed = self.normed(&x, &layer.input_norm);
        for (found, matrix) in found.iter().zip(matrices) {
            let mut expected = vec![0.0; rows * matrix.rows];
            project(&matrix.view(), &normed, &mut expected);
            self.compare("attn_in", found, &expected, ROUNDING);
        }

        self.gpu.until("attn_merge");
        let width = mixer.o_proj.cols;
        let mixed = self.gpu.floats("mixed", rows * width);
        self.attention_over_the_cache(index, mixer, &found, &mixed);

        self.gpu.until("attn_out");
        let mut expected = x;
        attn_out::reference(mixer, &self.multiplied(&mixed), &mut expected);
        self.compare("attn_out", &self.gpu.x(), &expected, ROUNDING);
    }

    /// Compares what came of attention, and what was written into the cache.
    fn attention_over_the_cache(
        &self,
        index: usize,
        mixer: &AttentionWeights,
        [query_and_gate, k, v]: &[Vec<f32>; 3],
        mixed: &[f32],
    ) {
        let attention = &self.weights.geometry.attention;
        let (dim, width) = (attention.head_dim, attention.heads * attention.head_dim);
        let kv_width = attention.kv_heads * dim;
        let normed = |head: &[f32], weight: &[f32], position: usize| {
            let mut head = head.to_vec();
            rms_norm_in_place(&mut head, weight, self.eps());
            let mut angles = vec![0.0; attention.rotary_dim];
            attn_in::rotary_angles(attention, position, &mut angles);
            attn_in::rotate(&mut head[..attention.rotary_dim], &angles);
            head
        };
        let stored = match self.gpu.kv {
            KvFormat::F16 => HALF,
            KvFormat::Q8 => HALF_A_SCALE + ROUNDING,
        };
        for (part, range) in self.gpu.parts.iter().zip(self.gpu.ranges()) {
            let (cache, given) = (self.gpu.cache(part, index), self.gpu.given(part, index));
            let key = |position: usize, head: usize| cache.key(part.place(position), head);
            let value = |position: usize, head: usize| cache.value(part.place(position), head);
            let new =
                |row: usize, head: usize| row * kv_width + head * dim..row * kv_width + (head + 1) * dim;
            // What the rows before one, and itself, were before they were stored.
            let new_keys: Vec<Vec<f32>> = (range.clone())
                .flat_map(|row| (0..attention.kv_heads).map(move |head| (row, head)))
                .map(|(row, head)| {
                    normed(&k[new(row, head)], &mixer.k_norm, part.position + row - range.start)
                })
                .collect();
            let plain_key = |position: usize, head: usize| match position.checked_sub(part.position) {
                None => given.key(part.place(position), head),
                Some(row) => &new_keys[row * attention.kv_heads + head],
            };
            let plain_value = |position: usize, head: usize| match position.checked_sub(part.position) {
                None => given.value(part.place(position), head),
                Some(row) => &v[new(range.start + row, head)],
            };
            for row in range.clone() {
                let position = part.position + row - range.start;
                for head in 0..attention.kv_heads {
                    let (new_key, new_value) = (plain_key(position, head), plain_value(position, head));
                    self.compare("attn_core's key", key(position, head), new_key, stored);
                    self.compare("attn_core's value", value(position, head), new_value, stored);
                    if self.gpu.kv == KvFormat::Q8 {
                        let mut elements = vec![0; dim];
                        let scale = quantize_row(new_value, &mut elements);
                        let of_cpu = elements.iter().map(|&element| f32::from(element) * scale);
                        assert!(of_cpu.eq(value(position, head).iter().copied()), "stored as the CPU's");
                    }
                }
                let (mut q, mut gate) = (Vec::new(), Vec::new());
                for head in query_and_gate[row * 2 * width..(row + 1) * 2 * width].chunks_exact(2 * dim) {
                    q.extend(normed(&head[..dim], &mixer.q_norm, position));
                    gate.extend(&head[dim..]);
                }
                let found = &mixed[row * width..(row + 1) * width];
                let mut expected = vec![0.0; width];
                if position < MANY {
                    attn_core::reference(attention, position, &q, &gate, key, value, &mut expected);
                } else {
                    expected = attention_in_f64(attention, position, (&q, &gate), key, value);
                }
                self.compare("attn_core", found, &expected, ROUNDING);
                if self.gpu.kv == KvFormat::Q8 {
                    attn_core::reference(
                        attention,
                        position,
                        &q,
                        &gate,
                        plain_key,
                        plain_value,
                        &mut expected,
                    );
                    self.within_half_a_scale(&q, position, found, &expected, &plain_key, &plain_value);
                }
            }
        }
    }

    /// Attention over rounded rows is from that over the rows that were given by no more than half a scale makes of it: scores
    /// move by `d` at the most, weights by the factor `exp(2 d)`, and values by half a scale.
    fn within_half_a_scale<'r>(
        &self,
        q: &[f32],
        position: usize,
        found: &[f32],
        expected: &[f32],
        key: &dyn Fn(usize, usize) -> &'r [f32],
        value: &dyn Fn(usize, usize) -> &'r [f32],
    ) {
        let AttentionGeometry { heads, kv_heads, head_dim, .. } = self.weights.geometry.attention;
        let largest = |row: &[f32]| row.iter().fold(0f32, |most, v| most.max(v.abs()));
        for head in 0..heads {
            let of = head * head_dim..(head + 1) * head_dim;
            let most = |rows: &dyn Fn(usize, usize) -> &'r [f32]| {
                let rows = (0..=position).map(|position| largest(rows(position, head * kv_heads / heads)));
                f64::from(rows.fold(0.0, f32::max))
            };
            let (key, value, half) = (most(key), most(value), f64::from(HALF_A_SCALE + ROUNDING));
            let norm: f64 =
                q[of.clone()].iter().map(|q| f64::from(q.abs())).sum::<f64>() / (head_dim as f64).sqrt();
            let bound = half * value + ((2.0 * norm * half * key).exp() - 1.0) * value;
            for (found, expected) in found[of.clone()].iter().zip(&expected[of]) {
                let error = f64::from(found - expected).abs();
                assert!(error <= bound, "attn_core, {}: {error} is beyond {bound}", self.case);
            }
        }
    }

    fn experts(&mut self, index: usize, layer: &LayerWeights) {
        let (moe, rows, x) = (&self.weights.geometry.moe, self.gpu.rows(), self.gpu.x());
        let mut normed = vec![0.0; x.len()];
        let mut choices = vec![moe_route::Choice::default(); rows * moe.top_k];
        let mut factors = vec![0.0; rows];
        let (norm, eps) = (&layer.post_norm, self.eps());
        moe_route::reference(moe, &layer.moe, norm, eps, &x, &mut normed, &mut choices, &mut factors);
        if self.gpu.is_prompt {
            normed = self.normed(&x, &layer.post_norm);
            project(&layer.moe.shared_expert_gate.view(), &normed, &mut factors);
            factors.iter_mut().for_each(|factor| *factor = sigmoid(*factor));
        }
        self.gpu.until("moe_route");
        let stride = (moe.experts + 1).next_multiple_of(16);
        let logits = columns(&self.gpu.floats("router", rows * stride), stride, 0, moe.experts);
        let mut expected = vec![0.0; rows * moe.experts];
        project(&layer.moe.gate.view(), &normed, &mut expected);
        self.compare("moe_route", &logits, &expected, ROUNDING);
        if !self.gpu.is_prompt {
            let packed = self.gpu.floats("packed", normed.len());
            self.compare("moe_route's inputs of the experts", &packed, &normed, ROUNDING);
        }
        let logits = match self.router {
            None => logits,
            Some(router) => {
                let mut all = self.gpu.floats("router", rows * stride);
                for (row, all) in all.chunks_exact_mut(stride).enumerate() {
                    all[..moe.experts]
                        .iter_mut()
                        .enumerate()
                        .for_each(|(expert, logit)| *logit = router(row, expert, *logit));
                }
                self.gpu.write("router", &all);
                columns(&all, stride, 0, moe.experts)
            }
        };

        self.gpu.until("moe_up");
        let choice = if self.gpu.is_prompt { "choice".to_owned() } else { format!("choices.{index}") };
        let words = self.gpu.words(&choice, rows * 32);
        for (row, words) in words.chunks_exact(32).enumerate() {
            // The choice is that of the logits which the router left; the plain form has others by rounding.
            let of_row = row * moe.top_k..(row + 1) * moe.top_k;
            let mut logits = logits[row * moe.experts..(row + 1) * moe.experts].to_vec();
            moe_route::choose(&mut logits, &mut choices[of_row.clone()]);
            let chosen: Vec<u32> = choices[of_row.clone()].iter().map(|choice| choice.expert).collect();
            assert_eq!(words[..moe.top_k], chosen, "moe_up's choice, {}", self.case);
            let shares: Vec<f32> = choices[of_row].iter().map(|choice| choice.weight).collect();
            let found: Vec<f32> = words[8..8 + moe.top_k].iter().copied().map(f32::from_bits).collect();
            self.compare("moe_up's shares", &found, &shares, ROUNDING);
            self.compare("moe_up's shares", &[f32::from_bits(words[16])], &[factors[row]], ROUNDING);
        }
        let (routed_width, shared_width) = (moe.top_k * moe.expert_width, moe.shared_width);
        let (mut routed, mut shared) = (vec![0.0; rows * routed_width], vec![0.0; rows * shared_width]);
        moe_up::reference(moe, &layer.moe, &normed, &choices, &mut routed, &mut shared);
        let inner = self.gpu.floats("inner", rows * (routed_width + shared_width));
        let inner_of = |from, width| columns(&inner, routed_width + shared_width, from, width);
        let (found_routed, found_shared) = (inner_of(0, routed_width), inner_of(routed_width, shared_width));
        self.compare("moe_up", &found_routed, &routed, ROUNDING);
        self.compare("moe_route's shared expert", &found_shared, &shared, ROUNDING);

        self.gpu.until(if rows == 1 || self.gpu.is_prompt { "moe_down" } else { "moe_sum" });
        let mut expected = x;
        let (routed, shared) = (&self.multiplied(&found_routed), &self.multiplied(&found_shared));
        moe_down::reference(moe, &layer.moe, routed, shared, &choices, &factors, &mut expected);
        self.compare("moe_down", &self.gpu.x(), &expected, ROUNDING);
    }
}
