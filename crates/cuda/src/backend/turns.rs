//! Decode steps through the ring, and tokens that are chosen behind a pass.

use lily_engine::backend::{BackendError, DecodeStep, SequenceId, Ticket};
use lily_gpu::step::LAST_SAMPLED;

use super::{CudaBackend, Done, Expected, HeadRow, Pending, TOKENS_AT};
use crate::error::CudaError;
use crate::ring::Rows;
use crate::sampling::Recipe;

impl CudaBackend {
    /// Has the tokens of the enqueued pass chosen as sequences ask, one for each head row that is the end of a
    /// sequence's.
    pub(super) fn settle(&mut self, owners: &[Option<SequenceId>]) -> Result<(), BackendError> {
        let recipe = |id: &Option<SequenceId>| id.and_then(|id| self.sequences.get(&id)?.recipe.as_ref());
        let recipes: Vec<Option<&Recipe>> = owners.iter().map(recipe).collect();
        if recipes.iter().all(Option::is_none) {
            return Ok(());
        }
        let [step, logits, tokens] = ["step", "logits", "tokens"].map(|name| self.address(name));
        Ok(self.sampling.run(&recipes, step?, logits?, tokens?)?)
    }

    /// Enqueues a decode step whose tokens come back through the ring.
    pub(super) fn take_turn(&mut self, steps: &[DecodeStep], tokens: &[u32]) -> Result<Ticket, BackendError> {
        let sequences: Vec<SequenceId> = steps.iter().map(|step| step.sequence).collect();
        let length = |id: &SequenceId| self.sequences[id].now.length;
        let rows = Rows {
            sequences: sequences.iter().map(|id| (*id, length(id))).collect(),
            deferred: sequences.iter().any(|id| self.sequences[id].recipe.is_some()),
        };
        let context = sequences.iter().map(|id| length(id) + 1).max().unwrap_or(0);
        let mut slots = Vec::new();
        if !(self.ring.repeats(&rows) && tokens.iter().all(|&token| token == LAST_SAMPLED)) {
            let mut slot = self.slot(0)?;
            let parts: Vec<(SequenceId, &[u32])> = sequences.iter().copied().zip(tokens.chunks(1)).collect();
            let head_rows: Vec<u32> = (0..steps.len() as u32).collect();
            self.write_step(&mut slot, &parts, &head_rows);
            self.ring.write(slot.pinned.bytes_mut(), &rows);
            self.store.gpu.upload(self.address("step")?, &slot.pinned, 0, TOKENS_AT)?;
            slots.push(slot);
        }
        // SAFETY: as in `enqueue`.
        unsafe { self.programs.graph(steps.len(), context).launch()? };
        if rows.deferred {
            self.settle(&sequences.iter().copied().map(Some).collect::<Vec<_>>())?;
        }
        let turn = self.ring.enqueued(rows);
        for id in &sequences {
            if let Some(sequence) = self.sequences.get_mut(id) {
                sequence.now.length += 1;
                sequence.now.sampled = true;
            }
        }
        let output = |(index, &sequence): (usize, &SequenceId)| {
            let row = Some(HeadRow { slot: 0, index, logits: false });
            Expected { sequence, row, logits: Vec::new() }
        };
        let outputs = sequences.iter().enumerate().map(output).collect();
        let id = self.next_id();
        self.pending.insert(id, Pending { slots, done: Done::Turn(turn), outputs });
        Ok(Ticket(id))
    }

    /// Milliseconds that the card takes for the pass of a step of `rows` rows, when it repeats the one that was enqueued
    /// last `times` times with nothing in between: what a decode would take if the host were not there. That step
    /// must have wanted logits. Its sequences are of no use afterwards but to be closed.
    pub fn repeat(&mut self, rows: usize, context: usize, times: usize) -> Result<f32, CudaError> {
        let graph = self.programs.graph(rows, context);
        let gpu = &self.store.gpu;
        gpu.synchronize()?;
        let start = gpu.mark()?;
        for _ in 0..times {
            // SAFETY: the step block is the last step's, whose sequences are open.
            unsafe { graph.launch()? };
        }
        let end = gpu.mark()?;
        gpu.synchronize()?;
        start.milliseconds_to(&end)
    }
}
