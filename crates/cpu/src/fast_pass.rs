//! The forward pass in int8: the stages' fast forms over one set of scratch buffers.

use lily_engine::backend::BackendError;
use lily_model::weights::{Mixer, Weights};

use crate::fast::Machine;
use crate::segment::Segment;
use crate::stages::{
    attn_core, attn_in, attn_out, delta_core, delta_in, delta_out, embed, head, moe_down, moe_route, moe_up,
};
use crate::workspace::Workspace;

/// What the fast pass keeps beside the weights.
pub struct FastPass {
    machine: Machine,
    workspace: Workspace,
    /// [`delta_core::taps_by_head`] of each Gated DeltaNet layer; empty for the other layers.
    taps: Vec<Vec<f32>>,
}

impl FastPass {
    /// Prepares to run `weights` on `machine`.
    pub fn new(machine: Machine, weights: &Weights) -> FastPass {
        let taps = weights
            .layers
            .iter()
            .map(|layer| match &layer.mixer {
                Mixer::Delta(mixer) => delta_core::taps_by_head(&mixer.conv1d, &weights.geometry.delta),
                Mixer::Attention(_) => Vec::new(),
            })
            .collect();
        FastPass { machine, workspace: Workspace::default(), taps }
    }

    /// Threads and instructions.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Makes room for a pass, so that [`FastPass::forward`] cannot fail.
    pub fn reserve(&mut self, weights: &Weights, rows: usize, wanted: usize) -> Result<(), BackendError> {
        self.workspace.reserve(&weights.geometry, rows, wanted)
    }

    /// Runs `tokens` through all layers and the `wanted` rows through the head: `logits` is `[wanted, vocab]`.
    /// Room must have been reserved here and in the segments' sequences, whose `length` the caller advances.
    pub fn forward(
        &mut self,
        weights: &Weights,
        segments: &mut [Segment<'_>],
        tokens: &[u32],
        wanted: &[usize],
        logits: &mut [f32],
    ) {
        let FastPass { machine, workspace: w, taps } = self;
        let geometry = &weights.geometry;
        w.set_rows(geometry, tokens.len(), wanted.len());
        let (eps, hidden, rows) = (geometry.rms_eps, geometry.hidden, tokens.len());
        let (attention, delta) = (&geometry.attention, &geometry.delta);
        let kv_width = attention.kv_heads * attention.head_dim;
        let x = &mut w.x[..rows * hidden];
        let product = &mut w.product[..rows * hidden];

        embed::reference(&weights.embed_tokens.view(), tokens, x);
        let angles = &mut w.angles[..rows * attention.rotary_dim];
        attn_in::rotary_angles_of(attention, segments, angles);
        for (index, layer) in weights.layers.iter().enumerate() {
            match &layer.mixer {
                Mixer::Delta(mixer) => {
                    let qkv = &mut w.qkv[..rows * delta.conv_channels()];
                    let z = &mut w.z[..rows * delta.value_width()];
                    let b = &mut w.b[..rows * delta.value_heads];
                    let a = &mut w.a[..rows * delta.value_heads];
                    let projections = delta_in::Projections { qkv, z, b, a };
                    delta_in::fast(machine, mixer, &layer.input_norm, eps, x, &mut w.normed, projections);
                    let inputs = delta_core::Inputs { qkv: &w.qkv, z: &w.z, b: &w.b, a: &w.a };
                    let weights = delta_core::FastWeights { weights: mixer, taps: &taps[index], eps };
                    delta_core::fast(
                        machine,
                        delta,
                        weights,
                        inputs,
                        index,
                        segments,
                        &mut w.delta_work,
                        &mut w.delta,
                    );
                    delta_out::fast(machine, mixer, &w.delta, product, x);
                }
                Mixer::Attention(mixer) => {
                    let width = attention.heads * attention.head_dim;
                    let projections = attn_in::FastProjections {
                        q: &mut w.q[..rows * width],
                        query_and_gate: &mut w.query_and_gate[..rows * 2 * width],
                        raw_k: &mut w.raw_k[..rows * kv_width],
                        k: &mut w.k[..rows * kv_width],
                        v: &mut w.v[..rows * kv_width],
                    };
                    let norm = &layer.input_norm;
                    attn_in::fast(
                        machine,
                        attention,
                        mixer,
                        norm,
                        eps,
                        x,
                        angles,
                        &mut w.normed,
                        projections,
                    );
                    attn_in::write_cache(attention, index, segments, &w.k, &w.v);
                    let queries = attn_core::FastQueries { q: &w.q, query_and_gate: &w.query_and_gate };
                    attn_core::fast(
                        machine,
                        attention,
                        index,
                        segments,
                        queries,
                        &mut w.spans,
                        &mut w.attention,
                    );
                    attn_out::fast(machine, mixer, &w.attention, product, x);
                }
            }
            let moe = &layer.moe;
            let norm = &layer.post_norm;
            moe_route::fast(machine, &geometry.moe, moe, norm, eps, x, &mut w.normed, &mut w.routing);
            moe_up::fast(machine, moe, &w.normed, &w.routing, &mut w.routed, &mut w.shared);
            moe_down::fast(machine, moe, &w.routing, &w.routed, &w.shared, &mut w.products, x);
        }
        if !wanted.is_empty() {
            let last = &mut w.last[..wanted.len() * hidden];
            for (&row, last) in wanted.iter().zip(last.chunks_exact_mut(hidden)) {
                last.copy_from_slice(&x[row * hidden..(row + 1) * hidden]);
            }
            head::fast(machine, weights.lm_head.view(), &weights.norm, eps, last, &mut w.last_normed, logits);
        }
    }
}
