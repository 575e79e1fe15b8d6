//! What int8 activations change in a checkpoint's numbers, against plain f32.
//!
//! `cargo run --release -p lily-cpu --example activation_error -- DIR [tokens]` feeds random tokens (32 where
//! nothing is said) to the checkpoint in `DIR` and prints two things:
//!
//! - **Each projection by itself.** The reference pass runs through the first layers, and every projection whose
//!   activations the fast path rounds to int8 is multiplied both ways on the reference's own activations.
//! - **The whole model.** [`Numerics::Int8`] against [`Numerics::F32`], position by position. With random weights
//!   router logits lie so close together that any rounding sends tokens to other experts, and the error is that of
//!   the experts. A control shows it: the same int8 path, with one norm of the first layer moved a little.
//!
//! Errors are relative: length of the difference over length of the reference. The f32 pass of the full model
//! takes a minute or more on its one thread.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use lily_cpu::isa::Isa;
use lily_cpu::kernels::activations::QuantizedRows;
use lily_cpu::kernels::matmul::{matmul, matmul_f32};
use lily_cpu::plain::norm_rows;
use lily_cpu::pool::{ThreadPool, physical_cores};
use lily_cpu::stages::moe_route::Choice;
use lily_cpu::stages::moe_up::slots_of;
use lily_cpu::stages::{
    attn_core, attn_in, attn_out, delta_core, delta_in, delta_out, embed, moe_down, moe_route, moe_up,
};
use lily_cpu::{CpuBackend, CpuOptions, Numerics};
use lily_engine::backend::{Backend, Want};
use lily_model::checkpoint::Checkpoint;
use lily_model::weights::{AttentionWeights, DeltaWeights, LayerWeights, MatrixView, Mixer, Weights};

/// Tokens where the command line says nothing.
const TOKENS: usize = 32;
/// Layers whose projections are looked at one by one: three of Gated DeltaNet and one of attention.
const LAYERS: usize = 4;
/// What the control changes, relatively: as much as int8 activations change one projection.
const NUDGE: f32 = 0.006;

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let dir = words.next().ok_or("name the directory of a checkpoint")?;
    let count = words.next().map_or(Ok(TOKENS), |word| word.parse::<usize>())?.max(1);
    let weights = Checkpoint::open(Path::new(&dir))?.weights()?;
    // One more than is fed: every position has a next token.
    let tokens = random_tokens(count + 1, weights.geometry.vocab);
    Projections::new(&weights).measure(&tokens[..count]);
    whole_model(&weights, &tokens)
}

/// Seeded, uniform over the vocabulary.
fn random_tokens(count: usize, vocab: usize) -> Vec<u32> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let draw = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        ((state >> 32) % vocab as u64) as u32
    };
    std::iter::repeat_with(draw).take(count).collect()
}

/// Squared lengths of differences and of what they are relative to.
#[derive(Clone, Copy, Default)]
struct Squares {
    difference: f64,
    reference: f64,
}

impl Squares {
    fn add(&mut self, reference: &[f32], other: &[f32]) {
        for (&r, &o) in reference.iter().zip(other) {
            self.difference += f64::from(r - o).powi(2);
            self.reference += f64::from(r).powi(2);
        }
    }

    fn relative(&self) -> f64 {
        (self.difference / self.reference).sqrt()
    }
}

/// The reference pass through the first layers, with each projection multiplied both ways on the way.
struct Projections<'a> {
    weights: &'a Weights,
    pool: ThreadPool,
    isa: Isa,
    /// By projection: each layer's, in the order in which the pass meets them.
    errors: Vec<(&'static str, Vec<Squares>)>,
}

