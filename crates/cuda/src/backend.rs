//! [`CudaBackend`]: sequences, snapshots and tickets around captured passes.
//!
//! A step is enqueued in four parts on one stream: the step block to the card, the pass, the chosen tokens back,
//! and a mark. A decode step that only goes on from the last one is the pass alone ([`crate::ring`]). Nothing waits
//! for the card but [`Backend::collect`], so the next step can be enqueued before the last one is done: the token
//! that it begins with lies on the card by then. What a step reads and writes in the host's memory is a slot of its
//! own until it is collected.
//!
//! A prompt goes through programs of its own, thousands of tokens a pass, however short a piece of it comes; its last
//! token, or every one whose logits are wanted, through the kernels of decode, [`MAX_ROWS`] tokens a step. Within either
//! a token's bits do not depend on what shares a pass with it, but they are not the other's; and a prompt has the same
//! bits as a whole one where it is cut at multiples of 64 positions (the DeltaNet's chunks).

mod turns;

use std::collections::HashMap;
use std::io::Read;
use std::sync::Arc;

use lily_engine::backend::{
    Backend, BackendError, DecodeStep, Export, Input, Limits, Memory, PrefillChunks, SequenceId, SnapshotId,
    StepOutput, Ticket, Want,
};
use lily_engine::meter::Meter;
use lily_engine::sampler::SamplerState;
use lily_gpu::decode::MAX_ROWS;
use lily_gpu::layout::{KvFormat, PAGE_TOKENS};
use lily_gpu::memory::Context;
use lily_gpu::prompt::{self, PromptLayout};
use lily_gpu::step::{self, LAST_SAMPLED, Segment, StepLayout};
use lily_model::geometry::Geometry;
use lily_model::weights::Weights;

use crate::cache::Cache;
use crate::driver::{Event, Gpu, Pinned};
use crate::error::CudaError;
use crate::memory_plan::{MemoryPlan, Planned};
use crate::pages::Store;
use crate::program::Programs;
use crate::ring::Ring;
use crate::sampling::{Recipe, Sampling};
use crate::sequence::{Frozen, Sequence, Snapshot};
use crate::weights::{self, Loaded};
use crate::{compile, limits};

/// How to build a [`CudaBackend`].
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Which card, counted as the driver does.
    pub device: usize,
    /// The most tokens that one sequence may hold (never more than the model's own limit).
    pub context: Context,
    /// The most bytes of the card that the backend may take, weights and all; what is free where that is less.
    pub memory_bytes: u64,
    /// How keys and values are stored.
    pub kv_format: KvFormat,
    /// Compiled kernels of earlier starts.
    pub cache: Cache,
}

/// The model on an NVIDIA card.
pub struct CudaBackend {
    geometry: Geometry,
    context_limit: usize,
    memory_plan: MemoryPlan,
    store: Store,
    /// The part of all state that snapshots hold.
    held: Meter,
    sequences: HashMap<SequenceId, Sequence>,
    snapshots: HashMap<SnapshotId, Snapshot>,
    pending: HashMap<u64, Pending>,
    free_slots: Vec<Slot>,
    last_id: u64,
    ring: Ring,
    sampling: Sampling,
    programs: Programs,
    _weights: Loaded,
}

/// What one step reads and writes of the host's memory: the step block, the sampled tokens, logits.
struct Slot {
    pinned: Pinned,
    /// A prompt block, for passes over prompts.
    prompt: Option<Pinned>,
    logits: Option<Pinned>,
}

/// Bytes of a slot before the sampled tokens.
const TOKENS_AT: usize = StepLayout::BYTES;
const SLOT_BYTES: usize = TOKENS_AT + MAX_ROWS * size_of::<u32>();

/// What comes back of one sequence of an enqueued step.
struct Expected {
    sequence: SequenceId,
    /// Where its token is, if it has one.
    row: Option<HeadRow>,
    /// Logits that were waited for when they were enqueued.
    logits: Vec<f32>,
}

/// A row that went through the head.
#[derive(Clone, Copy)]
struct HeadRow {
    /// Which of the ticket's slots has it.
    slot: usize,
    /// Which of that slot's rows.
    index: usize,
    /// Whether its logits are wanted.
    logits: bool,
}

