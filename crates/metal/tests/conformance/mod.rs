//! What must hold of the Metal backend on any device: the demo's greedy tokens are those of the CPU's plain f32, and
//! the same tokens give the same bits, however they come to the GPU. `apple.rs` runs it on a Mac's own GPU.
//!
//! Plain f32, because tokens that follow the end of an answer have no margin: there int8 activations choose others.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::OnceLock;

use lily_cpu::{CpuBackend, CpuOptions, Numerics};
use lily_engine::backend::{Backend, BackendError, DecodeStep, Input, SequenceId, StepOutput, Want};
use lily_engine::constraint::Constraint;
use lily_engine::engine::{Engine, EngineOptions, Event, Generation, Request};
use lily_engine::sampler::{Sampler, SamplingParams};
use lily_gpu::decode::Shape;
use lily_gpu::layout::{KvFormat, PAGE_TOKENS};
use lily_gpu::memory::Context;
use lily_gpu::stage::Stage;
use lily_metal::device::Device;
use lily_metal::program::Work;
use lily_metal::{MetalBackend, MetalOptions};
use lily_model::chat_template::ChatInput;
use lily_model::checkpoint::Checkpoint;
use serde_json::{Map, Value, json};

/// Greedy tokens of an answer that are compared, the end of the answer or not.
const TOKENS: usize = 64;
/// The families of the demo's held-out questions that the prompts come from, one of each.
const FAMILIES: [&str; 5] = ["sum", "reverse", "json", "thinking", "tool_answer"];
/// The most tokens of a sequence here.
const CONTEXT: usize = 1024;
/// The most tokens of an answer to a question about a long text.
const LONGEST_ANSWER: usize = 64;
/// Contexts of more tokens have attention's layout for long ones: within every answer below.
const SHORT: usize = 64;
/// What logits may differ from plain f32, relative to their size: keys and values are rounded to f16, and sums have
/// another order.
const LOGITS: f64 = 2e-3;

/// A backend for the demo.
pub fn open<D: Device>(device: &D) -> MetalBackend<D> {
    open_with(device, CONTEXT, KvFormat::F16)
}

/// The same for contexts of `context` tokens, whose keys and values are stored as `kv_format` says.
fn open_with<D: Device>(device: &D, context: usize, kv_format: KvFormat) -> MetalBackend<D> {
    let weights = Checkpoint::demo().unwrap().weights().unwrap();
    let context = Context::Exactly(context);
    let options = MetalOptions { context, short: SHORT, kv_format, ..MetalOptions::default() };
    MetalBackend::new(device, &weights, &options).unwrap()
}

fn cpu(numerics: Numerics) -> CpuBackend {
    let weights = Checkpoint::demo().unwrap().weights().unwrap();
    let options = CpuOptions { ctx_len: CONTEXT, numerics, ..CpuOptions::default() };
    CpuBackend::new(weights, options).unwrap()
}

/// The first held-out question of each family, as the model gets it.
fn prompts(families: &[&str]) -> Vec<Vec<u32>> {
    let demo = Checkpoint::demo().unwrap();
    let (tokenizer, template) = (demo.tokenizer().unwrap(), demo.chat_template().unwrap());
    let items = include_str!("../../../../demo/heldout.jsonl");
    let items: Vec<Value> = items.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let prompt = |family: &&str| {
        let item = items.iter().find(|item| item["family"] == *family).unwrap();
        let list = |name: &str| item[name].as_array().map(Vec::as_slice).unwrap_or_default();
        let input = ChatInput {
            messages: list("messages"),
            tools: list("tools"),
            add_generation_prompt: true,
            enable_thinking: Some(item["enable_thinking"] == true),
            extra: Map::new(),
        };
        tokenizer.encode(&template.render(&input).unwrap())
    };
    families.iter().map(prompt).collect()
}

/// Tokens that mean nothing, other ones for each seed.
fn noise(seed: u32, length: usize) -> Vec<u32> {
    (0..length as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed * 40_503) >> 7) % 4000)
        .collect()
}

fn next(sequence: SequenceId, want: Want) -> DecodeStep {
    DecodeStep { sequence, input: Input::LastSampled, want }
}

/// A sequence of `tokens`, put in `chunk` at a time, and what the last chunk gave.
fn prefill(
    backend: &mut dyn Backend,
    tokens: &[u32],
    chunk: usize,
) -> Result<(SequenceId, StepOutput), BackendError> {
    let sequence = backend.open(None)?;
    let mut last = None;
    for part in tokens.chunks(chunk) {
        let ticket = backend.extend(sequence, part, Want::Logits)?;
        last = backend.collect(ticket)?.pop();
    }
    Ok((sequence, last.expect("there is a chunk")))
}

