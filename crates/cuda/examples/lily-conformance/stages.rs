//! Every stage against its plain f32 form.
//!
//! A pass is run kernel by kernel. Before a stage its inputs are read back from the card, after it its outputs; the
//! f32 form of `lily-cpu` is given the same inputs. So an error shows in the stage that makes it, and nowhere else.

use std::collections::BTreeMap;

use lily_cpu::stages::{
    attn_core, attn_in, attn_out, delta_core, delta_in, delta_out, embed, head, moe_down, moe_route, moe_up,
    sample,
};
use lily_engine::backend::BackendError;
use lily_model::checkpoint::Checkpoint;
use lily_model::geometry::Geometry;
use lily_model::synth;
use lily_model::weights::{LayerWeights, Mixer, Weights};

use crate::card::{Card, Part, State};
use crate::{Report, open, relative, within};

/// What a stage's outputs may differ at the worst of thousands, of their root mean square: 16 steps of rounding. Each input is rounded to
/// a step of at most this part of the largest of its 64; errors of some thousand inputs add up as random ones do, and
/// the demo's larger outputs are several times the root mean square.
const STEP: f32 = 1.0 / 1024.0;
const PRODUCTS: f32 = 16.0 * STEP;
/// The same of SwiGLU, which multiplies two products that were rounded each by itself: the sum of both errors.
const PRODUCTS_OF_TWO: f32 = 2.0 * PRODUCTS;
/// The same where keys, values or weights of attention are f16.
const ATTENTION: f32 = 4e-3;

/// The largest error of each stage, and what it may be.
#[derive(Default)]
struct Errors(BTreeMap<&'static str, (f32, f32)>);

impl Errors {
    fn compare(&mut self, stage: &'static str, found: &[f32], expected: &[f32], most: f32) {
        let error = relative(found, expected);
        let (worst, _) = self.0.entry(stage).or_insert((0.0, most));
        *worst = worst.max(error);
    }

    fn equal<T: PartialEq>(&mut self, stage: &'static str, found: &T, expected: &T) {
        self.compare(stage, &[f32::from(u8::from(found == expected))], &[1.0], 0.0);
    }
}

/// Tokens that a sequence has seen, and those that the traced pass adds.
type Seen = (usize, usize);

/// Runs the demo, and random weights with the full model's shapes in four layers.
pub fn run(report: &mut Report, device: usize) -> Result<(), String> {
    let cases: [(&str, &[Seen]); 4] = [
        ("one row", &[(100, 1)]),
        ("five sequences", &[(0, 1), (3, 1), (63, 1), (64, 1), (130, 1)]),
        ("a prompt", &[(70, 20)]),
        ("prompts and sequences", &[(1, 9), (200, 1), (30, 22)]),
    ];
    let demo = Checkpoint::demo().and_then(|demo| demo.weights()).map_err(|error| error.to_string())?;
    with_weights(report, "demo", &demo, device, &cases)?;
    let mut geometry = Geometry::qwen3_6_35b_a3b();
    geometry.layers.truncate(4);
    geometry.vocab = 8192;
    let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
    synth::write(dir.path(), &geometry, 1, &|_, _| {}).map_err(|error| error.to_string())?;
    let random = Checkpoint::open(dir.path()).and_then(|random| random.weights());
    with_weights(report, "random", &random.map_err(|error| error.to_string())?, device, &cases)
}

/// Traces passes over `weights`, one for each of `cases`.
pub fn with_weights(
    report: &mut Report,
    name: &str,
    weights: &Weights,
    device: usize,
    cases: &[(&str, &[Seen])],
) -> Result<(), String> {
    let backend = open(weights, device, 2048)?;
    let token = |i: usize| (i * 7919 + 13) as u32 % weights.geometry.vocab as u32;
    let tokens = |start: usize, count: usize| (start..start + count).map(token).collect::<Vec<u32>>();
    for (case, parts) in cases {
        let mut card = Card::new(&backend).map_err(|error| error.to_string())?;
        let mut errors = Errors::default();
        let parts: Vec<Part> = parts
            .iter()
            .map(|&(seen, more)| card.sequence(&tokens(seen, seen), &tokens(7 * seen, more)))
            .collect::<Result<_, _>>()
            .map_err(|error| error.to_string())?;
        trace(&mut card, weights, parts, &mut errors).map_err(|error| error.to_string())?;
        for (stage, (error, most)) in errors.0 {
            report.check(&format!("{stage}, {name}, {case}"), within(error, most));
        }
    }
    Ok(())
}

/// Runs one pass, comparing as it goes.
fn trace(
    card: &mut Card<'_>,
    weights: &Weights,
    parts: Vec<Part>,
    errors: &mut Errors,
) -> Result<(), BackendError> {
    let rows: usize = parts.iter().map(|part| part.tokens.len()).sum();
    let plan = card.begin(parts)?;
    let mut next = 0;
    // Runs the plan up to and with the next dispatch of a kernel.
    let mut until = |card: &Card<'_>, kernel: &str| -> Result<(), BackendError> {
        loop {
            let dispatch = &plan.dispatches[next];
            next += 1;
            card.launch(plan, dispatch)?;
            if dispatch.kernel.trim_end_matches("_batch") == kernel {
                return Ok(());
            }
        }
    };
    let geometry = &weights.geometry;
    let tokens: Vec<u32> = card.parts.iter().flat_map(|part| part.tokens.clone()).collect();
    until(card, "embed")?;
    let mut expected = vec![0.0; rows * geometry.hidden];
    embed::reference(&weights.embed_tokens.view(), &tokens, &mut expected);
    errors.compare("embed", &card.x(rows)?, &expected, 1e-6);
    for (index, layer) in weights.layers.iter().enumerate() {
        let x = card.x(rows)?;
        match &layer.mixer {
            Mixer::Delta(_) => {
                let before = card.states(index)?;
                until(card, "delta_in")?;
                let projected = delta_input(card, geometry, layer, &x, rows, errors)?;
                until(card, "delta_core")?;
                let core = recurrence(card, geometry, layer, index, &projected, before, rows, errors)?;
                until(card, "delta_out")?;
                let Mixer::Delta(mixer) = &layer.mixer else { unreachable!() };
                let mut expected = x;
                delta_out::reference(mixer, &core, &mut expected);
                errors.compare("delta_out", &card.x(rows)?, &expected, PRODUCTS);
            }
            Mixer::Attention(mixer) => {
                until(card, "attn_in")?;
                let projected = attention_input(card, geometry, layer, &x, rows, errors)?;
                until(card, "attn_merge")?;
                let mixed = attention(card, geometry, layer, index, &projected, rows, errors)?;
                until(card, "attn_out")?;
                let mut expected = x;
                attn_out::reference(mixer, &mixed, &mut expected);
                errors.compare("attn_out", &card.x(rows)?, &expected, PRODUCTS);
            }
        }
        experts(card, geometry, layer, index, rows, &mut until, errors)?;
    }
    let x = card.x(rows)?;
    until(card, "sample")?;
    let mut expected = vec![0.0; rows * geometry.vocab];
    head::reference(&weights.lm_head.view(), &weights.norm, geometry.rms_eps, &x, &mut expected);
    let logits = card.floats("logits", rows * geometry.vocab)?;
    errors.compare("head", &logits, &expected, PRODUCTS);
    let greedy: Vec<u32> = logits.chunks_exact(geometry.vocab).map(sample::greedy).collect();
    errors.equal("sample", &card.words("tokens", rows)?, &greedy);
    Ok(())
}

