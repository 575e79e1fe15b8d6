//! [`MetalBackend`]: sequences, snapshots and tickets around passes.
//!
//! A step is one pass. Two slots alternate: while the GPU works on the step in one, the host writes the next into the
//! other and submits it, with the token that it begins with still being computed: kernels hand it
//! over in the GPU's memory. Before a slot is written again its last step is waited for, and what came of it
//! goes to the ticket that it belongs to. So the host is one step ahead, and never more.
//!
//! A prompt goes through programs of its own, thousands of tokens a pass, however short a piece of it comes: a token's
//! numbers do not depend on what it shares a pass with, so neither do they on how a prompt is cut. Rows of decode steps have
//! the same numbers in any step too; but the two programs add in different orders, and a token has other bits from
//! one than from the other (`docs/lab/metal-prefill.md` says how far apart).
//!
//! Where a sequence asks for more than the largest logit, the kernels that choose its token stand behind the others of
//! the pass ([`crate::sampling`]): the next step begins with that token as with any.
//!
//! # When a pass fails
//!
//! A pass that is refused has changed nothing, and neither has the call. (A call that needed several passes
//! and was refused in the middle closes its sequences.) A pass that fails while it runs may have left anything:
//! every sequence and snapshot that it or a later one has written is lost, and says so when it is named again.

use std::collections::HashMap;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use lily_engine::backend::{
    Backend, BackendError, DecodeStep, Export, Input, Limits, Memory, PrefillChunks, SequenceId, SnapshotId,
    StageTime, StepOutput, Ticket, Want,
};
use lily_engine::meter::Meter;
use lily_engine::sampler::SamplerState;
use lily_gpu::decode::{MAX_ROWS, Shape};
use lily_gpu::layout::{KvFormat, PAGE_TOKENS};
use lily_gpu::memory::Context;
use lily_gpu::prompt::{self, PromptLayout};
use lily_gpu::sampling::NONE;
use lily_gpu::step::{self, LAST_SAMPLED, Segment, StepLayout};
use lily_model::geometry::Geometry;
use lily_model::weights::Weights;

use crate::device::{Completion, Device, Pass};
use crate::error::{DeviceError, MetalError};
use crate::memory_plan::{MemoryPlan, Planned};
use crate::program::{self, Programs, StepPlace, Work};
use crate::reach::Reach;
use crate::sampling::{BROKEN, Recipe};
use crate::sequence::{Frozen, Snapshot};
use crate::slot::Slot;
use crate::store::{Pools, Sizes, Store};
use crate::{limits, profile, weights};

/// How long a pass may take: hundreds of times the longest there is.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// The most tokens of a prompt that are read at once while others wait for their next token.
const BUSY: usize = 512;
/// Steps that are under way at once.
pub(crate) const SLOTS: usize = 2;

/// How to build a [`MetalBackend`].
#[derive(Clone, Debug)]
pub struct MetalOptions {
    /// The most tokens that one sequence may hold (never more than the model's own limit).
    pub context: Context,
    /// The most bytes that sequences and snapshots may hold together; what the system leaves where that is less.
    pub state_bytes: u64,
    /// Contexts of more tokens have attention's layout for long ones: at most [`program::SHORT`], which is where it
    /// pays. The answer does not depend on it.
    pub short: usize,
    /// How keys and values are stored.
    pub kv_format: KvFormat,
}

impl Default for MetalOptions {
    fn default() -> MetalOptions {
        MetalOptions {
            context: Context::AtMost(usize::MAX),
            state_bytes: u64::MAX,
            short: program::SHORT,
            kv_format: KvFormat::F16,
        }
    }
}

