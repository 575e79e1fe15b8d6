//! Memory of sequences: pages of keys and values, recurrent states, sampled tokens, and how tokens are chosen.
//!
//! What has to be done to it before a kernel may look (zeros, copies) is only noted here, in order, and goes to
//! the GPU at the beginning of the next pass.

use std::sync::atomic::{AtomicUsize, Ordering};

use lily_engine::backend::BackendError;
use lily_engine::meter::{Charge, Meter};
use lily_engine::sampler::SamplerState;
use lily_gpu::layout::{KvFormat, KvLayout, StateLayout};
use lily_model::geometry::Geometry;

use crate::device::{Device, Transfer};
use crate::error::DeviceError;
use crate::pool::{Pool, Unit};
use crate::sampling::{Recipe, Recipes};

const A_PAGE: &str = "a page of the KV cache";
const A_STATE: &str = "the recurrent state of a sequence";

/// Units that the pools begin with: pages for 1,024 positions, and states of two sequences (132 MB of the full
/// model).
const FIRST_PAGES: usize = 16;
const FIRST_STATES: usize = 2;
/// Bytes of a sampled token, which goes with a state.
const TOKEN: usize = size_of::<u32>();

/// Sizes, and where memory comes from.
#[derive(Debug)]
pub struct Store<D: Device> {
    device: D,
    /// Layout of a page.
    pub kv: KvLayout,
    /// Layout of a state.
    pub state: StateLayout,
    /// All of it.
    pub meter: Meter,
    pages: Pool<D>,
    states: Pool<D>,
    /// A u32 for each state.
    tokens: Pool<D>,
    recipes: Recipes<D>,
    /// What the next pass begins with.
    pending: Vec<Transfer<D::Buffer>>,
}

/// The buffers that pages, states and sampled tokens lie in now.
#[derive(Clone, Debug, PartialEq)]
pub struct Pools<B> {
    /// Pages.
    pub pages: B,
    /// States.
    pub states: B,
    /// Sampled tokens.
    pub tokens: B,
    /// Recipes.
    pub recipes: B,
    /// Tables of recipes.
    pub tables: B,
}

/// Keys and values of [`lily_gpu::layout::PAGE_TOKENS`] positions.
#[derive(Debug)]
pub struct Page {
    unit: Unit,
    charge: Charge,
    /// Snapshots that hold the page.
    snapshots: AtomicUsize,
}

/// The recurrent state of a sequence, and its last sampled token.
#[derive(Debug)]
pub struct State {
    unit: Unit,
    token: Unit,
    charge: Charge,
}

/// Sizes of what sequences take, for planning.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    kv: KvLayout,
    state: StateLayout,
}

impl Sizes {
    /// Of a model whose keys and values are stored as `kv` says.
    pub fn new(geometry: &Geometry, kv: KvFormat) -> Sizes {
        Sizes { kv: KvLayout::new(geometry, kv), state: StateLayout::new(geometry) }
    }

    /// Bytes of a page.
    pub fn page(&self) -> usize {
        self.kv.page_bytes()
    }

    /// Bytes that a sequence of `tokens` tokens takes when it shares nothing.
    pub fn sequence(&self, tokens: usize) -> usize {
        let pages = self.kv.pages(tokens).saturating_mul(self.kv.page_bytes());
        (self.state.bytes() + TOKEN).saturating_add(pages)
    }
}

impl<D: Device> Store<D> {
    /// For a model on a device, whose keys and values are stored as `kv` says, with room for `limit` bytes.
    pub fn new(device: &D, geometry: &Geometry, kv: KvFormat, limit: u64) -> Result<Store<D>, DeviceError> {
        let (kv, state) = (KvLayout::new(geometry, kv), StateLayout::new(geometry));
        Ok(Store {
            device: device.clone(),
            kv,
            state,
            meter: Meter::new(usize::try_from(limit).unwrap_or(usize::MAX)),
            pages: Pool::new(device, A_PAGE, kv.page_bytes(), FIRST_PAGES, limit)?,
            states: Pool::new(device, A_STATE, state.bytes(), FIRST_STATES, limit)?,
            tokens: Pool::new(device, "sampled tokens", TOKEN, FIRST_STATES, limit)?,
            recipes: Recipes::new(device, geometry.vocab, limit)?,
            pending: Vec::new(),
        })
    }

    /// Where everything lies, until more is taken.
    pub fn pools(&self) -> Pools<D::Buffer> {
        Pools {
            pages: self.pages.buffer().clone(),
            states: self.states.buffer().clone(),
            tokens: self.tokens.buffer().clone(),
            recipes: self.recipes.recipes().clone(),
            tables: self.recipes.tables().clone(),
        }
    }

    /// What the next pass has to begin with.
    pub fn pending(&self) -> &[Transfer<D::Buffer>] {
        &self.pending
    }

