//! `lily eval`: how well a model predicts a text, and how far one way of computing it is from another.
//!
//! Every token of the text is given (teacher forcing), whatever the model would have written; after each, the
//! distribution of the next token is looked at. So a thousand positions are a thousand independent comparisons, where a
//! generated text is compared only up to the first token that differs.
//!
//! The **subject** is what `--backend` and its kin name. The **reference** is another backend on the same or another
//! checkpoint (`--against`), computed beside it, or a file that holds what another program said of the same tokens
//! (`--reference`; those of `oracle/` come from `mlx-lm`).
//!
//! Read first: `eval/score.rs`, which says what is computed of a position.

mod documents;
mod plot;
mod report;
mod score;

use std::path::Path;

use anyhow::bail;
use lily_cpu::{CpuBackend, CpuOptions, Numerics};
use lily_engine::backend::{Backend, SequenceId, Want};
use lily_model::checkpoint::Checkpoint;

use crate::args::{Against, BackendKind, EvalArgs, KvCacheType, ModelArgs};
use crate::{device, models, output, progress, session};
use documents::Document;
use report::{Position, Report};
use score::{Row, divergence};

/// Rows whose logits are looked at together: two backends' of the full model take 64 MB.
const CHUNK: usize = 32;

/// Scores what `args` name.
pub fn run(args: &EvalArgs) -> anyhow::Result<()> {
    if let Some(path) = &args.plot {
        output::check_picture_place(path)?;
    }
    if args.answers_only && args.reference.is_none() {
        bail!(
            "--answers-only needs a stored reference, which says what is an answer; name one with --reference"
        );
    }
    let checkpoint = session::open(&args.model)?;
    let documents = match (&args.text, &args.reference) {
        (_, Some(path)) => documents::stored(path)?,
        (Some(path), None) => documents::cut(path, &checkpoint.tokenizer()?, args.window)?,
        (None, None) => {
            bail!("there is nothing to score; name a text file, or a stored reference with --reference")
        }
    };
    let documents = documents::limit(documents, args.positions);
    check(&documents, &checkpoint)?;
    let longest = documents.iter().map(|document| document.tokens.len()).max().unwrap_or(1);

    let mut subject = side(args.f32, &args.model, &checkpoint, longest)?;
    let mut reference = match args.against {
        None if args.against_model.is_none() => None,
        against => Some(other(args, against, &checkpoint, longest)?),
    };
    let bar = progress::items(documents.iter().map(|document| document.positions().len()).sum(), "scoring");
    let mut positions = Vec::new();
    for document in &documents {
        let others = reference.as_deref_mut();
        one(document, args.answers_only, &mut *subject, others, &mut positions, &|count| bar.inc(count))?;
    }
    bar.finish_and_clear();
    if positions.is_empty() {
        bail!("the reference marks no answers; score all positions, without --answers-only");
    }

    let against = match (&reference, &args.reference) {
        (Some(backend), _) => Some(backend.description()),
        (None, Some(path)) => Some(path.display().to_string()),
        (None, None) => None,
    };
    let text = args.text.as_deref().or(args.reference.as_deref()).unwrap_or(Path::new(""));
    let report = Report::new(checkpoint.name(), subject.description(), against, text, positions);
    if let Some(path) = &args.plot {
        output::write_picture(path, &plot::draw(&report)?)?;
    }
    output::print(&report, &report, args.json)
}

/// A backend for sequences of `longest` tokens.
fn side(
    f32: bool,
    args: &ModelArgs,
    checkpoint: &Checkpoint,
    longest: usize,
) -> anyhow::Result<Box<dyn Backend>> {
    if f32 {
        let threads = args.threads;
        let options =
            CpuOptions { threads, ctx_len: longest, numerics: Numerics::F32, ..CpuOptions::default() };
        return Ok(Box::new(CpuBackend::new(checkpoint.weights()?, options)?));
    }
    let args = ModelArgs { ctx_len: Some(longest), ..args.clone() };
    Ok(device::open(&args, checkpoint, longest, &|_| usize::MAX)?.backend)
}

/// The reference's backend.
fn other(
    args: &EvalArgs,
    against: Option<Against>,
    checkpoint: &Checkpoint,
    longest: usize,
) -> anyhow::Result<Box<dyn Backend>> {
    let other = match &args.against_model {
        Some(path) => models::open(path)?,
        None => checkpoint.clone(),
    };
    if other.geometry().vocab != checkpoint.geometry().vocab {
        bail!("--against-model {} has another vocabulary, so nothing can be compared", other.name());
    }
    let backend = match against {
        Some(Against::F32) => return side(true, &args.model, &other, longest),
        Some(Against::Cpu) => BackendKind::Cpu,
        Some(Against::Cuda) => BackendKind::Cuda,
        Some(Against::Metal) => BackendKind::Metal,
        // Another checkpoint in the same way.
        None => return side(false, &args.model, &other, longest),
    };
    let model = ModelArgs { backend, kv_cache_type: KvCacheType::F16, ..args.model.clone() };
    side(false, &model, &other, longest)
}

