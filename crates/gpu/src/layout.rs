//! How what belongs to a sequence lies in a device's memory: KV pages, and the recurrent state.
//!
//! Both are plain bytes with fixed offsets, so that a kernel, an export and a copy agree on them without asking.
//!
//! - A **page** holds the keys and values of [`PAGE_TOKENS`] positions in *all* attention layers, so a sequence
//!   has one table of pages, whatever its layers, and a page is shared, copied and counted as one thing. f16:
//!   `[attention layers][kv_heads]`, of each the keys `[PAGE_TOKENS][head_dim]`, then the values, transposed,
//!   `[head_dim][PAGE_TOKENS]`: so scores and weighted sums both run along memory. Zero where nothing was written.
//! - A **state** holds all Gated DeltaNet layers of a sequence, first all recurrent matrices, then all tails of
//!   the convolution: `[delta layers][value_heads][value_dim][key_dim]`, then
//!   `[delta layers][conv_width - 1][conv_channels]` (oldest input first), f32.

use lily_model::geometry::{Geometry, LayerKind};

/// Positions in a page.
pub const PAGE_TOKENS: usize = 64;
/// Bytes of a stored key or value element, an f16.
pub const KV_ELEMENT_BYTES: usize = 2;

/// Sizes of a KV page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl KvLayout {
    /// The layout of a model.
    pub fn new(geometry: &Geometry) -> KvLayout {
        KvLayout {
            layers: geometry.count(LayerKind::Attention),
            kv_heads: geometry.attention.kv_heads,
            head_dim: geometry.attention.head_dim,
        }
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.layers * self.layer_bytes()
    }

    /// Bytes of a page that belong to one attention layer.
    pub fn layer_bytes(&self) -> usize {
        PAGE_TOKENS * self.position_bytes()
    }

    /// Bytes that one position takes in one attention layer.
    pub fn position_bytes(&self) -> usize {
        2 * self.kv_heads * self.head_dim * KV_ELEMENT_BYTES
    }

    /// Pages that `tokens` positions take.
    pub fn pages(&self, tokens: usize) -> usize {
        tokens.div_ceil(PAGE_TOKENS)
    }
}

/// Sizes of a sequence's recurrent state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateLayout {
    layers: usize,
    recurrent: usize,
    tail: usize,
}

impl StateLayout {
    /// The layout of a model.
    pub fn new(geometry: &Geometry) -> StateLayout {
        StateLayout {
            layers: geometry.count(LayerKind::Delta),
            recurrent: geometry.delta.state_elements() * size_of::<f32>(),
            tail: geometry.delta.conv_tail_elements() * size_of::<f32>(),
        }
    }

    /// Bytes of a state.
    pub fn bytes(&self) -> usize {
        self.layers * (self.recurrent + self.tail)
    }

    /// Gated DeltaNet layers.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Bytes of one layer's recurrent matrices.
    pub fn recurrent_bytes(&self) -> usize {
        self.recurrent
    }

    /// Bytes of one layer's tail.
    pub fn tail_bytes(&self) -> usize {
        self.tail
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_of_the_full_model_takes_what_the_design_says() {
        let geometry = Geometry::qwen3_6_35b_a3b();
        let (kv, state) = (KvLayout::new(&geometry), StateLayout::new(&geometry));
        assert_eq!(kv.page_bytes() / PAGE_TOKENS, 20 * 1024);
        assert_eq!(kv.pages(0) + kv.pages(1) + kv.pages(64) + kv.pages(65), 4);
        // 63 MB, and the tails of the convolution.
        assert_eq!(state.bytes(), 62_914_560 + 2_949_120);
    }
}