/// An enqueued step. Slots are kept as long as the card may look at them.
struct Pending {
    slots: Vec<Slot>,
    done: Done,
    outputs: Vec<Expected>,
}

/// How the end of a step is seen.
enum Done {
    /// The mark behind it has passed; tokens are in the slots.
    Mark(Event),
    /// The ring has the tokens of this turn.
    Turn(u32),
}

impl CudaBackend {
    /// Copies `weights` to a card and prepares to run them; `progress` is called with bytes done and bytes in all.
    ///
    /// # Errors
    /// No driver, card or compiler that will do; a model that the kernels are not written for, or that does not
    /// fit. Nothing is left on the card then.
    pub fn new(
        weights: &Weights,
        options: &CudaOptions,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<CudaBackend, CudaError> {
        let (geometry, kv_format) = (&weights.geometry, options.kv_format);
        let gpu = Gpu::open(options.device)?;
        let Planned { memory: memory_plan, plans, prompt_plans } =
            MemoryPlan::of_model(&gpu, weights, kv_format, options.context, options.memory_bytes)?;

        let chip = gpu.card.chip();
        let machine = format!("{}, driver {}", gpu.card.name, gpu.card.driver);
        let cubins = compile::all_files(geometry, kv_format, &chip, &machine, &options.cache)?;
        let widest = &plans.last().expect("there is a plan for every bucket").1;
        let loaded = weights::load(&gpu, weights, widest, progress)?;
        let limit = usize::try_from(memory_plan.state).unwrap_or(usize::MAX);
        let store = Store::new(&gpu, geometry, kv_format, limit);
        let programs = Programs::new(&gpu, plans, prompt_plans, &cubins, &loaded, store.sizes.kv)?;
        gpu.synchronize()?;
        Ok(CudaBackend {
            geometry: geometry.clone(),
            context_limit: memory_plan.context,
            memory_plan,
            store,
            held: Meter::default(),
            sequences: HashMap::new(),
            snapshots: HashMap::new(),
            pending: HashMap::new(),
            free_slots: Vec::new(),
            last_id: 0,
            ring: Ring::new(&gpu, programs.module("sample")?)?,
            sampling: Sampling::new(&gpu, programs.module("sample")?)?,
            programs,
            _weights: loaded,
        })
    }

    /// What was planned of the card's memory.
    pub fn memory_plan(&self) -> &MemoryPlan {
        &self.memory_plan
    }

    /// The loaded passes, for measurements stage by stage.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// The card.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.store.gpu
    }

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), BackendError> {
        let vocab = self.geometry.vocab;
        match tokens.iter().find(|&&token| token as usize >= vocab) {
            Some(&token) => Err(BackendError::BadToken { token, vocab }),
            None => Ok(()),
        }
    }

    fn check_room(&self, sequence: SequenceId, more: usize) -> Result<(), BackendError> {
        let needed = self.length(sequence)?.saturating_add(more);
        if needed > self.context_limit {
            return Err(BackendError::ContextFull { needed, limit: self.context_limit });
        }
        Ok(())
    }

    /// A slot with room for the logits of so many rows.
    fn slot(&mut self, logit_rows: usize) -> Result<Slot, BackendError> {
        let mut slot = match self.free_slots.pop() {
            Some(slot) => slot,
            None => Slot { pinned: self.store.gpu.pinned(SLOT_BYTES)?, prompt: None, logits: None },
        };
        let bytes = logit_rows * self.geometry.vocab * size_of::<f32>();
        if slot.logits.as_ref().map_or(0, |logits| logits.bytes().len()) < bytes {
            slot.logits = Some(self.store.gpu.pinned(bytes)?);
        }
        Ok(slot)
    }

    /// Enqueues one step of sequences that have room, and advances them. Of `head_rows`, ascending, tokens come
    /// back, and logits where `logits`.
    fn enqueue(
        &mut self,
        slot: &mut Slot,
        parts: &[(SequenceId, &[u32])],
        head_rows: &[u32],
        logits: bool,
    ) -> Result<(), BackendError> {
        self.ring.forget();
        let context = self.write_step(slot, parts, head_rows);
        let rows = parts.iter().map(|(_, tokens)| tokens.len()).sum();
        let gpu = &self.store.gpu;
        gpu.upload(self.address("step")?, &slot.pinned, 0, TOKENS_AT)?;
        // SAFETY: the step block names states, pages and tables of open sequences, which are freed in the order
        // of the stream; the programs live as long as `self`.
        unsafe { self.programs.graph(rows, context).launch()? };
        if let (true, Some(to)) = (logits, &slot.logits) {
            let bytes = head_rows.len() * self.geometry.vocab * size_of::<f32>();
            gpu.download(to, 0, self.address("logits")?, bytes)?;
        }
        // Of a sequence's rows the last one's token is chosen as it asks.
        let ends = parts.iter().scan(0, |end, (id, tokens)| {
            *end += tokens.len() as u32;
            Some((*end - 1, *id))
        });
        let ends: HashMap<u32, SequenceId> = ends.collect();
        let owners: Vec<Option<SequenceId>> = head_rows.iter().map(|row| ends.get(row).copied()).collect();
        self.settle(&owners)?;
        if !head_rows.is_empty() {
            let bytes = size_of_val(head_rows);
            self.store.gpu.download(&slot.pinned, TOKENS_AT, self.address("tokens")?, bytes)?;
        }
        for &(id, tokens) in parts {
            if let Some(sequence) = self.sequences.get_mut(&id) {
                sequence.now.length += tokens.len();
            }
        }
        Ok(())
    }

    /// Writes a step down, and returns the longest context that it brings a sequence to.
    fn write_step(&self, slot: &mut Slot, parts: &[(SequenceId, &[u32])], head_rows: &[u32]) -> usize {
        let segments: Vec<Segment<'_>> = parts
            .iter()
            .map(|&(id, tokens)| {
                let sequence = &self.sequences[&id];
                Segment {
                    tokens,
                    position: sequence.now.length as u32,
                    state: sequence.state(),
                    pages: sequence.table(),
                    sampled: sequence.sampled(),
                }
            })
            .collect();
        step::write(&mut slot.pinned.bytes_mut()[..TOKENS_AT], &segments, head_rows);
        let end = |segment: &Segment<'_>| segment.position as usize + segment.tokens.len();
        segments.iter().map(end).max().unwrap_or(0)
    }

    fn address(&self, name: &str) -> Result<u64, BackendError> {
        let address = self.programs.address(name);
        address.ok_or_else(|| BackendError::Device(format!("the plan has no buffer {name}")))
    }

    fn finish(&mut self, slots: Vec<Slot>, outputs: Vec<Expected>) -> Result<Ticket, BackendError> {
        let done = Done::Mark(self.store.gpu.mark()?);
        let id = self.next_id();
        self.pending.insert(id, Pending { slots, done, outputs });
        Ok(Ticket(id))
    }

    /// Enqueues a pass over a part of a prompt, as many tokens as its program takes, and advances the sequence.
    fn enqueue_prompt(&mut self, id: SequenceId, tokens: &[u32]) -> Result<Slot, BackendError> {
        self.ring.forget();
        let mut slot = self.slot(0)?;
        let gpu = &self.store.gpu;
        let bytes = PromptLayout::bytes(self.programs.prompt_rows());
        let mut pinned = match slot.prompt.take() {
            Some(pinned) => pinned,
            None => gpu.pinned(bytes)?,
        };
        let block = self.address("prompt")?;
        let graph = self.programs.prompt_graph(tokens.len());
        let graph = graph.ok_or_else(|| BackendError::Device("no program takes such a prompt".to_owned()))?;
        let sequence = self.sequences.get_mut(&id).ok_or_else(|| unknown_sequence(id))?;
        let position = sequence.now.length as u32;
        let said = prompt::write(pinned.bytes_mut(), tokens, position, sequence.state(), sequence.table());
        gpu.upload(block, &pinned, 0, said)?;
        // SAFETY: the block names the state, table and pages of an open sequence, which are freed in the order of the
        // stream; the programs live as long as `self`.
        unsafe { graph.launch()? };
        sequence.now.length += tokens.len();
        slot.prompt = Some(pinned);
        Ok(slot)
    }

    /// Enqueues a prompt, whose room is reserved.
    fn prefill(&mut self, id: SequenceId, mut tokens: &[u32], want: Want) -> Result<Ticket, BackendError> {
        let (mut slots, mut all) = (Vec::new(), Vec::new());
        let all_logits = want == Want::AllLogits;
        // The row that wants more than to advance the state goes through decode.
        let kept = usize::from(want != Want::Nothing);
        let most = if all_logits { 0 } else { self.programs.prompt_rows() };
        while most > 0 && tokens.len() > kept {
            let (part, rest) = tokens.split_at((tokens.len() - kept).min(most));
            slots.push(self.enqueue_prompt(id, part)?);
            tokens = rest;
        }
        let mut parts = tokens.chunks(MAX_ROWS).peekable();
        while let Some(part) = parts.next() {
            let last = parts.peek().is_none();
            let rows = part.len() as u32;
            let (head_rows, logits): (Vec<u32>, bool) = match want {
                Want::AllLogits => ((0..rows).collect(), true),
                Want::Token | Want::Logits if last => (vec![rows - 1], want == Want::Logits),
                _ => (Vec::new(), false),
            };
            let mut slot = self.slot(if logits { head_rows.len() } else { 0 })?;
            self.enqueue(&mut slot, &[(id, part)], &head_rows, logits)?;
            if all_logits {
                // So many logits are taken over step by step.
                self.store.gpu.synchronize()?;
                all.extend(slot.logits(0, head_rows.len(), self.geometry.vocab));
            }
            slots.push(slot);
        }
        let index = if all_logits { (tokens.len() - 1) % MAX_ROWS } else { 0 };
        let row = HeadRow { slot: slots.len() - 1, index, logits: want == Want::Logits };
        let row = (want != Want::Nothing).then_some(row);
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.now.sampled = row.is_some();
        }
        self.finish(slots, vec![Expected { sequence: id, row, logits: all }])
    }

    /// The token that each step consumes, after checking everything that the caller may have got wrong.
    fn check_steps(&self, steps: &[DecodeStep]) -> Result<Vec<u32>, BackendError> {
        let mut tokens = Vec::with_capacity(steps.len());
        for (index, step) in steps.iter().enumerate() {
            let sequence = self.sequences.get(&step.sequence).filter(|_| {
                // A sequence named twice is one that is not there the second time.
                steps[..index].iter().all(|earlier| earlier.sequence != step.sequence)
            });
            let sequence = sequence.ok_or_else(|| unknown_sequence(step.sequence))?;
            self.check_room(step.sequence, 1)?;
            tokens.push(match step.input {
                Input::Token(token) => {
                    self.check_tokens(&[token])?;
                    token
                }
                Input::LastSampled if sequence.now.sampled => LAST_SAMPLED,
                Input::LastSampled => {
                    let what = format!("a token sampled for sequence {}", step.sequence.0);
                    return Err(BackendError::Unknown(what));
                }
            });
        }
        Ok(tokens)
    }

    /// Makes room for one token in each sequence, or changes nothing.
    fn reserve_steps(&mut self, steps: &[DecodeStep]) -> Result<(), BackendError> {
        for index in 0..steps.len() {
            let Some(sequence) = self.sequences.get_mut(&steps[index].sequence) else { continue };
            if let Err(error) = sequence.reserve(&self.store, 1) {
                for step in &steps[..index] {
                    if let Some(sequence) = self.sequences.get_mut(&step.sequence) {
                        sequence.release_unused(&self.store);
                    }
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn frozen(&self, id: SnapshotId) -> Result<&Arc<Frozen>, BackendError> {
        let snapshot = self.snapshots.get(&id);
        snapshot.map(Snapshot::frozen).ok_or_else(|| BackendError::Unknown(format!("snapshot {}", id.0)))
    }

    fn keep(&mut self, frozen: Frozen) -> SnapshotId {
        let id = SnapshotId(self.next_id());
        self.snapshots.insert(id, Snapshot::new(frozen, &self.held));
        id
    }
}

impl Slot {
    fn token(&self, head_row: usize) -> Option<u32> {
        let bytes = self.pinned.bytes().get(TOKENS_AT..)?;
        bytes.as_chunks::<4>().0.get(head_row).map(|bytes| u32::from_le_bytes(*bytes))
    }

    fn logits(&self, first: usize, rows: usize, vocab: usize) -> Vec<f32> {
        let Some(logits) = &self.logits else { return Vec::new() };
        let (floats, _) = logits.bytes().as_chunks::<4>();
        floats[first * vocab..(first + rows) * vocab].iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }
}

fn unknown_sequence(id: SequenceId) -> BackendError {
    BackendError::Unknown(format!("sequence {}", id.0))
}

impl Backend for CudaBackend {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn description(&self) -> String {
        let card = &self.store.gpu.card;
        let kv = if self.store.sizes.kv.format() == KvFormat::Q8 { ", 8-bit KV cache" } else { "" };
        format!("CUDA, {} ({}){kv}", card.name, card.chip().architecture)
    }

    /// As many as one pass takes; while streams run, what a card reads in a few hundredths of a second.
    fn prefill_chunks(&self) -> PrefillChunks {
        const BUSY: usize = 1024;
        let alone = self.programs.prompt_rows().max(BUSY);
        PrefillChunks { alone, busy: BUSY }
    }

    fn context_limit(&self) -> usize {
        self.context_limit
    }

    fn runs_ahead(&self) -> bool {
        true
    }

    fn limits(&mut self) -> Option<Limits> {
        // Without room for the measurement there is none.
        limits::measure(&self.store.gpu).ok()
    }

    fn open(&mut self, from: Option<SnapshotId>) -> Result<SequenceId, BackendError> {
        let sequence = match from {
            None => Sequence::new(&self.store, self.context_limit)?,
            Some(id) => Sequence::resume(&self.store, self.context_limit, self.frozen(id)?)?,
        };
        let id = SequenceId(self.next_id());
        self.sequences.insert(id, sequence);
        Ok(id)
    }

    fn length(&self, sequence: SequenceId) -> Result<usize, BackendError> {
        self.sequences.get(&sequence).map(|s| s.now.length).ok_or_else(|| unknown_sequence(sequence))
    }

    fn sample_on_device(&mut self, sequence: SequenceId, state: &SamplerState) -> Result<bool, BackendError> {
        let open = self.sequences.get_mut(&sequence).ok_or_else(|| unknown_sequence(sequence))?;
        match Recipe::new(&self.store, self.geometry.vocab, state) {
            Ok(recipe) => open.recipe = Some(recipe),
            Err(BackendError::OutOfMemory { .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    fn extend(&mut self, sequence: SequenceId, tokens: &[u32], want: Want) -> Result<Ticket, BackendError> {
        if tokens.is_empty() {
            return Err(BackendError::Device("a prefill without tokens was enqueued".into()));
        }
        self.check_tokens(tokens)?;
        self.check_room(sequence, tokens.len())?;
        let state = self.sequences.get_mut(&sequence).ok_or_else(|| unknown_sequence(sequence))?;
        state.reserve(&self.store, tokens.len())?;
        self.prefill(sequence, tokens, want)
    }

    fn decode(&mut self, steps: &[DecodeStep]) -> Result<Ticket, BackendError> {
        let tokens = self.check_steps(steps)?;
        let wants_logits = |step: &DecodeStep| matches!(step.want, Want::Logits | Want::AllLogits);
        self.reserve_steps(steps)?;
        let short = !steps.is_empty() && steps.len() <= MAX_ROWS && self.ring.has_room();
        if short && steps.iter().all(|step| step.want == Want::Token) {
            return self.take_turn(steps, &tokens);
        }
        let (mut slots, mut outputs) = (Vec::new(), Vec::new());
        for (steps, tokens) in steps.chunks(MAX_ROWS).zip(tokens.chunks(MAX_ROWS)) {
            let parts: Vec<(SequenceId, &[u32])> =
                steps.iter().zip(tokens.chunks(1)).map(|(step, token)| (step.sequence, token)).collect();
            let head_rows: Vec<u32> =
                (0..steps.len() as u32).filter(|&row| steps[row as usize].want != Want::Nothing).collect();
            let logits = steps.iter().any(wants_logits);
            let mut slot = self.slot(if logits { head_rows.len() } else { 0 })?;
            self.enqueue(&mut slot, &parts, &head_rows, logits)?;
            for (row, step) in steps.iter().enumerate() {
                let index = head_rows.iter().position(|&head_row| head_row as usize == row);
                let row = index.map(|index| HeadRow { slot: slots.len(), index, logits: wants_logits(step) });
                if let Some(sequence) = self.sequences.get_mut(&step.sequence) {
                    sequence.now.sampled = row.is_some();
                }
                outputs.push(Expected { sequence: step.sequence, row, logits: Vec::new() });
            }
            slots.push(slot);
        }
        self.finish(slots, outputs)
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Vec<StepOutput>, BackendError> {
        let pending = self.pending.remove(&ticket.0);
        let Pending { slots, done, outputs } =
            pending.ok_or_else(|| BackendError::Unknown(format!("ticket {}", ticket.0)))?;
        let ring = match done {
            Done::Mark(mark) => mark.wait().map(|()| Vec::new())?,
            Done::Turn(turn) => self.ring.collect(turn, outputs.len())?,
        };
        let vocab = self.geometry.vocab;
        let outputs = outputs
            .into_iter()
            .map(|Expected { sequence, row, mut logits }| {
                let chosen = |row: HeadRow| ring.get(row.index).copied().or_else(|| slots[row.slot].token(row.index));
                let token = row.and_then(chosen);
                if token.is_some_and(|token| token as usize >= vocab) {
                    let what = "a logit is not a number, or none is left to choose from; the weights or the device are broken";
                    return Err(BackendError::Device(what.to_owned()));
                }
                if let Some(row) = row.filter(|row| row.logits) {
                    logits = slots[row.slot].logits(row.index, 1, vocab);
                }
                Ok(StepOutput { sequence, token, logits })
            })
            .collect();
        self.free_slots.extend(slots);
        outputs
    }

    fn snapshot(&mut self, sequence: SequenceId) -> Result<SnapshotId, BackendError> {
        let state = self.sequences.get(&sequence).ok_or_else(|| unknown_sequence(sequence))?;
        let frozen = state.now.copy(&self.store)?;
        Ok(self.keep(frozen))
    }

    fn discard(&mut self, snapshot: SnapshotId) {
        self.snapshots.remove(&snapshot);
    }

    fn memory(&self) -> Memory {
        Memory {
            used: self.store.meter.bytes() as u64,
            snapshots: self.held.bytes() as u64,
            limit: self.store.meter.limit() as u64,
        }
    }

    fn sequence_bytes(&self, tokens: usize) -> u64 {
        self.store.sizes.sequence(tokens) as u64
    }

    fn layout(&self) -> String {
        let (architecture, format) = (self.store.gpu.card.chip().architecture, self.store.sizes.kv.format());
        format!("cuda 2, {architecture}, {format:?} in pages of {PAGE_TOKENS}, {:?}", self.geometry)
    }

    fn export(&mut self, snapshot: SnapshotId) -> Result<Export, BackendError> {
        let frozen = Arc::clone(self.frozen(snapshot)?);
        let (store, copied) = (self.store.clone(), self.store.gpu.mark()?);
        Ok(Box::new(move |out| {
            copied.wait().map_err(std::io::Error::other)?;
            frozen.save(&store, out)
        }))
    }

    fn import(&mut self, length: usize, state: &mut dyn Read) -> Result<SnapshotId, BackendError> {
        if length == 0 || length > self.context_limit {
            return Err(BackendError::ContextFull { needed: length, limit: self.context_limit });
        }
        let frozen = Frozen::load(&self.store, length, state)?;
        if !matches!(state.read(&mut [0]), Ok(0)) {
            return Err(BackendError::BadExport("it goes on after its end".to_owned()));
        }
        Ok(self.keep(frozen))
    }

    fn close(&mut self, sequence: SequenceId) {
        self.sequences.remove(&sequence);
    }
}
