//! Tokens that the card draws: those that the host's sampler draws from the same logits, one for one.

use lily_cuda::CudaBackend;
use lily_engine::backend::{Backend, BackendError, DecodeStep, Input, SequenceId, SnapshotId, Want};
use lily_engine::sampler::{Sampler, SamplingParams};
use lily_model::checkpoint::Checkpoint;

use crate::{Report, open};

/// Tokens that the model has read before the first is drawn.
const PROMPT: usize = 70;
/// Tokens that are drawn for each request, and in a brief run.
const COUNT: usize = 48;
const BRIEF: usize = 3;
/// Sequences that each start where the others do, and draw one token.
const DRAWS: u64 = 4_000;
/// The most that the draws' frequencies may differ from the probabilities, as chi-squared by its degrees of freedom: of
/// 100 such numbers about 10 lie above 1.2 where there are 30 degrees, and none of a million above 3.
const CHI_SQUARED: f64 = 3.0;

/// What is asked for, by name.
pub fn requests() -> Vec<(&'static str, SamplingParams)> {
    let base = || SamplingParams { temperature: 1.0, seed: Some(11), ..SamplingParams::default() };
    let bias = |logits: &[f32]| (0..).zip(logits.iter().copied()).map(|(i, b)| (i * 37, b)).collect();
    vec![
        ("temperature", base()),
        ("temperature 0.3", SamplingParams { temperature: 0.3, ..base() }),
        ("temperature 2.5", SamplingParams { temperature: 2.5, ..base() }),
        ("top_k", SamplingParams { top_k: 20, ..base() }),
        ("top_k 1", SamplingParams { top_k: 1, ..base() }),
        ("top_k 1000", SamplingParams { top_k: 1000, temperature: 3.0, ..base() }),
        ("top_p", SamplingParams { top_p: 0.9, ..base() }),
        ("top_p, flat", SamplingParams { top_p: 0.95, temperature: 40.0, ..base() }),
        ("top_p 0", SamplingParams { top_p: 0.0, ..base() }),
        ("min_p", SamplingParams { min_p: 0.05, temperature: 2.0, ..base() }),
        (
            "top_k, top_p, min_p",
            SamplingParams { temperature: 1.5, top_k: 50, top_p: 0.95, min_p: 0.01, ..base() },
        ),
        ("top_k 2000, top_p, flat", SamplingParams { temperature: 20.0, top_k: 2000, top_p: 0.7, ..base() }),
        (
            "penalties",
            SamplingParams {
                repetition_penalty: 1.2,
                presence_penalty: 0.5,
                frequency_penalty: -0.25,
                top_p: 0.95,
                ..base()
            },
        ),
        (
            "logit_bias",
            SamplingParams { logit_bias: bias(&[4.0, -100.0, 9.5, 0.0, -0.125]), top_k: 40, ..base() },
        ),
        (
            "greedy with penalties and bias",
            SamplingParams {
                temperature: 0.0,
                repetition_penalty: 1.5,
                logit_bias: bias(&[3.0, -5.0]),
                ..base()
            },
        ),
    ]
}

fn prompt(length: usize) -> Vec<u32> {
    (0..length as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) % 4000).collect()
}

/// Draws `count` tokens after `prompt` on the card, each step enqueued before the one before it is collected.
fn drawn(
    backend: &mut CudaBackend,
    prompt: &[u32],
    params: &[SamplingParams],
    count: usize,
) -> Result<Vec<Vec<u32>>, BackendError> {
    let mut tokens = vec![Vec::new(); params.len()];
    let mut sequences = Vec::new();
    for (params, tokens) in params.iter().zip(&mut tokens) {
        let sequence = backend.open(None)?;
        if *params != SamplingParams::default() {
            let state =
                Sampler::new(params.clone(), prompt).state().expect("nothing that a device cannot do");
            assert!(backend.sample_on_device(sequence, &state)?, "there is memory for it");
        }
        let ticket = backend.extend(sequence, prompt, Want::Token)?;
        tokens.extend(backend.collect(ticket)?.remove(0).token);
        sequences.push(sequence);
    }
    let step = |&sequence: &SequenceId| DecodeStep { sequence, input: Input::LastSampled, want: Want::Token };
    let steps: Vec<DecodeStep> = sequences.iter().map(step).collect();
    let mut waiting = None;
    for turn in 1..=count {
        let ticket = if turn < count { Some(backend.decode(&steps)?) } else { None };
        if let Some(earlier) = std::mem::replace(&mut waiting, ticket) {
            let outputs = backend.collect(earlier)?;
            outputs.iter().zip(&mut tokens).for_each(|(output, tokens)| tokens.extend(output.token));
        }
    }
    sequences.into_iter().for_each(|sequence| backend.close(sequence));
    Ok(tokens)
}

/// What the host's sampler chooses where the card chose `tokens`, from the logits of the same model.
fn expected(
    backend: &mut CudaBackend,
    prompt: &[u32],
    params: &SamplingParams,
    tokens: &[u32],
) -> Result<Vec<u32>, BackendError> {
    let sequence = backend.open(None)?;
    let mut sampler = Sampler::new(params.clone(), prompt);
    let mut ticket = backend.extend(sequence, prompt, Want::Logits)?;
    let mut chosen = Vec::new();
    for &token in tokens {
        let mut logits = backend.collect(ticket)?.remove(0).logits;
        let sampled = sampler.sample(&mut logits).map_err(|error| BackendError::Device(error.to_string()))?;
        chosen.push(sampled.token);
        let step = DecodeStep { sequence, input: Input::Token(token), want: Want::Logits };
        ticket = backend.decode(&[step])?;
    }
    backend.collect(ticket)?;
    backend.close(sequence);
    Ok(chosen)
}

