//! Memory of sequences on the card: pages of keys and values, and recurrent states.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lily_engine::backend::BackendError;
use lily_engine::meter::{Charge, Meter};
use lily_gpu::layout::{KvFormat, KvLayout, PAGE_TOKENS, StateLayout};
use lily_gpu::prefill::cuda;
use lily_model::geometry::Geometry;

use crate::driver::{Gpu, Memory};

/// Bytes behind a state for the token that was sampled last.
const SAMPLED_BYTES: usize = size_of::<u32>();

/// Bytes of what sequences are made of.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Layout of a page.
    pub kv: KvLayout,
    /// Layout of a state.
    pub state: StateLayout,
    /// What a prompt's attention unpacks a layer's part of a page into, where it is stored in 8 bits; else 0.
    pub expanded_page: usize,
}

impl Sizes {
    /// Those of a model whose keys and values are stored as `kv` says.
    pub fn new(geometry: &Geometry, kv: KvFormat) -> Sizes {
        Sizes {
            kv: KvLayout::new(geometry, kv),
            state: StateLayout::new(geometry),
            expanded_page: cuda::expanded_bytes(geometry, kv, PAGE_TOKENS) as usize,
        }
    }

    /// Bytes that a sequence of `tokens` tokens takes when it shares nothing.
    pub fn sequence(&self, tokens: usize) -> usize {
        self.state_bytes().saturating_add(self.kv.pages(tokens).saturating_mul(self.kv.page_bytes()))
    }

    fn state_bytes(&self) -> usize {
        self.state.bytes() + SAMPLED_BYTES
    }
}

/// Sizes, and where memory comes from.
#[derive(Clone, Debug)]
pub struct Store {
    /// The card.
    pub gpu: Arc<Gpu>,
    /// Sizes.
    pub sizes: Sizes,
    /// All of it.
    pub meter: Meter,
}

/// Keys and values of [`lily_gpu::layout::PAGE_TOKENS`] positions.
#[derive(Debug)]
pub struct Page {
    memory: Memory,
    charge: Charge,
    /// Snapshots that hold the page.
    snapshots: AtomicUsize,
}

/// The recurrent state of a sequence, and its last sampled token.
#[derive(Debug)]
pub struct State {
    memory: Memory,
    charge: Charge,
}

impl Store {
    /// For a model on a card whose keys and values are stored as `kv` says, with room for `limit` bytes.
    pub fn new(gpu: &Arc<Gpu>, geometry: &Geometry, kv: KvFormat, limit: usize) -> Store {
        Store { gpu: Arc::clone(gpu), sizes: Sizes::new(geometry, kv), meter: Meter::new(limit) }
    }

    /// A page of zeros.
    pub fn page(&self) -> Result<Page, BackendError> {
        const WHAT: &str = "a page of the KV cache";
        let bytes = self.sizes.kv.page_bytes();
        // Charged first: what passes the limit is not even asked of the card.
        let charge = self.meter.charge(WHAT, bytes)?;
        Ok(Page { memory: self.gpu.allocate(WHAT, bytes)?, charge, snapshots: AtomicUsize::new(0) })
    }

    /// A page with what `page` holds.
    pub fn copy_page(&self, page: &Page) -> Result<Page, BackendError> {
        let copy = self.page()?;
        self.gpu.copy(copy.address(), page.address(), self.sizes.kv.page_bytes())?;
        Ok(copy)
    }

    /// A state of zeros.
    pub fn state(&self) -> Result<State, BackendError> {
        const WHAT: &str = "the recurrent state of a sequence";
        let bytes = self.sizes.state_bytes();
        let charge = self.meter.charge(WHAT, bytes)?;
        Ok(State { memory: self.gpu.allocate(WHAT, bytes)?, charge })
    }

    /// A state with what `state` holds once all that is enqueued is done.
    pub fn copy_state(&self, state: &State) -> Result<State, BackendError> {
        let copy = self.state()?;
        self.gpu.copy(copy.address(), state.address(), self.sizes.state_bytes())?;
        Ok(copy)
    }
}

impl Page {
    /// Where it lies.
    pub fn address(&self) -> u64 {
        self.memory.address()
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
    /// Where it lies.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Where the last sampled token lies.
    pub fn sampled(&self) -> u64 {
        self.address() + (self.memory.bytes() - SAMPLED_BYTES) as u64
    }

    /// Its size as counted.
    pub fn bytes(&self) -> usize {
        self.charge.bytes()
    }
}
