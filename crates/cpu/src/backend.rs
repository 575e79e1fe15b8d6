//! [`CpuBackend`]: sequences, snapshots and tickets around the forward pass.
//!
//! Work is done when it is enqueued and handed over when it is collected: on a CPU there is no device to run
//! ahead of. Everything that can fail, memory above all, is done before the first token is computed, so that a
//! refused call leaves its sequences as they were.

use std::collections::HashMap;
use std::io::Read;
use std::sync::Arc;

use lily_engine::backend::{
    Backend, BackendError, DecodeStep, Export, Input, Limits, Memory, PrefillChunks, SequenceId, SnapshotId,
    StepOutput, Ticket, Want,
};
use lily_engine::meter::Meter;
use lily_model::geometry::Geometry;
use lily_model::weights::Weights;

use crate::fast::Machine;
use crate::fast_pass::FastPass;
use crate::isa::Isa;
use crate::kernels::simd::LANES;
use crate::kv_cache::{KvFormat, PAGE_TOKENS};
use crate::limits;
use crate::memory::{grow, zeroed};
use crate::pool::{ThreadPool, physical_cores};
use crate::prefault::Prefault;
use crate::reference_pass;
use crate::segment::Segment;
use crate::sequence::{Sequence, Snapshot};
use crate::stages::attn_core::MAX_GROUP;
use crate::stages::delta_core::MAX_TAPS;
use crate::stages::sample;

/// Tokens that go through the layers at once in prefill: enough for each expert to serve several tokens per
/// reading of its weights, few enough to bound the scratch memory and how long nothing can be cancelled. With matrix
/// instructions reading is the larger part of it, and twice as many tokens take no longer than they do elsewhere.
pub fn prefill_chunk() -> usize {
    if Isa::Amx.is_available() { 1024 } else { 512 }
}

/// The arithmetic of the pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numerics {
    /// int8 activations against the checkpoint's 4- and 8-bit weights in place, f16 KV cache.
    #[default]
    Int8,
    /// The same with a KV cache of 8 bits.
    Int8KvQ8,
    /// Plain f32 on exactly dequantized weights, f32 KV cache: slow, the reference for every backend.
    F32,
}

impl Numerics {
    /// How sequences store keys and values.
    pub fn kv_format(self) -> KvFormat {
        match self {
            Numerics::Int8 => KvFormat::F16,
            Numerics::Int8KvQ8 => KvFormat::Q8,
            Numerics::F32 => KvFormat::F32,
        }
    }
}

/// How to build a [`CpuBackend`].
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Threads of the arithmetic, the physical cores where `None`.
    pub threads: Option<usize>,
    /// The most tokens that one sequence may hold (never more than the model's own limit).
    pub ctx_len: usize,
    /// Vector instructions; the best that the machine has where `None`.
    pub isa: Option<Isa>,
    /// The arithmetic.
    pub numerics: Numerics,
    /// The most bytes that sequences and snapshots may hold together.
    pub state_bytes: usize,
}

impl Default for CpuOptions {
    /// The whole context of the model, the best instructions, all cores, the fast arithmetic, any memory.
    fn default() -> CpuOptions {
        CpuOptions {
            threads: None,
            ctx_len: usize::MAX,
            isa: None,
            numerics: Numerics::Int8,
            state_bytes: usize::MAX,
        }
    }
}

/// The programs that a pass can be.
enum Path {
    Reference(rayon::ThreadPool),
    Fast(Box<FastPass>),
}

/// The model on the CPU.
pub struct CpuBackend {
    weights: Weights,
    path: Path,
    kv_format: KvFormat,
    context_limit: usize,
    /// All state.
    meter: Meter,
    /// The part of it that snapshots hold.
    held: Meter,
    sequences: HashMap<SequenceId, Sequence>,
    snapshots: HashMap<SnapshotId, Snapshot>,
    finished: HashMap<u64, Vec<StepOutput>>,
    /// Logits of the last decode step, kept for their memory.
    logits: Vec<f32>,
    last_id: u64,
    _prefault: Prefault,
}

