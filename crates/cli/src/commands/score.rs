//! `lily demo-score`: how often the demo answers its held-out questions correctly.
//!
//! Each line of the held-out file is a conversation and the one right answer, either a text or tool calls.
//! Answers are greedy; a text counts where it is equal but for white space at its ends, tool calls where names
//! and arguments are equal as JSON. A family under its target makes the command fail.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, bail};
use lily_engine::tool_calls::ToolCall;
use lily_server::chat_model::ChatModel;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::args::{CacheArgs, PlaceArgs, SamplingArgs, ScoreArgs};
use crate::conversation::{Ask, Outcome, ask};
use crate::progress;
use crate::session;

/// Share of answers that must be right.
const TARGET_PERCENT: f64 = 95.0;
/// The family that may do worse, and its target: facts recalled from 8,000 tokens.
const LONG_RECALL: (&str, f64) = ("recall_8k", 85.0);
/// Longest answer: the longest right one takes about a quarter of it.
const MAX_TOKENS: usize = 1024;

/// One line of the held-out file.
#[derive(Clone, Debug, Deserialize)]
struct Item {
    family: String,
    messages: Vec<Value>,
    #[serde(default)]
    tools: Vec<Value>,
    #[serde(default)]
    enable_thinking: bool,
    answer: Expected,
}

/// The right answer.
#[derive(Clone, Debug, Deserialize)]
struct Expected {
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    tool_calls: Vec<ExpectedCall>,
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
struct ExpectedCall {
    name: String,
    arguments: Value,
}

/// How one family did.
#[derive(Clone, Debug, Serialize)]
struct Score {
    family: String,
    items: usize,
    correct: usize,
    percent: f64,
    target_percent: f64,
}

/// Scores what `args` name; an error where a family is under its target.
pub fn run(args: &ScoreArgs) -> anyhow::Result<()> {
    let items = read(&args.heldout)?;
    let families = select(items, args)?;
    // No two questions have more in common than a few words.
    let uncached = CacheArgs { cache_bytes: Some(0), ..CacheArgs::default() };
    let model = session::start(&args.model, &uncached, PlaceArgs::default())?.model;
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let bar = progress::items(families.iter().map(|(_, items)| items.len()).sum(), "asking");
    let mut scores = Vec::with_capacity(families.len());
    for (family, items) in families {
        let mut correct = 0;
        for item in &items {
            let outcome = runtime.block_on(answer(&model, item))?;
            correct += usize::from(is_correct(&outcome.content, &outcome.calls, &item.answer));
            bar.inc(1);
        }
        scores.push(score(family, items.len(), correct));
    }
    bar.finish_and_clear();
    print(&scores, args.json)?;
    let missed: Vec<&str> =
        scores.iter().filter(|s| s.percent < s.target_percent).map(|s| s.family.as_str()).collect();
    if !missed.is_empty() {
        bail!("under the target: {}", missed.join(", "));
    }
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<Vec<Item>> {
    let text = fs::read_to_string(path).with_context(|| {
        format!("{} cannot be read; name the held-out questions with --heldout", path.display())
    })?;
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(index, line)| {
            serde_json::from_str(line)
                .with_context(|| format!("{} line {} is no held-out question", path.display(), index + 1))
        })
        .collect()
}

/// The families asked for, in the file's order.
fn select(items: Vec<Item>, args: &ScoreArgs) -> anyhow::Result<Vec<(String, Vec<Item>)>> {
    let mut families: Vec<(String, Vec<Item>)> = Vec::new();
    for item in items {
        match families.iter_mut().find(|(family, _)| *family == item.family) {
            Some((_, items)) => items.push(item),
            None => families.push((item.family.clone(), vec![item])),
        }
    }
    let known: Vec<&str> = families.iter().map(|(family, _)| family.as_str()).collect();
    if let Some(unknown) = args.family.iter().find(|wanted| !known.contains(&wanted.as_str())) {
        bail!("there is no family {unknown:?}; the file has {}", known.join(", "));
    }
    if !args.family.is_empty() {
        families.retain(|(family, _)| args.family.contains(family));
    }
    if families.is_empty() {
        bail!("{} holds no questions", args.heldout.display());
    }
    if let Some(limit) = args.limit {
        families.iter_mut().for_each(|(_, items)| items.truncate(limit));
    }
    Ok(families)
}

async fn answer(model: &ChatModel, item: &Item) -> anyhow::Result<Outcome> {
    let wishes = Ask {
        messages: &item.messages,
        tools: &item.tools,
        think: item.enable_thinking,
        sampling: &SamplingArgs::default(),
        max_tokens: Some(MAX_TOKENS),
    };
    ask(model, &wishes, |_| Ok(())).await
}

fn is_correct(content: &str, calls: &[ToolCall], expected: &Expected) -> bool {
    let calls = calls.iter().map(|call| {
        let arguments = serde_json::from_str(&call.arguments).unwrap_or(Value::Null);
        ExpectedCall { name: call.name.clone(), arguments }
    });
    let text_matches = expected.content.as_ref().is_none_or(|expected| content.trim() == expected.trim());
    text_matches && calls.eq(expected.tool_calls.iter().cloned())
}

fn score(family: String, items: usize, correct: usize) -> Score {
    let (long, long_target) = LONG_RECALL;
    let target_percent = if family == long { long_target } else { TARGET_PERCENT };
    let percent = 100.0 * correct as f64 / items as f64;
    Score { family, items, correct, percent, target_percent }
}

fn print(scores: &[Score], json: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, scores)?;
        writeln!(out)?;
        return Ok(());
    }
    writeln!(out, "{:<20} {:>6} {:>8} {:>8} {:>7}", "family", "items", "correct", "percent", "target")?;
    for Score { family, items, correct, percent, target_percent } in scores {
        writeln!(out, "{family:<20} {items:>6} {correct:>8} {percent:>8.1} {target_percent:>7.1}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn expected(answer: Value) -> Expected {
        serde_json::from_value(answer).unwrap()
    }

    fn call(arguments: &str) -> ToolCall {
        ToolCall { name: "f".into(), arguments: arguments.into() }
    }

    #[test]
    fn a_text_must_be_equal_and_come_without_calls() {
        let right = expected(json!({"content": "42"}));
        assert!(is_correct(" 42\n", &[], &right));
        assert!(!is_correct("42.", &[], &right));
        assert!(!is_correct("42", &[call("{}")], &right));
    }

    #[test]
    fn calls_must_be_equal_as_json() {
        let right = expected(json!({"tool_calls": [{"name": "f", "arguments": {"a": 1, "b": "x"}}]}));
        assert!(is_correct("", &[call("{\"b\": \"x\", \"a\": 1}")], &right));
        assert!(!is_correct("", &[call("{\"b\": \"x\", \"a\": \"1\"}")], &right));
        assert!(!is_correct("", &[], &right));
    }
}