/// Refuses tokens that the model does not have, and documents that it cannot hold.
fn check(documents: &[Document], checkpoint: &Checkpoint) -> anyhow::Result<()> {
    let geometry = checkpoint.geometry();
    let highest = documents.iter().flat_map(|document| &document.tokens).max();
    match highest {
        None => bail!("the text has fewer than two tokens; there is nothing to predict"),
        Some(&token) if token as usize >= geometry.vocab => {
            bail!(
                "the reference has token {token}, and {} has {}; it is of another model",
                checkpoint.name(),
                geometry.vocab
            )
        }
        Some(_) => {}
    }
    match documents.iter().find(|document| document.tokens.len() > geometry.max_context) {
        Some(document) => bail!(
            "a window of {} tokens is more than the {} of {}; ask for less with --window",
            document.tokens.len(),
            geometry.max_context,
            checkpoint.name()
        ),
        None => Ok(()),
    }
}

/// Scores one document from an empty context, or with `answers_only` those positions, which is where what is not scored
/// goes the way of prompts.
fn one(
    document: &Document,
    answers_only: bool,
    subject: &mut dyn Backend,
    mut reference: Option<&mut (dyn Backend + '_)>,
    positions: &mut Vec<Position>,
    done: &dyn Fn(u64),
) -> anyhow::Result<()> {
    let vocab = subject.geometry().vocab;
    let ours = subject.open(None)?;
    let theirs = reference.as_mut().map(|backend| backend.open(None)).transpose()?;
    let inputs = document.positions();
    let is_answer = |index: usize| document.answers.as_ref().is_some_and(|answers| answers[index]);
    let scored = |index: usize| !answers_only || is_answer(index);
    let mut start = 0;
    while start < inputs.len() {
        let alike = (start..inputs.len()).take_while(|&index| scored(index) == scored(start));
        if !scored(start) {
            let tokens = &inputs[start..start + alike.count()];
            read(subject, ours, tokens)?;
            if let (Some(backend), Some(sequence)) = (reference.as_mut(), theirs) {
                read(&mut **backend, sequence, tokens)?;
            }
            start += tokens.len();
            done(tokens.len() as u64);
            continue;
        }
        let rows = start..start + alike.take(CHUNK).count();
        let tokens = &inputs[rows.clone()];
        let logits = logits(subject, ours, tokens)?;
        let others = match (reference.as_mut(), theirs) {
            (Some(backend), Some(sequence)) => Some(self::logits(&mut **backend, sequence, tokens)?),
            _ => None,
        };
        for (row, index) in logits.chunks_exact(vocab).zip(rows) {
            let target = document.tokens[index + 1];
            let mut position = Position {
                index,
                answer: document.answers.as_ref().map(|answers| answers[index]),
                subject: Row::new(row, target),
                reference: document.stored.as_ref().map(|rows| rows[index]),
                divergence: None,
            };
            if let Some(others) = &others {
                let other = &others[(index - start) * vocab..][..vocab];
                position.reference = Some(Row::new(other, target));
                position.divergence = Some(divergence(other, row));
            }
            positions.push(position);
        }
        start += tokens.len();
        done(tokens.len() as u64);
    }
    subject.close(ours);
    if let (Some(backend), Some(sequence)) = (reference, theirs) {
        backend.close(sequence);
    }
    Ok(())
}

/// Reads tokens after which nothing is looked at.
fn read(backend: &mut dyn Backend, sequence: SequenceId, tokens: &[u32]) -> anyhow::Result<()> {
    let ticket = backend.extend(sequence, tokens, Want::Nothing)?;
    backend.collect(ticket)?;
    Ok(())
}

/// Logits `[tokens, vocab]` after each of `tokens`.
fn logits(backend: &mut dyn Backend, sequence: SequenceId, tokens: &[u32]) -> anyhow::Result<Vec<f32>> {
    let ticket = backend.extend(sequence, tokens, Want::AllLogits)?;
    let outputs = backend.collect(ticket)?;
    let logits = outputs.into_iter().next().map(|output| output.logits).unwrap_or_default();
    if logits.len() != tokens.len() * backend.geometry().vocab {
        bail!(
            "{} gave logits for other rows than it was asked for; please report this",
            backend.description()
        );
    }
    Ok(logits)
}
