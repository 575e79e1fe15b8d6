//! Prefill on CUDA.
//!
//! A token's results do not depend on the tokens beside it, so a prompt can be cut into passes; cut at multiples of 64
//! positions, it has the same bits however it is cut. They are not decode's bits: weights are rounded to f16 here, next
//! to the tensor cores, and whole rows added there. There is no head: the last token of a prompt, whose logits are
//! wanted, goes through decode.
//!
//! Activations that meet quantized weights are written as f16 by the kernel before the product, as the tensor cores
//! want them ("operands"): eight rows stand together. A kernel's module says how many rows a block takes along y, and how
//! many blocks there are along x where that depends on the model alone.

use lily_model::cost::used_experts;
use lily_model::geometry::{Geometry, LayerKind};
use lily_model::weights::{LayerWeights, Weights};

use crate::decode::{Shape, tile_bytes};
use crate::layout::{KvFormat, KvLayout, StateLayout};
use crate::packing::{self, BF16, Group};
use crate::plan::{BufferId, Mode, Plan, Recorder, Recording, Role};
use crate::prompt::PromptLayout;
use crate::stage::Stage;
use crate::target::{CHUNK_INPUTS, Launch, TILE_ROWS, Target};
use crate::workspace::{F32, U32};

/// The most tokens that a pass takes: on an H200's 132 multiprocessors attention has a whole number of turns then, and so have most products.
pub const MOST_ROWS: usize = 64 * 132;
/// Tiles of a matrix that a block of a product takes.
pub const BLOCK_TILES: usize = 8;
/// Matrix rows whose results of a token stand together.
pub const COLUMN: usize = 128;
/// The least that a run of an expert's rows may be limited to, and the most that it may have: cards differ.
pub const RUN_ROWS: std::ops::RangeInclusive<usize> = 64..=144;
/// Tokens that a block chooses experts for, and that a block sorts.
pub const SELECT_ROWS: usize = 8;
/// See [`SELECT_ROWS`].
pub const SORT_ROWS: usize = 128;
/// Positions of a group, of which attention takes the query heads of a KV head together. Groups begin at multiples of it, so that the
/// first and the last may have fewer.
const ATTENTION_ROWS: usize = 16;
/// A long context is cut into spans. How many results of spans attention may leave before they are joined, each of a group and a KV head.
pub const PARTIALS: usize = 384;
/// Bytes of one: 256 threads with 128 sums and four numbers more.
const PARTIAL_BYTES: usize = 256 * (128 + 4) * 4;
/// Rows of operands that stand together; an expert's first is a multiple of it.
const EIGHT: usize = 8;
/// Bytes of an f16.
const F16: u64 = 2;
/// Tokens that the recurrence takes at once; where such a chunk begins is counted from the sequence's first token.
pub const DELTA_ROWS: usize = 64;
/// Rows and columns of a block of a matrix of halves for the tensor cores.
const BLOCK: usize = 16;
/// Words of a row's choice of experts, and of a run of slots of one expert.
const CHOICE_WORDS: usize = 32;
const RUN_WORDS: usize = 4;
/// Words from an expert's count to the next: a sector, so that additions to several do not wait for each other.
pub const COUNT_WORDS: usize = 8;

/// Threads that a plan says before a module does.
const THREADS: u32 = 256;

/// Bytes of a row of `inputs` inputs as operands.
fn operand_bytes(inputs: usize) -> u64 {
    inputs.next_multiple_of(CHUNK_INPUTS) as u64 * F16
}

/// Bytes of a token's results of a product with `rows` matrix rows.
fn result_bytes(rows: usize) -> u64 {
    rows.next_multiple_of(COLUMN) as u64 * F16
}

/// What a chunk of the recurrence keeps of a key head: its keys as two halves each, its queries as one.
fn key_head_bytes(key_dim: usize) -> usize {
    3 * DELTA_ROWS * key_dim * F16 as usize
}

/// What a chunk keeps of a value head: three triangles in blocks of halves (two are one matrix), and two numbers of each token.
fn value_head_bytes() -> usize {
    let blocks = DELTA_ROWS / BLOCK;
    3 * blocks * (blocks + 1) / 2 * BLOCK * BLOCK * F16 as usize + 2 * DELTA_ROWS * F32 as usize
}

