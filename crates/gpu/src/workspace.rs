//! The buffers of a decode plan that are not weights.

use lily_model::geometry::{Geometry, LayerKind};

use crate::decode::{MAX_ROWS, SPANS, Shape};
use crate::layout::{KvLayout, PAGE_TOKENS, StateLayout};
use crate::plan::{BufferId, Recorder, Role};
use crate::sampling;
use crate::step::StepLayout;
use crate::target::{RECURRENCE_PARTS, TILE_ROWS, Target, WeightLayout};

/// Numbers of a part beside its sums, for each query head: the largest score, and the sum of the weights.
pub(crate) const PART_SCALARS: usize = 2;
/// Words of a row's choice: the experts, their weights, the shared expert's factor and the tag that says it is
/// made.
const CHOICE_WORDS: usize = 32;
/// Words of a run of rows that share an expert.
const ITEM_WORDS: usize = 16;
/// Words of a logit that is the largest of a block's, and its index.
const BEST_WORDS: usize = 2;

pub(crate) const F32: u64 = size_of::<f32>() as u64;
pub(crate) const U32: u64 = size_of::<u32>() as u64;

/// What stages hand to each other; f32 where nothing else is said.
pub(crate) struct Workspace {
    /// The step block.
    pub step: BufferId,
    /// Residual stream, `[rows, hidden]`.
    pub x: BufferId,
    /// What `delta_in` and `attn_in` leave: `[rows, projections of the layer]`, each row a whole number of tiles.
    pub projected: BufferId,
    /// What the mixers leave, `[rows, width]`.
    pub mixed: BufferId,
    /// Sums of squares for the gated norm, `[rows, value_heads, RECURRENCE_PARTS]`, where several blocks share a head.
    pub squares: Option<BufferId>,
    /// Weighted values of the parts of the cache, `[rows, heads, SPANS, head_dim]`.
    pub parts: BufferId,
    /// `[rows, heads, SPANS, PART_SCALARS]`.
    pub part_scalars: BufferId,
    /// Router logits and the shared expert's, `[rows, experts + 1]` in whole tiles.
    pub router: BufferId,
    /// What the experts multiply: [`Target::packed_bytes`] a row.
    pub packed: BufferId,
    /// Of each layer, u32 `[rows, CHOICE_WORDS]`.
    pub choices: Vec<BufferId>,
    /// Inner activations, the shared expert's last: `[rows, top_k + 1, expert_width]`.
    pub inner: BufferId,
    /// Runs of rows that share an expert, in a batch: how many, then u32 `[rows * (top_k + 1), ITEM_WORDS]`.
    pub items: BufferId,
    /// Products of the experts of a batch, `[rows, top_k + 1, hidden]`.
    pub products: BufferId,
    /// `[rows, vocab]`.
    pub logits: BufferId,
    /// The largest logit that each block of the head saw, `[rows, blocks, BEST_WORDS]`.
    pub best: BufferId,
    /// u32 `[MAX_ROWS]`.
    pub tokens: BufferId,
    /// Recurrent matrices and convolution tails of the sequences.
    pub recurrent: BufferId,
    pub tails: BufferId,
    /// Keys and values of the sequences.
    pub kv: BufferId,
    /// Where memory has numbers instead of addresses.
    pub pools: Option<Pools>,
    /// What tokens are chosen with, where requests ask for more than the largest logit and memory has numbers.
    pub sampling: Option<Sampling>,
}

/// What a device without addresses needs to find a sequence's memory ([`crate::step`]).
#[derive(Clone, Copy)]
pub(crate) struct Pools {
    /// u32: the numbers of the sequences' pages, table after table.
    pub page_table: BufferId,
    /// u32: the tokens that were sampled last.
    pub sampled: BufferId,
}

/// See [`crate::sampling`].
#[derive(Clone, Copy)]
pub(crate) struct Sampling {
    /// u32 of each row of the head: the number of its recipe, or that it has none.
    pub row_recipes: BufferId,
    /// Of each row: [`sampling::RECIPE_BYTES`].
    pub recipes: BufferId,
    /// Of each row: two tables, u32 `[vocab]`.
    pub tables: BufferId,
    /// Of each row: [`sampling::NOTES_BYTES`].
    pub notes: BufferId,
}