/// Columns `from..from + width` of rows that are `stride` wide.
fn columns(values: &[f32], stride: usize, from: usize, width: usize) -> Vec<f32> {
    values.chunks_exact(stride).flat_map(|row| &row[from..from + width]).copied().collect()
}

/// Queries, keys and values, gate, write strength and decay.
type DeltaProjections = [Vec<f32>; 4];

fn delta_input(
    card: &Card<'_>,
    geometry: &Geometry,
    layer: &LayerWeights,
    x: &[f32],
    rows: usize,
    errors: &mut Errors,
) -> Result<DeltaProjections, BackendError> {
    let Mixer::Delta(mixer) = &layer.mixer else { unreachable!("the caller looked") };
    let delta = &geometry.delta;
    let widths = [delta.conv_channels(), delta.value_width(), delta.value_heads, delta.value_heads];
    let stride = widths.iter().sum::<usize>().next_multiple_of(16);
    let all = card.floats("projected", rows * stride)?;
    let mut from = 0;
    let found = widths.map(|width| {
        from += width;
        columns(&all, stride, from - width, width)
    });
    let mut expected = widths.map(|width| vec![0.0; rows * width]);
    let [qkv, z, b, a] = &mut expected;
    delta_in::reference(
        mixer,
        &layer.input_norm,
        geometry.rms_eps,
        x,
        delta_in::Projections { qkv, z, b, a },
    );
    for (found, expected) in found.iter().zip(&expected) {
        errors.compare("delta_in", found, expected, PRODUCTS);
    }
    Ok(found)
}

