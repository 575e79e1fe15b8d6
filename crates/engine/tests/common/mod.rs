//! A toy device and a byte-level tokenizer.
//!
//! [`FakeBackend`] is as strict as the contract: misuse of a sequence or ticket panics, which the engine
//! turns into failed requests and so into failed tests. It writes down every call, and a test can make any
//! call wait, fail or panic. Its state is the tokens themselves, in pages that are shared as the contract says
//! and counted by walking over all of them.

#![allow(dead_code, reason = "each test program uses a part")]

pub mod demo;

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::Read;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lily_engine::backend::{
    Backend, BackendError, DecodeStep, Export, Input, Memory, SequenceId, SnapshotId, StepOutput, Ticket,
    Want,
};
use lily_engine::engine::{Engine, Event, FinishReason, Generation, Load, Usage};
use lily_engine::sampler::{Sampler, SamplerState};
use lily_model::geometry::Geometry;
use lily_model::tokenizer::Tokenizer;

/// The 256 bytes, then the end-of-sequence token.
pub const VOCAB: usize = 257;

/// The only special token.
pub const EOS: u32 = 256;

/// Longer than anything takes that is waited for; reached only when something hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A call that the engine made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    Open(SequenceId),
    Resume(SequenceId, usize),
    Extend(SequenceId, Vec<u32>),
    Decode(Vec<(SequenceId, Input)>),
    Collect(Vec<SequenceId>),
    Snapshot(usize),
    Discard(usize),
    Close(SequenceId),
}

/// Tokens of a page.
pub const PAGE: usize = 4;
/// Bytes of a page.
pub const PAGE_BYTES: u64 = 10;
/// Bytes of what does not grow.
pub const STATE_BYTES: u64 = 100;

/// Maps a sequence's tokens to the next one.
pub type Model = Box<dyn Fn(&[u32]) -> u32 + Send>;

/// Sees every call before it is carried out.
pub type Hook = Box<dyn FnMut(&Call) -> Result<(), BackendError> + Send>;

pub struct FakeBackend {
    geometry: Geometry,
    context: usize,
    model: Model,
    hook: Hook,
    calls: Arc<Mutex<Vec<Call>>>,
    opened: u64,
    tickets: u64,
    sequences: HashMap<SequenceId, Sequence>,
    snapshots: HashMap<SnapshotId, State>,
    limit: u64,
    samples: bool,
    in_flight: VecDeque<(u64, Vec<StepOutput>)>,
}

/// What was read, in pages.
#[derive(Clone, Default)]
struct State {
    pages: Vec<Arc<Vec<u32>>>,
}

impl State {
    fn tokens(&self) -> Vec<u32> {
        self.pages.iter().flat_map(|page| page.iter().copied()).collect()
    }

    fn len(&self) -> usize {
        self.pages.iter().map(|page| page.len()).sum()
    }

    fn push(&mut self, token: u32) {
        match self.pages.last_mut() {
            // Copied first, should a snapshot share it.
            Some(page) if page.len() < PAGE => Arc::make_mut(page).push(token),
            _ => self.pages.push(Arc::new(vec![token])),
        }
    }
}

#[derive(Default)]
struct Sequence {
    state: State,
    sampled: Option<u32>,
    sampler: Option<Sampler>,
    in_flight: usize,
}

/// Bytes of some states; a page that several share counts once.
fn bytes<'a>(states: impl Iterator<Item = &'a State>) -> u64 {
    let mut pages = HashSet::new();
    let mut count = 0;
    for state in states {
        count += 1;
        pages.extend(state.pages.iter().map(Arc::as_ptr));
    }
    count * STATE_BYTES + pages.len() as u64 * PAGE_BYTES
}

impl FakeBackend {
    pub fn new(context: usize, model: impl Fn(&[u32]) -> u32 + Send + 'static) -> FakeBackend {
        FakeBackend {
            geometry: Geometry { vocab: VOCAB, ..Geometry::qwen3_6_35b_a3b() },
            context,
            model: Box::new(model),
            hook: Box::new(|_| Ok(())),
            calls: Arc::default(),
            opened: 0,
            tickets: 0,
            sequences: HashMap::new(),
            snapshots: HashMap::new(),
            limit: u64::MAX,
            samples: false,
            in_flight: VecDeque::new(),
        }
    }

