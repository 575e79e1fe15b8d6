//! Prefill on Metal.
//!
//! A token's numbers do not depend on what it shares a pass with, so neither do they on how a prompt is cut, as long as all of it
//! goes through this program: sums have another order than decode's, so a token that came through decode has other bits.
//! The last rows of a pass, as many as the step block says, go through decode's head.
//!
//! All between two kernels is f32. Norms are folded into the product behind them, and every projection lies in place.
//!
//! # Blocks
//!
//! A threadgroup of a product takes a block of rows (`gemm.h`) and unpacks the weights once for it. Small blocks leave fewer rows
//! empty, large ones unpack less; [`Blocks`] says which is chosen. That depends on the plan alone: the kernels have
//! their sizes from the compiler.

use lily_model::cost::used_experts;
use lily_model::geometry::{Geometry, LayerKind};
use lily_model::weights::{LayerWeights, Weights};

use crate::decode::{self, Chosen, MAX_ROWS, Shape};
use crate::layout::{KvLayout, PAGE_TOKENS, StateLayout};
use crate::packing::{self, Group};
use crate::plan::{BufferId, Mode, Plan, Recorder, Recording, Role};
use crate::prompt::PromptLayout;
use crate::stage::Stage;
use crate::step::StepLayout;
use crate::target::{Launch, TILE_ROWS, Target};
use crate::workspace::{F32, Sampling, U32};

/// How many tokens passes take at the most, from the shortest on; a prompt is cut into pieces of the longest that there is memory for.
pub const PASSES: [usize; 4] = [32, 128, 512, 2048];
/// Rows of a block, from the smallest on.
pub const BLOCKS: [usize; 4] = [8, 16, 32, 64];
/// Matrix rows that a threadgroup of a product takes.
pub const COLUMNS: usize = 64;
/// Rows that a threadgroup chooses experts for, and that it sorts.
pub const SORT_ROWS: usize = 32;
/// What unpacking a block's weights takes, in rows that are multiplied meanwhile: an assumption, not measured.
const UNPACKING: f64 = 8.0;

/// Threads of a product, of a kernel that works on rows element by element, of the convolution, and of attention.
const GEMM_THREADS: u32 = 128;
const ROW_THREADS: u32 = 256;
const CONV_THREADS: u32 = 128;
const ATTENTION_THREADS: u32 = 128;
/// Tokens of a threadgroup of the convolution, and parts that a head's recurrence is cut into.
const CONV_ROWS: usize = 16;
const SCAN_PARTS: u32 = 4;
/// Heads of a threadgroup of the gated norm, and positions of one of attention.
const NORM_HEADS: usize = 8;
const POSITIONS: usize = 2;
/// Words of a row's choice of experts, of a block, and of a row's largest logit in a threadgroup of the head.
const CHOICE_WORDS: usize = 32;
const BLOCK_WORDS: usize = 4;
const BEST_WORDS: usize = 2;

/// What a product's blocks are filled from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Blocks {
    /// So many rows, one after the other.
    Rows(usize),
    /// The rows of each of many experts, so many on average. Of each expert's the last block is half empty.
    Experts(f64),
}

impl Blocks {
    /// What the product takes where blocks have `size` rows, in rows: all blocks, each with its unpacking.
    pub fn cost(self, size: usize) -> f64 {
        let blocks = match self {
            Blocks::Rows(rows) => rows.div_ceil(size) as f64,
            Blocks::Experts(rows) => rows / size as f64 + 0.5,
        };
        blocks * (size as f64 + UNPACKING)
    }

    /// The rows of a block that takes least, the larger among equals.
    pub fn size(self) -> usize {
        let least = BLOCKS.into_iter().rev().min_by(|&a, &b| self.cost(a).total_cmp(&self.cost(b)));
        least.unwrap_or(BLOCKS[0])
    }
}

