//! Decode, recorded: one token of each of several sequences through all layers.
//!
//! Everything between two kernels lies in a buffer of the plan, in f32, but for what the experts multiply, which
//! is packed once by `moe_route` for all of them. A step's tokens are **rows**: every kernel takes all of them,
//! reads its weights once for all, and finds a row's position, pages and state through the step block
//! ([`crate::step`]). One row has kernels of its own; more have those whose names end in `_batch`, which
//! compute the same bits.
//!
//! `attn_core` writes the newest keys and values itself where there is one row. In a batch rows may follow each
//! other in one sequence (a prompt), so a kernel before it writes them all.
//!
//! The devices differ in few places. On CUDA a stage's weights are one argument, pages and states have addresses,
//! and several blocks share a value head. On Metal each projection lies in place, pages and states are numbers in
//! pools that are arguments, and attention has a second kernel for long contexts ([`long_context`]).

use lily_model::cost::used_experts;
use lily_model::geometry::{Geometry, LayerKind};
use lily_model::weights::{Format, LayerWeights, Matrix, Weights};

use crate::layout::{KvFormat, KvLayout, PAGE_TOKENS, StateLayout};
use crate::packing::{self, BF16, Group};
use crate::plan::{BufferId, Mode, Plan, Recorder, Recording, Role};
use crate::sampling;
use crate::stage::Stage;
use crate::target::{
    ASKED_AHEAD, CHUNK_INPUTS, CHUNK4_BYTES, CHUNK8_BYTES, Launch, TILE_ROWS, Target, WeightLayout,
};
use crate::workspace::{F32, PART_SCALARS, Sampling, U32, Workspace};

/// The most rows of a step.
pub const MAX_ROWS: usize = 32;
/// Parts that attention cuts a row's cache into at the most. A row that has few positions has fewer.
pub const SPANS: usize = 64;

/// Threads of a block that works on a row element by element.
const ROW_THREADS: u32 = 256;
/// Threads of the block that sorts a batch's choices.
const SELECT_THREADS: u32 = 1024;

/// What a plan is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The most rows of a step that the plan takes.
    pub rows: usize,
    /// The most positions that one has once the token is in its cache. Bytes depend on it, and how attention runs
    /// ahead, but no result.
    pub context: usize,
    /// Whether kernels stand behind the others that choose tokens as requests ask ([`crate::sampling`]). On CUDA they are
    /// launches of their own, and no plan has them.
    pub sampled: bool,
}

/// Parts that the cache of a row is cut into which has `positions` of them, each of whole pages: a function of the
/// row alone, so that its sums have the same order in every batch.
pub fn spans(positions: usize) -> usize {
    let pages = positions.div_ceil(PAGE_TOKENS).max(1);
    pages.div_ceil(pages.div_ceil(SPANS))
}

/// Whether a part of the longest cache has several pages. Attention then keeps several under way (CUDA), or gives
/// each SIMD-group pages of its own instead of sharing one out (Metal); what comes out of a row is the same.
pub fn long_context(context: usize) -> bool {
    context > SPANS * PAGE_TOKENS
}

/// Pages that a block of attention has under way on CUDA: what was fastest of either format on an H200.
pub fn pages_ahead(context: usize, kv: KvFormat) -> u32 {
    match (kv, long_context(context)) {
        (KvFormat::F16, false) => 1,
        (KvFormat::F16, true) | (KvFormat::Q8, false) => 3,
        (KvFormat::Q8, true) => 4,
    }
}

/// Records a decode step of `weights`, of which only shapes and formats are looked at.
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
    pass.sampling();
    pass.recorder.finish()
}

struct Pass<'a> {
    weights: &'a Weights,
    geometry: &'a Geometry,
    target: Target,
    shape: Shape,
    recorder: Recorder,
    to: Workspace,
    /// Rotary frequencies, `[rotary_dim / 2]`.
    frequencies: BufferId,
    /// The projections before each layer's mixer.
    inputs: Vec<Bound>,
    /// The head.
    head: Bound,
}

