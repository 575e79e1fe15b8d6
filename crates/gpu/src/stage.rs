//! The stages of the forward pass, under the names that every backend uses.

use std::fmt;

/// A stage, in the order of the pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// Token ids to rows of the embedding table.
    Embed,
    /// Input norm and projections of a Gated DeltaNet layer.
    DeltaIn,
    /// Convolution, gates, recurrence, gated norm.
    DeltaCore,
    /// `out_proj`, added to the residual stream.
    DeltaOut,
    /// Input norm and projections of an attention layer, head norms, rotary embedding, KV write.
    AttnIn,
    /// Attention over the cache, output gate.
    AttnCore,
    /// `o_proj`, added to the residual stream.
    AttnOut,
    /// Norm before the experts, router.
    MoeRoute,
    /// Top 8, gate and up projections, SwiGLU.
    MoeUp,
    /// Down projections, weighted sum, residual.
    MoeDown,
    /// Last norm, logits.
    Head,
    /// The next token.
    Sample,
}

impl Stage {
    /// All of them, in order.
    pub const ALL: [Stage; 12] = [
        Stage::Embed,
        Stage::DeltaIn,
        Stage::DeltaCore,
        Stage::DeltaOut,
        Stage::AttnIn,
        Stage::AttnCore,
        Stage::AttnOut,
        Stage::MoeRoute,
        Stage::MoeUp,
        Stage::MoeDown,
        Stage::Head,
        Stage::Sample,
    ];

    /// The name that its file has in every backend.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Embed => "embed",
            Stage::DeltaIn => "delta_in",
            Stage::DeltaCore => "delta_core",
            Stage::DeltaOut => "delta_out",
            Stage::AttnIn => "attn_in",
            Stage::AttnCore => "attn_core",
            Stage::AttnOut => "attn_out",
            Stage::MoeRoute => "moe_route",
            Stage::MoeUp => "moe_up",
            Stage::MoeDown => "moe_down",
            Stage::Head => "head",
            Stage::Sample => "sample",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
