//! What the backend keeps of one sequence between calls, and what a snapshot freezes.
//!
//! An attention layer keeps a [`KvCache`] that grows with the sequence; a Gated DeltaNet layer keeps a
//! recurrent state and the tail of its convolution, both of fixed size and overwritten by every token. A
//! snapshot copies the second kind and shares the pages of the first.

use std::io::{self, Read, Write};
use std::sync::Arc;

use lily_engine::backend::BackendError;
use lily_engine::meter::{Charge, Meter};
use lily_model::geometry::{Geometry, LayerKind};

use crate::kv_cache::{KvCache, KvFormat};
use crate::memory::Buffer;
use crate::saved;

/// State of one Gated DeltaNet layer.
#[derive(Debug)]
pub struct DeltaState {
    /// `[value_heads, value_dim, key_dim]`.
    pub recurrent: Buffer<f32>,
    /// The convolution's last inputs, oldest first: `[conv_width - 1, conv_channels]`.
    pub tail: Buffer<f32>,
    charge: Charge,
}

impl DeltaState {
    fn zeroed(recurrent: usize, tail: usize, meter: &Meter) -> Result<DeltaState, BackendError> {
        const WHAT: &str = "the recurrent state of a sequence";
        let charge = meter.charge(WHAT, (recurrent + tail) * size_of::<f32>())?;
        Ok(DeltaState {
            recurrent: Buffer::zeroed(WHAT, recurrent)?,
            tail: Buffer::zeroed(WHAT, tail)?,
            charge,
        })
    }

    fn copy(&self, meter: &Meter) -> Result<DeltaState, BackendError> {
        let mut copy = DeltaState::zeroed(self.recurrent.len(), self.tail.len(), meter)?;
        copy.recurrent.copy_from_slice(&self.recurrent);
        copy.tail.copy_from_slice(&self.tail);
        Ok(copy)
    }
}

/// State of one layer.
#[derive(Debug)]
pub enum LayerState {
    /// Of a Gated DeltaNet layer.
    Delta(DeltaState),
    /// Of an attention layer.
    Attention(KvCache),
}

impl LayerState {
    /// The state of a Gated DeltaNet layer. Panics on the other kind.
    pub fn delta_mut(&mut self) -> &mut DeltaState {
        match self {
            LayerState::Delta(state) => state,
            LayerState::Attention(_) => unreachable!("layer kinds come from one geometry"),
        }
    }

    /// The cache of an attention layer. Panics on the other kind.
    pub fn attention(&self) -> &KvCache {
        match self {
            LayerState::Attention(cache) => cache,
            LayerState::Delta(_) => unreachable!("layer kinds come from one geometry"),
        }
    }

    /// Counts the state as a snapshot's and returns the bytes that no snapshot held before.
    fn hold(&self) -> usize {
        match self {
            LayerState::Delta(state) => state.charge.bytes(),
            LayerState::Attention(cache) => cache.hold(),
        }
    }

    /// Undoes [`LayerState::hold`] and returns the bytes that no snapshot holds any more.
    fn release(&self) -> usize {
        match self {
            LayerState::Delta(state) => state.charge.bytes(),
            LayerState::Attention(cache) => cache.release(),
        }
    }

    /// As [`LayerState::attention`], to be written.
    pub fn attention_mut(&mut self) -> &mut KvCache {
        match self {
            LayerState::Attention(cache) => cache,
            LayerState::Delta(_) => unreachable!("layer kinds come from one geometry"),
        }
    }
}

/// A sequence, or the frozen copy of one.
#[derive(Debug)]
pub struct Sequence {
    /// Tokens that the state has seen.
    pub length: usize,
    /// The greedy token after the last step, where that step wanted one.
    pub last_sampled: Option<u32>,
    /// First layer to last.
    pub layers: Vec<LayerState>,
}

