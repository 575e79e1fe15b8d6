//! The shape of the model: every size that a kernel, a cache or a plan is derived from.
//!
//! A [`Geometry`] comes from `config.json` (see [`crate::config`]) and never changes afterwards.

/// What a decoder layer mixes tokens with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Gated DeltaNet: a recurrent state per value head.
    Delta,
    /// Full attention over the KV cache.
    Attention,
}

/// Sizes of the full-attention layers.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionGeometry {
    /// Query heads.
    pub heads: usize,
    /// KV heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Leading elements of each head that rotary embedding turns; the rest pass through.
    pub rotary_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
}

/// Sizes of the Gated DeltaNet layers.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaGeometry {
    /// Key (and query) heads.
    pub key_heads: usize,
    /// Value heads; value head `h` reads key head `h * key_heads / value_heads`.
    pub value_heads: usize,
    /// Elements of one key head.
    pub key_dim: usize,
    /// Elements of one value head.
    pub value_dim: usize,
    /// Taps of the causal depthwise convolution.
    pub conv_width: usize,
}

impl DeltaGeometry {
    /// Channels of the convolution: queries, keys, then values.
    pub fn conv_channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Elements of all value heads together: the width of `z` and of the layer's output before `out_proj`.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// f32 elements of one layer's recurrent state, `[value_heads, value_dim, key_dim]`.
    pub fn state_elements(&self) -> usize {
        self.value_heads * self.value_dim * self.key_dim
    }

    /// f32 elements of one layer's convolution tail, `[conv_width - 1, conv_channels]`.
    pub fn conv_tail_elements(&self) -> usize {
        (self.conv_width - 1) * self.conv_channels()
    }
}

/// Sizes of the mixture of experts that follows every mixer.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeGeometry {
    /// Routed experts.
    pub experts: usize,
    /// Experts that each token uses.
    pub top_k: usize,
    /// Inner width of a routed expert.
    pub expert_width: usize,
    /// Inner width of the shared expert.
    pub shared_width: usize,
}

/// The whole decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Geometry {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rows of the embedding table and of the head.
    pub vocab: usize,
    /// The kind of each layer, first to last.
    pub layers: Vec<LayerKind>,
    /// Full-attention sizes.
    pub attention: AttentionGeometry,
    /// Gated DeltaNet sizes.
    pub delta: DeltaGeometry,
    /// Mixture-of-experts sizes.
    pub moe: MoeGeometry,
    /// Epsilon of every RMS norm.
    pub rms_eps: f32,
    /// Longest context that the checkpoint declares, in tokens.
    pub max_context: usize,
    /// Whether the head shares the embedding table.
    pub tied_head: bool,
}

impl Geometry {
    /// Number of layers of `kind`.
    pub fn count(&self, kind: LayerKind) -> usize {
        self.layers.iter().filter(|&&k| k == kind).count()
    }

    /// The geometry of Qwen3.6-35B-A3B.
    pub fn qwen3_6_35b_a3b() -> Geometry {
        Geometry {
            hidden: 2048,
            vocab: 248_320,
            layers: (1..=40)
                .map(|i| if i % 4 == 0 { LayerKind::Attention } else { LayerKind::Delta })
                .collect(),
            attention: AttentionGeometry {
                heads: 16,
                kv_heads: 2,
                head_dim: 256,
                rotary_dim: 64,
                rope_theta: 1e7,
            },
            delta: DeltaGeometry {
                key_heads: 16,
                value_heads: 32,
                key_dim: 128,
                value_dim: 128,
                conv_width: 4,
            },
            moe: MoeGeometry { experts: 256, top_k: 8, expert_width: 512, shared_width: 512 },
            rms_eps: 1e-6,
            max_context: 262_144,
            tied_head: false,
        }
    }
}