    /// Lets state take no more than `limit` bytes.
    pub fn with_limit(self, limit: u64) -> Self {
        FakeBackend { limit, ..self }
    }

    /// Lets the device sample.
    pub fn that_samples(self) -> Self {
        FakeBackend { samples: true, ..self }
    }

    pub fn with_hook(self, hook: impl FnMut(&Call) -> Result<(), BackendError> + Send + 'static) -> Self {
        FakeBackend { hook: Box::new(hook), ..self }
    }

    pub fn calls(&self) -> Arc<Mutex<Vec<Call>>> {
        Arc::clone(&self.calls)
    }

    fn call(&mut self, call: Call) -> Result<(), BackendError> {
        let result = (self.hook)(&call);
        self.calls.lock().unwrap().push(call);
        result
    }

    fn keep(&mut self, state: State) -> SnapshotId {
        self.opened += 1;
        self.snapshots.insert(SnapshotId(self.opened), state);
        SnapshotId(self.opened)
    }

    fn ticket(&mut self, outputs: Vec<StepOutput>) -> Ticket {
        for output in &outputs {
            self.sequences.get_mut(&output.sequence).unwrap().in_flight += 1;
        }
        self.tickets += 1;
        self.in_flight.push_back((self.tickets, outputs));
        Ticket(self.tickets)
    }

    fn advance(&mut self, sequence: SequenceId, tokens: &[u32], want: Want) -> StepOutput {
        let state = self.sequences.get_mut(&sequence).expect("an open sequence");
        tokens.iter().for_each(|&token| state.state.push(token));
        assert!(state.state.len() <= self.context, "the engine ran past the context");
        let greedy = (want != Want::Nothing).then(|| (self.model)(&state.state.tokens()));
        let next = greedy.map(|greedy| match &mut state.sampler {
            Some(sampler) => sampler.sample(&mut logits(greedy)).expect("a row of numbers").token,
            None => greedy,
        });
        state.sampled = next;
        let logits = if want == Want::Logits { logits(greedy.unwrap()) } else { Vec::new() };
        StepOutput { sequence, token: next, logits }
    }
}

/// A row whose largest entry is `next` and whose others differ.
fn logits(next: u32) -> Vec<f32> {
    let mut row: Vec<f32> =
        (0..VOCAB as u32).map(|i| (i.wrapping_mul(next + 7) % 101) as f32 / 50.0).collect();
    row[next as usize] = 5.0;
    row
}

impl FakeBackend {
    /// Refuses `more` bytes that would pass the limit.
    fn room(&self, more: u64) -> Result<(), BackendError> {
        if self.memory().used.saturating_add(more) > self.limit {
            return Err(BackendError::OutOfMemory { what: "a toy", bytes: more as usize });
        }
        Ok(())
    }

    /// Bytes that `tokens` more tokens of a sequence take at the most.
    fn growth(&self, sequence: SequenceId, tokens: usize) -> u64 {
        let state = &self.sequences[&sequence].state;
        let copied = state.pages.last().is_some_and(|p| p.len() < PAGE && Arc::strong_count(p) > 1);
        let pages = (state.len() + tokens).div_ceil(PAGE) - state.pages.len();
        (pages as u64 + u64::from(copied)) * PAGE_BYTES
    }
}

impl Backend for FakeBackend {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn description(&self) -> String {
        "a toy".to_owned()
    }

    fn context_limit(&self) -> usize {
        self.context
    }

    fn open(&mut self, from: Option<SnapshotId>) -> Result<SequenceId, BackendError> {
        self.opened += 1;
        let sequence = SequenceId(self.opened);
        let state = from.map(|from| self.snapshots[&from].clone()).unwrap_or_default();
        self.call(match from {
            None => Call::Open(sequence),
            Some(_) => Call::Resume(sequence, state.len()),
        })?;
        self.room(STATE_BYTES)?;
        self.sequences.insert(sequence, Sequence { state, ..Sequence::default() });
        Ok(sequence)
    }