impl Sequence {
    /// An empty sequence.
    pub fn new(geometry: &Geometry, format: KvFormat, meter: &Meter) -> Result<Sequence, BackendError> {
        let delta = &geometry.delta;
        let layers = geometry
            .layers
            .iter()
            .map(|kind| match kind {
                LayerKind::Delta => {
                    DeltaState::zeroed(delta.state_elements(), delta.conv_tail_elements(), meter)
                        .map(LayerState::Delta)
                }
                LayerKind::Attention => Ok(LayerState::Attention(KvCache::new(&geometry.attention, format))),
            })
            .collect::<Result<_, _>>()?;
        Ok(Sequence { length: 0, last_sampled: None, layers })
    }

    /// A copy that shares full KV pages and owns its recurrent state.
    pub fn copy(&self, meter: &Meter) -> Result<Sequence, BackendError> {
        let layers = self
            .layers
            .iter()
            .map(|layer| match layer {
                LayerState::Delta(state) => state.copy(meter).map(LayerState::Delta),
                LayerState::Attention(cache) => Ok(LayerState::Attention(cache.clone())),
            })
            .collect::<Result<_, _>>()?;
        Ok(Sequence { length: self.length, last_sampled: self.last_sampled, layers })
    }

    /// Makes room for `tokens` more tokens in every layer, or changes nothing.
    pub fn reserve(&mut self, tokens: usize, meter: &Meter) -> Result<(), BackendError> {
        let (from, to) = (self.length, self.length + tokens);
        for index in 0..self.layers.len() {
            let LayerState::Attention(cache) = &mut self.layers[index] else { continue };
            if let Err(error) = cache.reserve(from, to, meter) {
                self.release_unused();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Gives back pages that were reserved and not filled.
    pub fn release_unused(&mut self) {
        for layer in &mut self.layers {
            if let LayerState::Attention(cache) = layer {
                cache.truncate(self.length);
            }
        }
    }

    /// Bytes that a sequence of `tokens` tokens takes when it shares nothing.
    pub fn bytes(geometry: &Geometry, format: KvFormat, tokens: usize) -> usize {
        let delta = &geometry.delta;
        let recurrent = (delta.state_elements() + delta.conv_tail_elements()) * size_of::<f32>();
        let cache = KvCache::new(&geometry.attention, format).bytes(tokens);
        let layers = geometry.layers.iter().map(|kind| match kind {
            LayerKind::Delta => recurrent,
            LayerKind::Attention => cache,
        });
        layers.fold(0, usize::saturating_add)
    }

    /// Writes the state layer by layer: recurrent state and tail, or keys and values.
    pub fn save(&self, out: &mut dyn Write) -> io::Result<()> {
        for layer in &self.layers {
            match layer {
                LayerState::Delta(state) => {
                    saved::write(out, &state.recurrent)?;
                    saved::write(out, &state.tail)?;
                }
                LayerState::Attention(cache) => cache.save(self.length, out)?,
            }
        }
        Ok(())
    }

    /// Makes this sequence, which is empty and has `length` tokens reserved, what [`Sequence::save`] wrote of
    /// one of that length.
    pub fn load(&mut self, length: usize, from: &mut dyn Read) -> io::Result<()> {
        for layer in &mut self.layers {
            match layer {
                LayerState::Delta(state) => {
                    saved::read(from, &mut state.recurrent)?;
                    saved::read(from, &mut state.tail)?;
                }
                LayerState::Attention(cache) => cache.load(length, from)?,
            }
        }
        self.length = length;
        Ok(())
    }
}

/// A frozen sequence, and its part in what all snapshots hold together.
#[derive(Debug)]
pub struct Snapshot {
    state: Arc<Sequence>,
    /// Bytes that snapshots hold.
    held: Meter,
}

impl Snapshot {
    /// Freezes `state`; what snapshots hold is counted on `held`.
    pub fn new(state: Sequence, held: &Meter) -> Snapshot {
        held.add(state.layers.iter().map(LayerState::hold).sum());
        Snapshot { state: Arc::new(state), held: held.clone() }
    }

    /// The frozen state. It lives as long as someone keeps it, though it counts as a snapshot's only while the
    /// snapshot does.
    pub fn state(&self) -> &Arc<Sequence> {
        &self.state
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        self.held.subtract(self.state.layers.iter().map(LayerState::release).sum());
    }
}