/// `count` further tokens of each sequence, decoded together, each step enqueued before the one before it is
/// collected.
fn decode(
    backend: &mut dyn Backend,
    sequences: &[SequenceId],
    count: usize,
) -> Result<Vec<Vec<u32>>, BackendError> {
    let mut tokens = vec![Vec::new(); sequences.len()];
    let mut waiting = None;
    for turn in 0..=count {
        let steps: Vec<DecodeStep> = sequences.iter().map(|&sequence| next(sequence, Want::Token)).collect();
        let ticket = if turn < count { Some(backend.decode(&steps)?) } else { None };
        if let Some(earlier) = std::mem::replace(&mut waiting, ticket) {
            for (output, tokens) in backend.collect(earlier)?.into_iter().zip(&mut tokens) {
                tokens.extend(output.token);
            }
        }
    }
    Ok(tokens)
}

/// Greedy answers to all prompts, of `count` tokens each; together or one after the other.
fn answers(backend: &mut dyn Backend, prompts: &[Vec<u32>], count: usize, together: bool) -> Vec<Vec<u32>> {
    let mut answers = Vec::new();
    for group in prompts.chunks(if together { prompts.len() } else { 1 }) {
        let starts: Vec<(SequenceId, StepOutput)> =
            group.iter().map(|prompt| prefill(backend, prompt, usize::MAX).unwrap()).collect();
        let sequences: Vec<SequenceId> = starts.iter().map(|&(sequence, _)| sequence).collect();
        let rest = decode(backend, &sequences, count - 1).unwrap();
        for ((sequence, first), rest) in starts.into_iter().zip(rest) {
            backend.close(sequence);
            answers.push(first.token.into_iter().chain(rest).collect());
        }
    }
    answers
}

/// What plain f32 answers to the prompts, and the logits after the first.
pub struct Expected {
    families: &'static [&'static str],
    prompts: Vec<Vec<u32>>,
    answers: Vec<Vec<u32>>,
    logits: Vec<f32>,
}

impl Expected {
    /// Asks the CPU for everything.
    pub fn new() -> Expected {
        Expected::of(&FAMILIES, TOKENS)
    }

    /// Asks the CPU for answers of `tokens` tokens to prompts of some families.
    pub fn of(families: &'static [&'static str], tokens: usize) -> Expected {
        let (mut backend, prompts) = (cpu(Numerics::F32), prompts(families));
        let answers = answers(&mut backend, &prompts, tokens, false);
        let (_, last) = prefill(&mut backend, &prompts[0], usize::MAX).unwrap();
        Expected { families, prompts, answers, logits: last.logits }
    }
}

/// The demo's answers are those of plain f32, and the shortest sequence crosses the length at which attention changes its layout.
pub fn greedy_tokens_are_those_of_plain_f32<D: Device>(device: &D, expected: &Expected, together: bool) {
    let mut backend = open(device);
    let shortest = expected.prompts.iter().map(Vec::len).min().unwrap();
    let count = expected.answers[0].len();
    assert!(shortest < SHORT && shortest + count > SHORT, "{shortest} tokens of prompt");
    let found = answers(&mut backend, &expected.prompts, count, together);
    for ((family, found), expected) in expected.families.iter().zip(&found).zip(&expected.answers) {
        assert_eq!(found, expected, "the answer to {family}");
    }
    let (_, last) = prefill(&mut backend, &expected.prompts[0], usize::MAX).unwrap();
    let distance = distance(&last.logits, &expected.logits);
    assert!(distance <= LOGITS, "logits are {distance:.1e} of their size away from plain f32");
}

/// With keys and values in 8 bits the prompt of a family has the same bits whole and in pieces of `piece` tokens, and its answer is, to
/// the end, that of the CPU's cache of 8 bits, whose activations are rounded too.
pub fn a_prompt_in_8_bits_is_answered_as_on_the_cpu<D: Device>(device: &D, family: &str, piece: usize) {
    let prompt = prompts(&[family]).remove(0);
    assert!(prompt.len() > piece.max(3 * PAGE_TOKENS), "{} tokens of prompt", prompt.len());
    let expected =
        answers(&mut cpu(Numerics::Int8KvQ8), std::slice::from_ref(&prompt), TOKENS, false).remove(0);
    let ends = Checkpoint::demo().unwrap().generation_config().eos_token_ids;
    let end = expected.iter().position(|token| ends.contains(token)).expect("an answer that ends");

    let mut backend = open_with(device, CONTEXT, KvFormat::Q8);
    let (whole, first) = prefill(&mut backend, &prompt, usize::MAX).unwrap();
    let (_, cut) = prefill(&mut backend, &prompt, piece).unwrap();
    assert!(cut.logits == first.logits, "logits of a prompt in pieces of {piece} and whole");
    let mut found = Vec::from_iter(first.token);
    found.extend(decode(&mut backend, &[whole], end).unwrap().remove(0));
    assert_eq!(found, expected[..=end]);
}

