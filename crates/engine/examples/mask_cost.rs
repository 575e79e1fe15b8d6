//! What constraints cost with a vocabulary of the model's size.
//!
//! ```sh
//! cargo run --release -p lily-engine --example mask_cost
//! ```
//!
//! The vocabulary is made up: 248,320 byte-level tokens, words of a few languages' letters with and without a space
//! before them, numbers, indentation and runs of punctuation, as many of each as models of this family have, about.
//! The device is dice: its logits cost nothing, so whatever a token takes is the engine's. Printed for each
//! constraint: what compiling takes (the first also builds the vocabulary's trie), time per token, and how much of
//! it the set of allowed tokens took, in the thread beside the engine's.

use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::time::Instant;

use lily_engine::backend::{
    Backend, BackendError, DecodeStep, Export, Memory, SequenceId, SnapshotId, StepOutput, Ticket, Want,
};
use lily_engine::constraint::{Constraint, Prose, ToolChoice};
use lily_engine::engine::{CacheOptions, Engine, EngineOptions, Event, Request};
use lily_engine::sampler::SamplingParams;
use lily_model::geometry::Geometry;
use lily_model::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// Rows of the model's embedding table.
const VOCAB: usize = 248_320;
/// Tokens measured for each constraint.
const TOKENS: usize = 400;
/// Answers that these tokens are spread over at the most.
const ANSWERS: usize = 100;
/// Markers behind the vocabulary.
const MARKERS: [&str; 5] = ["<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"];

fn main() {
    tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_target(false).without_time().init();
    let start = Instant::now();
    let tokenizer = tokenizer();
    println!("{} tokens made in {:.1} s", tokenizer.vocab_size(), start.elapsed().as_secs_f64());
    let eos = tokenizer.token_id(MARKERS[0]).expect("the marker is in the vocabulary");
    let options = EngineOptions {
        eos_token_ids: vec![eos],
        cache: CacheOptions { bytes: 0, ..CacheOptions::default() },
        ..EngineOptions::default()
    };
    let engine = Engine::start(Box::new(Dice::default()), tokenizer, options);
    for (name, constraint) in constraints() {
        let (mut tokens, mut compiling, mut spent) = (0, 0.0, 0.0);
        for seed in 0..ANSWERS as u64 {
            if tokens >= TOKENS {
                break;
            }
            let sampling = SamplingParams { temperature: 1.0, seed: Some(seed), ..SamplingParams::default() };
            let request = Request {
                sampling,
                constraint: constraint.clone(),
                max_tokens: Some(TOKENS - tokens),
                ..Request::new(vec![65])
            };
            let start = Instant::now();
            let mut generation = engine.submit(request).expect("the constraint can be enforced");
            compiling += start.elapsed().as_secs_f64();
            let start = Instant::now();
            while let Some(event) = generation.blocking_recv() {
                match event {
                    Event::Token { .. } => tokens += 1,
                    Event::Failed(reason) => panic!("{reason}"),
                    Event::Prefill { .. } | Event::Finished { .. } => {}
                }
            }
            spent += start.elapsed().as_secs_f64();
        }
        let (compiling, per_token) = (1e3 * compiling, 1e6 * spent / tokens.max(1) as f64);
        println!("{name}: {tokens} tokens, {per_token:.0} us a token, {compiling:.1} ms compiling in all");
    }
}

fn constraints() -> Vec<(&'static str, Option<Constraint>)> {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["name", "age", "tags"],
        "properties": {"name": {"type": "string", "maxLength": 80}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 9}}});
    let shell = json!({"type": "function", "function": {"name": "exec_command", "parameters": {"type": "object",
        "required": ["cmd"], "properties": {"cmd": {"type": "string"}, "login": {"type": "boolean"},
            "max_output_tokens": {"type": "number"}}}}});
    let edit = json!({"type": "function", "function": {"name": "edit", "parameters": {"type": "object",
        "required": ["path", "old", "new"], "properties": {"path": {"type": "string"}, "old": {"type": "string"},
            "new": {"type": "string"}, "count": {"type": "integer"}}}}});
    let tools = |prose| {
        let tools = vec![shell.clone(), edit.clone()];
        Some(Constraint::Tools(ToolChoice { tools, prose, parallel: true }))
    };
    vec![
        ("no constraint", None),
        ("any JSON object", Some(Constraint::json_object())),
        ("JSON of a schema", Some(Constraint::Json { schema, strict: true })),
        ("a date", Some(Constraint::Regex("[0-9]{4}-[0-9]{2}-[0-9]{2}".to_owned()))),
        ("calls of two tools", tools(Prose::None)),
        ("text, then calls", tools(Prose::Free)),
    ]
}

/// Numbers that look random and are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        // Knuth's multiplier; the high bits are the good ones.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// One made-up token.
fn word(random: &mut Random) -> String {
    const LATIN: &[char] = &[
        'e', 't', 'a', 'o', 'i', 'n', 's', 'r', 'h', 'l', 'd', 'c', 'u', 'm', 'f', 'p', 'g', 'w', 'y', 'b',
        'v', 'k',
    ];
    const SIGNS: &[char] = &[
        '(', ')', '{', '}', '[', ']', '.', ',', ';', ':', '"', '\'', '/', '\\', '<', '>', '=', '-', '+', '*',
        '_', '#',
    ];
    let from = |random: &mut Random, letters: &[char], most: usize| -> String {
        (0..1 + random.below(most)).map(|_| letters[random.below(letters.len())]).collect()
    };
    let block = |random: &mut Random, first: u32, size: usize, most: usize| -> String {
        let letter = |random: &mut Random| char::from_u32(first + random.below(size) as u32).unwrap_or('x');
        (0..1 + random.below(most)).map(|_| letter(random)).collect()
    };
    match random.below(100) {
        0..45 => format!(" {}", from(random, LATIN, 9)),
        45..60 => from(random, LATIN, 9),
        60..66 => from(random, SIGNS, 4),
        66..68 => format!("{}{}", " ".repeat(random.below(40)), from(random, SIGNS, 2)),
        68..84 => block(random, 0x4E00, 6000, 3), // Chinese
        84..92 => block(random, 0x0430, 32, 7),   // Cyrillic
        92..96 => block(random, 0x0627, 30, 6),   // Arabic
        _ => block(random, 0xAC00, 3000, 2),      // Korean
    }
}

