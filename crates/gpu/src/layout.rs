//! How what belongs to a sequence lies in a device's memory: KV pages, and the recurrent state.
//!
//! Both are plain bytes with fixed offsets, so that a kernel, an export and a copy agree on them without asking.
//!
//! - A **page** holds the keys and values of [`PAGE_TOKENS`] positions in *all* attention layers, so a sequence
//!   has one table of pages, whatever its layers, and a page is shared, copied and counted as one thing:
//!   `[attention layers][kv_heads]`, and of each as [`KvFormat`] says. Zero where nothing was written.
//!   f16: the keys `[PAGE_TOKENS][head_dim]`, then the values, transposed, `[head_dim][PAGE_TOKENS]`: so scores and
//!   weighted sums both run along memory. 8 bits: the keys and then the values, i8 `[PAGE_TOKENS][head_dim]` (CUDA:
//!   values transposed), then the scales of the keys and then of the values, f32 `[PAGE_TOKENS]`. In which order numbers
//!   stand within each part is for CUDA's kernels to say.
//! - A **state** holds all Gated DeltaNet layers of a sequence, first all recurrent matrices, then all tails of
//!   the convolution: `[delta layers][value_heads][value_dim][key_dim]`, then
//!   `[delta layers][conv_width - 1][conv_channels]` (oldest input first), f32.

use lily_model::geometry::{Geometry, LayerKind};

/// Positions in a page.
pub const PAGE_TOKENS: usize = 64;
/// Bytes of an f16.
const HALF: usize = 2;

/// How a page stores keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvFormat {
    /// IEEE halves; values beyond their range are stored as the largest.
    #[default]
    F16,
    /// Integers of 8 bits and an f32 for each position and KV head that they are multiplied with.
    Q8,
}

impl KvFormat {
    /// Bytes of a key or a value of `head_dim` elements.
    pub fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            KvFormat::F16 => head_dim * HALF,
            KvFormat::Q8 => head_dim * size_of::<i8>() + size_of::<f32>(),
        }
    }
}

/// Sizes of a KV page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    format: KvFormat,
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl KvLayout {
    /// The layout of a model whose keys and values are stored as `format` says.
    pub fn new(geometry: &Geometry, format: KvFormat) -> KvLayout {
        KvLayout {
            format,
            layers: geometry.count(LayerKind::Attention),
            kv_heads: geometry.attention.kv_heads,
            head_dim: geometry.attention.head_dim,
        }
    }

    /// How keys and values are stored.
    pub fn format(&self) -> KvFormat {
        self.format
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.layers * self.layer_bytes()
    }

    /// Bytes that one position takes in all layers.
    pub fn token_bytes(&self) -> usize {
        self.layers * self.position_bytes()
    }

    /// Bytes of a page that belong to one KV head of an attention layer.
    pub fn head_bytes(&self) -> usize {
        self.layer_bytes() / self.kv_heads
    }

    /// Bytes of a page that belong to one attention layer.
    pub fn layer_bytes(&self) -> usize {
        PAGE_TOKENS * self.position_bytes()
    }

    /// Bytes that one position takes in one attention layer.
    pub fn position_bytes(&self) -> usize {
        2 * self.kv_heads * self.format.row_bytes(self.head_dim)
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
        let (kv, state) = (KvLayout::new(&geometry, KvFormat::F16), StateLayout::new(&geometry));
        assert_eq!(kv.token_bytes(), 20 * 1024);
        // A scale for each key and value, and half of the rest.
        assert_eq!(KvLayout::new(&geometry, KvFormat::Q8).page_bytes(), 64 * (10 * 1024 + 40 * 4));
        assert_eq!(kv.pages(0) + kv.pages(1) + kv.pages(64) + kv.pages(65), 4);
        // 63 MB, and the tails of the convolution.
        assert_eq!(state.bytes(), 62_914_560 + 2_949_120);
    }
}