/// Root mean square of the differences, relative to that of what is expected.
fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let differences: f64 = found.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    (differences / expected.iter().map(|&x| square(x)).sum::<f64>()).sqrt()
}

/// A question about a long text, and the answer that `cpu` gives.
pub struct Recall {
    kv: KvFormat,
    context: usize,
    prompt: Vec<u32>,
    answer: Vec<u32>,
    /// Before the answer, of whoever reads the prompt first.
    logits: OnceLock<Vec<f32>>,
}

impl Recall {
    /// The first question of a family, which has so many tokens, with keys and values stored so.
    pub fn of(family: &'static str, tokens: Range<usize>, kv: KvFormat) -> Recall {
        let demo = Checkpoint::demo().unwrap();
        let prompt = prompts(&[family]).remove(0);
        assert!(tokens.contains(&prompt.len()), "{} tokens of prompt", prompt.len());
        let ends = demo.generation_config().eos_token_ids;
        let context = tokens.end + LONGEST_ANSWER;
        let numerics = match kv {
            KvFormat::F16 => Numerics::Int8,
            KvFormat::Q8 => Numerics::Int8KvQ8,
        };
        let options = CpuOptions { ctx_len: context, numerics, ..CpuOptions::default() };
        let mut cpu = CpuBackend::new(demo.weights().unwrap(), options).unwrap();
        let (sequence, first) = prefill(&mut cpu, &prompt, usize::MAX).unwrap();
        let mut answer = Vec::from_iter(first.token);
        while !ends.contains(&answer[answer.len() - 1]) {
            answer.extend(decode(&mut cpu, &[sequence], 1).unwrap().remove(0));
            assert!(answer.len() < LONGEST_ANSWER, "an answer that does not end: {answer:?}");
        }
        Recall { kv, context, prompt, answer, logits: OnceLock::new() }
    }
}

/// A question about a long text has the answer of `cpu` when it is put in pieces of so many tokens in turn, and the logits before the answer
/// have the same bits whatever it is cut into.
pub fn a_long_prompt_is_answered_as_on_the_cpu<D: Device>(device: &D, recall: &Recall, pieces: &[usize]) {
    let mut backend = open_with(device, recall.context, recall.kv);
    let sequence = backend.open(None).unwrap();
    let (mut rest, mut last) = (&recall.prompt[..], None);
    for &piece in pieces.iter().cycle() {
        let (piece, more) = rest.split_at(piece.min(rest.len()));
        rest = more;
        let want = if rest.is_empty() { Want::Logits } else { Want::Nothing };
        let ticket = backend.extend(sequence, piece, want).unwrap();
        last = backend.collect(ticket).unwrap().pop();
        if rest.is_empty() {
            break;
        }
    }
    let last = last.unwrap();
    let mut found = Vec::from_iter(last.token);
    found.extend(decode(&mut backend, &[sequence], recall.answer.len() - 1).unwrap().remove(0));
    assert_eq!(found, recall.answer, "in pieces of {pieces:?}");
    let first = recall.logits.get_or_init(|| last.logits.clone());
    assert!(*first == last.logits, "logits of a prompt in pieces of {pieces:?} and in other ones");
}