impl<'a> Pass<'a> {
    fn new(weights: &'a Weights, target: Target, shape: Shape) -> Pass<'a> {
        let geometry = &weights.geometry;
        let mut recorder = Recorder::new();
        let to = Workspace::new(&mut recorder, geometry, target, shape);
        let frequencies = (geometry.attention.rotary_dim / 2) as u64 * F32;
        let frequencies = recorder.buffer("inv_freq", Role::Weights, frequencies);
        let mut pass = Pass {
            weights,
            geometry,
            target,
            shape,
            recorder,
            to,
            frequencies,
            inputs: Vec::new(),
            head: Vec::new(),
        };
        for (index, layer) in weights.layers.iter().enumerate() {
            let input = pass.projections(index, &packing::groups(layer)[0], 1.0);
            pass.inputs.push(input);
        }
        pass.head = pass.whole(String::new(), &packing::outer_groups(weights)[1], |_| 1.0);
        pass
    }

    /// The kernel for so many rows.
    fn kernel(&self, one: &'static str, batch: &'static str) -> &'static str {
        if self.shape.rows == 1 { one } else { batch }
    }

    fn embed(&mut self) {
        let [group, _] = packing::outer_groups(self.weights);
        let matrix = group.matrices[0].1;
        let rows = self.shape.rows as u64;
        let (data, pairs) = (matrix.data_bytes() as u64, matrix.groups() as u64 * BF16);
        let per_row = |bytes: u64| rows * bytes / matrix.rows as u64;
        // Rows are taken from the table as the checkpoint has it, on every device.
        let parts: &[(&str, u64)] = match self.target.weights() {
            WeightLayout::Tiles => &[("", data), (".pairs", 2 * pairs)],
            WeightLayout::InPlace => &[("", data), (".scales", pairs), (".biases", pairs)],
        };
        let table: Vec<(BufferId, u64)> = parts
            .iter()
            .map(|&(part, bytes)| (self.weight(format!("embed{part}"), bytes), per_row(bytes)))
            .collect();
        let (step, x) = (self.to.step, self.to.x);
        let launch = Launch::plain([rows as u32, 1, 1], ROW_THREADS);
        let recording = self.recorder.dispatch("embed", Stage::Embed, None).reads(step);
        bind(recording, &table)
            .when(self.to.pools, |recording, pools| recording.reads_some(pools.sampled, rows * U32))
            .writes(x)
            .launch(launch)
            .end();
    }

