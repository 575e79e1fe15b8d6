//! What a step touches of the pools: the states of its sequences, their pages, and how their tokens are chosen.
//!
//! A plan says which layer a kernel works on; where that lies, the step says. [`Reach`] has the step's units, and a
//! [`PoolAccess`] is one of the plan's accesses, so that together they are byte ranges: declared for a device that watches
//! what kernels touch.

use std::ops::Range;

use lily_gpu::layout::PAGE_TOKENS;
use lily_gpu::plan::{Access, Buffer as PlanBuffer, Mode, Role};
use lily_gpu::sampling::RECIPE_BYTES;
use lily_model::geometry::{Geometry, LayerKind};

use crate::device::{Device, Touch};
use crate::sampling::Recipe;
use crate::sequence::Frozen;
use crate::store::{Pools, Store};

/// Byte offsets in the pools.
#[derive(Clone, Debug, Default)]
pub struct Reach {
    /// Of each state.
    states: Vec<usize>,
    /// Of each sampled token.
    tokens: Vec<usize>,
    /// Of each recipe, and of each of their tables.
    recipes: Vec<usize>,
    tables: Vec<usize>,
    /// Of each page that has positions.
    read: Vec<usize>,
    /// Of each page that gets positions.
    written: Vec<usize>,
}

impl Reach {
    /// Adds a sequence that grows by `tokens` tokens.
    pub fn add<D: Device>(&mut self, store: &Store<D>, sequence: &Frozen, tokens: usize) {
        let (from, to) = (sequence.length / PAGE_TOKENS, (sequence.length + tokens).div_ceil(PAGE_TOKENS));
        let pages: Vec<usize> = sequence.page_offsets(store).take(to).collect();
        self.states.push(store.state_at(sequence.state()));
        self.tokens.push(store.token_at(sequence.state()));
        self.written.extend(&pages[from..]);
        self.read.extend(pages);
    }

    /// Adds how the tokens of a sequence are chosen.
    pub fn add_recipe<D: Device>(&mut self, store: &Store<D>, recipe: &Recipe) {
        self.recipes.push(store.recipes().recipe_at(recipe));
        self.tables.extend(store.recipes().tables_at(recipe));
    }
}

/// An access of a plan to a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolAccess {
    pool: Pool,
    /// Which of the layers of its kind.
    layer: usize,
    mode: Mode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pool {
    Recurrent,
    Tails,
    Pages,
    Tokens,
    Recipes,
    Tables,
}

impl PoolAccess {
    /// What an access of a plan for `geometry` means, where it is to a pool.
    pub fn of(access: &Access, buffer: &PlanBuffer, geometry: &Geometry) -> Option<PoolAccess> {
        let (pool, kind) = match (buffer.role, buffer.name.as_str()) {
            (Role::Kv, _) => (Pool::Pages, LayerKind::Attention),
            (Role::State, "recurrent") => (Pool::Recurrent, LayerKind::Delta),
            (Role::State, "tails") => (Pool::Tails, LayerKind::Delta),
            (Role::State, name) => {
                let pool = match name {
                    "recipes" => Pool::Recipes,
                    "tables" => Pool::Tables,
                    _ => Pool::Tokens,
                };
                return Some(PoolAccess { pool, layer: 0, mode: access.mode });
            }
            _ => return None,
        };
        // The plan has layer after layer, all of one size.
        let layer_bytes = buffer.bytes / geometry.count(kind) as u64;
        let layer = (access.range.start / layer_bytes.max(1)) as usize;
        Some(PoolAccess { pool, layer, mode: access.mode })
    }

    /// The bytes that it is in a step.
    pub fn touches<'a, D: Device>(
        self,
        store: &'a Store<D>,
        pools: &'a Pools<D::Buffer>,
        reach: &'a Reach,
    ) -> impl Iterator<Item = Touch<D::Buffer>> + 'a {
        let state = &store.state;
        let tails_at = state.bytes() - state.tail_bytes() * state.layers();
        let (buffer, units, within) = match self.pool {
            Pool::Recurrent => (&pools.states, &reach.states, part(0, self.layer, state.recurrent_bytes())),
            Pool::Tails => (&pools.states, &reach.states, part(tails_at, self.layer, state.tail_bytes())),
            Pool::Tokens => (&pools.tokens, &reach.tokens, 0..size_of::<u32>()),
            Pool::Recipes => (&pools.recipes, &reach.recipes, 0..RECIPE_BYTES),
            Pool::Tables => (&pools.tables, &reach.tables, 0..store.recipes().table_bytes()),
            Pool::Pages => {
                let pages = if self.mode.writes() { &reach.written } else { &reach.read };
                (&pools.pages, pages, part(0, self.layer, store.kv.layer_bytes()))
            }
        };
        units.iter().map(move |&at| Touch {
            buffer: buffer.clone(),
            range: at + within.start..at + within.end,
            reads: self.mode.reads(),
            writes: self.mode.writes(),
        })
    }
}

/// Part `index` of parts of `bytes` bytes that begin at `start`.
fn part(start: usize, index: usize, bytes: usize) -> Range<usize> {
    let start = start + index * bytes;
    start..start + bytes
}