/// A row has the same bits however a prompt is cut, whatever shares a step, and after a snapshot or an export.
/// The prompts have so many tokens; the first is to go beyond a page, and so beyond the length at which attention
/// changes its layout.
pub fn the_same_tokens_give_the_same_bits<D: Device>(device: &D, kv: KvFormat, lengths: [usize; 2]) {
    let mut backend = open_with(device, CONTEXT, kv);
    assert!(lengths[0] > SHORT.max(PAGE_TOKENS));
    let tokens = noise(1, lengths[0]);
    let (whole, expected) = prefill(&mut backend, &tokens, usize::MAX).unwrap();
    let first = expected.token.unwrap();
    let snapshot = backend.snapshot(whole).unwrap();
    let (cut, found) = prefill(&mut backend, &tokens, 13).unwrap();
    assert!((found.token, found.logits) == (expected.token, expected.logits), "a prompt in chunks of 13");
    backend.close(cut);

    let other = prefill(&mut backend, &noise(2, lengths[1]), usize::MAX).unwrap().0;
    let export = backend.export(snapshot).unwrap();
    let written = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        export(&mut bytes).map(|()| bytes)
    });
    let alone = decode(&mut backend, &[whole], 3).unwrap().remove(0);
    let resumed = backend.open(Some(snapshot)).unwrap();
    let together = decode(&mut backend, &[other, resumed], 1).unwrap();
    assert_eq!(together[1][0], alone[0], "after a snapshot, beside another sequence");

    let bytes = written.join().unwrap().unwrap();
    let imported = backend.import(tokens.len(), &mut &bytes[..]).unwrap();
    let imported = backend.open(Some(imported)).unwrap();
    let given = DecodeStep { sequence: imported, input: Input::Token(first), want: Want::Token };
    let ticket = backend.decode(&[given, next(resumed, Want::Token)]).unwrap();
    let outputs = backend.collect(ticket).unwrap();
    assert_eq!((outputs[0].token, outputs[1].token), (Some(alone[0]), Some(alone[1])), "after an export");

    let ticket = backend.decode(&[next(imported, Want::Logits), next(resumed, Want::Token)]).unwrap();
    let in_batch = backend.collect(ticket).unwrap();
    let fresh = backend.open(Some(snapshot)).unwrap();
    for step in [next(fresh, Want::Token), next(fresh, Want::Logits)] {
        let ticket = backend.decode(&[step]).unwrap();
        let alone = backend.collect(ticket).unwrap();
        if step.want == Want::Logits {
            assert!(alone[0].logits == in_batch[0].logits, "logits after an export in a batch, and alone");
        }
    }
    assert_eq!((in_batch[0].token, in_batch[1].token), (Some(alone[1]), Some(alone[2])));
}

/// Requests that ask for more than the largest logit: each filter, penalties, a bias, any temperature.
fn requests() -> Vec<SamplingParams> {
    let request = |seed, change: fn(&mut SamplingParams)| {
        let mut params = SamplingParams { temperature: 1.0, seed: Some(seed), ..SamplingParams::default() };
        change(&mut params);
        params
    };
    vec![
        request(1, |_| {}),
        request(2, |p| (p.temperature, p.top_k, p.top_p) = (0.7, 20, 0.9)),
        request(3, |p| (p.temperature, p.min_p) = (2.0, 0.05)),
        request(4, |p| (p.temperature, p.top_p, p.repetition_penalty) = (1.5, 0.8, 1.3)),
        request(5, |p| (p.temperature, p.frequency_penalty, p.logit_bias) = (0.0, 2.0, vec![(77, 30.0)])),
    ]
}

/// The GPU chooses what the host's sampler chooses, in a batch with a greedy sequence and each step enqueued before the one before
/// it is collected; and logits that are asked for beside a chosen token are the model's own.
pub fn chosen_tokens_are_the_hosts<D: Device>(device: &D, count: usize) {
    let mut backend = open(device);
    let prompt = noise(4, 5);
    let mut sequences = vec![prefill(&mut backend, &prompt, usize::MAX).unwrap().0];
    let mut firsts = Vec::new();
    for params in requests() {
        let sequence = backend.open(None).unwrap();
        let state = Sampler::new(params, &prompt).state().unwrap();
        assert!(backend.sample_on_device(sequence, &state).unwrap());
        let ticket = backend.extend(sequence, &prompt, Want::Token).unwrap();
        firsts.extend(backend.collect(ticket).unwrap()[0].token);
        sequences.push(sequence);
    }
    let rest = decode(&mut backend, &sequences, count).unwrap();
    let steps: Vec<DecodeStep> = sequences.iter().map(|&sequence| next(sequence, Want::Logits)).collect();
    let ticket = backend.decode(&steps).unwrap();
    let last = backend.collect(ticket).unwrap();

    for (index, params) in requests().into_iter().enumerate() {
        let mut host = Sampler::new(params.clone(), &prompt);
        let (sequence, mut output) = prefill(&mut backend, &prompt, usize::MAX).unwrap();
        let mut expected = Vec::new();
        for _ in 0..count + 1 {
            let token = host.sample(&mut output.logits).unwrap().token;
            expected.push(token);
            let step = DecodeStep { sequence, input: Input::Token(token), want: Want::Logits };
            let ticket = backend.decode(&[step]).unwrap();
            output = backend.collect(ticket).unwrap().remove(0);
        }
        let found: Vec<u32> = [firsts[index]].into_iter().chain(rest[index + 1].iter().copied()).collect();
        assert_eq!(found, expected, "{params:?}");
        assert!(last[index + 1].logits == output.logits, "logits beside a token of {params:?}");
        assert_eq!(last[index + 1].token, Some(host.sample(&mut output.logits).unwrap().token));
        backend.close(sequence);
    }
}