impl CpuBackend {
    /// Prepares to run `weights`, which stay where they are mapped.
    pub fn new(weights: Weights, options: CpuOptions) -> Result<CpuBackend, BackendError> {
        check(&weights.geometry)?;
        let threads = options.threads.unwrap_or_else(physical_cores);
        let path = match options.numerics {
            Numerics::F32 => {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).build();
                Path::Reference(pool.map_err(|error| BackendError::Device(format!("threads: {error}")))?)
            }
            Numerics::Int8 | Numerics::Int8KvQ8 => {
                let isa = options.isa.unwrap_or_else(Isa::detect);
                if !isa.is_available() {
                    return Err(BackendError::Device(format!("this CPU does not have {isa}")));
                }
                let pool = ThreadPool::new(threads);
                Path::Fast(Box::new(FastPass::new(Machine { pool, isa }, &weights)))
            }
        };
        Ok(CpuBackend {
            held: Meter::default(),
            context_limit: options.ctx_len.min(weights.geometry.max_context),
            path,
            kv_format: options.numerics.kv_format(),
            meter: Meter::new(options.state_bytes),
            sequences: HashMap::new(),
            snapshots: HashMap::new(),
            finished: HashMap::new(),
            logits: Vec::new(),
            last_id: 0,
            _prefault: Prefault::start(&weights),
            weights,
        })
    }

    /// Bytes that open sequences and snapshots hold; a KV page that several share counts once.
    pub fn state_bytes(&self) -> usize {
        self.meter.bytes()
    }

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Makes room for passes of up to `rows` rows, so that [`CpuBackend::forward`] cannot fail.
    fn reserve(&mut self, rows: usize, wanted: usize) -> Result<(), BackendError> {
        match &mut self.path {
            Path::Fast(fast) => fast.reserve(&self.weights, rows, wanted),
            Path::Reference(_) => Ok(()),
        }
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), BackendError> {
        let vocab = self.weights.geometry.vocab;
        match tokens.iter().find(|&&token| token as usize >= vocab) {
            Some(&token) => Err(BackendError::BadToken { token, vocab }),
            None => Ok(()),
        }
    }

    fn check_room(&self, sequence: &Sequence, more: usize) -> Result<(), BackendError> {
        let needed = sequence.length.saturating_add(more);
        if needed > self.context_limit {
            return Err(BackendError::ContextFull { needed, limit: self.context_limit });
        }
        Ok(())
    }

    /// Runs one chunk and advances its sequences; `wanted` rows of the residual stream come back as logits.
    fn forward(
        &mut self,
        segments: &mut [Segment<'_>],
        tokens: &[u32],
        wanted: &[usize],
        logits: &mut [f32],
    ) {
        match &mut self.path {
            Path::Fast(fast) => fast.forward(&self.weights, segments, tokens, wanted, logits),
            Path::Reference(pool) => pool.install(|| {
                let x = reference_pass::forward(&self.weights, segments, tokens);
                let rows = x.chunks_exact(self.weights.geometry.hidden).enumerate();
                let rows: Vec<f32> =
                    rows.filter(|(row, _)| wanted.contains(row)).flat_map(|(_, x)| x).copied().collect();
                reference_pass::logits(&self.weights, &rows, logits);
            }),
        }
        for segment in segments {
            segment.sequence.length += segment.rows.len();
        }
    }

    fn extend_sequence(
        &mut self,
        id: SequenceId,
        sequence: &mut Sequence,
        tokens: &[u32],
        want: Want,
    ) -> Result<StepOutput, BackendError> {
        let vocab = self.weights.geometry.vocab;
        self.check_tokens(tokens)?;
        self.check_room(sequence, tokens.len())?;
        let logit_rows = match want {
            Want::Nothing => 0,
            Want::Token | Want::Logits => 1,
            Want::AllLogits => tokens.len(),
        };
        let mut logits = zeroed("logits", logit_rows.saturating_mul(vocab))?;
        let chunk = prefill_chunk();
        let rows = tokens.len().min(chunk);
        self.reserve(rows, logit_rows.min(rows))?;
        sequence.reserve(tokens.len(), &self.meter)?;

        let first_wanted = tokens.len() - logit_rows;
        for start in (0..tokens.len()).step_by(chunk) {
            let end = tokens.len().min(start + chunk);
            let wanted: Vec<usize> = (start.max(first_wanted)..end).map(|row| row - start).collect();
            let done = start.saturating_sub(first_wanted) * vocab;
            let mut segment = [Segment { sequence: &mut *sequence, rows: 0..end - start }];
            let out = &mut logits[done..done + wanted.len() * vocab];
            self.forward(&mut segment, &tokens[start..end], &wanted, out);
        }
        sequence.last_sampled = logits.rchunks_exact(vocab).next().map(sample::greedy);
        if want == Want::Token {
            logits = Vec::new();
        }
        Ok(StepOutput { sequence: id, token: sequence.last_sampled, logits })
    }

    /// The token that each step consumes, after checking everything that the caller may have got wrong.
    fn check_steps(&self, steps: &[DecodeStep], sequences: &[Sequence]) -> Result<Vec<u32>, BackendError> {
        let tokens = steps
            .iter()
            .zip(sequences)
            .map(|(step, sequence)| match step.input {
                Input::Token(token) => Ok(token),
                Input::LastSampled => sequence.last_sampled.ok_or_else(|| {
                    BackendError::Unknown(format!("a token sampled for sequence {}", step.sequence.0))
                }),
            })
            .collect::<Result<Vec<u32>, _>>()?;
        self.check_tokens(&tokens)?;
        for sequence in sequences {
            self.check_room(sequence, 1)?;
        }
        Ok(tokens)
    }

    fn decode_sequences(
        &mut self,
        steps: &[DecodeStep],
        sequences: &mut [Sequence],
        logits: &mut Vec<f32>,
    ) -> Result<Vec<StepOutput>, BackendError> {
        let vocab = self.weights.geometry.vocab;
        let tokens = self.check_steps(steps, sequences)?;
        let wanted: Vec<usize> = (0..steps.len()).filter(|&row| steps[row].want != Want::Nothing).collect();
        grow("logits", logits, wanted.len().saturating_mul(vocab))?;
        let logits = &mut logits[..wanted.len() * vocab];
        let mut outputs: Vec<StepOutput> = Vec::with_capacity(steps.len());
        for step in steps {
            let rows = usize::from(matches!(step.want, Want::Logits | Want::AllLogits));
            let logits = zeroed("logits", rows * vocab)?;
            outputs.push(StepOutput { sequence: step.sequence, token: None, logits });
        }
        self.reserve(steps.len(), wanted.len())?;
        for index in 0..sequences.len() {
            if let Err(error) = sequences[index].reserve(1, &self.meter) {
                sequences[..index].iter_mut().for_each(Sequence::release_unused);
                return Err(error);
            }
        }

        let mut segments: Vec<Segment<'_>> = sequences
            .iter_mut()
            .enumerate()
            .map(|(row, sequence)| Segment { sequence, rows: row..row + 1 })
            .collect();
        self.forward(&mut segments, &tokens, &wanted, logits);
        for sequence in sequences.iter_mut() {
            sequence.last_sampled = None;
        }
        for (logits, &row) in logits.chunks_exact(vocab).zip(&wanted) {
            sequences[row].last_sampled = Some(sample::greedy(logits));
            outputs[row].token = sequences[row].last_sampled;
            if !outputs[row].logits.is_empty() {
                outputs[row].logits.copy_from_slice(logits);
            }
        }
        Ok(outputs)
    }

    fn finish(&mut self, outputs: Vec<StepOutput>) -> Ticket {
        let id = self.next_id();
        self.finished.insert(id, outputs);
        Ticket(id)
    }

    fn frozen(&self, id: SnapshotId) -> Result<&Snapshot, BackendError> {
        self.snapshots.get(&id).ok_or_else(|| BackendError::Unknown(format!("snapshot {}", id.0)))
    }

    /// Puts a sequence among the snapshots.
    fn keep(&mut self, state: Sequence) -> SnapshotId {
        let id = SnapshotId(self.next_id());
        self.snapshots.insert(id, Snapshot::new(state, &self.held));
        id
    }

    /// Takes the sequence out of the table; the caller puts it back.
    fn take(&mut self, id: SequenceId) -> Result<Sequence, BackendError> {
        self.sequences.remove(&id).ok_or_else(|| unknown_sequence(id))
    }
}

