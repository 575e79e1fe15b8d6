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

use crate::kernels::attention::{KvElement, KvRows, quantize_row};
use crate::memory::Buffer;
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
    /// Integers of 8 bits and an f32 for each position and KV head that they are multiplied with.
    Q8,
}

impl KvFormat {
    /// Bytes of a key or a value of `head_dim` elements.
    fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            KvFormat::F32 => head_dim * size_of::<f32>(),
            KvFormat::F16 => head_dim * size_of::<f16>(),
            KvFormat::Q8 => head_dim * size_of::<i8>() + size_of::<f32>(),
        }
    }
}

/// The keys or the values of a page: rows of `head_dim` elements, `[kv_heads, PAGE_TOKENS]` of them.
#[derive(Clone, Debug)]
pub(crate) enum Rows {
    F32(Buffer<f32>),
    F16(Buffer<f16>),
    /// Elements, and a scale for each row.
    Q8(Buffer<i8>, Buffer<f32>),
}

/// An element type that the fast path reads the cache in.
pub(crate) trait Stored: KvElement {
    /// Elements and scales, where the rows are of this type.
    fn of(rows: &Rows) -> Option<KvRows<'_, Self>>;
}

impl Stored for f16 {
    fn of(rows: &Rows) -> Option<KvRows<'_, f16>> {
        match rows {
            Rows::F16(elements) => Some(KvRows { elements, scales: &[] }),
            _ => None,
        }
    }
}

impl Stored for i8 {
    fn of(rows: &Rows) -> Option<KvRows<'_, i8>> {
        match rows {
            Rows::Q8(elements, scales) => Some(KvRows { elements, scales }),
            _ => None,
        }
    }
}

/// What an error says the memory was for.
const WHAT: &str = "a page of the KV cache";

impl Rows {
    fn zeroed(format: KvFormat, rows: usize, head_dim: usize) -> Result<Rows, BackendError> {
        let count = rows * head_dim;
        Ok(match format {
            KvFormat::F32 => Rows::F32(Buffer::zeroed(WHAT, count)?),
            KvFormat::F16 => Rows::F16(Buffer::zeroed(WHAT, count)?),
            KvFormat::Q8 => Rows::Q8(Buffer::zeroed(WHAT, count)?, Buffer::zeroed(WHAT, rows)?),
        })
    }

    fn copy_from(&mut self, other: &Rows) {
        match (self, other) {
            (Rows::F32(to), Rows::F32(from)) => to.copy_from_slice(from),
            (Rows::F16(to), Rows::F16(from)) => to.copy_from_slice(from),
            (Rows::Q8(to, to_scales), Rows::Q8(from, scales)) => {
                to.copy_from_slice(from);
                to_scales.copy_from_slice(scales);
            }
            _ => unreachable!("all pages of a cache have one format"),
        }
    }

    fn store(&mut self, index: usize, row: &[f32]) {
        let place = elements(index..index + 1, row.len());
        match self {
            Rows::F32(to) => to[place].copy_from_slice(row),
            Rows::F16(to) => {
                let to = &mut to[place];
                to.convert_from_f32_slice(row);
                for stored in to.iter_mut().filter(|stored| stored.is_infinite()) {
                    *stored = if stored.is_sign_positive() { f16::MAX } else { f16::MIN };
                }
            }
            Rows::Q8(to, scales) => scales[index] = quantize_row(row, &mut to[place]),
        }
    }

    fn save(&self, rows: Range<usize>, head_dim: usize, out: &mut dyn Write) -> io::Result<()> {
        let place = elements(rows.clone(), head_dim);
        match self {
            Rows::F32(from) => saved::write(out, &from[place]),
            Rows::F16(from) => saved::write(out, &from[place]),
            Rows::Q8(from, scales) => {
                saved::write(out, &from[place])?;
                saved::write(out, &scales[rows])
            }
        }
    }

    fn load(&mut self, rows: Range<usize>, head_dim: usize, from: &mut dyn Read) -> io::Result<()> {
        let place = elements(rows.clone(), head_dim);
        match self {
            Rows::F32(to) => saved::read(from, &mut to[place]),
            Rows::F16(to) => saved::read(from, &mut to[place]),
            Rows::Q8(to, scales) => {
                saved::read(from, &mut to[place])?;
                saved::read(from, &mut scales[rows])
            }
        }
    }

    fn f32(&self) -> &[f32] {
        match self {
            Rows::F32(elements) => elements,
            _ => unreachable!("only the f32 reference reads its pages as f32"),
        }
    }
}