/// Compares the recurrence and returns what the card's `delta_out` multiplies.
#[allow(clippy::too_many_arguments, reason = "one argument for each thing that is compared")]
fn recurrence(
    card: &Card<'_>,
    geometry: &Geometry,
    layer: &LayerWeights,
    index: usize,
    [qkv, z, b, a]: &DeltaProjections,
    mut states: Vec<State>,
    rows: usize,
    errors: &mut Errors,
) -> Result<Vec<f32>, BackendError> {
    let Mixer::Delta(mixer) = &layer.mixer else { unreachable!("the caller looked") };
    let delta = &geometry.delta;
    let (channels, width, heads) = (delta.conv_channels(), delta.value_width(), delta.value_heads);
    let mut expected = vec![0.0; rows * width];
    for ((state, tail), part) in states.iter_mut().zip(card.ranges()) {
        let of = |width: usize| part.start * width..part.end * width;
        let inputs = delta_core::Inputs {
            qkv: &qkv[of(channels)],
            z: &z[of(width)],
            b: &b[of(heads)],
            a: &a[of(heads)],
        };
        let out = &mut expected[of(width)];
        delta_core::reference(delta, mixer, geometry.rms_eps, inputs, state, tail, out);
    }
    // The card leaves the norm's last factor to the next kernel.
    let mut core = card.floats("mixed", rows * width)?;
    let squares = card.floats("squares", rows * heads * 4)?;
    for (head, squares) in core.chunks_exact_mut(delta.value_dim).zip(squares.chunks_exact(4)) {
        let inverse = 1.0 / (squares.iter().sum::<f32>() / delta.value_dim as f32 + geometry.rms_eps).sqrt();
        head.iter_mut().for_each(|value| *value *= inverse);
    }
    errors.compare("delta_core", &core, &expected, PRODUCTS);
    for ((found, _), (expected, _)) in card.states(index)?.iter().zip(&states) {
        errors.compare("delta_core's state", found, expected, PRODUCTS);
    }
    Ok(core)
}

fn attention_input(
    card: &Card<'_>,
    geometry: &Geometry,
    layer: &LayerWeights,
    x: &[f32],
    rows: usize,
    errors: &mut Errors,
) -> Result<[Vec<f32>; 3], BackendError> {
    let Mixer::Attention(mixer) = &layer.mixer else { unreachable!("the caller looked") };
    let matrices = [&mixer.q_proj, &mixer.k_proj, &mixer.v_proj];
    let stride = matrices.iter().map(|matrix| matrix.rows).sum::<usize>().next_multiple_of(16);
    let all = card.floats("projected", rows * stride)?;
    let normed = lily_cpu::plain::norm_rows(x, &layer.input_norm, geometry.rms_eps);
    let mut from = 0;
    Ok(matrices.map(|matrix| {
        let found = columns(&all, stride, from, matrix.rows);
        from += matrix.rows;
        let mut expected = vec![0.0; rows * matrix.rows];
        lily_cpu::plain::project(&matrix.view(), &normed, &mut expected);
        errors.compare("attn_in", &found, &expected, PRODUCTS);
        found
    }))
}

/// Compares attention, and what it wrote into the cache; returns what the card's `attn_out` multiplies.
fn attention(
    card: &Card<'_>,
    geometry: &Geometry,
    layer: &LayerWeights,
    index: usize,
    [query_and_gate, k, v]: &[Vec<f32>; 3],
    rows: usize,
    errors: &mut Errors,
) -> Result<Vec<f32>, BackendError> {
    let Mixer::Attention(mixer) = &layer.mixer else { unreachable!("the caller looked") };
    let attention = &geometry.attention;
    let (dim, width) = (attention.head_dim, attention.heads * attention.head_dim);
    let kv_width = attention.kv_heads * dim;
    let mixed = card.floats("mixed", rows * width)?;
    let normed = |head: &[f32], weight: &[f32], position: usize| {
        let mut head = head.to_vec();
        lily_cpu::plain::rms_norm_in_place(&mut head, weight, geometry.rms_eps);
        let mut angles = vec![0.0; attention.rotary_dim];
        attn_in::rotary_angles(attention, position, &mut angles);
        attn_in::rotate(&mut head[..attention.rotary_dim], &angles);
        head
    };
    for (part, range) in card.parts.iter().zip(card.ranges()) {
        let first = part.position;
        let cache = card.cache(part, index)?;
        let key =
            |position: usize, head: usize| &cache.keys[(head * cache.positions + position) * dim..][..dim];
        let value =
            |position: usize, head: usize| &cache.values[(head * cache.positions + position) * dim..][..dim];
        for row in range.clone() {
            let position = first + row - range.start;
            for head in 0..attention.kv_heads {
                let of = row * kv_width + head * dim..row * kv_width + (head + 1) * dim;
                let expected = normed(&k[of.clone()], &mixer.k_norm, position);
                errors.compare("attn_in's keys", key(position, head), &expected, ATTENTION);
                errors.compare("attn_in's values", value(position, head), &v[of], ATTENTION);
            }
            let (mut q, mut gate) = (Vec::new(), Vec::new());
            for head in query_and_gate[row * 2 * width..(row + 1) * 2 * width].chunks_exact(2 * dim) {
                q.extend(normed(&head[..dim], &mixer.q_norm, position));
                gate.extend(&head[dim..]);
            }
            let mut expected = vec![0.0; width];
            attn_core::reference(attention, position, &q, &gate, key, value, &mut expected);
            errors.compare("attn_core", &mixed[row * width..(row + 1) * width], &expected, ATTENTION);
        }
    }
    Ok(mixed)
}