    /// That pass was submitted.
    pub fn submitted(&mut self) {
        self.pending.clear();
    }

    /// A page that holds anything.
    pub fn bare_page(&mut self) -> Result<Page, BackendError> {
        let bytes = self.kv.page_bytes();
        // Charged first: what passes the limit is not even asked of the device.
        let charge = self.meter.charge(A_PAGE, bytes)?;
        let unit =
            self.pages.take(&self.device, &mut self.pending).map_err(|e| e.while_for(A_PAGE, bytes))?;
        Ok(Page { unit, charge, snapshots: AtomicUsize::new(0) })
    }

    /// A page of zeros.
    pub fn page(&mut self) -> Result<Page, BackendError> {
        let page = self.bare_page()?;
        let start = self.page_at(&page);
        let range = start..start + self.kv.page_bytes();
        self.pending.push(Transfer::Zero { buffer: self.pages.buffer().clone(), range });
        Ok(page)
    }

    /// A page with what `page` holds once all that is enqueued is done.
    pub fn copy_page(&mut self, page: &Page) -> Result<Page, BackendError> {
        let copy = self.bare_page()?;
        let (from, to) = (self.page_at(page), self.page_at(&copy));
        self.pending.push(within(self.pages.buffer(), from, to, self.kv.page_bytes()));
        Ok(copy)
    }

    /// A state that holds anything.
    pub fn bare_state(&mut self) -> Result<State, BackendError> {
        let bytes = self.state.bytes() + TOKEN;
        let charge = self.meter.charge(A_STATE, bytes)?;
        let mut take = |pool: &mut Pool<D>| {
            pool.take(&self.device, &mut self.pending).map_err(|error| error.while_for(A_STATE, bytes))
        };
        let unit = take(&mut self.states)?;
        Ok(State { unit, token: take(&mut self.tokens)?, charge })
    }

    /// A state of zeros.
    pub fn zero_state(&mut self) -> Result<State, BackendError> {
        let state = self.bare_state()?;
        let start = self.state_at(&state);
        let range = start..start + self.state.bytes();
        self.pending.push(Transfer::Zero { buffer: self.states.buffer().clone(), range });
        Ok(state)
    }

    /// A state with what `state` holds once all that is enqueued is done.
    pub fn copy_state(&mut self, state: &State) -> Result<State, BackendError> {
        let copy = self.bare_state()?;
        let (from, to) = (self.state_at(state), self.state_at(&copy));
        self.pending.push(within(self.states.buffer(), from, to, self.state.bytes()));
        let (from, to) = (self.tokens.offset(&state.token), self.tokens.offset(&copy.token));
        self.pending.push(within(self.tokens.buffer(), from, to, TOKEN));
        Ok(copy)
    }

    /// How a sequence's tokens are chosen.
    pub fn recipe(&mut self, state: &SamplerState) -> Result<Recipe, BackendError> {
        self.recipes.add(&self.device, &self.meter, state, &mut self.pending)
    }

    /// Recipes and their tables.
    pub fn recipes(&self) -> &Recipes<D> {
        &self.recipes
    }

    /// Where a page begins in the buffer of pages.
    pub fn page_at(&self, page: &Page) -> usize {
        self.pages.offset(&page.unit)
    }

    /// Where the sampled token of a state is in the buffer of tokens.
    pub fn token_at(&self, state: &State) -> usize {
        self.tokens.offset(&state.token)
    }

    /// Where a state begins in the buffer of states.
    pub fn state_at(&self, state: &State) -> usize {
        self.states.offset(&state.unit)
    }
}

fn within<B: Clone>(buffer: &B, from_offset: usize, to_offset: usize, bytes: usize) -> Transfer<B> {
    Transfer::Copy { from: buffer.clone(), from_offset, to: buffer.clone(), to_offset, bytes }
}

impl Page {
    /// Its number.
    pub fn number(&self) -> u32 {
        self.unit.number()
    }

    /// Counts the page as held by one snapshot more. Returns its bytes where none held it before.
    pub fn hold(&self) -> usize {
        if self.snapshots.fetch_add(1, Ordering::Relaxed) == 0 { self.charge.bytes() } else { 0 }
    }

    /// Undoes one [`Page::hold`]. Returns its bytes where no snapshot holds it any more.
    pub fn release(&self) -> usize {
        if self.snapshots.fetch_sub(1, Ordering::Relaxed) == 1 { self.charge.bytes() } else { 0 }
    }
}

impl State {
    /// Its number.
    pub fn number(&self) -> u32 {
        self.unit.number()
    }

    /// The number of its sampled token.
    pub fn token(&self) -> u32 {
        self.token.number()
    }

    /// Its size as counted.
    pub fn bytes(&self) -> usize {
        self.charge.bytes()
    }
}
