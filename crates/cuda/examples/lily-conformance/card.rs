//! A card whose passes are run kernel by kernel, with what lies on it read back.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use lily_cuda::CudaBackend;
use lily_cuda::driver::Gpu;
use lily_cuda::pages::Store;
use lily_cuda::program::Programs;
use lily_cuda::sequence::Sequence;
use lily_engine::backend::BackendError;
use lily_gpu::decode::MAX_ROWS;
use lily_gpu::layout::{KvFormat, PAGE_TOKENS};
use lily_gpu::plan::{Dispatch, Plan};
use lily_gpu::step::{self, Segment, StepLayout};
use lily_model::geometry::{Geometry, LayerKind};

/// Context that a sequence has room for.
const CONTEXT: usize = 1024;
/// Numbers of a line of a page, and of one of its units.
const LINE: usize = 64;
const UNIT: usize = 8;

/// Where in its line the number at `column` lies: units are swapped by the line's number.
fn swapped(column: usize, line: usize) -> usize {
    ((column / UNIT) ^ (line % (LINE / UNIT))) * UNIT + column % UNIT
}

/// A sequence's part in the traced pass.
pub struct Part {
    sequence: Sequence,
    /// Tokens that it had seen.
    pub position: usize,
    /// Tokens that the pass adds.
    pub tokens: Vec<u32>,
}

/// Keys and values of one layer, `[kv_heads, positions, head_dim]` each.
pub struct Cache {
    /// Positions that there is room for.
    pub positions: usize,
    /// Keys.
    pub keys: Vec<f32>,
    /// Values.
    pub values: Vec<f32>,
}

/// Recurrent matrices and tail of a layer.
pub type State = (Vec<f32>, Vec<f32>);

/// See the module's page.
pub struct Card<'a> {
    gpu: &'a Arc<Gpu>,
    programs: &'a Programs,
    geometry: Geometry,
    store: Store,
    /// The sequences of the traced pass.
    pub parts: Vec<Part>,
}

impl<'a> Card<'a> {
    /// Borrows the backend's card and programs.
    pub fn new(backend: &'a CudaBackend) -> Result<Card<'a>, BackendError> {
        use lily_engine::backend::Backend;
        let (gpu, geometry) = (backend.gpu(), backend.geometry().clone());
        let store = Store::new(gpu, &geometry, KvFormat::F16, usize::MAX);
        Ok(Card { gpu, programs: backend.programs(), geometry, store, parts: Vec::new() })
    }

    /// A sequence that has seen `seen` and is to take `more`.
    pub fn sequence(&mut self, seen: &[u32], more: &[u32]) -> Result<Part, BackendError> {
        let mut sequence = Sequence::new(&self.store, CONTEXT)?;
        for tokens in seen.chunks(MAX_ROWS) {
            sequence.reserve(&self.store, tokens.len())?;
            self.say(&[(&sequence, tokens)], &[])?;
            let plan = self.programs.plan(tokens.len(), CONTEXT);
            plan.dispatches.iter().try_for_each(|dispatch| self.launch(plan, dispatch))?;
            sequence.now.length += tokens.len();
        }
        sequence.reserve(&self.store, more.len())?;
        let position = sequence.now.length;
        Ok(Part { sequence, position, tokens: more.to_vec() })
    }

    /// Says what the next pass works on, and returns its plan.
    pub fn begin(&mut self, parts: Vec<Part>) -> Result<&'a Plan, BackendError> {
        self.parts = parts;
        let rows: usize = self.parts.iter().map(|part| part.tokens.len()).sum();
        let said: Vec<(&Sequence, &[u32])> =
            self.parts.iter().map(|part| (&part.sequence, &part.tokens[..])).collect();
        self.say(&said, &(0..rows as u32).collect::<Vec<_>>())?;
        Ok(self.programs.plan(rows, CONTEXT))
    }

    fn say(&self, parts: &[(&Sequence, &[u32])], head_rows: &[u32]) -> Result<(), BackendError> {
        let segments: Vec<Segment<'_>> = parts
            .iter()
            .map(|(sequence, tokens)| Segment {
                tokens,
                position: sequence.now.length as u32,
                state: sequence.state(),
                pages: sequence.table(),
                sampled: sequence.sampled(),
            })
            .collect();
        let mut block = vec![0; StepLayout::BYTES];
        step::write(&mut block, &segments, head_rows);
        Ok(self.gpu.upload_now(self.address("step")?, &block)?)
    }