/// The model on a [`Device`].
#[derive(Debug)]
pub struct MetalBackend<D: Device> {
    device: D,
    geometry: Geometry,
    memory_plan: MemoryPlan,
    store: Store<D>,
    /// The part of all state that snapshots hold.
    held: Meter,
    sequences: HashMap<SequenceId, Sequence>,
    snapshots: HashMap<SnapshotId, (Snapshot, Soundness)>,
    pending: HashMap<u64, Pending>,
    slots: [Slot<D>; SLOTS],
    /// What each slot is busy with.
    busy: [Option<Busy<D>>; SLOTS],
    /// Passes so far.
    passes: u64,
    /// Where the pools were in the last pass.
    pools: Pools<D::Buffer>,
    last_id: u64,
    programs: Programs<D>,
    /// Where the times of stages go while a step is timed.
    times: Option<Vec<StageTime>>,
}

/// Whether state holds what it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Soundness {
    Sound,
    /// A pass that wrote it failed.
    Lost,
}

/// An open sequence.
#[derive(Debug)]
struct Sequence {
    now: Frozen,
    soundness: Soundness,
    /// How its tokens are chosen, where not the largest logits are.
    recipe: Option<Recipe>,
}

/// A step that is under way.
#[derive(Debug)]
struct Busy<D: Device> {
    completion: D::Completion,
    /// Which pass it is.
    number: u64,
    /// Whether it began with moving a pool.
    moved: bool,
    ticket: u64,
    /// Which of the ticket's steps it is.
    index: usize,
    /// Rows that went through the head.
    head_rows: usize,
    /// Whether their logits were kept.
    logits: bool,
}

/// What came of a step.
#[derive(Debug)]
struct Done {
    tokens: Vec<u32>,
    logits: Vec<f32>,
}

/// What comes back of one sequence of an enqueued step.
#[derive(Debug)]
struct Expected {
    sequence: SequenceId,
    row: Option<HeadRow>,
    /// Whether the logits of all rows of all steps come back.
    all_logits: bool,
}

/// A row that went through the head.
#[derive(Clone, Copy, Debug)]
struct HeadRow {
    /// Which of the ticket's steps has it.
    step: usize,
    /// Which of that step's rows.
    index: usize,
    /// Whether its logits are wanted.
    logits: bool,
}

/// An enqueued call: one result for each step, once it is there.
#[derive(Debug, Default)]
struct Pending {
    steps: Vec<Option<Result<Done, DeviceError>>>,
    outputs: Vec<Expected>,
}

/// A step to enqueue.
struct Step<'a> {
    /// Whether it is of a prompt, and then of one sequence alone; otherwise each has one token.
    is_prompt: bool,
    parts: &'a [(SequenceId, &'a [u32])],
    /// Rows that tokens come back of, ascending; of a prompt as many of the last ones, counted among themselves.
    head_rows: &'a [u32],
    /// Whether their logits do too.
    logits: bool,
}

impl<D: Device> MetalBackend<D> {
    /// Prepares to run `weights` on `device`.
    ///
    /// # Errors
    /// A model that the kernels are not written for or that does not fit, or a device that does not take them.
    pub fn new(device: &D, weights: &Weights, options: &MetalOptions) -> Result<Self, MetalError> {
        let geometry = &weights.geometry;
        let MetalOptions { context, state_bytes, short, kv_format } = *options;
        let Planned { memory: memory_plan, plans, prompt_plans } =
            MemoryPlan::of_model(device, weights, kv_format, context, short, state_bytes)?;
        let (_, widest) = plans.last().expect("there is a plan for every bucket");
        let loaded = weights::load(device, weights, widest)?;
        let programs = Programs::new(device, geometry, kv_format, plans, prompt_plans, loaded)?;
        let store = Store::new(device, geometry, kv_format, memory_plan.state)?;
        let slot = || Slot::new(device, memory_plan.context, memory_plan.prompt_rows);
        Ok(MetalBackend {
            device: device.clone(),
            geometry: geometry.clone(),
            memory_plan,
            pools: store.pools(),
            store,
            held: Meter::default(),
            sequences: HashMap::new(),
            snapshots: HashMap::new(),
            pending: HashMap::new(),
            slots: [slot()?, slot()?],
            busy: [None, None],
            passes: 0,
            last_id: 0,
            programs,
            times: None,
        })
    }