    fn delta(&mut self, index: usize, layer: &LayerWeights) {
        let groups = packing::groups(layer);
        let norm = self.vector(index, layer, "input_norm");
        let [conv, a_log, dt_bias, gated_norm] =
            ["conv1d", "a_log", "dt_bias", "norm"].map(|name| self.vector(index, layer, name));
        let (ordinal, rows) = (self.ordinal(index), self.shape.rows as u64);
        let Workspace { projected, mixed, squares, recurrent, tails, step, .. } = self.to;
        self.input(self.kernel("delta_in", "delta_in_batch"), Stage::DeltaIn, index, &groups[0], norm);

        let state = StateLayout::new(self.geometry);
        let of_layer = |bytes: usize| {
            let bytes = rows * bytes as u64;
            ordinal * bytes..(ordinal + 1) * bytes
        };
        let (matrices, tail) = (of_layer(state.recurrent_bytes()), of_layer(state.tail_bytes()));
        let [projected_bytes, mixed_bytes] =
            [group_rows(&groups[0]).next_multiple_of(TILE_ROWS), self.geometry.delta.value_width()]
                .map(|width| rows * width as u64 * F32);
        let launch = self.target.recurrence(self.geometry.delta.value_heads, self.shape.rows);
        let (recurrent_pool, tails_pool) = (self.pool(recurrent), self.pool(tails));
        self.recorder
            .dispatch("delta_core", Stage::DeltaCore, Some(index))
            .reads(step)
            .reads_first(projected, projected_bytes)
            .reads(conv)
            .reads(a_log)
            .reads(dt_bias)
            .reads(gated_norm)
            .reach(recurrent, matrices.clone(), Mode::Update, matrices.end - matrices.start)
            .reach(tails, tail.clone(), Mode::Read, tail.end - tail.start)
            .when(recurrent_pool, Recording::pool)
            .writes_first(mixed, mixed_bytes)
            .when(squares, Recording::writes)
            .value(ordinal as u32)
            .launch(launch)
            .end();

        // Every block of the recurrence reads the old tail, so the next kernel moves it on.
        let channels = rows * self.geometry.delta.conv_channels() as u64 * F32;
        let launch = self.dense(&groups[1]);
        let matrix = self.projections(index, &groups[1], 1.0);
        let kernel = self.kernel("delta_out", "delta_out_batch");
        let (x, ahead) = (self.to.x, self.ahead(index));
        let recording = self.recorder.dispatch(kernel, Stage::DeltaOut, Some(index)).reads(step);
        let recording = bind(recording, &matrix)
            .reads_first(mixed, mixed_bytes)
            .when(squares, Recording::reads)
            .bind(projected, 0..projected_bytes, Mode::Read, channels)
            .reach(tails, tail.clone(), Mode::Write, tail.end - tail.start)
            // What stays of the old tail comes from the cache: delta_core has just read it.
            .when(tails_pool, |recording, pool| recording.reach(pool, tail.clone(), Mode::Read, 0).pool(pool))
            .updates(x)
            .launch(launch);
        match ahead {
            Some((next, bytes)) => recording.mentions(next).value(ordinal as u32).value(bytes).end(),
            None => recording.value(ordinal as u32).end(),
        }
    }