/// The tokens and the text of an answer.
fn answer(mut generation: Generation) -> (Vec<u32>, String) {
    let (mut tokens, mut text) = (Vec::new(), String::new());
    while let Some(event) = generation.blocking_recv() {
        match event {
            Event::Token { id, text: more, .. } => {
                tokens.push(id);
                text += &more;
            }
            Event::Finished { tail, .. } => text += &tail,
            Event::Failed(why) => panic!("{why}"),
            Event::Prefill { .. } => {}
        }
    }
    (tokens, text)
}

/// An engine that has the GPU choose what it can, and the host what a grammar or log-probabilities ask for, all at once: the
/// same request has the same tokens either way, and the grammar holds.
pub fn an_engine_answers_alike_whoever_chooses<D: Device>(device: &D, tokens: usize) {
    let demo = Checkpoint::demo().unwrap();
    let options =
        EngineOptions { eos_token_ids: demo.generation_config().eos_token_ids, ..EngineOptions::default() };
    let engine = Engine::start(Box::new(open(device)), demo.tokenizer().unwrap(), options);
    let prompt = prompts(&["sum"]).remove(0);
    let ask = |sampling: SamplingParams, max_tokens: usize, constraint: Option<Constraint>| {
        let request = Request::new(prompt.clone());
        let max_tokens = Some(max_tokens);
        engine.submit(Request { sampling, max_tokens, constraint, ignore_eos: true, ..request }).unwrap()
    };
    let by_host = |params: &SamplingParams| SamplingParams { logprobs: Some(0), ..params.clone() };
    let asked: Vec<SamplingParams> = requests()
        .into_iter()
        .map(|params| SamplingParams { temperature: 2.0 * params.temperature, ..params })
        .collect();
    let pairs: Vec<[Generation; 2]> = asked
        .iter()
        .map(|params| [ask(params.clone(), tokens, None), ask(by_host(params), tokens, None)])
        .collect();
    let words = ["red", "green"];
    let schema = Constraint::Json { schema: json!({ "enum": words }), strict: true };
    let constrained = ask(asked[0].clone(), 32, Some(schema));
    for (pair, params) in pairs.into_iter().zip(&asked) {
        let [device, host] = pair.map(answer);
        assert_eq!(device.0.len(), tokens);
        assert_eq!(device, host, "{params:?}");
    }
    let (_, text) = answer(constrained);
    assert!(words.contains(&serde_json::from_str::<&str>(text.trim()).unwrap()), "{text}");
}

/// A model whose logits are no numbers gives no token, whoever chooses it.
pub fn what_is_no_number_is_no_token<D: Device>(device: &D) {
    let mut weights = Checkpoint::demo().unwrap().weights().unwrap();
    weights.norm[7] = f32::NAN;
    let mut backend = MetalBackend::new(device, &weights, &MetalOptions::default()).unwrap();
    for params in [None, Some(requests().remove(1))] {
        let sequence = backend.open(None).unwrap();
        if let Some(params) = params {
            let state = Sampler::new(params, &[]).state().unwrap();
            assert!(backend.sample_on_device(sequence, &state).unwrap());
        }
        let ticket = backend.extend(sequence, &[1], Want::Token).unwrap();
        let refused = backend.collect(ticket).unwrap_err().to_string();
        assert!(refused.contains("a logit is not a number"), "{refused}");
    }
}

/// A step whose stages are timed one by one is a step like any other.
pub fn a_timed_step_gives_what_a_step_gives<D: Device>(device: &D) {
    let mut backend = open(device);
    let (plain, first) = prefill(&mut backend, &noise(3, 5), usize::MAX).unwrap();
    let snapshot = backend.snapshot(plain).unwrap();
    let expected = decode(&mut backend, &[plain], 2).unwrap().remove(0);

    let timed = backend.open(Some(snapshot)).unwrap();
    let times = backend.decode_timed(timed, Input::Token(first.token.unwrap())).unwrap().expect("times");
    assert_eq!(decode(&mut backend, &[timed], 1).unwrap(), [expected[1..].to_vec()]);
    let stages: HashSet<&str> = times.iter().map(|time| time.stage).collect();
    assert_eq!(stages, HashSet::from(Stage::ALL.map(Stage::name)));
    let kernels: usize = times.iter().map(|time| time.kernels).sum();
    assert_eq!(
        kernels,
        backend.programs().plan(Work::Step(Shape { rows: 1, context: 6, sampled: false })).dispatches.len()
    );
    assert!(times.iter().all(|time| time.seconds > 0.0), "{times:?}");
}