    fn length(&self, sequence: SequenceId) -> Result<usize, BackendError> {
        Ok(self.sequences[&sequence].state.len())
    }

    fn extend(&mut self, sequence: SequenceId, tokens: &[u32], want: Want) -> Result<Ticket, BackendError> {
        assert!(!tokens.is_empty());
        self.call(Call::Extend(sequence, tokens.to_vec()))?;
        self.room(self.growth(sequence, tokens.len()))?;
        let output = self.advance(sequence, tokens, want);
        Ok(self.ticket(vec![output]))
    }

    fn decode(&mut self, steps: &[DecodeStep]) -> Result<Ticket, BackendError> {
        self.call(Call::Decode(steps.iter().map(|step| (step.sequence, step.input)).collect()))?;
        self.room(steps.iter().map(|step| self.growth(step.sequence, 1)).sum())?;
        let outputs = steps
            .iter()
            .map(|step| {
                let sampled = self.sequences[&step.sequence].sampled;
                let token = match step.input {
                    Input::Token(token) => token,
                    Input::LastSampled => sampled.expect("a token chosen on the device"),
                };
                self.advance(step.sequence, &[token], step.want)
            })
            .collect();
        Ok(self.ticket(outputs))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Vec<StepOutput>, BackendError> {
        let (expected, outputs) = self.in_flight.pop_front().expect("work in flight");
        assert_eq!(ticket, Ticket(expected), "work is collected in the order of enqueueing");
        for output in &outputs {
            self.sequences.get_mut(&output.sequence).expect("an open sequence").in_flight -= 1;
        }
        self.call(Call::Collect(outputs.iter().map(|output| output.sequence).collect()))?;
        Ok(outputs)
    }

    fn sample_on_device(&mut self, sequence: SequenceId, state: &SamplerState) -> Result<bool, BackendError> {
        let sequence = self.sequences.get_mut(&sequence).expect("an open sequence");
        sequence.sampler = self.samples.then(|| Sampler::resume(state.clone()));
        Ok(self.samples)
    }

    fn snapshot(&mut self, sequence: SequenceId) -> Result<SnapshotId, BackendError> {
        let state = self.sequences[&sequence].state.clone();
        self.call(Call::Snapshot(state.len()))?;
        self.room(STATE_BYTES)?;
        Ok(self.keep(state))
    }

    fn discard(&mut self, snapshot: SnapshotId) {
        let state = self.snapshots.remove(&snapshot).expect("a snapshot that exists");
        self.call(Call::Discard(state.len())).expect("discarding cannot fail");
    }

    fn memory(&self) -> Memory {
        let sequences = self.sequences.values().map(|sequence| &sequence.state);
        Memory {
            used: bytes(sequences.chain(self.snapshots.values())),
            snapshots: bytes(self.snapshots.values()),
            limit: self.limit,
        }
    }

    fn sequence_bytes(&self, tokens: usize) -> u64 {
        (tokens.div_ceil(PAGE) as u64).saturating_mul(PAGE_BYTES).saturating_add(STATE_BYTES)
    }

    fn layout(&self) -> String {
        "toy".to_owned()
    }

    fn export(&mut self, snapshot: SnapshotId) -> Result<Export, BackendError> {
        let tokens = self.snapshots[&snapshot].tokens();
        Ok(Box::new(move |out| tokens.iter().try_for_each(|token| out.write_all(&token.to_le_bytes()))))
    }

    fn import(&mut self, length: usize, from: &mut dyn Read) -> Result<SnapshotId, BackendError> {
        let mut state = State::default();
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).map_err(|error| BackendError::BadExport(error.to_string()))?;
        if bytes.len() != 4 * length {
            return Err(BackendError::BadExport("it has another length".to_owned()));
        }
        self.room(self.sequence_bytes(length))?;
        bytes.chunks(4).for_each(|b| state.push(u32::from_le_bytes(b.try_into().unwrap())));
        Ok(self.keep(state))
    }