    fn attention(&mut self, index: usize, layer: &LayerWeights) {
        let groups = packing::groups(layer);
        let [norm, q_norm, k_norm] =
            ["input_norm", "q_norm", "k_norm"].map(|name| self.vector(index, layer, name));
        self.input(self.kernel("attn_in", "attn_in_batch"), Stage::AttnIn, index, &groups[0], norm);

        let attention = &self.geometry.attention;
        let (rows, ordinal, frequencies) = (self.shape.rows as u64, self.ordinal(index), self.frequencies);
        let Workspace { projected, mixed, parts, part_scalars, kv, step, .. } = self.to;
        let (heads, kv_heads) = (attention.heads as u32, attention.kv_heads as u32);
        let projected_bytes = rows * group_rows(&groups[0]).next_multiple_of(TILE_ROWS) as u64 * F32;
        let mixed_bytes = rows * (attention.heads * attention.head_dim) as u64 * F32;

        let position = KvLayout::new(self.geometry, self.target.kv()).position_bytes() as u64;
        let row = position * self.shape.context as u64;
        let start = ordinal * rows * row;
        let cache = start..start + rows * row;
        // The newest position of each row.
        let newest = (1..=rows).map(|r| start + r * row).map(|end| end - position..end);
        let spans = spans(self.shape.context) as u64;
        let span_bytes = |width: usize| rows * spans * (attention.heads * width) as u64 * F32;
        let (part_bytes, scalar_bytes) = (span_bytes(attention.head_dim), span_bytes(PART_SCALARS));

        let attention_launch = self.target.attention(attention.kv_heads, SPANS, self.shape.rows);
        let batch = self.shape.rows > 1;
        let (page_table, kv_pool) = (self.to.pools.map(|pools| pools.page_table), self.pool(kv));
        let pages = rows * self.shape.context.div_ceil(PAGE_TOKENS) as u64 * U32;
        if batch {
            let recording = self
                .recorder
                .dispatch("attn_kv_batch", Stage::AttnIn, Some(index))
                .reads(step)
                .when(page_table, |recording, table| recording.reads_some(table, rows * U32))
                .reads_first(projected, projected_bytes)
                .reads(k_norm)
                .reads(frequencies)
                .when(kv_pool, Recording::pool);
            newest
                .clone()
                .fold(recording, |recording, range| recording.reach(kv, range, Mode::Write, position))
                .value(ordinal as u32)
                .launch(Launch::plain([kv_heads, rows as u32, 1], ROW_THREADS))
                .end();
        }
        let context = self.shape.context;
        let kernel = if self.to.pools.is_some() && long_context(context) {
            self.kernel("attn_core_long", "attn_core_long_batch")
        } else {
            self.kernel("attn_core", "attn_core_batch")
        };
        let mut recording = self
            .recorder
            .dispatch(kernel, Stage::AttnCore, Some(index))
            .reads(step)
            .when(page_table, |recording, table| recording.reads_some(table, pages))
            .reads_first(projected, projected_bytes)
            .reads(q_norm)
            .reads(k_norm)
            .reads(frequencies)
            .when(kv_pool, Recording::pool)
            .writes_some(parts, part_bytes)
            .writes_some(part_scalars, scalar_bytes)
            .reach(kv, cache.clone(), Mode::Read, cache.end - cache.start);
        if !batch {
            recording =
                newest.fold(recording, |recording, range| recording.reach(kv, range, Mode::Write, position));
        }
        let ahead = self.to.pools.is_none().then(|| pages_ahead(context, self.target.kv()));
        recording.value(ordinal as u32).when(ahead, Recording::value).launch(attention_launch).end();
        self.recorder
            .dispatch("attn_merge", Stage::AttnCore, Some(index))
            .reads(step)
            .reads_some(parts, part_bytes)
            .reads_some(part_scalars, scalar_bytes)
            .reads_first(projected, projected_bytes)
            .writes_first(mixed, mixed_bytes)
            .launch(Launch::plain([heads, rows as u32, 1], ROW_THREADS))
            .end();

        let launch = self.dense(&groups[1]);
        let matrix = self.projections(index, &groups[1], 1.0);
        let kernel = self.kernel("attn_out", "attn_out_batch");
        let (x, ahead) = (self.to.x, self.ahead(index));
        let recording = self.recorder.dispatch(kernel, Stage::AttnOut, Some(index)).reads(step);
        let recording = bind(recording, &matrix).reads_first(mixed, mixed_bytes).updates(x).launch(launch);
        match ahead {
            Some((next, bytes)) => recording.mentions(next).value(bytes).end(),
            None => recording.end(),
        }
    }

    /// The norm and the projections before a mixer.
    fn input(&mut self, kernel: &'static str, stage: Stage, index: usize, group: &Group<'_>, norm: BufferId) {
        let launch = self.dense(group);
        let matrix = self.inputs[index].clone();
        let bytes = (self.shape.rows * group_rows(group).next_multiple_of(TILE_ROWS)) as u64 * F32;
        let Workspace { step, x, projected, .. } = self.to;
        let recording = self.recorder.dispatch(kernel, stage, Some(index)).reads(step);
        bind(recording, &matrix).reads(norm).reads(x).writes_first(projected, bytes).launch(launch).end();
    }