    /// What was planned of the memory.
    pub fn memory_plan(&self) -> &MemoryPlan {
        &self.memory_plan
    }

    /// The loaded passes.
    pub fn programs(&self) -> &Programs<D> {
        &self.programs
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

    fn check_room(&self, id: SequenceId, more: usize) -> Result<(), BackendError> {
        let (needed, limit) = (self.sound(id)?.length.saturating_add(more), self.memory_plan.context);
        if needed > limit { Err(BackendError::ContextFull { needed, limit }) } else { Ok(()) }
    }

    /// What a sequence has, where it can be used.
    fn sound(&self, id: SequenceId) -> Result<&Frozen, BackendError> {
        let sequence = self.sequences.get(&id).ok_or_else(|| unknown_sequence(id))?;
        match sequence.soundness {
            Soundness::Sound => Ok(&sequence.now),
            Soundness::Lost => Err(lost("sequence", id.0)),
        }
    }

    fn frozen(&self, id: SnapshotId) -> Result<&Arc<Frozen>, BackendError> {
        match self.snapshots.get(&id) {
            Some((snapshot, Soundness::Sound)) => Ok(snapshot.frozen()),
            Some((_, Soundness::Lost)) => Err(lost("snapshot", id.0)),
            None => Err(BackendError::Unknown(format!("snapshot {}", id.0))),
        }
    }

    fn recipe(&self, id: SequenceId) -> Option<&Recipe> {
        self.sequences.get(&id)?.recipe.as_ref()
    }

    /// The number of the recipe of each head row of a step: of a sequence's rows the last one's token is chosen as it asks.
    fn recipes(&self, step: &Step<'_>) -> Vec<u32> {
        let mut end = 0;
        let mut ends = HashMap::new();
        for (id, tokens) in step.parts {
            end += if step.is_prompt { step.head_rows.len() } else { tokens.len() } as u32;
            ends.extend(self.recipe(*id).map(|recipe| (end - 1, recipe.number())));
        }
        step.head_rows.iter().map(|row| ends.get(row).copied().unwrap_or(NONE)).collect()
    }

    /// Takes over what came of the step in a slot, once it is done.
    fn harvest(&mut self, slot: usize) {
        let Some(busy) = self.busy[slot].take() else { return };
        let result = busy.completion.wait(PATIENCE).map(|()| {
            let rows = if busy.logits { busy.head_rows * self.geometry.vocab } else { 0 };
            Done { tokens: self.slots[slot].tokens(busy.head_rows), logits: self.slots[slot].logits(rows) }
        });
        if result.is_err() {
            // Where a pool was being moved, everything in it is gone.
            self.lose_from(if busy.moved { 0 } else { busy.number });
        }
        if let Some(pending) = self.pending.get_mut(&busy.ticket) {
            pending.steps[busy.index] = Some(result);
        }
    }

    /// Gives up everything that was written by pass `number` or a later one.
    fn lose_from(&mut self, number: u64) {
        for sequence in self.sequences.values_mut().filter(|sequence| sequence.now.written_by >= number) {
            sequence.soundness = Soundness::Lost;
        }
        for (snapshot, soundness) in self.snapshots.values_mut() {
            if snapshot.frozen().written_by >= number {
                *soundness = Soundness::Lost;
            }
        }
    }

    /// The slots, that of the older step first.
    fn oldest_first(&self) -> impl Iterator<Item = usize> + use<D> {
        let mut slots: [usize; SLOTS] = std::array::from_fn(|slot| slot);
        slots.sort_by_key(|&slot| self.busy[slot].as_ref().map(|busy| busy.number));
        slots.into_iter()
    }

    /// Takes over everything that is under way, the oldest first.
    fn harvest_all(&mut self) {
        self.oldest_first().for_each(|slot| self.harvest(slot));
    }

    /// Enqueues one step of sequences that have room, as a further step of `ticket`, and advances them.
    fn enqueue(&mut self, ticket: u64, step: &Step<'_>) -> Result<(), BackendError> {
        let number = self.passes + 1;
        let turn = number as usize % SLOTS;
        self.harvest(turn);
        let recipes = self.recipes(step);
        let mut tables = Vec::new();
        let mut segments = Vec::with_capacity(step.parts.len());
        let mut reach = Reach::default();
        let (mut rows, mut context, mut prompt) = (0, 0, Vec::new());
        for &(id, tokens) in step.parts {
            // The step that was just taken over may have been the end of it.
            let now = self.sound(id)?;
            let (state, position) = (now.state(), now.length as u32);
            let (number, pages) = (u64::from(state.number()), tables.len() as u64);
            // Of a prompt the step block has the rows that go through the head.
            let skipped = if step.is_prompt { tokens.len() - step.head_rows.len() } else { 0 };
            segments.push(Segment {
                tokens: &tokens[skipped..],
                position: position + skipped as u32,
                state: number,
                pages,
                sampled: u64::from(state.token()),
            });
            if step.is_prompt {
                prompt = vec![0; PromptLayout::bytes(tokens.len())];
                prompt::write(&mut prompt, tokens, position, number, pages);
            }
            rows += tokens.len();
            context = context.max(now.length + tokens.len());
            tables.extend(now.pages());
            if D::WATCHES {
                reach.add(&self.store, now, tokens.len());
            }
            if let Some(recipe) = self.recipe(id).filter(|_| D::WATCHES) {
                reach.add_recipe(&self.store, recipe);
            }
        }
        let logits =
            if step.logits { step.head_rows.len() * self.geometry.vocab * size_of::<f32>() } else { 0 };
        self.slots[turn].make_room(&self.device, logits)?;
        let mut block = [0; StepLayout::BYTES];
        step::write(&mut block, &segments, step.head_rows);
        self.slots[turn].write(&block, &tables, &recipes);
        if step.is_prompt {
            self.slots[turn].write_prompt(&prompt);
        }
        let shape = Shape { rows, context, sampled: recipes.iter().any(|&number| number != NONE) };
        let work = if step.is_prompt { Work::Prompt(shape) } else { Work::Step(shape) };
        let pools = self.store.pools();
        let kept = match (step.logits, self.programs.workspace("logits")) {
            (true, Some(from)) => self.slots[turn].keep_logits(&(from.clone(), 0), logits),
            _ => None,
        };
        let stages = match self.times {
            Some(_) => self.programs.plan(work).dispatches.iter().map(|d| d.stage).collect(),
            None => Vec::new(),
        };
        let place = StepPlace { number: turn, slot: &self.slots[turn], store: &self.store, reach: &reach };
        let pass = Pass {
            label: &format!("pass {number}: {rows} rows, context {context}"),
            before: self.store.pending(),
            dispatches: self.programs.dispatches(work, &place)?,
            after: kept.as_slice(),
        };
        let completion = match &mut self.times {
            None => self.device.submit(&pass)?,
            Some(times) => profile::submit(&self.device, &pass, &stages, times)?,
        };
        self.store.submitted();
        self.passes = number;
        let moved = self.pools != pools;
        self.pools = pools;
        let steps = &mut self.pending.entry(ticket).or_default().steps;
        steps.push(None);
        self.busy[turn] = Some(Busy {
            completion,
            number,
            moved,
            ticket,
            index: steps.len() - 1,
            head_rows: step.head_rows.len(),
            logits: step.logits,
        });
        for &(id, tokens) in step.parts {
            if let Some(sequence) = self.sequences.get_mut(&id) {
                sequence.now.length += tokens.len();
                sequence.now.written_by = number;
            }
        }
        Ok(())
    }

    /// Enqueues the steps of a call. Where the first is refused, nothing has changed; where a later one is, the
    /// sequences of the steps before it are closed.
    fn enqueue_all(&mut self, ticket: u64, steps: &[Step<'_>]) -> Result<(), BackendError> {
        for (index, step) in steps.iter().enumerate() {
            let Err(error) = self.enqueue(ticket, step) else { continue };
            for &(id, _) in steps[index..].iter().flat_map(|step| step.parts) {
                if let Some(sequence) = self.sequences.get_mut(&id) {
                    sequence.now.release_unused(&self.store);
                }
            }
            self.pending.remove(&ticket);
            for &(id, _) in steps[..index].iter().flat_map(|step| step.parts) {
                self.sequences.remove(&id);
            }
            return Err(error);
        }
        Ok(())
    }

    /// Does everything that is noted for the next pass, and waits for all passes.
    fn settle(&mut self) -> Result<(), BackendError> {
        self.harvest_all();
        if self.store.pending().is_empty() {
            return Ok(());
        }
        let number = self.passes + 1;
        let label = format!("pass {number}: copies");
        let before = self.store.pending();
        let pass = Pass { label: &label, before, dispatches: &[], after: &[] };
        let completion = self.device.submit(&pass)?;
        self.store.submitted();
        self.passes = number;
        let moved = std::mem::replace(&mut self.pools, self.store.pools()) != self.pools;
        completion.wait(PATIENCE).map_err(|error| {
            self.lose_from(if moved { 0 } else { number });
            error.into()
        })
    }

    /// The token that each step consumes, after checking everything that the caller may have got wrong.
    fn check_steps(&self, steps: &[DecodeStep]) -> Result<Vec<u32>, BackendError> {
        let mut tokens = Vec::with_capacity(steps.len());
        for (index, step) in steps.iter().enumerate() {
            // A sequence named twice is one that is not there the second time.
            if steps[..index].iter().any(|earlier| earlier.sequence == step.sequence) {
                return Err(unknown_sequence(step.sequence));
            }
            self.check_room(step.sequence, 1)?;
            tokens.push(match step.input {
                Input::Token(token) => {
                    self.check_tokens(&[token])?;
                    token
                }
                Input::LastSampled if self.sound(step.sequence)?.sampled => LAST_SAMPLED,
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
            if let Err(error) = sequence.now.reserve(&mut self.store, 1) {
                for step in &steps[..index] {
                    if let Some(sequence) = self.sequences.get_mut(&step.sequence) {
                        sequence.now.release_unused(&self.store);
                    }
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn expect(&mut self, ticket: u64, outputs: Vec<Expected>) -> Ticket {
        for Expected { sequence, row, .. } in &outputs {
            if let Some(sequence) = self.sequences.get_mut(sequence) {
                sequence.now.sampled = row.is_some();
            }
        }
        self.pending.entry(ticket).or_default().outputs = outputs;
        Ticket(ticket)
    }

    fn keep(&mut self, mut frozen: Frozen) -> SnapshotId {
        // What is noted for it is done by the next pass.
        frozen.written_by = frozen.written_by.max(self.passes + 1);
        let id = SnapshotId(self.next_id());
        self.snapshots.insert(id, (Snapshot::new(frozen, &self.held), Soundness::Sound));
        id
    }
}

fn unknown_sequence(id: SequenceId) -> BackendError {
    BackendError::Unknown(format!("sequence {}", id.0))
}

fn lost(what: &str, id: u64) -> BackendError {
    BackendError::Device(format!("{what} {id} was lost in a pass that failed"))
}

impl<D: Device> Backend for MetalBackend<D> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn description(&self) -> String {
        let info = self.device.info();
        format!("Metal, {} (Apple family {}, {} cores)", info.name, info.family, info.cores)
    }

    fn context_limit(&self) -> usize {
        self.memory_plan.context
    }

    fn runs_ahead(&self) -> bool {
        true
    }

    fn prefill_chunks(&self) -> PrefillChunks {
        let alone = self.programs.prompt_rows();
        PrefillChunks { alone, busy: BUSY.min(alone) }
    }

    fn limits(&mut self) -> Option<Limits> {
        // Without room for the measurement there is none.
        limits::measure(&self.device).ok()
    }

    fn decode_timed(
        &mut self,
        sequence: SequenceId,
        input: Input,
    ) -> Result<Option<Vec<StageTime>>, BackendError> {
        // Nothing else is to be under way.
        self.harvest_all();
        self.times = Some(Vec::new());
        let ticket = self.decode(&[DecodeStep { sequence, input, want: Want::Token }]);
        let times = self.times.take();
        let done = ticket.and_then(|ticket| self.collect(ticket));
        // A step that failed in the middle has written a part of what it was to write.
        if done.is_err()
            && times.as_ref().is_some_and(|times| !times.is_empty())
            && let Some(sequence) = self.sequences.get_mut(&sequence)
        {
            sequence.soundness = Soundness::Lost;
        }
        done.map(|_| times)
    }

    fn open(&mut self, from: Option<SnapshotId>) -> Result<SequenceId, BackendError> {
        let mut now = match from {
            None => Frozen::empty(&mut self.store)?,
            Some(id) => Arc::clone(self.frozen(id)?).copy(&mut self.store)?,
        };
        now.written_by = self.passes + 1;
        let id = SequenceId(self.next_id());
        self.sequences.insert(id, Sequence { now, soundness: Soundness::Sound, recipe: None });
        Ok(id)
    }

    fn length(&self, sequence: SequenceId) -> Result<usize, BackendError> {
        self.sequences.get(&sequence).map(|s| s.now.length).ok_or_else(|| unknown_sequence(sequence))
    }

    fn sample_on_device(&mut self, sequence: SequenceId, state: &SamplerState) -> Result<bool, BackendError> {
        let open = self.sequences.get_mut(&sequence).ok_or_else(|| unknown_sequence(sequence))?;
        match self.store.recipe(state) {
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
        if let Some(sequence) = self.sequences.get_mut(&sequence) {
            sequence.now.reserve(&mut self.store, tokens.len())?;
        }
        // Where all rows go through the head, it says how many there may be.
        let most = if want == Want::AllLogits { MAX_ROWS } else { self.programs.prompt_rows() };
        let parts: Vec<[(SequenceId, &[u32]); 1]> =
            tokens.chunks(most).map(|chunk| [(sequence, chunk)]).collect();
        let last = parts.len() - 1;
        let all_rows: Vec<u32> = (0..MAX_ROWS as u32).collect();
        let step = |(index, parts): (usize, &'_ [(SequenceId, &'_ [u32]); 1])| {
            let head_rows = match want {
                Want::AllLogits => parts[0].1.len(),
                Want::Token | Want::Logits if index == last => 1,
                _ => 0,
            };
            let logits = want == Want::AllLogits || (want == Want::Logits && index == last);
            (head_rows, logits)
        };
        let shapes: Vec<_> = parts.iter().enumerate().map(step).collect();
        let steps: Vec<Step<'_>> = parts
            .iter()
            .zip(&shapes)
            .map(|(parts, &(rows, logits))| Step {
                is_prompt: true,
                parts,
                head_rows: &all_rows[..rows],
                logits,
            })
            .collect();
        let ticket = self.next_id();
        self.enqueue_all(ticket, &steps)?;
        let index = if want == Want::AllLogits { (tokens.len() - 1) % MAX_ROWS } else { 0 };
        let row = HeadRow { step: last, index, logits: want == Want::Logits };
        let row = (want != Want::Nothing).then_some(row);
        let output = Expected { sequence, row, all_logits: want == Want::AllLogits };
        Ok(self.expect(ticket, vec![output]))
    }

    fn decode(&mut self, steps: &[DecodeStep]) -> Result<Ticket, BackendError> {
        let tokens = self.check_steps(steps)?;
        let wants_logits = |step: &DecodeStep| matches!(step.want, Want::Logits | Want::AllLogits);
        self.reserve_steps(steps)?;
        let parts: Vec<(SequenceId, &[u32])> =
            steps.iter().zip(tokens.chunks(1)).map(|(step, token)| (step.sequence, token)).collect();
        let mut outputs = Vec::with_capacity(steps.len());
        let mut shapes = Vec::new();
        for (index, steps) in steps.chunks(MAX_ROWS).enumerate() {
            let mut head_rows = Vec::new();
            for (row, step) in (0..).zip(steps) {
                let place = HeadRow { step: index, index: head_rows.len(), logits: wants_logits(step) };
                let place = (step.want != Want::Nothing).then_some(place);
                head_rows.extend(place.map(|_| row));
                outputs.push(Expected { sequence: step.sequence, row: place, all_logits: false });
            }
            shapes.push((head_rows, steps.iter().any(wants_logits)));
        }
        let steps: Vec<Step<'_>> = parts
            .chunks(MAX_ROWS)
            .zip(&shapes)
            .map(|(parts, (head_rows, logits))| Step { is_prompt: false, parts, head_rows, logits: *logits })
            .collect();
        let ticket = self.next_id();
        self.enqueue_all(ticket, &steps)?;
        Ok(self.expect(ticket, outputs))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Vec<StepOutput>, BackendError> {
        if !self.pending.contains_key(&ticket.0) {
            return Err(BackendError::Unknown(format!("ticket {}", ticket.0)));
        }
        for slot in self.oldest_first() {
            if self.busy[slot].as_ref().is_some_and(|busy| busy.ticket == ticket.0) {
                self.harvest(slot);
            }
        }
        let Pending { steps, outputs } = self.pending.remove(&ticket.0).unwrap_or_default();
        let done: Vec<Done> = steps.into_iter().flatten().collect::<Result<_, DeviceError>>()?;
        let vocab = self.geometry.vocab;
        let output = |Expected { sequence, row, all_logits }: Expected| {
            let token = row.and_then(|row| done[row.step].tokens.get(row.index).copied());
            if token == Some(BROKEN) {
                let what = "a logit is not a number, or none is left to choose from; the weights or the device are broken";
                return Err(BackendError::Device(what.to_owned()));
            }
            let logits = match row {
                Some(row) if row.logits => {
                    done[row.step].logits[row.index * vocab..(row.index + 1) * vocab].to_vec()
                }
                _ if all_logits => done.iter().flat_map(|done| &done.logits).copied().collect(),
                _ => Vec::new(),
            };
            Ok(StepOutput { sequence, token, logits })
        };
        outputs.into_iter().map(output).collect()
    }

    fn snapshot(&mut self, sequence: SequenceId) -> Result<SnapshotId, BackendError> {
        self.sound(sequence)?;
        let state = self.sequences.get(&sequence).ok_or_else(|| unknown_sequence(sequence))?;
        let frozen = state.now.copy(&mut self.store)?;
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
        Sizes::new(&self.geometry, self.store.kv.format()).sequence(tokens) as u64
    }

    fn layout(&self) -> String {
        let (family, format) = (self.device.info().family, self.store.kv.format());
        format!("metal 1, Apple family {family}, {format:?} in pages of {PAGE_TOKENS}, {:?}", self.geometry)
    }

    fn export(&mut self, snapshot: SnapshotId) -> Result<Export, BackendError> {
        self.settle()?;
        let frozen = Arc::clone(self.frozen(snapshot)?);
        // What is frozen is not written again, so it can be read where it lies while the GPU goes on.
        let (places, pools) = (frozen.places(&self.store), self.store.pools());
        Ok(Box::new(move |out| {
            let result = places.save(&pools, out);
            drop(frozen);
            result
        }))
    }

    fn import(&mut self, length: usize, state: &mut dyn Read) -> Result<SnapshotId, BackendError> {
        let limit = self.memory_plan.context;
        if length == 0 || length > limit {
            return Err(BackendError::ContextFull { needed: length, limit });
        }
        let frozen = Frozen::bare(&mut self.store, length)?;
        // Nothing that was noted before may be done to it afterwards.
        self.settle()?;
        frozen.places(&self.store).load(&self.store.pools(), state)?;
        if !matches!(state.read(&mut [0]), Ok(0)) {
            return Err(BackendError::BadExport("it goes on after its end".to_owned()));
        }
        Ok(self.keep(frozen))
    }

    fn close(&mut self, sequence: SequenceId) {
        self.sequences.remove(&sequence);
    }
}