impl<'a> Projections<'a> {
    fn new(weights: &'a Weights) -> Projections<'a> {
        Projections {
            weights,
            pool: ThreadPool::new(physical_cores()),
            isa: Isa::detect(),
            errors: Vec::new(),
        }
    }

    fn measure(mut self, tokens: &[u32]) {
        let weights = self.weights;
        let eps = weights.geometry.rms_eps;
        let mut x = vec![0.0; tokens.len() * weights.geometry.hidden];
        embed::reference(&weights.embed_tokens.view(), tokens, &mut x);
        for layer in weights.layers.iter().take(LAYERS) {
            match &layer.mixer {
                Mixer::Delta(mixer) => self.delta(layer, mixer, &mut x),
                Mixer::Attention(mixer) => self.attention(layer, mixer, &mut x),
            }
            self.experts(layer, &mut x);
        }
        let mut head = Squares::default();
        self.compare(weights.lm_head.view(), &norm_rows(&x, &weights.norm, eps), &mut head);
        self.note("head", head);

        println!("{} tokens, {LAYERS} layers; relative error of each projection, per layer:", tokens.len());
        for (name, layers) in &self.errors {
            let each: Vec<String> =
                layers.iter().map(|error| format!("{:.3} %", 100.0 * error.relative())).collect();
            println!("{name:>24}  {}", each.join("  "));
        }
    }

    /// Adds what int8 activations `x`, `[tokens, cols]`, change in `matrix x`.
    fn compare(&self, matrix: MatrixView<'_>, x: &[f32], error: &mut Squares) {
        let mut quantized = QuantizedRows::new();
        quantized.quantize(self.isa, x, matrix.cols);
        let mut reference = vec![0.0; quantized.rows() * matrix.rows];
        let mut rounded = reference.clone();
        matmul_f32(&self.pool, self.isa, matrix, x, &mut reference);
        matmul(&self.pool, self.isa, matrix, &quantized, &mut rounded);
        error.add(&reference, &rounded);
    }

    fn note(&mut self, name: &'static str, error: Squares) {
        match self.errors.iter_mut().find(|(known, _)| *known == name) {
            Some((_, layers)) => layers.push(error),
            None => self.errors.push((name, vec![error])),
        }
    }

    /// [`Projections::compare`] of matrices that read the same rows, noted together.
    fn compare_all(&mut self, name: &'static str, matrices: &[MatrixView<'_>], x: &[f32]) {
        let mut error = Squares::default();
        for matrix in matrices {
            self.compare(*matrix, x, &mut error);
        }
        self.note(name, error);
    }

    fn delta(&mut self, layer: &LayerWeights, mixer: &DeltaWeights, x: &mut [f32]) {
        let geometry = &self.weights.geometry;
        let (delta, eps) = (&geometry.delta, geometry.rms_eps);
        let tokens = x.len() / geometry.hidden;
        let normed = norm_rows(x, &layer.input_norm, eps);
        self.compare_all("delta_in (qkv, z)", &[mixer.in_proj_qkv.view(), mixer.in_proj_z.view()], &normed);

        let mut qkv = vec![0.0; tokens * delta.conv_channels()];
        let mut z = vec![0.0; tokens * delta.value_width()];
        let mut b = vec![0.0; tokens * delta.value_heads];
        let mut a = b.clone();
        let out = delta_in::Projections { qkv: &mut qkv, z: &mut z, b: &mut b, a: &mut a };
        delta_in::reference(mixer, &layer.input_norm, eps, x, out);
        let inputs = delta_core::Inputs { qkv: &qkv, z: &z, b: &b, a: &a };
        let mut state = vec![0.0; delta.state_elements()];
        let mut tail = vec![0.0; delta.conv_tail_elements()];
        let mut core = vec![0.0; tokens * delta.value_width()];
        delta_core::reference(delta, mixer, eps, inputs, &mut state, &mut tail, &mut core);
        self.compare_all("delta_out", &[mixer.out_proj.view()], &core);
        delta_out::reference(mixer, &core, x);
    }

