//! `attn_core`: causal attention of every query head over the KV cache, times the output gate.
//!
//! Source of the arithmetic: `eager_attention_forward` and `Qwen3_5MoeAttention.forward` in transformers'
//! `models/qwen3_5_moe/modeling_qwen3_5_moe.py`.

use lily_model::geometry::AttentionGeometry;

use half::f16;

use crate::fast::{Activations, Machine};
use crate::kernels::OutRows;
use crate::kernels::attention::{KvPages, Partial, Queries, attend, attend_span, merge_spans, span_count};
use crate::kernels::delta::Strided;
use crate::kernels::f32_ops;
use crate::kv_cache::PAGE_TOKENS;
use crate::plain::{add_scaled, dot, sigmoid};
use crate::segment::Segment;

/// Plain form for one token at `position`: softmax over positions `0..=position`.
///
/// `key(p, h)` and `value(p, h)` are the rows of KV head `h` at position `p`, `[head_dim]` each; `q`, `gate`
/// and `out` are `[heads * head_dim]`.
pub fn reference<'a>(
    geometry: &AttentionGeometry,
    position: usize,
    q: &[f32],
    gate: &[f32],
    key: impl Fn(usize, usize) -> &'a [f32],
    value: impl Fn(usize, usize) -> &'a [f32],
    out: &mut [f32],
) {
    let dim = geometry.head_dim;
    let scale = 1.0 / (dim as f32).sqrt();
    let mut weights = vec![0.0; position + 1];
    for head in 0..geometry.heads {
        let kv_head = head * geometry.kv_heads / geometry.heads;
        let range = head * dim..(head + 1) * dim;
        for (p, weight) in weights.iter_mut().enumerate() {
            *weight = dot(&q[range.clone()], key(p, kv_head)) * scale;
        }
        let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        weights.iter_mut().for_each(|w| *w = (*w - largest).exp());
        let total: f32 = weights.iter().sum();
        let out = &mut out[range.clone()];
        out.fill(0.0);
        for (p, weight) in weights.iter().enumerate() {
            add_scaled(out, weight / total, value(p, kv_head));
        }
        for (o, g) in out.iter_mut().zip(&gate[range]) {
            *o *= sigmoid(*g);
        }
    }
}

/// Most query heads of a KV head that the fast form takes.
pub const MAX_GROUP: usize = 32;
/// Tokens of a prompt that one task of the fast form takes.
const TOKEN_BLOCK: usize = 8;

/// What the fast form reads of `attn_in`.
#[derive(Clone, Copy)]
pub struct FastQueries<'a> {
    /// `[rows, heads * head_dim]`.
    pub q: &'a [f32],
    /// Its second halves are the gates: `[rows, heads, 2, head_dim]`.
    pub query_and_gate: &'a [f32],
}

/// One sequence's cache in one layer, as the kernels take it.
struct Cache<'a> {
    /// Keys of each page, all pages of KV head 0, then of head 1, ...
    keys: Vec<&'a [f16]>,
    /// Values, like the keys.
    values: Vec<&'a [f16]>,
    pages: usize,
    first_position: usize,
    rows: std::ops::Range<usize>,
}

impl<'a> Cache<'a> {
    fn new(geometry: &AttentionGeometry, layer: usize, segment: &'a Segment<'_>) -> Cache<'a> {
        let first_position = segment.sequence.length;
        let pages = (first_position + segment.rows.len()).div_ceil(PAGE_TOKENS);
        let cache = segment.sequence.layers[layer].attention();
        let each = |page: fn(&'a crate::kv_cache::KvCache, usize, usize) -> &'a [f16]| {
            (0..geometry.kv_heads * pages).map(|i| page(cache, i % pages, i / pages)).collect()
        };
        Cache {
            keys: each(|cache, page, head| cache.page_keys(page, head)),
            values: each(|cache, page, head| cache.page_values(page, head)),
            pages,
            first_position,
            rows: segment.rows.clone(),
        }
    }