    fn experts(&mut self, index: usize, layer: &LayerWeights) {
        let (moe, hidden, rows) = (&self.geometry.moe, self.geometry.hidden, self.shape.rows);
        let groups = packing::groups(layer);
        let [.., route, up, down] = &groups[..] else { unreachable!("every layer has experts") };
        let used = used_experts(moe.experts, moe.top_k, rows) / moe.experts as f64;
        let norm = self.vector(index, layer, "post_norm");
        let router = self.projections(index, route, 1.0);
        let [up, down] = [up, down].map(|group| self.expert_projections(index, group, used));
        let [route_launch, up_launch, down_launch] = [
            self.target.moe_route(moe, rows),
            self.target.moe_up(moe, rows),
            self.target.moe_down(moe, hidden, rows),
        ];
        let choice = self.to.choices[index];
        // The tag of a choice is taken off half a pass before it is set again, where a kernel waits for it.
        let reset = self.to.choices[(index + self.to.choices.len() / 2) % self.to.choices.len()];
        let reset = self.to.pools.is_none().then_some(reset);
        let Workspace { step, x, router: logits, packed, inner, items, products, .. } = self.to;
        let inner_bytes = |experts: usize| (rows * experts * moe.expert_width) as u64 * F32;

        let kernel = self.kernel("moe_route", "moe_route_batch");
        let recording = self.recorder.dispatch(kernel, Stage::MoeRoute, Some(index)).reads(step);
        bind(bind(recording, &router), &up.shared)
            .reads(norm)
            .reads(x)
            .writes(logits)
            .writes(packed)
            .writes_some(inner, inner_bytes(1))
            .when(reset, |recording, reset| recording.writes_some(reset, rows as u64 * U32))
            .launch(route_launch)
            .end();
        if rows == 1 {
            let recording = self.recorder.dispatch("moe_up", Stage::MoeUp, Some(index)).reads(step);
            bind(recording, &up.routed)
                .reads(packed)
                .reads(logits)
                .writes_some(inner, inner_bytes(moe.top_k))
                .writes(choice)
                .launch(up_launch)
                .end();
            let recording = self.recorder.dispatch("moe_down", Stage::MoeDown, Some(index)).reads(step);
            bind(recording, &down.all).reads(inner).reads(choice).updates(x).launch(down_launch).end();
            return;
        }
        self.recorder
            .dispatch("moe_select_batch", Stage::MoeRoute, Some(index))
            .reads(step)
            .reads(logits)
            .writes(choice)
            .writes(items)
            .launch(Launch::plain([1, 1, 1], SELECT_THREADS))
            .end();
        let recording = self.recorder.dispatch("moe_up_batch", Stage::MoeUp, Some(index)).reads(step);
        bind(recording, &up.routed)
            .reads(packed)
            .reads(items)
            .writes_some(inner, inner_bytes(moe.top_k))
            .launch(up_launch)
            .end();
        let recording = self.recorder.dispatch("moe_down_batch", Stage::MoeDown, Some(index)).reads(step);
        bind(recording, &down.all).reads(inner).reads(items).writes(products).launch(down_launch).end();
        self.recorder
            .dispatch("moe_sum_batch", Stage::MoeDown, Some(index))
            .reads(step)
            .reads(products)
            .reads(choice)
            .updates(x)
            .launch(Launch::plain(
                [hidden.div_ceil(ROW_THREADS as usize) as u32, rows as u32, 1],
                ROW_THREADS,
            ))
            .end();
    }

    fn head(&mut self) {
        let [_, group] = packing::outer_groups(self.weights);
        let launch = self.dense(&group);
        let matrix = self.head.clone();
        let norm = self.weight("norm".into(), self.weights.norm.len() as u64 * F32);
        let Workspace { step, x, logits, best, tokens, .. } = self.to;
        let rows = self.shape.rows as u32;
        let kernel = self.kernel("head", "head_batch");
        let recording = self.recorder.dispatch(kernel, Stage::Head, None).reads(step);
        bind(recording, &matrix).reads(norm).reads(x).writes(logits).writes(best).launch(launch).end();
        let value = match self.to.pools {
            Some(_) => self.target.dense_blocks(self.geometry.vocab, self.shape.rows) as u32,
            // The host says the positions of every step.
            None => 0,
        };
        self.recorder
            .dispatch("sample", Stage::Sample, None)
            .reads(step)
            .reads(best)
            .when(self.to.pools, |recording, pools| {
                recording.writes_some(pools.sampled, u64::from(rows) * U32)
            })
            .writes_some(tokens, u64::from(rows) * U32)
            .value(value)
            .launch(Launch::plain([rows, 1, 1], ROW_THREADS))
            .end();
    }