/// Refuses what the fast forms have no room for; the reference refuses the same, so that both run the same models.
fn check(geometry: &Geometry) -> Result<(), BackendError> {
    let Geometry { attention, delta, moe, .. } = geometry;
    let is_vectors = |elements: usize| elements > 0 && elements.is_multiple_of(LANES);
    let limits = [
        (is_vectors(attention.head_dim), "attention heads of a multiple of 16 elements"),
        (
            is_vectors(delta.key_dim) && is_vectors(delta.value_dim),
            "DeltaNet heads of a multiple of 16 elements",
        ),
        ((2..=MAX_TAPS).contains(&delta.conv_width), "a convolution of 2 to 8 taps"),
        (
            attention.heads.is_multiple_of(attention.kv_heads),
            "the same number of query heads for each KV head",
        ),
        (attention.heads / attention.kv_heads <= MAX_GROUP, "at most 32 query heads for each KV head"),
        (
            delta.value_heads.is_multiple_of(delta.key_heads),
            "the same number of value heads for each key head",
        ),
        (moe.top_k >= 1 && moe.top_k <= moe.experts, "between one and all experts for each token"),
    ];
    match limits.iter().find(|(holds, _)| !holds) {
        Some((_, what)) => Err(BackendError::Device(format!("the CPU backend needs {what}"))),
        None => Ok(()),
    }
}

