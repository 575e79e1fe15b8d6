//! What the backend keeps of one sequence between calls, and what a snapshot freezes.
//!
//! The state is the sequence's own; pages are shared with snapshots. A full page is never written again, and a
//! partly filled one that is shared is copied before the next write.

use std::io::{self, Read, Write};
use std::sync::Arc;

use lily_engine::backend::BackendError;
use lily_engine::meter::Meter;
use lily_gpu::layout::PAGE_TOKENS;

use crate::device::{Buffer, Device};
use crate::store::{Page, Pools, State, Store};

/// State at some length.
#[derive(Debug)]
pub struct Frozen {
    /// Tokens that it has seen.
    pub length: usize,
    /// Whether the last step left a token.
    pub sampled: bool,
    /// The last pass that wrote it.
    pub written_by: u64,
    state: State,
    pages: Vec<Arc<Page>>,
}

impl Frozen {
    /// What an empty sequence has.
    pub fn empty<D: Device>(store: &mut Store<D>) -> Result<Frozen, BackendError> {
        Ok(Frozen { length: 0, sampled: false, written_by: 0, state: store.zero_state()?, pages: Vec::new() })
    }

    /// A copy that shares the pages, as of when all that is enqueued is done.
    pub fn copy<D: Device>(&self, store: &mut Store<D>) -> Result<Frozen, BackendError> {
        Ok(Frozen { state: store.copy_state(&self.state)?, pages: self.pages.clone(), ..*self })
    }

    /// Makes room for `tokens` more tokens, or changes nothing.
    pub fn reserve<D: Device>(&mut self, store: &mut Store<D>, tokens: usize) -> Result<(), BackendError> {
        let (from, to) = (self.length, self.length + tokens);
        let first = from / PAGE_TOKENS;
        let is_shared = !from.is_multiple_of(PAGE_TOKENS) && Arc::strong_count(&self.pages[first]) > 1;
        let missing = store.kv.pages(to).saturating_sub(self.pages.len());
        let mut fresh = Vec::with_capacity(missing + 1);
        if is_shared {
            fresh.push(Arc::new(store.copy_page(&self.pages[first])?));
        }
        for _ in 0..missing {
            fresh.push(Arc::new(store.page()?));
        }
        if is_shared {
            self.pages.truncate(first);
        }
        self.pages.extend(fresh);
        Ok(())
    }

    /// Gives back pages that were reserved and not filled.
    pub fn release_unused<D: Device>(&mut self, store: &Store<D>) {
        self.pages.truncate(store.kv.pages(self.length));
    }

    /// The numbers of its pages, in the order of positions.
    pub fn pages(&self) -> impl ExactSizeIterator<Item = u32> {
        self.pages.iter().map(|page| page.number())
    }

    /// Where its pages begin in the buffer of pages.
    pub fn page_offsets<D: Device>(&self, store: &Store<D>) -> impl Iterator<Item = usize> {
        self.pages.iter().map(|page| store.page_at(page))
    }

    /// Its state.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Where its parts lie: the state, then page after page, each with all its positions.
    pub fn places<D: Device>(&self, store: &Store<D>) -> Places {
        Places {
            state: store.state_at(&self.state),
            state_bytes: store.state.bytes(),
            pages: self.page_offsets(store).collect(),
            page_bytes: store.kv.page_bytes(),
        }
    }

    /// Room for a state of `length` tokens; what it holds is anything.
    pub fn bare<D: Device>(store: &mut Store<D>, length: usize) -> Result<Frozen, BackendError> {
        let state = store.bare_state()?;
        let pages = (0..store.kv.pages(length))
            .map(|_| store.bare_page().map(Arc::new))
            .collect::<Result<_, BackendError>>()?;
        Ok(Frozen { length, sampled: false, written_by: 0, state, pages })
    }
}

/// Byte offsets in the buffers of states and of pages.
#[derive(Debug)]
pub struct Places {
    state: usize,
    state_bytes: usize,
    pages: Vec<usize>,
    page_bytes: usize,
}

impl Places {
    /// Writes what lies there.
    pub fn save<B: Buffer>(&self, pools: &Pools<B>, out: &mut dyn Write) -> io::Result<()> {
        let mut part = |buffer: &B, start: usize, bytes: usize| {
            let mut copy = vec![0; bytes];
            buffer.read(start, &mut copy);
            out.write_all(&copy)
        };
        part(&pools.states, self.state, self.state_bytes)?;
        self.pages.iter().try_for_each(|&start| part(&pools.pages, start, self.page_bytes))
    }

    /// Fills it with what [`Places::save`] wrote.
    ///
    /// # Errors
    /// [`BackendError::BadExport`] where `from` ends early.
    pub fn load<B: Buffer>(&self, pools: &Pools<B>, from: &mut dyn Read) -> Result<(), BackendError> {
        let mut part = |buffer: &B, start: usize, bytes: usize| {
            let mut copy = vec![0; bytes];
            from.read_exact(&mut copy).map_err(|error| BackendError::BadExport(error.to_string()))?;
            buffer.write(start, &copy);
            Ok(())
        };
        part(&pools.states, self.state, self.state_bytes)?;
        self.pages.iter().try_for_each(|&start| part(&pools.pages, start, self.page_bytes))
    }
}

/// A frozen sequence, and its part in what all snapshots hold together.
#[derive(Debug)]
pub struct Snapshot {
    frozen: Arc<Frozen>,
    /// Bytes that snapshots hold.
    held: Meter,
}

impl Snapshot {
    /// Takes `frozen`; what snapshots hold is counted on `held`.
    pub fn new(frozen: Frozen, held: &Meter) -> Snapshot {
        held.add(frozen.state.bytes() + frozen.pages.iter().map(|page| page.hold()).sum::<usize>());
        Snapshot { frozen: Arc::new(frozen), held: held.clone() }
    }

    /// The frozen state, which lives as long as someone keeps it.
    pub fn frozen(&self) -> &Arc<Frozen> {
        &self.frozen
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        let Frozen { state, pages, .. } = &*self.frozen;
        self.held.subtract(state.bytes() + pages.iter().map(|page| page.release()).sum::<usize>());
    }
}
