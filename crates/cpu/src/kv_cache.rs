//! The KV cache of one attention layer of one sequence: pages of [`PAGE_TOKENS`] positions.
//!
//! Pages are reference-counted, so that a snapshot costs a count and not a copy. A full page is never written
//! again. The last, partly filled one is copied before the next write if a snapshot shares it.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::f16;
use half::slice::HalfFloatSliceExt;
use lily_engine::backend::BackendError;
use lily_engine::meter::{Charge, Meter};
use lily_model::geometry::AttentionGeometry;

use crate::memory::zeroed;
use crate::saved;

/// Positions in a page. Attention works in blocks of this size, aligned to absolute positions, so that the
/// order of its sums does not depend on where a prompt was cut.
pub const PAGE_TOKENS: usize = 64;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvFormat {
    /// IEEE single.
    F32,
    /// IEEE half; values beyond its range are stored as its largest.
    F16,
}

impl KvFormat {
    fn bytes(self) -> usize {
        match self {
            KvFormat::F32 => size_of::<f32>(),
            KvFormat::F16 => size_of::<f16>(),
        }
    }
}

/// The keys or the values of a page: `[kv_heads, PAGE_TOKENS, head_dim]`.
#[derive(Clone, Debug)]
enum Elements {
    F32(Vec<f32>),
    F16(Vec<f16>),
}

/// What an error says the memory was for.
const WHAT: &str = "a page of the KV cache";

impl Elements {
    fn zeroed(format: KvFormat, count: usize) -> Result<Elements, BackendError> {
        Ok(match format {
            KvFormat::F32 => Elements::F32(zeroed(WHAT, count)?),
            KvFormat::F16 => Elements::F16(zeroed(WHAT, count)?),
        })
    }

    fn copy_from(&mut self, other: &Elements) {
        match (self, other) {
            (Elements::F32(to), Elements::F32(from)) => to.copy_from_slice(from),
            (Elements::F16(to), Elements::F16(from)) => to.copy_from_slice(from),
            _ => unreachable!("all pages of a cache have one format"),
        }
    }

    fn store(&mut self, start: usize, row: &[f32]) {
        match self {
            Elements::F32(to) => to[start..start + row.len()].copy_from_slice(row),
            Elements::F16(to) => {
                let to = &mut to[start..start + row.len()];
                to.convert_from_f32_slice(row);
                for stored in to.iter_mut().filter(|stored| stored.is_infinite()) {
                    *stored = if stored.is_sign_positive() { f16::MAX } else { f16::MIN };
                }
            }
        }
    }

    fn save(&self, range: Range<usize>, out: &mut dyn Write) -> io::Result<()> {
        match self {
            Elements::F32(elements) => saved::write(out, &elements[range]),
            Elements::F16(elements) => saved::write(out, &elements[range]),
        }
    }

    fn load(&mut self, range: Range<usize>, from: &mut dyn Read) -> io::Result<()> {
        match self {
            Elements::F32(elements) => saved::read(from, &mut elements[range]),
            Elements::F16(elements) => saved::read(from, &mut elements[range]),
        }
    }

    fn f32(&self) -> &[f32] {
        match self {
            Elements::F32(elements) => elements,
            Elements::F16(_) => unreachable!("only the f32 reference reads its pages as f32"),
        }
    }

    fn f16(&self) -> &[f16] {
        match self {
            Elements::F16(elements) => elements,
            Elements::F32(_) => unreachable!("only the fast path reads its pages as f16"),
        }
    }
}

#[derive(Debug)]
struct Page {
    keys: Elements,
    values: Elements,
    charge: Charge,
    /// Snapshots that hold the page.
    snapshots: AtomicUsize,
}

/// Sizes that all pages of a cache share.
#[derive(Clone, Debug)]
struct Shape {
    format: KvFormat,
    kv_heads: usize,
    head_dim: usize,
}

impl Shape {
    fn page(&self, meter: &Meter) -> Result<Page, BackendError> {
        let count = self.kv_heads * PAGE_TOKENS * self.head_dim;
        // Charged first: what passes the limit is not even asked of the system.
        let charge = meter.charge(WHAT, self.page_bytes())?;
        Ok(Page {
            keys: Elements::zeroed(self.format, count)?,
            values: Elements::zeroed(self.format, count)?,
            charge,
            snapshots: AtomicUsize::new(0),
        })
    }

    fn page_bytes(&self) -> usize {
        2 * self.kv_heads * PAGE_TOKENS * self.head_dim * self.format.bytes()
    }

    /// Elements of one KV head within a page.
    fn head_range(&self, kv_head: usize) -> Range<usize> {
        let elements = PAGE_TOKENS * self.head_dim;
        kv_head * elements..(kv_head + 1) * elements
    }

    /// The elements of each KV head in page `page` that belong to positions `0..length`.
    fn filled(&self, page: usize, length: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let rows = PAGE_TOKENS.min(length - page * PAGE_TOKENS);
        let (head, filled) = (PAGE_TOKENS * self.head_dim, rows * self.head_dim);
        (0..self.kv_heads).map(move |kv_head| kv_head * head..kv_head * head + filled)
    }

    fn row_range(&self, position: usize, kv_head: usize) -> Range<usize> {
        let start = (kv_head * PAGE_TOKENS + position % PAGE_TOKENS) * self.head_dim;
        start..start + self.head_dim
    }
}