    fn close(&mut self, sequence: SequenceId) {
        let state = self.sequences.remove(&sequence).expect("an open sequence");
        assert_eq!(state.in_flight, 0, "a sequence was closed with work in flight");
        self.call(Call::Close(sequence)).expect("closing cannot fail");
    }
}

/// A byte-level vocabulary of [`VOCAB`] tokens: id and byte are the same.
pub fn tokenizer() -> Tokenizer {
    // Printable bytes stand for themselves, the others for the characters from U+0100 on, in order.
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut substitute = 0x100;
    let mut vocab = serde_json::Map::new();
    for byte in 0..256 {
        let code = if printable(byte) { byte } else { substitute };
        substitute += u32::from(!printable(byte));
        vocab.insert(char::from_u32(code).unwrap().to_string(), byte.into());
    }
    let byte_level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let file = serde_json::json!({
        "version": "1.0",
        "added_tokens": [{
            "id": EOS, "content": "<|im_end|>", "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false
        }],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap()
}

/// A model that continues a prompt of `prompt_len` tokens with `text` and then ends the sequence for ever.
pub fn scripted(prompt_len: usize, text: &str) -> impl Fn(&[u32]) -> u32 + Send + 'static {
    let bytes = text.as_bytes().to_vec();
    move |tokens| bytes.get(tokens.len() - prompt_len).map_or(EOS, |&byte| byte.into())
}

/// A model whose next letter depends on every token before it, and which never ends.
pub fn mixing(tokens: &[u32]) -> u32 {
    let hash = tokens.iter().fold(17u32, |hash, &token| hash.wrapping_mul(0x01000193) ^ (token + 1));
    u32::from(b'a') + (hash >> 8) % 26
}

/// What [`mixing`] continues `prompt` with.
pub fn mixing_text(prompt: &[u32], tokens: usize) -> String {
    let mut all = prompt.to_vec();
    (0..tokens).for_each(|_| all.push(mixing(&all)));
    all[prompt.len()..].iter().map(|&token| token as u8 as char).collect()
}

/// Makes the backend wait in its first call, so that a test can submit several requests to one iteration.
pub fn gate() -> (Sender<()>, impl FnMut(&Call) -> Result<(), BackendError> + Send + 'static) {
    let (open, gate): (Sender<()>, Receiver<()>) = channel();
    let mut closed = true;
    let hook = move |_: &Call| {
        if std::mem::take(&mut closed) {
            gate.recv_timeout(PATIENCE).expect("the test opens the gate");
        }
        Ok(())
    };
    (open, hook)
}

/// Waits until the engine has nothing left to do; its figures are up to date then.
pub fn wait_until_idle(engine: &Engine) {
    let begin = Instant::now();
    while engine.load() != Load::default() {
        assert!(begin.elapsed() < PATIENCE, "the engine still holds {:?}", engine.load());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Everything that one request gave.
#[derive(Debug, Default)]
pub struct Outcome {
    pub events: Vec<Event>,
    pub text: String,
    pub tokens: Vec<u32>,
    pub reason: Option<FinishReason>,
    pub usage: Usage,
    pub failure: Option<String>,
}

/// Reads a request to its end and checks the order of its events.
pub fn outcome(mut generation: Generation) -> Outcome {
    let mut outcome = Outcome::default();
    while let Some(event) = generation.blocking_recv() {
        assert!(outcome.reason.is_none() && outcome.failure.is_none(), "an event after the last: {event:?}");
        match event.clone() {
            Event::Prefill { .. } => assert!(outcome.tokens.is_empty(), "prefill after a token"),
            Event::Token { id, text, .. } => {
                outcome.tokens.push(id);
                outcome.text += &text;
            }
            Event::Finished { reason, tail, usage, .. } => {
                outcome.text += &tail;
                outcome.reason = Some(reason);
                outcome.usage = usage;
            }
            Event::Failed(message) => outcome.failure = Some(message),
        }
        outcome.events.push(event);
    }
    assert!(outcome.reason.is_some() || outcome.failure.is_some(), "a request ended without a last event");
    outcome
}