fn unknown_sequence(id: SequenceId) -> BackendError {
    BackendError::Unknown(format!("sequence {}", id.0))
}

impl Backend for CpuBackend {
    fn geometry(&self) -> &Geometry {
        &self.weights.geometry
    }

    fn description(&self) -> String {
        match &self.path {
            Path::Fast(fast) => {
                let Machine { pool, isa } = fast.machine();
                let kv = if self.kv_format == KvFormat::Q8 { ", 8-bit KV cache" } else { "" };
                format!("CPU, int8 on {isa}, {} threads{kv}", pool.threads())
            }
            Path::Reference(_) => "CPU, plain f32 reference".into(),
        }
    }

    /// On two cores the full model takes about 3 s for 512 tokens, too long a pause to read through; 128 tokens
    /// make every expert serve fewer tokens per reading of its weights, and prompts slower, only while somebody else is
    /// reading.
    fn prefill_chunks(&self) -> PrefillChunks {
        PrefillChunks { alone: prefill_chunk(), busy: 128 }
    }

    fn context_limit(&self) -> usize {
        self.context_limit
    }

    fn limits(&mut self) -> Option<Limits> {
        match &self.path {
            // Without room for the measurement there is none.
            Path::Fast(fast) => limits::measure(fast.machine(), &self.weights).ok(),
            Path::Reference(_) => None,
        }
    }

    fn open(&mut self, from: Option<SnapshotId>) -> Result<SequenceId, BackendError> {
        let sequence = match from {
            None => Sequence::new(&self.weights.geometry, self.kv_format, &self.meter)?,
            Some(id) => self.frozen(id)?.state().copy(&self.meter)?,
        };
        let id = SequenceId(self.next_id());
        self.sequences.insert(id, sequence);
        Ok(id)
    }