/// Keys and values of one attention layer for positions `0..length`. A clone shares the pages.
#[derive(Clone, Debug)]
pub struct KvCache {
    shape: Shape,
    pages: Vec<Arc<Page>>,
}

impl KvCache {
    /// An empty cache.
    pub fn new(geometry: &AttentionGeometry, format: KvFormat) -> KvCache {
        let shape = Shape { format, kv_heads: geometry.kv_heads, head_dim: geometry.head_dim };
        KvCache { shape, pages: Vec::new() }
    }

    /// Makes positions `from..to` writable, where `0..from` are held already. Without memory for all of them
    /// nothing changes.
    pub fn reserve(&mut self, from: usize, to: usize, meter: &Meter) -> Result<(), BackendError> {
        let held = self.pages.len();
        if !from.is_multiple_of(PAGE_TOKENS) {
            let last = &mut self.pages[from / PAGE_TOKENS];
            if Arc::get_mut(last).is_none() {
                let mut copy = self.shape.page(meter)?;
                copy.keys.copy_from(&last.keys);
                copy.values.copy_from(&last.values);
                *last = Arc::new(copy);
            }
        }
        while self.pages.len() * PAGE_TOKENS < to {
            match self.shape.page(meter) {
                Ok(page) => self.pages.push(Arc::new(page)),
                Err(error) => {
                    self.pages.truncate(held);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Gives back pages that hold nothing of positions `0..length`.
    pub fn truncate(&mut self, length: usize) {
        self.pages.truncate(length.div_ceil(PAGE_TOKENS));
    }

    /// Bytes of the pages for `tokens` positions.
    pub fn bytes(&self, tokens: usize) -> usize {
        tokens.div_ceil(PAGE_TOKENS).saturating_mul(self.shape.page_bytes())
    }

    /// Counts the pages as held by one snapshot more. Returns the bytes of those that none held before.
    pub fn hold(&self) -> usize {
        let fresh = self.pages.iter().filter(|page| page.snapshots.fetch_add(1, Ordering::Relaxed) == 0);
        fresh.map(|page| page.charge.bytes()).sum()
    }

    /// Undoes one [`KvCache::hold`]. Returns the bytes of the pages that no snapshot holds any more.
    pub fn release(&self) -> usize {
        let last = self.pages.iter().filter(|page| page.snapshots.fetch_sub(1, Ordering::Relaxed) == 1);
        last.map(|page| page.charge.bytes()).sum()
    }

    /// Writes positions `0..length`: page by page the keys, then the values, `[kv_heads, positions, head_dim]`
    /// each.
    pub fn save(&self, length: usize, out: &mut dyn Write) -> io::Result<()> {
        for (index, page) in self.pages.iter().enumerate().take(length.div_ceil(PAGE_TOKENS)) {
            for elements in [&page.keys, &page.values] {
                for range in self.shape.filled(index, length) {
                    elements.save(range, out)?;
                }
            }
        }
        Ok(())
    }

    /// Fills positions `0..length`, which are reserved and not shared, with what [`KvCache::save`] wrote.
    pub fn load(&mut self, length: usize, from: &mut dyn Read) -> io::Result<()> {
        for (index, page) in self.pages.iter_mut().enumerate().take(length.div_ceil(PAGE_TOKENS)) {
            let page = Arc::get_mut(page).expect("a reserved page is not shared");
            for elements in [&mut page.keys, &mut page.values] {
                for range in self.shape.filled(index, length) {
                    elements.load(range, from)?;
                }
            }
        }
        Ok(())
    }

    /// Stores the key and the value of every KV head, `[kv_heads, head_dim]` each, at a reserved position.
    pub fn write(&mut self, position: usize, key: &[f32], value: &[f32]) {
        let page =
            Arc::get_mut(&mut self.pages[position / PAGE_TOKENS]).expect("a reserved page is not shared");
        for head in 0..self.shape.kv_heads {
            let row = head * self.shape.head_dim..(head + 1) * self.shape.head_dim;
            let start = self.shape.row_range(position, head).start;
            page.keys.store(start, &key[row.clone()]);
            page.values.store(start, &value[row]);
        }
    }

    /// The key of one head at one position, from an [`KvFormat::F32`] cache.
    pub fn key(&self, position: usize, kv_head: usize) -> &[f32] {
        &self.pages[position / PAGE_TOKENS].keys.f32()[self.shape.row_range(position, kv_head)]
    }

    /// The value of one head at one position, from an [`KvFormat::F32`] cache.
    pub fn value(&self, position: usize, kv_head: usize) -> &[f32] {
        &self.pages[position / PAGE_TOKENS].values.f32()[self.shape.row_range(position, kv_head)]
    }

    /// All keys of one head in page `page`, `[PAGE_TOKENS, head_dim]`, from an [`KvFormat::F16`] cache.
    pub fn page_keys(&self, page: usize, kv_head: usize) -> &[f16] {
        &self.pages[page].keys.f16()[self.shape.head_range(kv_head)]
    }

    /// All values of one head in page `page`, `[PAGE_TOKENS, head_dim]`, from an [`KvFormat::F16`] cache.
    pub fn page_values(&self, page: usize, kv_head: usize) -> &[f16] {
        &self.pages[page].values.f16()[self.shape.head_range(kv_head)]
    }
}
