//! A toy device and a byte-level tokenizer.
//!
//! [`FakeBackend`] is as strict as the contract: misuse of a sequence or ticket panics, which the engine
//! turns into failed requests and so into failed tests. It writes down every call, and a test can make any
//! call wait, fail or panic.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use lily_engine::backend::{
    Backend, BackendError, DecodeStep, Input, SequenceId, SnapshotId, StepOutput, Ticket, Want,
};
use lily_engine::engine::{Event, FinishReason, Generation, Usage};
use lily_model::geometry::Geometry;
use lily_model::tokenizer::Tokenizer;

/// The 256 bytes, then the end-of-sequence token.
pub const VOCAB: usize = 257;

/// The only special token.
pub const EOS: u32 = 256;

/// A call that the engine made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    Open(SequenceId),
    Extend(SequenceId, Vec<u32>),
    Decode(Vec<(SequenceId, Input)>),
    Collect(Vec<SequenceId>),
    Close(SequenceId),
}

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
    in_flight: VecDeque<(u64, Vec<StepOutput>)>,
}

#[derive(Default)]
struct Sequence {
    tokens: Vec<u32>,
    sampled: Option<u32>,
    in_flight: usize,
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
            in_flight: VecDeque::new(),
        }
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
        state.tokens.extend(tokens);
        assert!(state.tokens.len() <= self.context, "the engine ran past the context");
        let next = (want != Want::Nothing).then(|| (self.model)(&state.tokens));
        state.sampled = next;
        let logits = if want == Want::Logits { logits(next.unwrap()) } else { Vec::new() };
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
        assert_eq!(from, None);
        self.opened += 1;
        let sequence = SequenceId(self.opened);
        self.call(Call::Open(sequence))?;
        self.sequences.insert(sequence, Sequence::default());
        Ok(sequence)
    }

    fn length(&self, sequence: SequenceId) -> Result<usize, BackendError> {
        Ok(self.sequences[&sequence].tokens.len())
    }

    fn extend(&mut self, sequence: SequenceId, tokens: &[u32], want: Want) -> Result<Ticket, BackendError> {
        assert!(!tokens.is_empty());
        self.call(Call::Extend(sequence, tokens.to_vec()))?;
        let output = self.advance(sequence, tokens, want);
        Ok(self.ticket(vec![output]))
    }

    fn decode(&mut self, steps: &[DecodeStep]) -> Result<Ticket, BackendError> {
        self.call(Call::Decode(steps.iter().map(|step| (step.sequence, step.input)).collect()))?;
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

    fn snapshot(&mut self, _: SequenceId) -> Result<SnapshotId, BackendError> {
        panic!("the engine takes no snapshots yet")
    }

    fn discard(&mut self, _: SnapshotId) {}

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