    fn of_head(&'a self, geometry: &AttentionGeometry, kv_head: usize) -> KvPages<'a, f16> {
        let range = kv_head * self.pages..(kv_head + 1) * self.pages;
        KvPages {
            keys: &self.keys[range.clone()],
            values: &self.values[range],
            page_positions: PAGE_TOKENS,
            head_dim: geometry.head_dim,
        }
    }
}

/// Fast form for all sequences of a pass: `out` is `[rows, heads * head_dim]`, `spans` scratch.
///
/// A prompt is shared out by tokens and KV heads. A decode step has one token per sequence, so its context is
/// shared out too, in spans whose merge has the same bits as one thread's walk over all of them.
pub fn fast(
    machine: &Machine,
    geometry: &AttentionGeometry,
    layer: usize,
    segments: &[Segment<'_>],
    queries: FastQueries<'_>,
    spans: &mut Vec<Partial>,
    out: &mut Activations,
) {
    let width = geometry.heads * geometry.head_dim;
    let caches: Vec<Cache<'_>> =
        segments.iter().map(|segment| Cache::new(geometry, layer, segment)).collect();
    let rows = out.writer().values();
    if caches.iter().all(|cache| cache.rows.len() == 1) {
        decode(machine, geometry, &caches, queries.q, spans, rows);
    } else {
        for cache in &caches {
            prefill(machine, geometry, cache, queries.q, rows);
        }
    }
    out.fill(machine, |row, out| {
        let gates = queries.query_and_gate[row * 2 * width..].chunks_exact(2 * geometry.head_dim);
        for (out, gate) in out.chunks_exact_mut(geometry.head_dim).zip(gates) {
            f32_ops::sigmoid_gate(machine.isa, &gate[geometry.head_dim..], out);
        }
    });
}

/// The queries of `tokens` tokens from `first` on (counted in the sequence's rows) for one KV head.
fn queries_of<'a>(
    geometry: &AttentionGeometry,
    cache: &Cache<'_>,
    q: &'a [f32],
    kv_head: usize,
    first: usize,
    tokens: usize,
) -> Queries<'a> {
    let heads = geometry.heads / geometry.kv_heads;
    let width = geometry.heads * geometry.head_dim;
    let start = (cache.rows.start + first) * width + kv_head * heads * geometry.head_dim;
    Queries {
        data: Strided { data: &q[start..], stride: width },
        tokens,
        heads,
        first_position: cache.first_position + first,
        scale: 1.0 / (geometry.head_dim as f32).sqrt(),
    }
}

fn prefill(machine: &Machine, geometry: &AttentionGeometry, cache: &Cache<'_>, q: &[f32], out: OutRows<'_>) {
    let group = geometry.heads / geometry.kv_heads * geometry.head_dim;
    let blocks = cache.rows.len().div_ceil(TOKEN_BLOCK);
    machine.pool.for_each(blocks * geometry.kv_heads, |task| {
        let kv_head = task % geometry.kv_heads;
        // The latest tokens see most: first, so that no thread is left with a long one.
        let first = (blocks - 1 - task / geometry.kv_heads) * TOKEN_BLOCK;
        let tokens = TOKEN_BLOCK.min(cache.rows.len() - first);
        let queries = queries_of(geometry, cache, q, kv_head, first, tokens);
        let out = out.from_row(cache.rows.start + first);
        // SAFETY: each block of tokens and each KV head's columns are one task's.
        unsafe { attend(machine.isa, &cache.of_head(geometry, kv_head), &queries, out, kv_head * group) };
    });
}

fn decode(
    machine: &Machine,
    geometry: &AttentionGeometry,
    caches: &[Cache<'_>],
    q: &[f32],
    spans: &mut Vec<Partial>,
    out: OutRows<'_>,
) {
    let group = geometry.heads / geometry.kv_heads * geometry.head_dim;
    let per_head = caches.iter().map(|cache| span_count(cache.first_position)).max().unwrap_or(0);
    let heads = caches.len() * geometry.kv_heads;
    if spans.len() < heads * per_head {
        spans.resize_with(heads * per_head, Partial::new);
    }
    let spans = &mut spans[..heads * per_head];
    let of = |head: usize| (&caches[head / geometry.kv_heads], head % geometry.kv_heads);
    machine.pool.for_each_mut(spans, |task, partial| {
        let (cache, kv_head) = of(task / per_head);
        let span = task % per_head;
        if span < span_count(cache.first_position) {
            let queries = queries_of(geometry, cache, q, kv_head, 0, 1);
            attend_span(machine.isa, &cache.of_head(geometry, kv_head), &queries, span, partial);
        }
    });
    for head in 0..heads {
        let (cache, kv_head) = of(head);
        let count = span_count(cache.first_position);
        // SAFETY: no task runs any more.
        let out = unsafe { out.row(cache.rows.start, kv_head * group..(kv_head + 1) * group) };
        merge_spans(machine.isa, &spans[head * per_head..][..count], out);
    }
}