/// Rows of a block of the dense products, and of the experts', in a plan for `rows` tokens.
pub fn block_rows(geometry: &Geometry, rows: usize) -> (usize, usize) {
    let routed = (rows * geometry.moe.top_k) as f64 / geometry.moe.experts as f64;
    (Blocks::Rows(rows).size(), Blocks::Experts(routed).size())
}

/// Rows that a matrix meets in a pass of `rows` tokens: a dense one, and one of an expert's on average.
pub fn matrix_rows(geometry: &Geometry, rows: usize) -> (usize, usize) {
    (rows, rows * geometry.moe.top_k / geometry.moe.experts)
}

/// Rows of a block of `kernel`, where it is a product of [`record`]'s plans.
pub fn kernel_rows(kernel: &str) -> Option<usize> {
    kernel.rsplit_once("_prefill_").and_then(|(_, rows)| rows.parse().ok())
}

/// The instances of a kernel for [`BLOCKS`].
type Sized = [&'static str; BLOCKS.len()];
macro_rules! sized {
    ($name:literal) => {
        [concat!($name, "_8"), concat!($name, "_16"), concat!($name, "_32"), concat!($name, "_64")]
    };
}

fn instance(names: Sized, size: usize) -> &'static str {
    names[BLOCKS.iter().position(|&known| known == size).unwrap_or(0)]
}

/// Records the prefill of at most `shape.rows` tokens of one sequence, which has `shape.context` positions then.
/// Only shapes and formats of `weights` are looked at.
pub fn record(weights: &Weights, target: Target, shape: Shape) -> Plan {
    let mut pass = Pass::new(weights, target, shape);
    pass.embed();
    for (index, layer) in weights.layers.iter().enumerate() {
        match weights.geometry.layers[index] {
            LayerKind::Delta => pass.delta(index, layer),
            LayerKind::Attention => pass.attention(index, layer),
        }
        pass.experts(index, layer);
    }
    pass.head();
    pass.recorder.finish()
}

/// What stages hand to each other; f32 where nothing else is said.
struct Workspace {
    prompt: BufferId,
    /// What the head is told: the step block of the rows that want logits.
    step: BufferId,
    page_table: BufferId,
    /// Residual stream, `[rows, hidden]`.
    x: BufferId,
    /// `[rows, projections of the layer]`, each row a whole number of tiles.
    projected: BufferId,
    /// Queries, keys and values after the convolution, queries and keys scaled: `[rows, conv_channels]`.
    convolved: BufferId,
    /// Decay and write strength, `[rows, value_heads, 2]`.
    gates: BufferId,
    /// What the mixers leave, `[rows, width]`.
    mixed: BufferId,
    /// Router logits and the shared expert's, `[rows, experts + 1]` in whole tiles.
    router: BufferId,
    /// u32 `[rows, CHOICE_WORDS]`.
    choice: BufferId,
    /// u32 `[groups of SORT_ROWS rows, experts]`: how many of them chose each.
    histogram: BufferId,
    /// u32 `[rows * (top_k + 1)]`: slots, sorted by expert.
    sorted: BufferId,
    /// u32: how many blocks, then [`BLOCK_WORDS`] of each.
    blocks: BufferId,
    /// `[rows, top_k + 1, expert_width]`, the shared expert last.
    inner: BufferId,
    /// `[rows, top_k + 1, hidden]`.
    products: BufferId,
    /// The rows that want logits, `[MAX_ROWS, hidden]`.
    last: BufferId,
    recurrent: BufferId,
    tails: BufferId,
    kv: BufferId,
}

struct Pass<'a> {
    weights: &'a Weights,
    geometry: &'a Geometry,
    target: Target,
    shape: Shape,
    /// Rows of a block of the products with all rows.
    dense_rows: usize,
    /// Rows of a block of the experts' products, and the most blocks that there can be.
    expert_rows: usize,
    most_blocks: usize,
    recorder: Recorder,
    to: Workspace,
    frequencies: BufferId,
}

