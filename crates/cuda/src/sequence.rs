//! What the backend keeps of one sequence between calls, and what a snapshot freezes.
//!
//! The state is the sequence's own; pages are shared with snapshots. A full page is never written again, and a
//! partly filled one that is shared is copied before the next write. The kernels find the pages through a table
//! on the card, which belongs to the open sequence.

use std::io::{self, Read, Write};
use std::sync::Arc;

use lily_engine::backend::BackendError;
use lily_engine::meter::Meter;
use lily_gpu::layout::PAGE_TOKENS;

use crate::driver::Memory;
use crate::pages::{Page, State, Store};
use crate::sampling::Recipe;

/// Bytes of an entry of the table.
const ENTRY: usize = size_of::<u64>();

/// State at some length.
#[derive(Debug)]
pub struct Frozen {
    /// Tokens that it has seen.
    pub length: usize,
    /// Whether the last step left a token.
    pub sampled: bool,
    state: State,
    pages: Vec<Arc<Page>>,
}

/// An open sequence.
#[derive(Debug)]
pub struct Sequence {
    /// Its state.
    pub now: Frozen,
    /// How its tokens are chosen; greedily where it says nothing.
    pub recipe: Option<Recipe>,
    table: Memory,
}

impl Sequence {
    /// An empty sequence of at most `context` tokens.
    pub fn new(store: &Store, context: usize) -> Result<Sequence, BackendError> {
        let now = Frozen { length: 0, sampled: false, state: store.state()?, pages: Vec::new() };
        Sequence::open(store, context, now)
    }

    /// A sequence that goes on from `frozen`.
    pub fn resume(store: &Store, context: usize, frozen: &Frozen) -> Result<Sequence, BackendError> {
        let sequence = Sequence::open(store, context, frozen.copy(store)?)?;
        let pages = &sequence.now.pages;
        sequence.write_table(store, 0, pages)?;
        Ok(sequence)
    }

    fn open(store: &Store, context: usize, now: Frozen) -> Result<Sequence, BackendError> {
        let entries = context.div_ceil(PAGE_TOKENS).max(1);
        Ok(Sequence { now, recipe: None, table: store.gpu.allocate("a table of pages", entries * ENTRY)? })
    }

    /// Makes room for `tokens` more tokens, or changes nothing.
    pub fn reserve(&mut self, store: &Store, tokens: usize) -> Result<(), BackendError> {
        let (from, to) = (self.now.length, self.now.length + tokens);
        let first = from / PAGE_TOKENS;
        let mut fresh = Vec::new();
        if !from.is_multiple_of(PAGE_TOKENS) && Arc::strong_count(&self.now.pages[first]) > 1 {
            fresh.push(Arc::new(store.copy_page(&self.now.pages[first])?));
        }
        let copied = fresh.len();
        let missing = store.sizes.kv.pages(to).saturating_sub(self.now.pages.len());
        for _ in 0..missing {
            fresh.push(Arc::new(store.page()?));
        }
        if fresh.is_empty() {
            return Ok(());
        }
        let start = if copied == 1 { first } else { self.now.pages.len() };
        self.write_table(store, start, &fresh)?;
        self.now.pages.truncate(start);
        self.now.pages.extend(fresh);
        Ok(())
    }

    /// Gives back pages that were reserved and not filled.
    pub fn release_unused(&mut self, store: &Store) {
        self.now.pages.truncate(store.sizes.kv.pages(self.now.length));
    }

    fn write_table(&self, store: &Store, start: usize, pages: &[Arc<Page>]) -> Result<(), BackendError> {
        let entries: Vec<u8> = pages.iter().flat_map(|page| page.address().to_le_bytes()).collect();
        if !entries.is_empty() {
            store.gpu.upload_now(self.table.address() + (start * ENTRY) as u64, &entries)?;
        }
        Ok(())
    }

    /// Address of the table of pages.
    pub fn table(&self) -> u64 {
        self.table.address()
    }

    /// Address of the recurrent state.
    pub fn state(&self) -> u64 {
        self.now.state.address()
    }

    /// Address of the last sampled token.
    pub fn sampled(&self) -> u64 {
        self.now.state.sampled()
    }
}

impl Frozen {
    /// A copy that shares the pages, as of when all that is enqueued is done.
    pub fn copy(&self, store: &Store) -> Result<Frozen, BackendError> {
        Ok(Frozen {
            length: self.length,
            sampled: self.sampled,
            state: store.copy_state(&self.state)?,
            pages: self.pages.clone(),
        })
    }

    /// Writes the state, then page after page, each with all its positions.
    ///
    /// # Errors
    /// Those of the card come as [`io::Error`] too.
    pub fn save(&self, store: &Store, out: &mut dyn Write) -> io::Result<()> {
        let stream = store.gpu.stream().map_err(io::Error::other)?;
        let mut part = |address: u64, bytes: usize| {
            let mut copy = vec![0; bytes];
            stream.download_now(&mut copy, address).map_err(io::Error::other)?;
            out.write_all(&copy)
        };
        part(self.state.address(), store.sizes.state.bytes())?;
        self.pages.iter().try_for_each(|page| part(page.address(), store.sizes.kv.page_bytes()))
    }

    /// What [`Frozen::save`] wrote of a state of `length` tokens.
    ///
    /// # Errors
    /// [`BackendError::BadExport`] where `from` ends early.
    pub fn load(store: &Store, length: usize, from: &mut dyn Read) -> Result<Frozen, BackendError> {
        let mut part = |address: u64, bytes: usize| {
            let mut copy = vec![0; bytes];
            from.read_exact(&mut copy).map_err(|error| BackendError::BadExport(error.to_string()))?;
            store.gpu.upload_now(address, &copy).map_err(BackendError::from)
        };
        let state = store.state()?;
        part(state.address(), store.sizes.state.bytes())?;
        let pages = (0..store.sizes.kv.pages(length))
            .map(|_| {
                let page = store.page()?;
                part(page.address(), store.sizes.kv.page_bytes())?;
                Ok(Arc::new(page))
            })
            .collect::<Result<_, BackendError>>()?;
        // The buffers above are ordinary memory, and large ones are not taken aside.
        store.gpu.synchronize()?;
        Ok(Frozen { length, sampled: false, state, pages })
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