/// Compares the card's draws with the host's, `count` tokens for each request.
pub fn equal(report: &mut Report, backend: &mut CudaBackend, of: &str, count: usize) {
    let prompt = prompt(PROMPT);
    for (name, params) in requests() {
        let mut outcome = || -> Result<String, BackendError> {
            let found = drawn(backend, &prompt, std::slice::from_ref(&params), count)?.remove(0);
            let expected = expected(backend, &prompt, &params, &found)?;
            let same = found.iter().zip(&expected).take_while(|(a, b)| a == b).count();
            if same < count || found.len() != count {
                let what = format!("token {same} of {} is {found:?}, the host's {expected:?}", found.len());
                return Err(BackendError::Device(what));
            }
            Ok(format!("{count} tokens as the host's sampler draws them"))
        };
        let outcome = outcome().map_err(|error| error.to_string());
        report.check(&format!("{of}, sampling with {name}"), outcome);
    }
}

/// Runs all checks on the demo.
pub fn run(report: &mut Report, device: usize, brief: bool) -> Result<(), String> {
    let weights = Checkpoint::demo().and_then(|demo| demo.weights()).map_err(|error| error.to_string())?;
    let mut backend = open(&weights, device, 16_384)?;
    let count = if brief { BRIEF } else { COUNT };
    equal(report, &mut backend, "demo", count);
    report.check("sampling in company", company(&mut backend, count).map_err(|error| error.to_string())?);
    if brief {
        return Ok(());
    }
    report.check("frequencies of draws", frequencies(&mut backend).map_err(|error| error.to_string())?);
    Ok(())
}

/// Whether sequences that ask for different things draw what each draws alone, beside greedy ones.
fn company(backend: &mut CudaBackend, count: usize) -> Result<Result<String, String>, BackendError> {
    let prompt = prompt(PROMPT);
    let mut all: Vec<SamplingParams> = requests().into_iter().map(|(_, params)| params).collect();
    all.insert(3, SamplingParams::default());
    all.push(SamplingParams::default());
    let together = drawn(backend, &prompt, &all, count)?;
    for (index, (params, found)) in all.iter().zip(&together).enumerate() {
        if drawn(backend, &prompt, std::slice::from_ref(params), count)?[0] != *found {
            return Ok(Err(format!("sequence {index} draws other tokens in a batch than alone")));
        }
    }
    let used = backend.memory().used;
    if used != 0 {
        return Ok(Err(format!("{used} bytes are left when all is closed")));
    }
    Ok(Ok(format!("{count} tokens of {} sequences are the same alone and together", all.len())))
}

/// Chi-squared of many single draws with different seeds against the softmax.
fn frequencies(backend: &mut CudaBackend) -> Result<Result<String, String>, BackendError> {
    const TEMPERATURE: f32 = 4.0;
    const TOP_K: usize = 30;
    let prompt = prompt(PROMPT);
    let sequence = backend.open(None)?;
    let ticket = backend.extend(sequence, &prompt[..PROMPT - 1], Want::Nothing)?;
    backend.collect(ticket)?;
    let snapshot = backend.snapshot(sequence)?;
    let ticket = backend.extend(sequence, &prompt[PROMPT - 1..], Want::Logits)?;
    let logits = backend.collect(ticket)?.remove(0).logits;
    backend.close(sequence);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    order.truncate(TOP_K);
    let weight = |token: usize| f64::from((logits[token] - logits[order[0]]) / TEMPERATURE).exp();
    let total: f64 = order.iter().map(|&token| weight(token)).sum();
    let mut counts = vec![0u32; logits.len()];
    for seed in 0..DRAWS {
        let params = SamplingParams {
            temperature: TEMPERATURE,
            top_k: TOP_K,
            seed: Some(seed),
            ..SamplingParams::default()
        };
        counts[draw(backend, snapshot, &prompt, params)? as usize] += 1;
    }
    backend.discard(snapshot);
    let (mut chi_squared, mut drawn) = (0.0, 0);
    for &token in &order {
        let expected = weight(token) / total * DRAWS as f64;
        chi_squared += (f64::from(counts[token]) - expected).powi(2) / expected;
        drawn += counts[token];
    }
    if u64::from(drawn) != DRAWS {
        return Ok(Err(format!("{} draws are not among the first {TOP_K}", DRAWS - u64::from(drawn))));
    }
    let freedom = TOP_K - 1;
    let ratio = chi_squared / freedom as f64;
    let figures = format!("chi-squared is {ratio:.2} of its {freedom} degrees of freedom over {DRAWS} draws");
    Ok(if ratio < CHI_SQUARED { Ok(figures) } else { Err(figures) })
}

fn draw(
    backend: &mut CudaBackend,
    snapshot: SnapshotId,
    prompt: &[u32],
    params: SamplingParams,
) -> Result<u32, BackendError> {
    let sequence = backend.open(Some(snapshot))?;
    let state = Sampler::new(params, prompt).state().expect("nothing that a device cannot do");
    backend.sample_on_device(sequence, &state)?;
    let ticket = backend.extend(sequence, &prompt[PROMPT - 1..], Want::Token)?;
    let token = backend.collect(ticket)?.remove(0).token;
    backend.close(sequence);
    token.ok_or_else(|| BackendError::Device("no token came back".to_owned()))
}