/// Bytes that a layer's pages take as attention reads them where they are stored otherwise: of `context` positions, in halves.
pub fn expanded_bytes(geometry: &Geometry, kv: KvFormat, context: usize) -> u64 {
    match kv {
        KvFormat::F16 => 0,
        KvFormat::Q8 => {
            let halves = KvLayout::new(geometry, KvFormat::F16);
            (halves.pages(context) * halves.layer_bytes()) as u64
        }
    }
}

/// Records the prefill on `target` of at most `shape.rows` tokens of one sequence, which has at most `shape.context` positions
/// then. Only shapes and formats of `weights` are looked at.
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
    pass.recorder.finish()
}

/// Positions of a cache that has room for a pass.
fn cached_positions(shape: Shape) -> usize {
    shape.context.max(shape.rows)
}

/// What stages hand to each other; f32 where nothing else is said.
struct Workspace {
    prompt: BufferId,
    /// Residual stream, `[rows, hidden]`.
    x: BufferId,
    /// f16: what the layer's projections in left, then what the one out did: `[matrix rows / COLUMN][rows][COLUMN]`.
    projected: BufferId,
    /// Halves, for each chunk of [`DELTA_ROWS`] tokens and each key head: see [`key_head_bytes`].
    delta_keys: BufferId,
    /// For each chunk and each value head: see [`value_head_bytes`].
    delta_heads: BufferId,
    /// What the recurrence leaves, `[rows, value heads * value dim]`.
    mixed: BufferId,
    /// The projections' inputs.
    operands: BufferId,
    /// Router logits and the shared expert's, `[rows, experts + 1]` in whole tiles.
    router: BufferId,
    /// u32 `[rows, CHOICE_WORDS]`.
    choice: BufferId,
    /// u32: tokens of each expert, [`COUNT_WORDS`] apart.
    counts: BufferId,
    /// u32 `[rows, top_k]`: which of its expert's tokens a row is.
    places: BufferId,
    /// u32 `[rows, top_k + 1]`: the place of a slot, sorted by expert.
    positions: BufferId,
    /// u32: how many runs, then [`RUN_WORDS`] of each.
    runs: BufferId,
    /// Operands of the experts, by place; the shared expert's are the rows' own.
    gathered: BufferId,
    /// Operands of the down projections, by place.
    inner: BufferId,
    /// f16 `[places, hidden]`.
    products: BufferId,
    /// Queries of attention, normed and turned, in f16: groups of positions, each `[kv_heads]` of a group's rows.
    queries: BufferId,
    /// What attention leaves of spans of a long context; how many of a group's have been left, zero before and after.
    partials: BufferId,
    arrived: BufferId,
    /// A layer's pages in halves, `[pages][kv_heads]`, where they are stored otherwise.
    expanded: Option<BufferId>,
    recurrent: BufferId,
    tails: BufferId,
    kv: BufferId,
}

struct Pass<'a> {
    weights: &'a Weights,
    geometry: &'a Geometry,
    kv: KvLayout,
    shape: Shape,
    recorder: Recorder,
    to: Workspace,
    frequencies: BufferId,
}