/// How a vocabulary file spells a byte: printable ones by themselves, the others by the characters from U+0100 on.
fn letter(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let place = (0..byte).filter(|&other| !printable(other)).count() as u32;
    let code = if printable(byte) { u32::from(byte) } else { 0x100 + place };
    char::from_u32(code).unwrap_or('?')
}

fn spelled(text: &str) -> String {
    text.bytes().map(letter).collect()
}

fn tokenizer() -> Tokenizer {
    let mut random = Random(1);
    let mut vocab: Map<String, Value> =
        (0..=u8::MAX).map(|byte| (letter(byte).to_string(), Value::from(byte))).collect();
    let mut seen = HashSet::new();
    while vocab.len() < VOCAB - MARKERS.len() {
        let word = spelled(&word(&mut random));
        if word.chars().count() > 1 && seen.insert(word.clone()) {
            let id = vocab.len();
            vocab.insert(word, Value::from(id));
        }
    }
    let marker = |(index, text): (usize, &&str)| {
        json!({"id": VOCAB - MARKERS.len() + index, "content": text,
        "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": index == 0})
    };
    let added: Vec<Value> = MARKERS.iter().enumerate().map(marker).collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let file = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []}});
    Tokenizer::from_bytes(file.to_string().as_bytes()).expect("the file is a tokenizer")
}

/// A device whose logits are dice.
struct Dice {
    geometry: Geometry,
    lengths: HashMap<SequenceId, usize>,
    row: Vec<f32>,
    opened: u64,
    tickets: HashMap<u64, Vec<StepOutput>>,
}

impl Default for Dice {
    fn default() -> Dice {
        let mut random = Random(2);
        let row = (0..VOCAB).map(|_| random.below(1000) as f32 / 100.0).collect();
        let geometry = Geometry { vocab: VOCAB, ..Geometry::qwen3_6_35b_a3b() };
        Dice { geometry, lengths: HashMap::new(), row, opened: 0, tickets: HashMap::new() }
    }
}

impl Dice {
    fn outputs(&mut self, steps: impl Iterator<Item = (SequenceId, usize, Want)>) -> Ticket {
        let mut outputs = Vec::new();
        for (sequence, tokens, want) in steps {
            let length = self.lengths.entry(sequence).or_default();
            *length += tokens;
            // The same row, turned: another one for every step.
            let turn = *length * 7919 % VOCAB;
            let logits = if want == Want::Logits {
                [&self.row[turn..], &self.row[..turn]].concat()
            } else {
                Vec::new()
            };
            outputs.push(StepOutput {
                sequence,
                token: (want != Want::Nothing).then_some(turn as u32),
                logits,
            });
        }
        self.opened += 1;
        self.tickets.insert(self.opened, outputs);
        Ticket(self.opened)
    }
}

impl Backend for Dice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn description(&self) -> String {
        "dice".to_owned()
    }

    fn context_limit(&self) -> usize {
        1 << 20
    }

    fn open(&mut self, _from: Option<SnapshotId>) -> Result<SequenceId, BackendError> {
        self.opened += 1;
        self.lengths.insert(SequenceId(self.opened), 0);
        Ok(SequenceId(self.opened))
    }

    fn length(&self, sequence: SequenceId) -> Result<usize, BackendError> {
        Ok(self.lengths[&sequence])
    }

    fn extend(&mut self, sequence: SequenceId, tokens: &[u32], want: Want) -> Result<Ticket, BackendError> {
        Ok(self.outputs([(sequence, tokens.len(), want)].into_iter()))
    }

    fn decode(&mut self, steps: &[DecodeStep]) -> Result<Ticket, BackendError> {
        Ok(self.outputs(steps.iter().map(|step| (step.sequence, 1, step.want))))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Vec<StepOutput>, BackendError> {
        Ok(self.tickets.remove(&ticket.0).unwrap_or_default())
    }

    fn snapshot(&mut self, _sequence: SequenceId) -> Result<SnapshotId, BackendError> {
        self.opened += 1;
        Ok(SnapshotId(self.opened))
    }

    fn discard(&mut self, _snapshot: SnapshotId) {}

    fn memory(&self) -> Memory {
        Memory { used: 0, snapshots: 0, limit: u64::MAX }
    }

    fn sequence_bytes(&self, _tokens: usize) -> u64 {
        1
    }

    fn layout(&self) -> String {
        "dice".to_owned()
    }

    fn export(&mut self, _snapshot: SnapshotId) -> Result<Export, BackendError> {
        Ok(Box::new(|_| Ok(())))
    }

    fn import(&mut self, _length: usize, _state: &mut dyn Read) -> Result<SnapshotId, BackendError> {
        Err(BackendError::BadExport("dice have no state".to_owned()))
    }

    fn close(&mut self, sequence: SequenceId) {
        self.lengths.remove(&sequence);
    }
}