    /// Tokens as requests ask, where the device has no addresses.
    fn sampling(&mut self) {
        let (Some(sampling), Some(pools)) = (self.to.sampling, self.to.pools) else { return };
        let Workspace { step, logits, tokens, .. } = self.to;
        let to = Chosen { sampling, step, logits, tokens, sampled: pools.sampled };
        choose(&mut self.recorder, &to, self.geometry.vocab, self.shape.rows as u32);
    }

    /// Memory that is an argument where it has no address.
    fn pool(&self, buffer: BufferId) -> Option<BufferId> {
        self.to.pools.map(|_| buffer)
    }

    /// Where layer `index` stands among those of its kind.
    fn ordinal(&self, index: usize) -> u64 {
        let layers = &self.geometry.layers;
        layers[..index].iter().filter(|&&kind| kind == layers[index]).count() as u64
    }

    /// The launch of a product with a group's matrices.
    fn dense(&self, group: &Group<'_>) -> Launch {
        self.target.dense(group_rows(group), self.shape.rows)
    }

    /// The matrix that is multiplied once layer `index` is done, where the device is told ahead.
    fn ahead(&self, index: usize) -> Option<(BufferId, u32)> {
        let (buffer, bytes) = *self.inputs.get(index + 1).unwrap_or(&self.head).first()?;
        let tells = self.target.weights() == WeightLayout::Tiles;
        tells.then_some((buffer, bytes.min(ASKED_AHEAD) as u32))
    }

    fn vector(&mut self, index: usize, layer: &LayerWeights, name: &str) -> BufferId {
        let vectors = packing::vectors(layer);
        let elements = vectors.iter().find(|(known, _)| *known == name).map_or(0, |(_, vector)| vector.len());
        self.weight(format!("layers.{index}.{name}"), elements as u64 * F32)
    }

    fn weight(&mut self, name: String, bytes: u64) -> BufferId {
        self.recorder.buffer(name, Role::Weights, bytes)
    }
}

/// What the kernels work with that choose tokens as requests ask.
pub(crate) struct Chosen {
    pub sampling: Sampling,
    pub step: BufferId,
    pub logits: BufferId,
    pub tokens: BufferId,
    pub sampled: BufferId,
}

/// Records them, for as many as `rows` rows of the head.
pub(crate) fn choose(recorder: &mut Recorder, to: &Chosen, vocab: usize, rows: u32) {
    let Sampling { row_recipes, recipes, tables, notes } = to.sampling;
    let parts = sampling::parts(vocab) as u32;
    let words = u64::from(rows) * U32;
    let [recipe_bytes, table_bytes, note_bytes] =
        [recipes, tables, notes].map(|buffer| 0..recorder.bytes(buffer));
    for (kernel, of_notes) in [
        ("sample_largest", Mode::Write),
        ("sample_weigh", Mode::Update),
        ("sample_list", Mode::Update),
        ("sample_choose", Mode::Read),
    ] {
        let chooses = kernel == "sample_choose";
        let of_sequence = if chooses { Mode::Update } else { Mode::Read };
        let grid = [if chooses { 1 } else { parts }, rows, 1];
        recorder
            .dispatch(kernel, Stage::Sample, None)
            .reads(to.step)
            .reads_some(row_recipes, words)
            .bind(recipes, recipe_bytes.clone(), of_sequence, recipe_bytes.end)
            .bind(tables, table_bytes.clone(), of_sequence, table_bytes.end)
            .reads(to.logits)
            .bind(notes, note_bytes.clone(), of_notes, note_bytes.end)
            .when(chooses.then_some(to.sampled), |recording, sampled| recording.writes_some(sampled, words))
            .when(chooses.then_some(to.tokens), |recording, tokens| recording.writes_some(tokens, words))
            .launch(Launch::plain(grid, sampling::THREADS))
            .end();
    }
}

/// Buffers of weights, and what is read of each.
type Bound = Vec<(BufferId, u64)>;

/// The projections of the experts, as three kernels bind them.
struct Experts {
    /// All, of which the routed experts in use and the shared one are read.
    all: Bound,
    /// All, of which the routed experts in use are read.
    routed: Bound,
    /// All, of which the shared expert is read.
    shared: Bound,
}