    fn length(&self, sequence: SequenceId) -> Result<usize, BackendError> {
        self.sequences.get(&sequence).map(|s| s.length).ok_or_else(|| unknown_sequence(sequence))
    }

    fn extend(&mut self, sequence: SequenceId, tokens: &[u32], want: Want) -> Result<Ticket, BackendError> {
        if tokens.is_empty() {
            return Err(BackendError::Device("a prefill without tokens was enqueued".into()));
        }
        let mut state = self.take(sequence)?;
        let output = self.extend_sequence(sequence, &mut state, tokens, want);
        self.sequences.insert(sequence, state);
        Ok(self.finish(vec![output?]))
    }

    fn decode(&mut self, steps: &[DecodeStep]) -> Result<Ticket, BackendError> {
        let mut sequences = Vec::with_capacity(steps.len());
        // A sequence named twice is missing the second time: the same error as one never opened.
        let taken = steps.iter().try_for_each(|step| {
            sequences.push(self.take(step.sequence)?);
            Ok(())
        });
        let mut logits = std::mem::take(&mut self.logits);
        let outputs = taken.and_then(|()| self.decode_sequences(steps, &mut sequences, &mut logits));
        self.logits = logits;
        for (step, sequence) in steps.iter().zip(sequences) {
            self.sequences.insert(step.sequence, sequence);
        }
        Ok(self.finish(outputs?))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Vec<StepOutput>, BackendError> {
        self.finished.remove(&ticket.0).ok_or_else(|| BackendError::Unknown(format!("ticket {}", ticket.0)))
    }

    fn snapshot(&mut self, sequence: SequenceId) -> Result<SnapshotId, BackendError> {
        let state = self.sequences.get(&sequence).ok_or_else(|| unknown_sequence(sequence))?;
        let copy = state.copy(&self.meter)?;
        Ok(self.keep(copy))
    }

    fn discard(&mut self, snapshot: SnapshotId) {
        self.snapshots.remove(&snapshot);
    }

    fn memory(&self) -> Memory {
        Memory {
            used: self.meter.bytes() as u64,
            snapshots: self.held.bytes() as u64,
            limit: self.meter.limit() as u64,
        }
    }

    fn sequence_bytes(&self, tokens: usize) -> u64 {
        Sequence::bytes(&self.weights.geometry, self.kv_format, tokens) as u64
    }

    fn layout(&self) -> String {
        let numerics = match &self.path {
            Path::Fast(fast) => format!("int8 on {}", fast.machine().isa),
            Path::Reference(_) => "f32".to_owned(),
        };
        let format = self.kv_format;
        format!("cpu 1, {numerics}, {format:?} in pages of {PAGE_TOKENS}, {:?}", self.weights.geometry)
    }

    fn export(&mut self, snapshot: SnapshotId) -> Result<Export, BackendError> {
        let state = Arc::clone(self.frozen(snapshot)?.state());
        Ok(Box::new(move |out| state.save(out)))
    }

    fn import(&mut self, length: usize, state: &mut dyn Read) -> Result<SnapshotId, BackendError> {
        if length == 0 || length > self.context_limit {
            return Err(BackendError::ContextFull { needed: length, limit: self.context_limit });
        }
        let mut sequence = Sequence::new(&self.weights.geometry, self.kv_format, &self.meter)?;
        sequence.reserve(length, &self.meter)?;
        sequence.load(length, state).map_err(|error| BackendError::BadExport(error.to_string()))?;
        if !matches!(state.read(&mut [0]), Ok(0)) {
            return Err(BackendError::BadExport("it goes on after its end".to_owned()));
        }
        Ok(self.keep(sequence))
    }

    fn close(&mut self, sequence: SequenceId) {
        self.sequences.remove(&sequence);
    }
}
