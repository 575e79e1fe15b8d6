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
use crate::kv_cache::{KvFormat, PAGE_TOKENS, Stored};
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
    let attention = Attention { geometry, layer, q: queries.q };
    let rows = out.writer().values();
    // One format for all sequences of a backend.
    match segments.first().map(|segment| segment.sequence.layers[layer].attention().format()) {
        Some(KvFormat::F16) => attention.all::<f16>(machine, segments, spans, rows),
        Some(KvFormat::Q8) => attention.all::<i8>(machine, segments, spans, rows),
        Some(KvFormat::F32) => unreachable!("only the plain form has an f32 cache"),
        None => {}
    }
    out.fill(machine, |row, out| {
        let gates = queries.query_and_gate[row * 2 * width..].chunks_exact(2 * geometry.head_dim);
        for (out, gate) in out.chunks_exact_mut(geometry.head_dim).zip(gates) {
            f32_ops::sigmoid_gate(machine.isa, &gate[geometry.head_dim..], out);
        }
    });
}

/// What all tasks of a pass read.
#[derive(Clone, Copy)]
struct Attention<'a> {
    geometry: &'a AttentionGeometry,
    layer: usize,
    /// `[rows, heads * head_dim]`.
    q: &'a [f32],
}

impl Attention<'_> {
    /// Elements of the query heads that share a KV head.
    fn group(&self) -> usize {
        self.geometry.heads / self.geometry.kv_heads * self.geometry.head_dim
    }

    /// Lets `body` work with the cache of `segment` and `kv_head` and with the queries of `tokens` tokens from
    /// `first` on, counted in the segment's rows.
    fn with<T: Stored, R>(
        &self,
        segment: &Segment<'_>,
        kv_head: usize,
        first: usize,
        tokens: usize,
        body: impl FnOnce(&KvPages<'_, T>, &Queries<'_>) -> R,
    ) -> R {
        let AttentionGeometry { heads, kv_heads, head_dim, .. } = *self.geometry;
        let width = heads * head_dim;
        let cache = segment.sequence.layers[self.layer].attention();
        let position = segment.sequence.length + first;
        let kv = KvPages {
            pages: (position + tokens).div_ceil(PAGE_TOKENS),
            keys: &|page| cache.page_keys(page, kv_head),
            values: &|page| cache.page_values(page, kv_head),
            page_positions: PAGE_TOKENS,
            head_dim,
        };
        let start = (segment.rows.start + first) * width + kv_head * self.group();
        let queries = Queries {
            data: Strided { data: &self.q[start..], stride: width },
            tokens,
            heads: heads / kv_heads,
            first_position: position,
            scale: 1.0 / (head_dim as f32).sqrt(),
        };
        body(&kv, &queries)
    }

    fn all<T: Stored>(
        &self,
        machine: &Machine,
        segments: &[Segment<'_>],
        spans: &mut Vec<Partial>,
        out: OutRows<'_>,
    ) {
        if segments.iter().all(|segment| segment.rows.len() == 1) {
            self.decode::<T>(machine, segments, spans, out);
        } else {
            for segment in segments {
                self.prefill::<T>(machine, segment, out);
            }
        }
    }

    fn prefill<T: Stored>(&self, machine: &Machine, segment: &Segment<'_>, out: OutRows<'_>) {
        let (kv_heads, group) = (self.geometry.kv_heads, self.group());
        let blocks = segment.rows.len().div_ceil(TOKEN_BLOCK);
        machine.pool.for_each(blocks * kv_heads, |task| {
            let kv_head = task % kv_heads;
            // The latest tokens see most: first, so that no thread is left with a long one.
            let first = (blocks - 1 - task / kv_heads) * TOKEN_BLOCK;
            let tokens = TOKEN_BLOCK.min(segment.rows.len() - first);
            let out = out.from_row(segment.rows.start + first);
            self.with::<T, _>(segment, kv_head, first, tokens, |kv, queries| {
                // SAFETY: each block of tokens and each KV head's columns are one task's.
                unsafe { attend(machine.isa, kv, queries, out, kv_head * group) };
            });
        });
    }

    fn decode<T: Stored>(
        &self,
        machine: &Machine,
        segments: &[Segment<'_>],
        spans: &mut Vec<Partial>,
        out: OutRows<'_>,
    ) {
        let (kv_heads, group) = (self.geometry.kv_heads, self.group());
        let spans_of = |segment: &Segment<'_>| span_count(segment.sequence.length);
        let per_head = segments.iter().map(spans_of).max().unwrap_or(0);
        let heads = segments.len() * kv_heads;
        if spans.len() < heads * per_head {
            spans.resize_with(heads * per_head, Partial::new);
        }
        let spans = &mut spans[..heads * per_head];
        machine.pool.for_each_mut(spans, |task, partial| {
            let (head, span) = (task / per_head, task % per_head);
            let segment = &segments[head / kv_heads];
            if span < spans_of(segment) {
                self.with::<T, _>(segment, head % kv_heads, 0, 1, |kv, queries| {
                    attend_span(machine.isa, kv, queries, span, partial);
                });
            }
        });
        for (head, spans) in spans.chunks(per_head.max(1)).enumerate() {
            let (segment, kv_head) = (&segments[head / kv_heads], head % kv_heads);
            // SAFETY: no task runs any more.
            let out = unsafe { out.row(segment.rows.start, kv_head * group..(kv_head + 1) * group) };
            merge_spans(machine.isa, &spans[..spans_of(segment)], out);
        }
    }
}