impl Pass<'_> {
    /// The buffers of a layer's group, of which the part `used` is read.
    fn projections(&mut self, index: usize, group: &Group<'_>, used: f64) -> Bound {
        self.whole(format!("layers.{index}."), group, |_| used)
    }

    /// The buffers of the experts' group, of whose routed part `used` is read.
    fn expert_projections(&mut self, index: usize, group: &Group<'_>, used: f64) -> Experts {
        let buffers: Vec<(BufferId, f64, f64)> = self.buffers(format!("layers.{index}."), group);
        let read = |routed: f64, shared: f64| {
            let bytes = |&(buffer, stacks, plain): &(BufferId, f64, f64)| {
                (buffer, (routed * stacks + shared * plain) as u64)
            };
            buffers.iter().map(bytes).filter(|&(_, bytes)| bytes > 0).collect::<Bound>()
        };
        Experts { all: read(used, 1.0), routed: read(used, 0.0), shared: read(0.0, 1.0) }
    }

    fn whole(&mut self, path: String, group: &Group<'_>, used: impl Fn(&Matrix) -> f64) -> Bound {
        let part = used(group.matrices[0].1);
        let buffers = self.buffers(path, group);
        buffers
            .into_iter()
            .map(|(buffer, stacks, plain)| (buffer, (part * (stacks + plain)) as u64))
            .collect()
    }

    /// The buffers of a group, and their bytes that are of stacks of experts and of plain matrices.
    fn buffers(&mut self, path: String, group: &Group<'_>) -> Vec<(BufferId, f64, f64)> {
        let path = path + group.name;
        let mut buffers = Vec::new();
        let mut add = |name: String, stacks: u64, plain: u64| {
            if stacks + plain > 0 {
                let buffer = self.recorder.buffer(name, Role::Weights, stacks + plain);
                buffers.push((buffer, stacks as f64, plain as f64));
            }
        };
        match self.target.weights() {
            WeightLayout::Tiles => {
                let bytes = |stacked: bool| {
                    let matrices = group.matrices.iter().map(|(_, matrix)| *matrix);
                    tile_bytes(matrices.filter(|matrix| (matrix.count > 1) == stacked))
                };
                add(path, bytes(true), bytes(false));
            }
            WeightLayout::InPlace => {
                for &(name, matrix) in &group.matrices {
                    for (part, bytes) in packing::parts(matrix) {
                        let (stacks, plain) = if matrix.count > 1 { (bytes, 0) } else { (0, bytes) };
                        add(format!("{path}.{name}{part}"), stacks, plain);
                    }
                }
            }
        }
        buffers
    }
}

/// Bytes of matrices that lie one after the other as tiles; stacks matrix by matrix.
pub fn tile_bytes<'m>(matrices: impl Iterator<Item = &'m Matrix>) -> u64 {
    let (mut rows, mut chunk) = (0, 0);
    for matrix in matrices {
        let bytes = if matrix.format == Format::Affine8 { CHUNK8_BYTES } else { CHUNK4_BYTES };
        chunk = matrix.cols.div_ceil(CHUNK_INPUTS) * bytes;
        rows += matrix.count * matrix.rows;
    }
    (rows.div_ceil(TILE_ROWS) * chunk) as u64
}

/// Rows of a group's matrices together, one of each stack.
fn group_rows(group: &Group<'_>) -> usize {
    group.matrices.iter().map(|(_, matrix)| matrix.rows).sum()
}

fn bind<'r>(recording: Recording<'r>, buffers: &Bound) -> Recording<'r> {
    buffers.iter().fold(recording, |recording, &(buffer, read)| recording.reads_some(buffer, read))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_is_cut_into_at_most_64_parts_of_whole_pages() {
        let parts = [0, 1, 64, 65, 256, 4096, 4097, 8192, 8193, 262_144].map(spans);
        assert_eq!(parts, [1, 1, 1, 2, 4, 64, 33, 64, 43, 64]);
    }
}