/// The elements of `rows`.
fn elements(rows: Range<usize>, head_dim: usize) -> Range<usize> {
    rows.start * head_dim..rows.end * head_dim
}

#[derive(Debug)]
struct Page {
    keys: Rows,
    values: Rows,
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
        let rows = self.kv_heads * PAGE_TOKENS;
        // Charged first: what passes the limit is not even asked of the system.
        let charge = meter.charge(WHAT, self.page_bytes())?;
        Ok(Page {
            keys: Rows::zeroed(self.format, rows, self.head_dim)?,
            values: Rows::zeroed(self.format, rows, self.head_dim)?,
            charge,
            snapshots: AtomicUsize::new(0),
        })
    }

    fn page_bytes(&self) -> usize {
        2 * self.kv_heads * PAGE_TOKENS * self.format.row_bytes(self.head_dim)
    }

    /// The rows of each KV head in page `page` that belong to positions `0..length`.
    fn filled(&self, page: usize, length: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let filled = PAGE_TOKENS.min(length - page * PAGE_TOKENS);
        (0..self.kv_heads).map(move |kv_head| kv_head * PAGE_TOKENS..kv_head * PAGE_TOKENS + filled)
    }

    /// The rows of one KV head in any page.
    fn head<'a, T: Stored>(&self, rows: &'a Rows, kv_head: usize) -> KvRows<'a, T> {
        let of_head = kv_head * PAGE_TOKENS..(kv_head + 1) * PAGE_TOKENS;
        let all = T::of(rows).expect("the fast path reads the format that it was made with");
        KvRows {
            elements: &all.elements[elements(of_head.clone(), self.head_dim)],
            scales: if T::SCALED { &all.scales[of_head] } else { all.scales },
        }
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

    /// How its keys and values are stored.
    pub fn format(&self) -> KvFormat {
        self.shape.format
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

    /// Writes positions `0..length`: page by page the keys, then the values, for each KV head `[positions, head_dim]`
    /// and, where there are scales, `[positions]` of them.
    pub fn save(&self, length: usize, out: &mut dyn Write) -> io::Result<()> {
        for (index, page) in self.pages.iter().enumerate().take(length.div_ceil(PAGE_TOKENS)) {
            for rows in [&page.keys, &page.values] {
                for filled in self.shape.filled(index, length) {
                    rows.save(filled, self.shape.head_dim, out)?;
                }
            }
        }
        Ok(())
    }

    /// Fills positions `0..length`, which are reserved and not shared, with what [`KvCache::save`] wrote.
    pub fn load(&mut self, length: usize, from: &mut dyn Read) -> io::Result<()> {
        for (index, page) in self.pages.iter_mut().enumerate().take(length.div_ceil(PAGE_TOKENS)) {
            let page = Arc::get_mut(page).expect("a reserved page is not shared");
            for rows in [&mut page.keys, &mut page.values] {
                for filled in self.shape.filled(index, length) {
                    rows.load(filled, self.shape.head_dim, from)?;
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
            let index = row_index(position, head);
            page.keys.store(index, &key[row.clone()]);
            page.values.store(index, &value[row]);
        }
    }

    /// The key of one head at one position, from an [`KvFormat::F32`] cache.
    pub fn key(&self, position: usize, kv_head: usize) -> &[f32] {
        let index = row_index(position, kv_head);
        &self.pages[position / PAGE_TOKENS].keys.f32()[elements(index..index + 1, self.shape.head_dim)]
    }

    /// The value of one head at one position, from an [`KvFormat::F32`] cache.
    pub fn value(&self, position: usize, kv_head: usize) -> &[f32] {
        let index = row_index(position, kv_head);
        &self.pages[position / PAGE_TOKENS].values.f32()[elements(index..index + 1, self.shape.head_dim)]
    }

    /// All keys of one head in page `page`, from a cache of `T`.
    pub(crate) fn page_keys<T: Stored>(&self, page: usize, kv_head: usize) -> KvRows<'_, T> {
        self.shape.head(&self.pages[page].keys, kv_head)
    }

    /// All values of one head in page `page`, from a cache of `T`.
    pub(crate) fn page_values<T: Stored>(&self, page: usize, kv_head: usize) -> KvRows<'_, T> {
        self.shape.head(&self.pages[page].values, kv_head)
    }
}

/// The row of a position and a KV head within its page.
fn row_index(position: usize, kv_head: usize) -> usize {
    kv_head * PAGE_TOKENS + position % PAGE_TOKENS
}
