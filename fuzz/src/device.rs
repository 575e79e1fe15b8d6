//! A device that has no model and writes what it was told to.

use std::collections::{HashMap, VecDeque};
use std::io::Read;
use std::sync::{Arc, Mutex, PoisonError};

use lily_engine::backend::{
    Backend, BackendError, DecodeStep, Export, Memory, SequenceId, SnapshotId, StepOutput, Ticket, Want,
};
use lily_model::geometry::Geometry;

/// The logit of the token that is written; the others have 0.
const WRITTEN_LOGIT: f32 = 8.0;

/// The tokens that the device writes into sequences opened from now on. Clones share them.
#[derive(Clone, Default)]
pub struct Script(Arc<Mutex<Arc<[u32]>>>);

impl Script {
    /// Replaces them.
    pub fn set(&self, tokens: Vec<u32>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = tokens.into();
    }

    fn get(&self) -> Arc<[u32]> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The device.
pub struct Device {
    geometry: Geometry,
    context: usize,
    /// What follows the script's end, for ever.
    end: u32,
    script: Script,
    opened: u64,
    sequences: HashMap<SequenceId, Sequence>,
    enqueued: VecDeque<Vec<StepOutput>>,
}

struct Sequence {
    length: usize,
    script: Arc<[u32]>,
    written: usize,
}

impl Device {
    /// `vocab`: its tokens; `context`: the most that a sequence may hold; `end`: the token after the script.
    pub fn new(vocab: usize, context: usize, end: u32, script: Script) -> Device {
        let geometry = Geometry { vocab, ..Geometry::qwen3_6_35b_a3b() };
        let (sequences, enqueued) = (HashMap::new(), VecDeque::new());
        Device { geometry, context, end, script, opened: 0, sequences, enqueued }
    }

    fn advance(&mut self, id: SequenceId, tokens: usize, want: Want) -> Result<StepOutput, BackendError> {
        let sequence =
            self.sequences.get_mut(&id).ok_or_else(|| BackendError::Unknown("a sequence".to_string()))?;
        sequence.length += tokens;
        if want == Want::Nothing {
            return Ok(StepOutput { sequence: id, token: None, logits: Vec::new() });
        }
        let token = sequence.script.get(sequence.written).copied().unwrap_or(self.end);
        sequence.written += 1;
        let rows = match want {
            Want::Nothing | Want::Token => 0,
            Want::Logits => 1,
            Want::AllLogits => tokens,
        };
        let mut logits = vec![0.0; rows * self.geometry.vocab];
        logits
            .iter_mut()
            .skip(token as usize)
            .step_by(self.geometry.vocab)
            .for_each(|it| *it = WRITTEN_LOGIT);
        Ok(StepOutput { sequence: id, token: Some(token), logits })
    }

    fn enqueue(&mut self, outputs: Vec<StepOutput>) -> Ticket {
        self.enqueued.push_back(outputs);
        Ticket(0)
    }
}

/// What it does not do, and nobody may ask of it: there is no prefix cache here.
fn no_snapshots() -> BackendError {
    BackendError::Device("it keeps no snapshots".to_string())
}

impl Backend for Device {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn description(&self) -> String {
        "a script".to_string()
    }

    fn context_limit(&self) -> usize {
        self.context
    }

    fn open(&mut self, from: Option<SnapshotId>) -> Result<SequenceId, BackendError> {
        if from.is_some() {
            return Err(no_snapshots());
        }
        self.opened += 1;
        let sequence = Sequence { length: 0, script: self.script.get(), written: 0 };
        self.sequences.insert(SequenceId(self.opened), sequence);
        Ok(SequenceId(self.opened))
    }

    fn length(&self, sequence: SequenceId) -> Result<usize, BackendError> {
        let sequence = self.sequences.get(&sequence);
        sequence.map(|it| it.length).ok_or_else(|| BackendError::Unknown("a sequence".to_string()))
    }

    fn extend(&mut self, sequence: SequenceId, tokens: &[u32], want: Want) -> Result<Ticket, BackendError> {
        let output = self.advance(sequence, tokens.len(), want)?;
        Ok(self.enqueue(vec![output]))
    }

    fn decode(&mut self, steps: &[DecodeStep]) -> Result<Ticket, BackendError> {
        let outputs = steps.iter().map(|step| self.advance(step.sequence, 1, step.want));
        let outputs = outputs.collect::<Result<_, _>>()?;
        Ok(self.enqueue(outputs))
    }

    fn collect(&mut self, _: Ticket) -> Result<Vec<StepOutput>, BackendError> {
        self.enqueued.pop_front().ok_or_else(|| BackendError::Unknown("a ticket".to_string()))
    }

    fn snapshot(&mut self, _: SequenceId) -> Result<SnapshotId, BackendError> {
        Err(no_snapshots())
    }

    fn discard(&mut self, _: SnapshotId) {}

    fn memory(&self) -> Memory {
        Memory { used: self.sequences.len() as u64, snapshots: 0, limit: u64::MAX }
    }

    fn sequence_bytes(&self, _: usize) -> u64 {
        1
    }

    fn layout(&self) -> String {
        "script".to_string()
    }

    fn export(&mut self, _: SnapshotId) -> Result<Export, BackendError> {
        Err(no_snapshots())
    }

    fn import(&mut self, _: usize, _: &mut dyn Read) -> Result<SnapshotId, BackendError> {
        Err(no_snapshots())
    }

    fn close(&mut self, sequence: SequenceId) {
        self.sequences.remove(&sequence);
    }
}