impl<'a> Pass<'a> {
    fn new(weights: &'a Weights, target: Target, shape: Shape) -> Pass<'a> {
        let geometry = &weights.geometry;
        let Geometry { hidden, attention, delta, moe, .. } = geometry;
        let routed = shape.rows * moe.top_k;
        let (dense_rows, expert_rows) = block_rows(geometry, shape.rows);
        // Every expert that has rows may leave a block partly filled.
        let most_blocks = routed / expert_rows + moe.experts.min(routed) + shape.rows.div_ceil(expert_rows);
        let rows = shape.rows as u64;
        let mut recorder = Recorder::new();
        let mut of =
            |name: &str, bytes_a_row: u64| recorder.buffer(name, Role::Activations, rows * bytes_a_row);
        let f32 = |width: usize| width as u64 * F32;
        let tiled = |rows: usize| rows.next_multiple_of(TILE_ROWS);
        let width = attention.heads * attention.head_dim;
        let slots = moe.top_k + 1;
        let projected = tiled(delta.conv_channels() + delta.value_width() + 2 * delta.value_heads)
            .max(tiled(2 * width + 2 * attention.kv_heads * attention.head_dim));
        let (state, kv) = (StateLayout::new(geometry), KvLayout::new(geometry, target.kv()));
        let (delta_layers, attention_layers) =
            (geometry.count(LayerKind::Delta), geometry.count(LayerKind::Attention));
        let to = Workspace {
            x: of("x", f32(*hidden)),
            projected: of("projected", f32(projected)),
            convolved: of("convolved", f32(delta.conv_channels())),
            gates: of("gates", f32(2 * delta.value_heads)),
            mixed: of("mixed", f32(width.max(delta.value_width()))),
            router: of("router", f32(tiled(moe.experts + 1))),
            choice: of("choice", CHOICE_WORDS as u64 * U32),
            sorted: of("sorted", slots as u64 * U32),
            inner: of("inner", f32(slots * moe.expert_width)),
            products: of("products", f32(slots * hidden)),
            histogram: recorder.buffer(
                "histogram",
                Role::Activations,
                (shape.rows.div_ceil(SORT_ROWS) * moe.experts) as u64 * U32,
            ),
            blocks: recorder.buffer(
                "blocks",
                Role::Activations,
                ((1 + most_blocks) * BLOCK_WORDS) as u64 * U32,
            ),
            last: recorder.buffer("last", Role::Activations, (MAX_ROWS * hidden) as u64 * F32),
            prompt: recorder.buffer("prompt", Role::Step, PromptLayout::bytes(shape.rows) as u64),
            step: recorder.buffer("step", Role::Step, StepLayout::BYTES as u64),
            page_table: recorder.buffer(
                "page_table",
                Role::Step,
                shape.context.div_ceil(PAGE_TOKENS) as u64 * U32,
            ),
            recurrent: recorder.buffer(
                "recurrent",
                Role::State,
                (delta_layers * state.recurrent_bytes()) as u64,
            ),
            tails: recorder.buffer("tails", Role::State, (delta_layers * state.tail_bytes()) as u64),
            kv: recorder.buffer(
                "kv",
                Role::Kv,
                (attention_layers * kv.position_bytes() * shape.context) as u64,
            ),
        };
        let frequencies = (attention.rotary_dim / 2) as u64 * F32;
        let frequencies = recorder.buffer("inv_freq", Role::Weights, frequencies);
        Pass {
            weights,
            geometry,
            target,
            shape,
            dense_rows,
            expert_rows,
            most_blocks,
            recorder,
            to,
            frequencies,
        }
    }

    fn rows(&self) -> u32 {
        self.shape.rows as u32
    }

    /// Bytes of `width` numbers a row.
    fn floats(&self, width: usize) -> u64 {
        (self.shape.rows * width) as u64 * F32
    }

    /// A dispatch that is told of the prompt.
    fn dispatch(&mut self, kernel: &'static str, stage: Stage, layer: Option<usize>) -> Recording<'_> {
        let prompt = self.to.prompt;
        self.recorder.dispatch(kernel, stage, layer).reads(prompt)
    }

    /// The launch of such a product with a matrix of `columns` rows.
    fn dense(&self, columns: usize) -> Launch {
        let blocks = self.shape.rows.div_ceil(self.dense_rows);
        Launch::plain([blocks as u32, columns.div_ceil(COLUMNS) as u32, 1], GEMM_THREADS)
    }

    fn embed(&mut self) {
        let [group, _] = packing::outer_groups(self.weights);
        let matrix = group.matrices[0].1;
        let rows = self.shape.rows as u64;
        let table: Bound = packing::parts(matrix)
            .into_iter()
            .map(|(part, bytes)| {
                let buffer = self.recorder.buffer(format!("embed{part}"), Role::Weights, bytes);
                (buffer, rows * bytes / matrix.rows as u64)
            })
            .collect();
        let (x, grid) = (self.to.x, [self.rows(), 1, 1]);
        let recording = self.dispatch("embed_prefill", Stage::Embed, None);
        bind(recording, &table).writes(x).launch(Launch::plain(grid, ROW_THREADS)).end();
    }

    /// The norm and the projections before a mixer.
    fn input(&mut self, names: Sized, stage: Stage, index: usize, layer: &LayerWeights, group: &Group<'_>) {
        let norm = self.vector(index, layer, "input_norm");
        let matrices = self.matrices(index, group, 1.0);
        let columns = group_rows(group);
        let bytes = self.floats(columns.next_multiple_of(TILE_ROWS));
        let (launch, kernel) = (self.dense(columns), instance(names, self.dense_rows));
        let (x, projected) = (self.to.x, self.to.projected);
        let recording = self.dispatch(kernel, stage, Some(index));
        bind(recording, &matrices).reads(norm).reads(x).writes_first(projected, bytes).launch(launch).end();
    }

    /// The projection after a mixer, added to the residual stream.
    fn output(&mut self, names: Sized, stage: Stage, index: usize, group: &Group<'_>) {
        let matrices = self.matrices(index, group, 1.0);
        let bytes = self.floats(group.matrices[0].1.cols);
        let (launch, kernel) = (self.dense(group_rows(group)), instance(names, self.dense_rows));
        let (x, mixed) = (self.to.x, self.to.mixed);
        let recording = self.dispatch(kernel, stage, Some(index));
        bind(recording, &matrices).reads_first(mixed, bytes).updates(x).launch(launch).end();
    }

    fn delta(&mut self, index: usize, layer: &LayerWeights) {
        let groups = packing::groups(layer);
        let delta = &self.geometry.delta;
        let (rows, ordinal) = (self.rows(), self.ordinal(index));
        self.input(sized!("delta_in_prefill"), Stage::DeltaIn, index, layer, &groups[0]);

        let [conv, a_log, dt_bias, norm] =
            ["conv1d", "a_log", "dt_bias", "norm"].map(|name| self.vector(index, layer, name));
        let Workspace { projected, convolved, gates, mixed, recurrent, tails, .. } = self.to;
        let state = StateLayout::new(self.geometry);
        let of_layer = |bytes: usize| ordinal * bytes as u64..(ordinal + 1) * bytes as u64;
        let (matrices, tail) = (of_layer(state.recurrent_bytes()), of_layer(state.tail_bytes()));
        let (matrix_bytes, tail_bytes) = (state.recurrent_bytes() as u64, state.tail_bytes() as u64);
        let projected_bytes = self.floats(group_rows(&groups[0]).next_multiple_of(TILE_ROWS));
        let qkv_bytes = self.floats(delta.conv_channels());
        let z_bytes = self.floats(delta.value_width());
        let conv_heads = (2 * delta.key_heads + delta.value_heads) as u32;
        self.dispatch("delta_conv_prefill", Stage::DeltaCore, Some(index))
            .bind(projected, 0..projected_bytes, Mode::Read, projected_bytes - z_bytes)
            .reads(conv)
            .reads(a_log)
            .reads(dt_bias)
            .pool(tails)
            .reach(tails, tail.clone(), Mode::Read, tail_bytes)
            .writes(convolved)
            .writes(gates)
            .value(ordinal as u32)
            .launch(Launch::plain([conv_heads, rows.div_ceil(CONV_ROWS as u32), 1], CONV_THREADS))
            .end();
        let tail_rows = tail_bytes.min(qkv_bytes);
        self.dispatch("delta_scan_prefill", Stage::DeltaCore, Some(index))
            .reads(convolved)
            .reads(gates)
            .bind(projected, 0..projected_bytes, Mode::Read, tail_rows)
            .pool(recurrent)
            .reach(recurrent, matrices, Mode::Update, matrix_bytes)
            .reach(tails, tail, Mode::Update, tail_bytes)
            .writes_first(mixed, z_bytes)
            .value(ordinal as u32)
            .launch(Launch::plain([delta.value_heads as u32, SCAN_PARTS, 1], ROW_THREADS))
            .end();
        let head_groups = delta.value_heads.div_ceil(NORM_HEADS) as u32;
        self.dispatch("delta_norm_prefill", Stage::DeltaCore, Some(index))
            .bind(projected, 0..projected_bytes, Mode::Read, z_bytes)
            .reads(norm)
            .bind(mixed, 0..z_bytes, Mode::Update, z_bytes)
            .launch(Launch::plain([head_groups, rows, 1], ROW_THREADS))
            .end();
        self.output(sized!("delta_out_prefill"), Stage::DeltaOut, index, &groups[1]);
    }

    fn attention(&mut self, index: usize, layer: &LayerWeights) {
        let groups = packing::groups(layer);
        let attention = &self.geometry.attention;
        let (rows, ordinal, frequencies) = (self.rows(), self.ordinal(index), self.frequencies);
        self.input(sized!("attn_in_prefill"), Stage::AttnIn, index, layer, &groups[0]);

        let [q_norm, k_norm] = ["q_norm", "k_norm"].map(|name| self.vector(index, layer, name));
        let Workspace { projected, mixed, kv, page_table, .. } = self.to;
        let projected_bytes = self.floats(group_rows(&groups[0]).next_multiple_of(TILE_ROWS));
        let width = attention.heads * attention.head_dim;
        let (query_bytes, mixed_bytes) = (self.floats(2 * width), self.floats(width));
        let position = KvLayout::new(self.geometry, self.target.kv()).position_bytes() as u64;
        let all = position * self.shape.context as u64;
        let (cache, new) =
            (ordinal * all..(ordinal + 1) * all, position * u64::from(rows).min(self.shape.context as u64));
        let kv_heads = attention.kv_heads as u32;
        self.dispatch("attn_kv_prefill", Stage::AttnIn, Some(index))
            .reads(page_table)
            .bind(projected, 0..projected_bytes, Mode::Read, projected_bytes - query_bytes)
            .reads(k_norm)
            .reads(frequencies)
            .pool(kv)
            .reach(kv, cache.end - new..cache.end, Mode::Write, new)
            .value(ordinal as u32)
            .launch(Launch::plain([kv_heads, rows, 1], ROW_THREADS))
            .end();
        self.dispatch("attn_core_prefill", Stage::AttnCore, Some(index))
            .reads(page_table)
            .bind(projected, 0..projected_bytes, Mode::Read, query_bytes)
            .reads(q_norm)
            .reads(frequencies)
            .pool(kv)
            .reach(kv, cache, Mode::Read, all)
            .writes_first(mixed, mixed_bytes)
            .value(ordinal as u32)
            .launch(Launch::plain([kv_heads, rows.div_ceil(POSITIONS as u32), 1], ATTENTION_THREADS))
            .end();
        self.output(sized!("attn_out_prefill"), Stage::AttnOut, index, &groups[1]);
    }

    fn experts(&mut self, index: usize, layer: &LayerWeights) {
        let groups = packing::groups(layer);
        let [.., route, up, down] = &groups[..] else { unreachable!("every layer has experts") };
        let (moe, hidden, rows) = (&self.geometry.moe, self.geometry.hidden, self.rows());
        let norm = self.vector(index, layer, "post_norm");
        let Workspace { x, router, choice, histogram, sorted, blocks, inner, products, .. } = self.to;
        let matrices = self.matrices(index, route, 1.0);
        let (launch, kernel) =
            (self.dense(moe.experts + 1), instance(sized!("moe_route_prefill"), self.dense_rows));
        let recording = self.dispatch(kernel, Stage::MoeRoute, Some(index));
        bind(recording, &matrices).reads(norm).reads(x).writes(router).launch(launch).end();
        let sort = Launch::plain([rows.div_ceil(SORT_ROWS as u32), 1, 1], ROW_THREADS);
        self.dispatch("moe_select_prefill", Stage::MoeRoute, Some(index))
            .reads(router)
            .writes(choice)
            .writes(histogram)
            .launch(sort)
            .end();
        let expert_rows = self.expert_rows;
        self.dispatch("moe_sort_prefill", Stage::MoeRoute, Some(index))
            .reads(choice)
            .reads(histogram)
            .writes(sorted)
            .writes(blocks)
            .value(expert_rows as u32)
            .launch(sort)
            .end();

        let used = used_experts(moe.experts, moe.top_k, self.shape.rows) / moe.experts as f64;
        let launch = |columns: usize, width: usize, blocks: usize| {
            Launch::plain([blocks as u32, columns.div_ceil(width) as u32, 1], GEMM_THREADS)
        };
        // Of a tile half the columns are of gate, half of up.
        let up_launch = launch(moe.expert_width, COLUMNS / 2, self.most_blocks);
        let down_launch = launch(hidden, COLUMNS, self.most_blocks);
        let matrices = self.matrices(index, up, used);
        let recording =
            self.dispatch(instance(sized!("moe_up_prefill"), expert_rows), Stage::MoeUp, Some(index));
        bind(recording, &matrices)
            .reads(norm)
            .reads(x)
            .reads(sorted)
            .reads(blocks)
            .writes(inner)
            .launch(up_launch)
            .end();
        let matrices = self.matrices(index, down, used);
        let recording =
            self.dispatch(instance(sized!("moe_down_prefill"), expert_rows), Stage::MoeDown, Some(index));
        bind(recording, &matrices)
            .reads(inner)
            .reads(sorted)
            .reads(blocks)
            .writes(products)
            .launch(down_launch)
            .end();
        self.dispatch("moe_sum_prefill", Stage::MoeDown, Some(index))
            .reads(products)
            .reads(choice)
            .updates(x)
            .launch(Launch::plain([hidden.div_ceil(ROW_THREADS as usize) as u32, rows, 1], ROW_THREADS))
            .end();
    }

    /// Decode's head, of the rows that want logits, and their tokens.
    fn head(&mut self) {
        let [_, group] = packing::outer_groups(self.weights);
        let vocab = self.geometry.vocab;
        let (launch, blocks) =
            (self.target.dense(vocab, MAX_ROWS), self.target.dense_blocks(vocab, MAX_ROWS));
        let matrix = self.parts_of("head", &group, 1.0);
        let norm = self.weights.norm.len() as u64 * F32;
        let norm = self.recorder.buffer("norm", Role::Weights, norm);
        let rows = MAX_ROWS as u64;
        let logits = self.recorder.buffer("logits", Role::Activations, rows * vocab as u64 * F32);
        let best = self.recorder.buffer("best", Role::Activations, rows * (blocks * BEST_WORDS) as u64 * U32);
        let tokens = self.recorder.buffer("tokens", Role::Activations, rows * U32);
        let sampled = self.recorder.buffer("sampled", Role::State, U32);
        let Workspace { step, x, last, .. } = self.to;
        // One row is what a prompt asks for.
        let row = self.geometry.hidden as u64 * F32;
        self.dispatch("head_rows_prefill", Stage::Head, None)
            .reads(step)
            .reads_some(x, row)
            .writes_some(last, row)
            .launch(Launch::plain([MAX_ROWS as u32, 1, 1], ROW_THREADS))
            .end();
        let recording = self.recorder.dispatch("head_batch", Stage::Head, None).reads(step);
        bind(recording, &matrix)
            .reads(norm)
            .reads_some(last, row)
            .writes_some(logits, vocab as u64 * F32)
            .writes_some(best, (blocks * BEST_WORDS) as u64 * U32)
            .launch(launch)
            .end();
        self.recorder
            .dispatch("sample", Stage::Sample, None)
            .reads(step)
            .reads_some(best, (blocks * BEST_WORDS) as u64 * U32)
            .writes_some(sampled, U32)
            .writes_some(tokens, U32)
            .value(blocks as u32)
            .launch(Launch::plain([MAX_ROWS as u32, 1, 1], ROW_THREADS))
            .end();
        if self.shape.sampled {
            let sampling = Sampling::new(&mut self.recorder, vocab, rows);
            let to = Chosen { sampling, step, logits, tokens, sampled };
            decode::choose(&mut self.recorder, &to, vocab, MAX_ROWS as u32);
        }
    }

    /// Where layer `index` stands among those of its kind.
    fn ordinal(&self, index: usize) -> u64 {
        let layers = &self.geometry.layers;
        layers[..index].iter().filter(|&&kind| kind == layers[index]).count() as u64
    }

    /// The buffers of a layer's group, of whose experts the part `used` is read.
    fn matrices(&mut self, index: usize, group: &Group<'_>, used: f64) -> Bound {
        self.parts_of(&format!("layers.{index}.{}", group.name), group, used)
    }

    fn parts_of(&mut self, path: &str, group: &Group<'_>, used: f64) -> Bound {
        let mut bound = Vec::new();
        for &(name, matrix) in &group.matrices {
            for (part, bytes) in packing::parts(matrix) {
                let read = if matrix.count > 1 { (used * bytes as f64) as u64 } else { bytes };
                let buffer = self.recorder.buffer(format!("{path}.{name}{part}"), Role::Weights, bytes);
                bound.push((buffer, read));
            }
        }
        bound
    }

    fn vector(&mut self, index: usize, layer: &LayerWeights, name: &str) -> BufferId {
        let vectors = packing::vectors(layer);
        let elements = vectors.iter().find(|(known, _)| *known == name).map_or(0, |(_, vector)| vector.len());
        self.recorder.buffer(format!("layers.{index}.{name}"), Role::Weights, elements as u64 * F32)
    }
}

/// Buffers of weights, and what is read of each.
type Bound = Vec<(BufferId, u64)>;

fn bind<'r>(recording: Recording<'r>, buffers: &Bound) -> Recording<'r> {
    buffers.iter().fold(recording, |recording, &(buffer, read)| recording.reads_some(buffer, read))
}

/// Rows of a group's matrices together, one of each stack.
fn group_rows(group: &Group<'_>) -> usize {
    group.matrices.iter().map(|(_, matrix)| matrix.rows).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_as_large_as_pays() {
        let dense = [1, 8, 9, 17, 32, 33, 64, 100, 4096].map(|rows| Blocks::Rows(rows).size());
        assert_eq!(dense, [8, 8, 16, 32, 32, 64, 64, 64, 64]);
        // Experts' rows in chunks of 32, 128, 512, 2,048 and 8,192 tokens of the full model.
        let experts = [1.0, 4.0, 16.0, 64.0, 256.0].map(|rows| Blocks::Experts(rows).size());
        assert_eq!(experts, [8, 8, 16, 32, 64]);
    }

    #[test]
    fn a_product_says_in_its_name_how_many_rows_its_blocks_have() {
        for (name, rows) in sized!("moe_up_prefill").into_iter().zip(BLOCKS) {
            assert_eq!(kernel_rows(name), Some(rows));
        }
        assert_eq!(["moe_sum_prefill", "head_batch"].map(kernel_rows), [None; 2]);
    }
}