impl<'a> Pass<'a> {
    fn new(weights: &'a Weights, target: Target, shape: Shape) -> Pass<'a> {
        let geometry = &weights.geometry;
        let Geometry { hidden, attention, delta, moe, .. } = geometry;
        let rows = shape.rows as u64;
        let mut recorder = Recorder::new();
        let mut of =
            |name: &str, bytes_a_row: u64| recorder.buffer(name, Role::Activations, rows * bytes_a_row);
        let f32 = |width: usize| width as u64 * F32;
        let tiled = |rows: usize| rows.next_multiple_of(TILE_ROWS);
        let width = attention.heads * attention.head_dim;
        let slots = moe.top_k + 1;
        let projected = (delta.conv_channels() + delta.value_width() + 2 * delta.value_heads)
            .max(2 * width + 2 * attention.kv_heads * attention.head_dim);
        let x = of("x", f32(*hidden));
        let projected = of("projected", result_bytes(projected));
        let mixed = of("mixed", f32(delta.value_width()));
        let router = of("router", f32(tiled(moe.experts + 1)));
        let choice = of("choice", CHOICE_WORDS as u64 * U32);
        let places = of("places", moe.top_k as u64 * U32);
        let positions = of("positions", slots as u64 * U32);
        let rows_together = shape.rows.next_multiple_of(EIGHT);
        let width_of_operands = width.max(delta.value_width()).max(*hidden);
        let operands = rows_together as u64 * operand_bytes(width_of_operands);
        let operands = recorder.buffer("operands", Role::Activations, operands);
        // An expert's last eight may be partly filled.
        let room = (shape.rows * moe.top_k + moe.experts * EIGHT + rows_together) as u64;
        let mut by_place = |name: &str, bytes: u64| recorder.buffer(name, Role::Activations, room * bytes);
        let gathered = by_place("gathered", operand_bytes(*hidden));
        let inner = by_place("inner", operand_bytes(moe.expert_width));
        let products = by_place("products", *hidden as u64 * F16);
        let runs = 1 + (shape.rows * slots).div_ceil(*RUN_ROWS.start()) + moe.experts + 1;
        let groups = shape.rows / ATTENTION_ROWS + 2;
        let group_queries = ATTENTION_ROWS * attention.heads * attention.head_dim;
        let queries = recorder.buffer("queries", Role::Activations, (groups * group_queries) as u64 * F16);
        let partials = recorder.buffer("partials", Role::Activations, (PARTIALS * PARTIAL_BYTES) as u64);
        let arrived = recorder.buffer("arrived", Role::Activations, PARTIALS as u64 * U32);
        let runs = recorder.buffer("runs", Role::Activations, (runs * RUN_WORDS) as u64 * U32);
        let counts = recorder.buffer("counts", Role::Activations, (moe.experts * COUNT_WORDS) as u64 * U32);
        // A pass of whole chunks that begins within one has one more.
        let chunks = (shape.rows.div_ceil(DELTA_ROWS) + 1) as u64;
        let mut of = |name: &str, bytes_a_chunk: usize| {
            recorder.buffer(name, Role::Activations, chunks * bytes_a_chunk as u64)
        };
        let delta_keys = of("delta_keys", delta.key_heads * key_head_bytes(delta.key_dim));
        let delta_heads = of("delta_heads", delta.value_heads * value_head_bytes());
        let prompt = recorder.buffer("prompt", Role::Step, PromptLayout::bytes(shape.rows) as u64);
        let expanded = expanded_bytes(geometry, target.kv(), shape.context);
        let expanded = (expanded > 0).then(|| recorder.buffer("expanded", Role::Activations, expanded));
        let (state, layout) = (StateLayout::new(geometry), KvLayout::new(geometry, target.kv()));
        let delta_layers = geometry.count(LayerKind::Delta);
        let attention_layers = geometry.count(LayerKind::Attention);
        let recurrent =
            recorder.buffer("recurrent", Role::State, (delta_layers * state.recurrent_bytes()) as u64);
        let tails = recorder.buffer("tails", Role::State, (delta_layers * state.tail_bytes()) as u64);
        let kv = (attention_layers * layout.position_bytes() * cached_positions(shape)) as u64;
        let kv = recorder.buffer("kv", Role::Kv, kv);
        let frequencies = recorder.buffer("inv_freq", Role::Weights, (attention.rotary_dim / 2) as u64 * F32);
        let to = Workspace {
            prompt,
            x,
            projected,
            delta_keys,
            delta_heads,
            mixed,
            operands,
            router,
            choice,
            counts,
            places,
            positions,
            runs,
            gathered,
            inner,
            products,
            queries,
            partials,
            arrived,
            expanded,
            recurrent,
            tails,
            kv,
        };
        Pass { weights, geometry, kv: layout, shape, recorder, to, frequencies }
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

    fn embed(&mut self) {
        let [group, _] = packing::outer_groups(self.weights);
        let matrix = group.matrices[0].1;
        let (data, pairs) = (matrix.data_bytes() as u64, 2 * matrix.groups() as u64 * BF16);
        let rows = u64::from(self.rows());
        let of_rows = |bytes: u64| rows * bytes / matrix.rows as u64;
        let words = self.recorder.buffer("embed", Role::Weights, data);
        let parameters = self.recorder.buffer("embed.pairs", Role::Weights, pairs);
        let (x, grid) = (self.to.x, [self.rows(), 1, 1]);
        self.dispatch("embed_prefill", Stage::Embed, None)
            .reads_some(words, of_rows(data))
            .reads_some(parameters, of_rows(pairs))
            .writes(x)
            .launch(Launch::plain(grid, THREADS))
            .end();
    }

    /// The norm before a layer's first projection, which only the first layer has not from the layer before it.
    fn first_norm(&mut self, stage: Stage, index: usize, layer: &LayerWeights) {
        if index == 0 {
            let norm = self.vector(index, layer, "input_norm");
            let (x, operands, grid) = (self.to.x, self.to.operands, [self.rows(), 1, 1]);
            let bytes = u64::from(self.rows()) * operand_bytes(self.geometry.hidden);
            self.dispatch("round_prefill", stage, Some(index))
                .reads(norm)
                .value(0)
                .reads(x)
                .writes_first(operands, bytes)
                .launch(Launch::plain(grid, THREADS))
                .end();
        }
    }

    /// The projection out of a mixer, added to the residual stream, and the norm before the experts.
    fn project_out(&mut self, stage: Stage, index: usize, layer: &LayerWeights, group: &Group<'_>) {
        let results = self.dense(stage, index, group);
        let norm = self.vector(index, layer, "post_norm");
        let Workspace { x, projected, operands, .. } = self.to;
        let grid = [self.rows(), 1, 1];
        let bytes = u64::from(self.rows()) * operand_bytes(self.geometry.hidden);
        self.dispatch("round_prefill", stage, Some(index))
            .reads(norm)
            .reads_first(projected, results)
            .updates(x)
            .writes_first(operands, bytes)
            .launch(Launch::plain(grid, THREADS))
            .end();
    }

    /// The product of a group with the operands. Returns how many bytes its results take.
    fn dense(&mut self, stage: Stage, index: usize, group: &Group<'_>) -> u64 {
        let matrix = self.matrix(index, group);
        let inputs = group.matrices[0].1.cols;
        let matrix_rows = group.matrices.iter().map(|(_, matrix)| matrix.rows).sum::<usize>();
        let tiles = matrix_rows.div_ceil(TILE_ROWS);
        let (operands, projected, rows) = (self.to.operands, self.to.projected, self.rows());
        let written = u64::from(rows) * result_bytes(matrix_rows);
        self.dispatch("dense_prefill", stage, Some(index))
            .reads(matrix)
            .reads_first(operands, u64::from(rows) * operand_bytes(inputs))
            .writes_first(projected, written)
            .value(tiles as u32)
            .value(inputs.div_ceil(CHUNK_INPUTS) as u32)
            .launch(Launch::plain([tiles.div_ceil(BLOCK_TILES) as u32, rows, 1], THREADS))
            .end();
        written
    }

    fn delta(&mut self, index: usize, layer: &LayerWeights) {
        let groups = packing::groups(layer);
        let delta = &self.geometry.delta;
        let (rows, ordinal) = (self.rows(), self.ordinal(index));
        let projected = self.to.projected;
        self.first_norm(Stage::DeltaIn, index, layer);
        let projected_bytes = self.dense(Stage::DeltaIn, index, &groups[0]);

        let [conv, a_log, dt_bias, gated_norm] =
            ["conv1d", "a_log", "dt_bias", "norm"].map(|name| self.vector(index, layer, name));
        let Workspace { delta_keys, delta_heads, mixed, operands, recurrent, tails, .. } = self.to;
        let state = StateLayout::new(self.geometry);
        let of_layer = |bytes: usize| ordinal * bytes as u64..(ordinal + 1) * bytes as u64;
        let (matrices, tail) = (of_layer(state.recurrent_bytes()), of_layer(state.tail_bytes()));
        let (matrix_bytes, tail_bytes) = (state.recurrent_bytes() as u64, state.tail_bytes() as u64);
        let (mixed_bytes, width) = (self.floats(delta.value_width()), delta.value_width());
        let (key_heads, value_heads) = (delta.key_heads as u32, delta.value_heads as u32);
        self.dispatch("delta_chunk_prefill", Stage::DeltaCore, Some(index))
            .reads_first(projected, projected_bytes)
            .reads(conv)
            .reads(a_log)
            .reads(dt_bias)
            .writes(delta_keys)
            .writes(delta_heads)
            .reach(tails, tail.clone(), Mode::Read, tail_bytes)
            .value(ordinal as u32)
            .launch(Launch::plain([key_heads, rows + DELTA_ROWS as u32 - 1, 1], THREADS))
            .end();
        self.dispatch("delta_core_prefill", Stage::DeltaCore, Some(index))
            .reads(delta_keys)
            .reads(delta_heads)
            .reads_first(projected, projected_bytes)
            .reads(conv)
            .writes_first(mixed, mixed_bytes)
            .reach(recurrent, matrices, Mode::Update, matrix_bytes)
            .reach(tails, tail.clone(), Mode::Read, tail_bytes)
            .value(ordinal as u32)
            .launch(Launch::plain([value_heads, 1, 1], THREADS))
            .end();
        self.dispatch("delta_round_prefill", Stage::DeltaCore, Some(index))
            .reads_first(mixed, mixed_bytes)
            .reads_first(projected, projected_bytes)
            .reads(gated_norm)
            .writes_first(operands, u64::from(rows) * operand_bytes(width))
            .reach(tails, tail, Mode::Update, tail_bytes)
            .value(ordinal as u32)
            .launch(Launch::plain([rows, 1, 1], THREADS))
            .end();
        self.project_out(Stage::DeltaOut, index, layer, &groups[1]);
    }

    fn attention(&mut self, index: usize, layer: &LayerWeights) {
        let groups = packing::groups(layer);
        let attention = &self.geometry.attention;
        let (rows, ordinal) = (self.rows(), self.ordinal(index));
        let (projected, frequencies) = (self.to.projected, self.frequencies);
        self.first_norm(Stage::AttnIn, index, layer);
        let projected_bytes = self.dense(Stage::AttnIn, index, &groups[0]);

        let [q_norm, k_norm] = ["q_norm", "k_norm"].map(|name| self.vector(index, layer, name));
        let Workspace { operands, queries, partials, arrived, expanded, kv, .. } = self.to;
        let width = attention.heads * attention.head_dim;
        let position = self.kv.position_bytes() as u64;
        let all = position * cached_positions(self.shape) as u64;
        let (cache, new) = (ordinal * all..(ordinal + 1) * all, position * u64::from(rows));
        let kv_heads = attention.kv_heads as u32;
        self.dispatch("attn_kv_prefill", Stage::AttnCore, Some(index))
            .reads_first(projected, projected_bytes)
            .reads(q_norm)
            .reads(k_norm)
            .reads(frequencies)
            .writes(queries)
            .reach(kv, cache.end - new..cache.end, Mode::Write, new)
            .value(ordinal as u32)
            .launch(Launch::plain([kv_heads, rows + ATTENTION_ROWS as u32, 1], THREADS))
            .end();
        if let Some(expanded) = expanded {
            self.dispatch("attn_expand_prefill", Stage::AttnCore, Some(index))
                .writes(expanded)
                .reach(kv, cache.clone(), Mode::Read, all)
                .value(ordinal as u32)
                .launch(Launch::plain([1, 1, 1], THREADS))
                .end();
        }
        let core = self
            .dispatch("attn_core_prefill", Stage::AttnCore, Some(index))
            .reads_first(projected, projected_bytes)
            .reads(queries)
            .writes_first(operands, u64::from(rows) * operand_bytes(width))
            .writes_some(partials, 0)
            .writes(arrived);
        match expanded {
            Some(expanded) => core.reads(expanded),
            None => core.value(0).reach(kv, cache, Mode::Read, all),
        }
        .value(ordinal as u32)
        .launch(Launch::plain([kv_heads, rows + ATTENTION_ROWS as u32, 1], THREADS))
        .end();
        self.project_out(Stage::AttnOut, index, layer, &groups[1]);
    }

    fn experts(&mut self, index: usize, layer: &LayerWeights) {
        let groups = packing::groups(layer);
        let [.., route, up, down] = &groups[..] else { unreachable!("every layer has experts") };
        let (moe, hidden) = (&self.geometry.moe, self.geometry.hidden);
        let rows = self.rows();
        let Workspace { x, operands, router, choice, counts, places, positions, runs, .. } = self.to;
        let Workspace { gathered, inner, products, .. } = self.to;
        let read = u64::from(rows) * operand_bytes(hidden);
        let route = self.matrix(index, route);
        self.dispatch("moe_route_prefill", Stage::MoeRoute, Some(index))
            .reads(route)
            .reads_first(operands, read)
            .writes(router)
            .writes(counts)
            .launch(Launch::plain([(moe.experts + 1).div_ceil(TILE_ROWS) as u32, rows, 1], THREADS))
            .end();
        self.dispatch("moe_select_prefill", Stage::MoeRoute, Some(index))
            .reads(router)
            .writes(choice)
            .updates(counts)
            .writes(places)
            .launch(Launch::plain([rows.div_ceil(SELECT_ROWS as u32), 1, 1], THREADS))
            .end();
        self.dispatch("moe_sort_prefill", Stage::MoeRoute, Some(index))
            .reads(choice)
            .reads(counts)
            .reads(places)
            .writes(positions)
            .writes(runs)
            .launch(Launch::plain([rows.div_ceil(SORT_ROWS as u32), 1, 1], THREADS))
            .end();

        self.dispatch("moe_gather_prefill", Stage::MoeUp, Some(index))
            .reads_first(operands, read)
            .reads(positions)
            .writes(gathered)
            .writes_some(inner, 0)
            .launch(Launch::plain([rows, 1, 1], THREADS))
            .end();
        // Every expert may leave a block partly filled.
        let slots = self.shape.rows * (moe.top_k + 1);
        let units = (slots + moe.experts * RUN_ROWS.end()) as u32;
        let used = used_experts(moe.experts, moe.top_k, self.shape.rows) / moe.experts as f64;
        let [up, down] = [up, down].map(|group| {
            let matrix = self.matrix(index, group);
            (matrix, (used * self.recorder.bytes(matrix) as f64) as u64)
        });
        self.dispatch("moe_up_prefill", Stage::MoeUp, Some(index))
            .reads_some(up.0, up.1)
            .reads_first(operands, read)
            .reads(gathered)
            .reads(runs)
            .writes(inner)
            .launch(Launch::plain([1, units, 1], THREADS))
            .end();
        self.dispatch("moe_down_prefill", Stage::MoeDown, Some(index))
            .reads_some(down.0, down.1)
            .reads(inner)
            .reads(runs)
            .writes(products)
            .launch(Launch::plain([1, units, 1], THREADS))
            .end();
        // The norm that follows, of the next layer.
        let norm = self.weights.layers.get(index + 1).map(|next| self.vector(index + 1, next, "input_norm"));
        let sum = self
            .dispatch("moe_sum_prefill", Stage::MoeDown, Some(index))
            .reads(products)
            .reads(positions)
            .reads(choice);
        let sum = match norm {
            Some(norm) => sum.reads(norm).updates(x).writes_first(operands, read),
            None => sum.value(0).updates(x).writes_some(operands, 0),
        };
        sum.launch(Launch::plain([rows, 1, 1], THREADS)).end();
    }

    /// Where layer `index` stands among those of its kind.
    fn ordinal(&self, index: usize) -> u64 {
        let layers = &self.geometry.layers;
        layers[..index].iter().filter(|&&kind| kind == layers[index]).count() as u64
    }

    fn matrix(&mut self, index: usize, group: &Group<'_>) -> BufferId {
        let bytes = |stacked: bool| {
            let matrices = group.matrices.iter().map(|(_, matrix)| *matrix);
            tile_bytes(matrices.filter(|matrix| (matrix.count > 1) == stacked))
        };
        let bytes = bytes(true) + bytes(false);
        self.recorder.buffer(format!("layers.{index}.{}", group.name), Role::Weights, bytes)
    }

    fn vector(&mut self, index: usize, layer: &LayerWeights, name: &str) -> BufferId {
        let vectors = packing::vectors(layer);
        let elements = vectors.iter().find(|(known, _)| *known == name).map_or(0, |(_, vector)| vector.len());
        self.recorder.buffer(format!("layers.{index}.{name}"), Role::Weights, elements as u64 * F32)
    }
}