impl Sampling {
    /// Records the buffers for as many as `rows` rows of the head.
    pub fn new(recorder: &mut Recorder, vocab: usize, rows: u64) -> Sampling {
        let tables = 2 * sampling::table_bytes(vocab) as u64;
        Sampling {
            row_recipes: recorder.buffer("row_recipes", Role::Step, rows * U32),
            recipes: recorder.buffer("recipes", Role::State, rows * sampling::RECIPE_BYTES as u64),
            tables: recorder.buffer("tables", Role::State, rows * tables),
            notes: recorder.buffer("notes", Role::Activations, rows * sampling::NOTES_BYTES as u64),
        }
    }
}

impl Workspace {
    /// Records the buffers.
    pub fn new(recorder: &mut Recorder, geometry: &Geometry, target: Target, shape: Shape) -> Workspace {
        let Geometry { hidden, attention, delta, moe, .. } = geometry;
        let (state, kv) = (StateLayout::new(geometry), KvLayout::new(geometry, target.kv()));
        let (attention_layers, delta_layers) =
            (geometry.count(LayerKind::Attention), geometry.count(LayerKind::Delta));
        let width = attention.heads * attention.head_dim;
        let tiled = |rows: usize| rows.next_multiple_of(TILE_ROWS);
        let projected = tiled(delta.conv_channels() + delta.value_width() + 2 * delta.value_heads)
            .max(tiled(2 * width + 2 * attention.kv_heads * attention.head_dim));
        let spans = attention.heads * SPANS;
        let blocks = target.dense_blocks(geometry.vocab, shape.rows);
        let slots = moe.top_k + 1;
        let rows = shape.rows as u64;
        let tiles = target.weights() == WeightLayout::Tiles;
        let pools = (!tiles).then(|| {
            let pages = shape.context.div_ceil(PAGE_TOKENS) as u64;
            Pools {
                page_table: recorder.buffer("page_table", Role::Step, rows * pages * U32),
                sampled: recorder.buffer("sampled", Role::State, rows * U32),
            }
        });
        let sampling = (!tiles && shape.sampled).then(|| Sampling::new(recorder, geometry.vocab, rows));
        let mut of = |name: String, width: usize, element: u64| {
            recorder.buffer(name, Role::Activations, rows * width as u64 * element)
        };
        let mut f32 = |name: &str, width: usize| of(name.to_owned(), width, F32);
        Workspace {
            x: f32("x", *hidden),
            projected: f32("projected", projected),
            mixed: f32("mixed", width.max(delta.value_width())),
            squares: tiles.then(|| f32("squares", delta.value_heads * RECURRENCE_PARTS)),
            parts: f32("parts", spans * attention.head_dim),
            part_scalars: f32("part_scalars", spans * PART_SCALARS),
            router: f32("router", tiled(moe.experts + 1)),
            inner: f32("inner", slots * moe.expert_width),
            products: f32("products", slots * hidden),
            logits: f32("logits", geometry.vocab),
            packed: of("packed".into(), target.packed_bytes(*hidden), 1),
            best: of("best".into(), blocks * BEST_WORDS, U32),
            choices: (0..geometry.layers.len())
                .map(|layer| of(format!("choices.{layer}"), CHOICE_WORDS, U32))
                .collect(),
            items: recorder.buffer(
                "items",
                Role::Activations,
                (ITEM_WORDS * (1 + shape.rows * slots)) as u64 * U32,
            ),
            tokens: recorder.buffer("tokens", Role::Activations, MAX_ROWS as u64 * U32),
            step: recorder.buffer("step", Role::Step, StepLayout::BYTES as u64),
            recurrent: recorder.buffer(
                "recurrent",
                Role::State,
                rows * (delta_layers * state.recurrent_bytes()) as u64,
            ),
            tails: recorder.buffer("tails", Role::State, rows * (delta_layers * state.tail_bytes()) as u64),
            kv: recorder.buffer(
                "kv",
                Role::Kv,
                rows * (attention_layers * kv.position_bytes() * shape.context) as u64,
            ),
            pools,
            sampling,
        }
    }
}