    fn attention(&mut self, layer: &LayerWeights, mixer: &AttentionWeights, x: &mut [f32]) {
        let geometry = &self.weights.geometry;
        let (attention, eps) = (&geometry.attention, geometry.rms_eps);
        let tokens = x.len() / geometry.hidden;
        let normed = norm_rows(x, &layer.input_norm, eps);
        let matrices = [mixer.q_proj.view(), mixer.k_proj.view(), mixer.v_proj.view()];
        self.compare_all("attn_in (q, k, v)", &matrices, &normed);

        let dim = attention.head_dim;
        let (width, kv_width) = (attention.heads * dim, attention.kv_heads * dim);
        let mut angles = vec![0.0; tokens * attention.rotary_dim];
        for (position, angles) in angles.chunks_exact_mut(attention.rotary_dim).enumerate() {
            attn_in::rotary_angles(attention, position, angles);
        }
        let (mut q, mut gate) = (vec![0.0; tokens * width], vec![0.0; tokens * width]);
        let (mut k, mut v) = (vec![0.0; tokens * kv_width], vec![0.0; tokens * kv_width]);
        let out = attn_in::Projections { q: &mut q, gate: &mut gate, k: &mut k, v: &mut v };
        attn_in::reference(attention, mixer, &layer.input_norm, eps, x, &angles, out);
        let mut core = vec![0.0; tokens * width];
        for (position, out) in core.chunks_exact_mut(width).enumerate() {
            let row = position * width..(position + 1) * width;
            let head = |position: usize, head: usize| {
                let start = position * kv_width + head * dim;
                start..start + dim
            };
            attn_core::reference(
                attention,
                position,
                &q[row.clone()],
                &gate[row],
                |position, kv_head| &k[head(position, kv_head)],
                |position, kv_head| &v[head(position, kv_head)],
                out,
            );
        }
        self.compare_all("attn_out", &[mixer.o_proj.view()], &core);
        attn_out::reference(mixer, &core, x);
    }

    fn experts(&mut self, layer: &LayerWeights, x: &mut [f32]) {
        let geometry = &self.weights.geometry;
        let (moe, weights) = (&geometry.moe, &layer.moe);
        let tokens = x.len() / geometry.hidden;
        let mut normed = vec![0.0; x.len()];
        let mut choices = vec![Choice::default(); tokens * moe.top_k];
        let mut factors = vec![0.0; tokens];
        let (norm, eps) = (&layer.post_norm, geometry.rms_eps);
        moe_route::reference(moe, weights, norm, eps, x, &mut normed, &mut choices, &mut factors);
        let mut routed = vec![0.0; choices.len() * moe.expert_width];
        let mut shared = vec![0.0; tokens * moe.shared_width];
        moe_up::reference(moe, weights, &normed, &choices, &mut routed, &mut shared);

        let (mut up, mut down) = (Squares::default(), Squares::default());
        for expert in 0..moe.experts {
            let slots = slots_of(&choices, expert);
            if slots.is_empty() {
                continue;
            }
            let inputs = gather(&normed, geometry.hidden, slots.iter().map(|slot| slot / moe.top_k));
            self.compare(weights.gate_proj.at(expert), &inputs, &mut up);
            self.compare(weights.up_proj.at(expert), &inputs, &mut up);
            let inner = gather(&routed, moe.expert_width, slots.iter().copied());
            self.compare(weights.down_proj.at(expert), &inner, &mut down);
        }
        self.compare(weights.shared_gate_proj.view(), &normed, &mut up);
        self.compare(weights.shared_up_proj.view(), &normed, &mut up);
        self.compare(weights.shared_down_proj.view(), &shared, &mut down);
        self.note("moe_up (gate, up)", up);
        self.note("moe_down", down);
        moe_down::reference(moe, weights, &routed, &shared, &choices, &factors, x);
    }
}

/// Rows of `x`, `[any, width]`, one after the other.
fn gather(x: &[f32], width: usize, rows: impl Iterator<Item = usize>) -> Vec<f32> {
    rows.flat_map(|row| &x[row * width..(row + 1) * width]).copied().collect()
}