fn experts(
    card: &Card<'_>,
    geometry: &Geometry,
    layer: &LayerWeights,
    index: usize,
    rows: usize,
    until: &mut dyn FnMut(&Card<'_>, &str) -> Result<(), BackendError>,
    errors: &mut Errors,
) -> Result<(), BackendError> {
    let (moe, eps) = (&geometry.moe, geometry.rms_eps);
    let x = card.x(rows)?;
    let mut normed = vec![0.0; x.len()];
    let mut choices = vec![moe_route::Choice::default(); rows * moe.top_k];
    let mut factors = vec![0.0; rows];
    moe_route::reference(moe, &layer.moe, &layer.post_norm, eps, &x, &mut normed, &mut choices, &mut factors);
    until(card, "moe_route")?;
    let stride = (moe.experts + 1).next_multiple_of(16);
    let logits = columns(&card.floats("router", rows * stride)?, stride, 0, moe.experts);
    let mut expected = vec![0.0; rows * moe.experts];
    lily_cpu::plain::project(&layer.moe.gate.view(), &normed, &mut expected);
    errors.compare("moe_route", &logits, &expected, PRODUCTS);

    until(card, "moe_up")?;
    let words = card.words(&format!("choices.{index}"), rows * 32)?;
    for (row, words) in words.chunks_exact(32).enumerate() {
        let choices = &mut choices[row * moe.top_k..(row + 1) * moe.top_k];
        let logits = &expected[row * moe.experts..(row + 1) * moe.experts];
        let logit = |expert: u32| logits[(expert as usize).min(moe.experts - 1)];
        // Experts whose logits are closer than the products' errors may change places.
        let distance = |(&id, choice): (&u32, &moe_route::Choice)| (logit(id) - logit(choice.expert)).abs();
        let missed = words.iter().zip(choices.iter()).map(distance).fold(0.0, f32::max);
        errors.compare("moe_up's choice", &[1.0 + missed], &[1.0], PRODUCTS);
        let total: f32 = words[..moe.top_k].iter().map(|&id| (logit(id) - logit(words[0])).exp()).sum();
        for (place, choice) in choices.iter_mut().enumerate() {
            choice.expert = words[place].min(moe.experts as u32 - 1);
            choice.weight = (logit(choice.expert) - logit(words[0])).exp() / total;
            let share = f32::from_bits(words[8 + place]);
            errors.compare("moe_up's shares", &[1.0 + share], &[1.0 + choice.weight], PRODUCTS);
            choice.weight = share;
        }
        let factor = f32::from_bits(words[16]);
        errors.compare("moe_up's shares", &[1.0 + factor], &[1.0 + factors[row]], PRODUCTS);
    }
    let (routed_width, shared_width) = (moe.top_k * moe.expert_width, moe.shared_width);
    let (mut routed, mut shared) = (vec![0.0; rows * routed_width], vec![0.0; rows * shared_width]);
    moe_up::reference(moe, &layer.moe, &normed, &choices, &mut routed, &mut shared);
    let inner = card.floats("inner", rows * (routed_width + shared_width))?;
    let inner_of = |from, width| columns(&inner, routed_width + shared_width, from, width);
    let (found_routed, found_shared) = (inner_of(0, routed_width), inner_of(routed_width, shared_width));
    errors.compare("moe_up", &found_routed, &routed, PRODUCTS_OF_TWO);
    errors.compare("moe_up's shared expert", &found_shared, &shared, PRODUCTS_OF_TWO);

    until(card, if rows == 1 { "moe_down" } else { "moe_sum" })?;
    let mut expected = x;
    moe_down::reference(moe, &layer.moe, &found_routed, &found_shared, &choices, &factors, &mut expected);
    errors.compare("moe_down", &card.x(rows)?, &expected, PRODUCTS);
    Ok(())
}
