//! The demo's answers: the tokens of the CPU backend's plain f32, and recall over a long context.
//!
//! Plain f32, because tokens that follow the end of an answer have no margin: there int8 activations choose others.

use std::path::Path;

use lily_cpu::{CpuBackend, CpuOptions, Numerics};
use lily_engine::backend::{Backend, BackendError, DecodeStep, Input, Want};
use lily_model::chat_template::ChatInput;
use lily_model::checkpoint::Checkpoint;
use serde_json::{Map, Value};

use crate::{Report, distance, open, within};

/// Prompts whose answers are compared, and tokens of each.
const PROMPTS: usize = 10;
const TOKENS: usize = 64;
/// Recall questions of each length, and the most tokens that an answer may have.
const RECALLS: usize = 10;
const RECALL_TOKENS: usize = 32;
/// Families of recall questions, and about how many tokens they have.
const RECALL_FAMILIES: [(&str, &str); 2] = [("recall_4k", "4,000"), ("recall_8k", "8,000")];
/// Pieces in which the first question of each family is read too.
const PIECES: [usize; 5] = [64, 100, 512, 1000, 4096];
/// What the whole demo's logits may differ from plain f32.
pub const LOGITS: f32 = 2e-2;
/// The families that the prompts come from, one prompt of each.
const FAMILIES: [&str; PROMPTS] =
    ["sum", "repeat", "reverse", "sort", "count", "json", "story", "thinking", "tool_answer", "multi_turn"];

/// Greedy tokens after `prompt`, `count` of them, the end of the answer or not.
fn greedy(backend: &mut dyn Backend, prompt: &[u32], count: usize) -> Result<Vec<u32>, BackendError> {
    greedy_after(backend, prompt, prompt.len(), count)
}

/// The same, the prompt read in pieces of `piece` tokens.
fn greedy_after(
    backend: &mut dyn Backend,
    prompt: &[u32],
    piece: usize,
    count: usize,
) -> Result<Vec<u32>, BackendError> {
    let sequence = backend.open(None)?;
    let (before, last) = prompt.split_at((prompt.len() - 1) / piece * piece);
    for part in before.chunks(piece) {
        let ticket = backend.extend(sequence, part, Want::Nothing)?;
        backend.collect(ticket)?;
    }
    let mut ticket = backend.extend(sequence, last, Want::Token)?;
    let mut tokens = Vec::with_capacity(count);
    loop {
        tokens.extend(backend.collect(ticket)?.remove(0).token);
        if tokens.len() == count {
            backend.close(sequence);
            return Ok(tokens);
        }
        ticket = backend.decode(&[DecodeStep { sequence, input: Input::LastSampled, want: Want::Token }])?;
    }
}

/// Logits of all positions of `prompt`.
fn logits(backend: &mut dyn Backend, prompt: &[u32]) -> Result<Vec<f32>, BackendError> {
    let sequence = backend.open(None)?;
    let ticket = backend.extend(sequence, prompt, Want::AllLogits)?;
    let logits = backend.collect(ticket)?.remove(0).logits;
    backend.close(sequence);
    Ok(logits)
}

/// Compares the answers.
pub fn run(report: &mut Report, device: usize, heldout: &Path) -> Result<(), String> {
    let demo = Checkpoint::demo().map_err(|error| error.to_string())?;
    let weights = demo.weights().map_err(|error| error.to_string())?;
    let (tokenizer, template) = (
        demo.tokenizer().map_err(|error| error.to_string())?,
        demo.chat_template().map_err(|error| error.to_string())?,
    );
    let items = std::fs::read_to_string(heldout)
        .map_err(|error| format!("{} cannot be read ({error}); name it with --heldout", heldout.display()))?;
    let items: Vec<Value> = items
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()
        .map_err(|error| error.to_string())?;
    let prompt = |item: &Value| -> Result<Vec<u32>, String> {
        let messages = item["messages"].as_array().map(Vec::as_slice).unwrap_or_default();
        let tools = item["tools"].as_array().map(Vec::as_slice).unwrap_or_default();
        let input = ChatInput {
            messages,
            tools,
            add_generation_prompt: true,
            enable_thinking: Some(item["enable_thinking"] == true),
            extra: Map::new(),
        };
        Ok(tokenizer.encode(&template.render(&input).map_err(|error| error.to_string())?))
    };
    let mut cuda = open(&weights, device, 16_384)?;
    let options = CpuOptions { ctx_len: 16_384, ..CpuOptions::default() };
    let mut f32 = CpuBackend::new(weights, CpuOptions { numerics: Numerics::F32, ..options })
        .map_err(|error| error.to_string())?;
    let question = prompt(items.iter().find(|item| item["family"] == "story").ok_or("no story")?)?;
    let found = logits(&mut cuda, &question).map_err(|error| error.to_string())?;
    let expected = logits(&mut f32, &question).map_err(|error| error.to_string())?;
    report.check("logits of a prompt against plain f32", within(distance(&found, &expected), LOGITS));

    for family in FAMILIES {
        let item =
            items.iter().find(|item| item["family"] == family).ok_or(format!("no question of {family}"))?;
        let prompt = prompt(item)?;
        let outcome = || -> Result<String, String> {
            let found = greedy(&mut cuda, &prompt, TOKENS).map_err(|error| error.to_string())?;
            let expected = greedy(&mut f32, &prompt, TOKENS).map_err(|error| error.to_string())?;
            let same = found.iter().zip(&expected).take_while(|(a, b)| a == b).count();
            if same < TOKENS {
                let texts = [&found, &expected].map(|tokens| tokenizer.decode_with_special(tokens));
                return Err(format!("token {same} differs: {:?} and the CPU's {:?}", texts[0], texts[1]));
            }
            Ok(format!("{TOKENS} greedy tokens as the CPU's"))
        }();
        report.check(&format!("answer to {family}"), outcome);
    }

    for (family, tokens) in RECALL_FAMILIES {
        let recalls = items.iter().filter(|item| item["family"] == family).take(RECALLS);
        let (mut asked, mut right, mut longest) = (0, 0, 0);
        for (index, item) in recalls.enumerate() {
            let prompt = prompt(item)?;
            longest = longest.max(prompt.len());
            let expected = item["answer"]["content"].as_str().unwrap_or_default();
            let pieces = if index == 0 { &PIECES[..] } else { &[] };
            for &piece in pieces.iter().chain([&prompt.len()]) {
                let answer = greedy_after(&mut cuda, &prompt, piece, RECALL_TOKENS);
                let answer = answer.map_err(|error| error.to_string())?;
                let end =
                    answer.iter().position(|&token| tokenizer.is_special(token)).unwrap_or(answer.len());
                asked += 1;
                right += usize::from(tokenizer.decode(&answer[..end]).trim() == expected.trim());
            }
        }
        let figures = format!("{right} of {asked} right, up to {longest} tokens, one question in pieces too");
        let outcome = if right == asked { Ok(figures) } else { Err(figures) };
        report.check(&format!("recall over {tokens} tokens"), outcome);
    }
    Ok(())
}