    /// Rows of each part.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        let mut end = 0;
        let ranges = self.parts.iter().map(|part| {
            end += part.tokens.len();
            end - part.tokens.len()..end
        });
        ranges.collect()
    }

    /// Runs one dispatch. An error names it, which an error of a whole pass cannot.
    pub fn launch(&self, plan: &Plan, dispatch: &Dispatch) -> Result<(), BackendError> {
        let launched = self.programs.launch(self.gpu, plan, dispatch, true);
        launched.and_then(|()| self.gpu.synchronize()).map_err(|error| {
            let Dispatch { kernel, layer, grid, threads, shared_bytes, .. } = dispatch;
            let shape = format!("grid {grid:?}, {threads} threads, {shared_bytes} bytes shared");
            BackendError::Device(format!("{kernel} of layer {layer:?} ({shape}): {error}"))
        })
    }

    fn address(&self, name: &str) -> Result<u64, BackendError> {
        self.programs.address(name).ok_or_else(|| BackendError::Unknown(format!("buffer {name}")))
    }

    fn bytes(&self, address: u64, bytes: usize) -> Result<Vec<u8>, BackendError> {
        let mut copy = vec![0; bytes];
        self.gpu.stream()?.download_now(&mut copy, address)?;
        Ok(copy)
    }

    fn floats_at(&self, address: u64, count: usize) -> Result<Vec<f32>, BackendError> {
        let bytes = self.bytes(address, count * 4)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    /// The first `count` numbers of a buffer.
    pub fn floats(&self, name: &str, count: usize) -> Result<Vec<f32>, BackendError> {
        self.floats_at(self.address(name)?, count)
    }

    /// The first `count` words of a buffer.
    pub fn words(&self, name: &str, count: usize) -> Result<Vec<u32>, BackendError> {
        let bytes = self.bytes(self.address(name)?, count * 4)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }

    /// The residual stream.
    pub fn x(&self, rows: usize) -> Result<Vec<f32>, BackendError> {
        self.floats("x", rows * self.geometry.hidden)
    }

    /// Where a layer stands among those of its kind.
    fn ordinal(&self, index: usize) -> usize {
        let layers = &self.geometry.layers;
        layers[..index].iter().filter(|&&kind| kind == layers[index]).count()
    }

    /// Recurrent matrices and tail of a layer, of each part.
    pub fn states(&self, index: usize) -> Result<Vec<State>, BackendError> {
        let delta = &self.geometry.delta;
        let (matrices, tail) = (delta.state_elements(), delta.conv_tail_elements());
        let layers = self.geometry.count(LayerKind::Delta);
        let ordinal = self.ordinal(index);
        self.parts
            .iter()
            .map(|part| {
                let start = part.sequence.state();
                let at = |elements: usize| start + (elements * 4) as u64;
                Ok((
                    self.floats_at(at(ordinal * matrices), matrices)?,
                    self.floats_at(at(layers * matrices + ordinal * tail), tail)?,
                ))
            })
            .collect()
    }

    /// A layer's cache of a part, with what the pass wrote. How a page lies in memory: `kernels/README.md`, "KV page".
    pub fn cache(&self, part: &Part, index: usize) -> Result<Cache, BackendError> {
        let (kv_heads, dim) = (self.geometry.attention.kv_heads, self.geometry.attention.head_dim);
        let pages = (part.position + part.tokens.len()).div_ceil(PAGE_TOKENS);
        let positions = pages * PAGE_TOKENS;
        let half = PAGE_TOKENS * dim;
        let mut cache = Cache {
            positions,
            keys: vec![0.0; kv_heads * positions * dim],
            values: vec![0.0; kv_heads * positions * dim],
        };
        let table = self.bytes(part.sequence.table(), pages * 8)?;
        for (page, entry) in table.as_chunks::<8>().0.iter().enumerate() {
            let start = u64::from_le_bytes(*entry) + (self.ordinal(index) * kv_heads * 2 * half * 2) as u64;
            let bytes = self.bytes(start, kv_heads * 2 * half * 2)?;
            let stored: Vec<f32> =
                bytes.as_chunks::<2>().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32()).collect();
            for (head, stored) in stored.chunks_exact(2 * half).enumerate() {
                let (keys, values) = stored.split_at(half);
                let at = (head * positions + page * PAGE_TOKENS) * dim;
                for position in 0..PAGE_TOKENS {
                    for element in 0..dim {
                        let to = at + position * dim + element;
                        let (block, column) = (element / LINE, element % LINE);
                        cache.keys[to] =
                            keys[(block * PAGE_TOKENS + position) * LINE + swapped(column, position)];
                        cache.values[to] = values[element * PAGE_TOKENS + swapped(position, element)];
                    }
                }
            }
        }
        Ok(cache)
    }
}