/// Both numerics over all layers, position by position, and how much of what is between them is chaos.
fn whole_model(weights: &Weights, tokens: &[u32]) -> Result<(), Box<dyn Error>> {
    let fed = &tokens[..tokens.len() - 1];
    let reference = logits(weights, fed, Numerics::F32)?;
    let rounded = logits(weights, fed, Numerics::Int8)?;
    println!("int8 against f32, {} layers:", weights.layers.len());
    println!("position   error of logits   same best token   change of the next token's log-probability");
    let positions = compare(weights, tokens, &reference, &rounded);
    for (index, position) in positions.iter().enumerate() {
        let Position { error, same_best, change } = position;
        let same = if *same_best { "yes" } else { "no" };
        println!("{index:>8}   {:>13.2} %   {same:>15}   {change:>+8.4}", 100.0 * error);
    }
    println!("{}", summary(&positions));

    let mut moved = weights.clone();
    for (i, weight) in moved.layers[0].input_norm.iter_mut().enumerate() {
        *weight *= if i % 2 == 0 { 1.0 + NUDGE } else { 1.0 - NUDGE };
    }
    let moved = logits(&moved, fed, Numerics::Int8)?;
    println!("int8 against itself with the first layer's input norm moved by {} %:", 100.0 * NUDGE);
    println!("{}", summary(&compare(weights, tokens, &rounded, &moved)));
    Ok(())
}

/// What differs at one position.
struct Position {
    /// Of all logits.
    error: f64,
    same_best: bool,
    /// Of the log-probability of the token that comes next.
    change: f64,
}

/// Compares logits after every token but the last, `[tokens - 1, vocab]`.
fn compare(weights: &Weights, tokens: &[u32], reference: &[f32], other: &[f32]) -> Vec<Position> {
    let vocab = weights.geometry.vocab;
    let rows = reference.chunks_exact(vocab).zip(other.chunks_exact(vocab));
    rows.zip(&tokens[1..])
        .map(|((reference, other), &next)| {
            let mut error = Squares::default();
            error.add(reference, other);
            Position {
                error: error.relative(),
                same_best: argmax(reference) == argmax(other),
                change: logprob(other, next) - logprob(reference, next),
            }
        })
        .collect()
}

fn summary(positions: &[Position]) -> String {
    let count = positions.len();
    let mut errors: Vec<f64> = positions.iter().map(|position| position.error).collect();
    errors.sort_by(f64::total_cmp);
    let same = positions.iter().filter(|position| position.same_best).count();
    let change: f64 = positions.iter().map(|position| position.change.abs()).sum();
    format!(
        "{count} positions: median error of logits {:.2} %, same best token {:.1} %, mean change of \
         log-probability {:.4}",
        100.0 * errors[count / 2],
        100.0 * same as f64 / count as f64,
        change / count as f64
    )
}

/// Logits after every token, `[tokens, vocab]`.
fn logits(weights: &Weights, tokens: &[u32], numerics: Numerics) -> Result<Vec<f32>, Box<dyn Error>> {
    eprintln!("{} tokens through {} layers, {numerics:?}", tokens.len(), weights.layers.len());
    let begin = Instant::now();
    let options = CpuOptions { numerics, ctx_len: tokens.len(), ..CpuOptions::default() };
    let mut backend = CpuBackend::new(weights.clone(), options)?;
    let sequence = backend.open(None)?;
    let ticket = backend.extend(sequence, tokens, Want::AllLogits)?;
    let output = backend.collect(ticket)?.pop().ok_or("the backend returned nothing")?;
    eprintln!("took {:.1} s", begin.elapsed().as_secs_f64());
    Ok(output.logits)
}

fn argmax(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

fn logprob(logits: &[f32], token: u32) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    f64::from(logits[token as usize] - largest) - total.ln()
}
