//! The demo's logits and greedy continuations are those of `transformers` in f32.
//!
//! `transformers` ran the weights that the 4-bit file means. Lily runs the file itself, and the unquantized
//! checkpoint in Hugging Face's layout that it means, rebuilt here.

#[path = "common/golden.rs"]
mod golden;
#[path = "common/unquantized.rs"]
mod unquantized;

use golden::{Golden, all_logits, backend, relative_error, repository};
use lily_cpu::{CpuBackend, Numerics};
use lily_engine::backend::{Backend, DecodeStep, Input, Want};
use lily_model::checkpoint::Checkpoint;
use safetensors::Dtype;
use serde_json::Value;

/// `max|a - b| / max|b|` over the logits of one position.
const TOLERANCE: f32 = 5e-5;

const LENGTHS: [usize; 10] = [1, 2, 3, 63, 64, 65, 128, 257, 600, 2000];

/// Compares every golden position of the prompts of at most `longest` tokens.
fn expect_golden_logits(backend: &mut CpuBackend, longest: usize) {
    let golden = Golden::open("transformers_logits.safetensors");
    let vocab = backend.geometry().vocab;
    let mut worst = 0.0f32;
    for length in LENGTHS.into_iter().filter(|&length| length <= longest) {
        let tokens = golden.ids(&format!("{length}.tokens"));
        assert_eq!(tokens.len(), length);
        let positions = golden.ids(&format!("{length}.positions"));
        let expected = golden.floats(&format!("{length}.logits"));
        let found = all_logits(backend, &tokens);
        for (position, expected) in positions.iter().map(|&p| p as usize).zip(expected.chunks_exact(vocab)) {
            let error = relative_error(&found[position * vocab..(position + 1) * vocab], expected);
            assert!(error <= TOLERANCE, "position {position} of {length} tokens is off by {error:.1e}");
            worst = worst.max(error);
        }
    }
    println!("largest relative error {worst:.1e}");
}

#[test]
fn f32_logits_on_the_4_bit_demo_are_those_of_transformers() {
    let weights = Checkpoint::demo().unwrap().weights().unwrap();
    expect_golden_logits(&mut backend(weights, Numerics::F32), 2000);
}

#[test]
fn f32_logits_on_the_unquantized_hugging_face_layout_are_those_of_transformers() {
    let dir = tempfile::tempdir().unwrap();
    let config = std::fs::read(repository("demo/checkpoint/config.json")).unwrap();
    let four_bit = Checkpoint::demo().unwrap().weights().unwrap();
    unquantized::write(&four_bit, serde_json::from_slice(&config).unwrap(), Dtype::F32, dir.path());

    let weights = Checkpoint::open(dir.path()).unwrap().weights().unwrap();
    let mut unquantized = backend(weights, Numerics::F32);
    expect_golden_logits(&mut unquantized, 600);

    let tokens = Golden::open("transformers_logits.safetensors").ids("65.tokens");
    let same =
        all_logits(&mut unquantized, &tokens) == all_logits(&mut backend(four_bit, Numerics::F32), &tokens);
    assert!(same, "the same weights in two layouts give the same bits");
}

struct Continuation {
    family: String,
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    /// Gap between the two best logits at every token of the oracle's continuation.
    margins: Vec<f64>,
}

fn continuations() -> Vec<Continuation> {
    let text = std::fs::read(repository("oracle/golden/transformers_greedy.json")).unwrap();
    let entries: Vec<Value> = serde_json::from_slice(&text).unwrap();
    let ids = |value: &Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
    };
    entries
        .iter()
        .map(|entry| Continuation {
            family: entry["family"].as_str().unwrap().to_owned(),
            prompt: ids(&entry["prompt"]),
            tokens: ids(&entry["tokens"]),
            margins: entry["margins"].as_array().unwrap().iter().map(|m| m.as_f64().unwrap()).collect(),
        })
        .collect()
}

/// `count` greedy tokens after `prompt`, each decoded from the one before.
fn continue_greedily(backend: &mut CpuBackend, prompt: &[u32], count: usize) -> Vec<u32> {
    let sequence = backend.open(None).unwrap();
    let ticket = backend.extend(sequence, prompt, Want::Token).unwrap();
    let mut tokens = vec![backend.collect(ticket).unwrap()[0].token.unwrap()];
    while tokens.len() < count {
        let step = DecodeStep { sequence, input: Input::LastSampled, want: Want::Token };
        let ticket = backend.decode(&[step]).unwrap();
        tokens.push(backend.collect(ticket).unwrap()[0].token.unwrap());
    }
    backend.close(sequence);
    tokens
}

#[test]
fn f32_continues_as_transformers_does() {
    let mut backend = backend(Checkpoint::demo().unwrap().weights().unwrap(), Numerics::F32);
    for golden in continuations() {
        let found = continue_greedily(&mut backend, &golden.prompt, golden.tokens.len());
        assert_eq!(found, golden.tokens, "{}", golden.family);
    }
}

/// Rounding activations to int8 may turn a choice between two tokens whose logits are closer than this.
const INT8_MARGIN: f64 = 1.0;

#[test]
fn int8_continues_as_transformers_does_while_its_choices_are_clear() {
    let mut backend = backend(Checkpoint::demo().unwrap().weights().unwrap(), Numerics::Int8);
    let (mut compared, mut total) = (0, 0);
    for golden in continuations() {
        let clear = golden.margins.iter().take_while(|&&margin| margin >= INT8_MARGIN).count();
        let found = continue_greedily(&mut backend, &golden.prompt, clear.max(1));
        assert_eq!(found[..clear], golden.tokens[..clear], "{}", golden.family);
        compared += clear;
        total += golden.tokens.len();
    }
    println!("{compared} of {total} tokens have a clear beginning and are equal");
    assert!(compared * 2 >= total, "only {compared} of {total} golden tokens have wide margins before them");
}
