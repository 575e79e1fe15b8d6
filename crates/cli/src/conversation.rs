//! One question to the model and its answer, for the commands that ask.

use lily_engine::engine::Request;
use lily_engine::output::Delta;
use lily_engine::sampler::SamplingParams;
use lily_engine::tool_calls::ToolCall;
use lily_server::answer::{Answer, End, Form, News};
use lily_server::chat_model::ChatModel;
use lily_server::record::Record;
use serde_json::{Map, Value};

use crate::args::SamplingArgs;
use crate::progress::Prefill;

/// What is asked, and how.
pub struct Ask<'a> {
    /// The conversation in the template's form, ending with the question.
    pub messages: &'a [Value],
    /// Tools that the model is told about.
    pub tools: &'a [Value],
    /// Whether it thinks first.
    pub think: bool,
    /// How tokens are chosen.
    pub sampling: &'a SamplingArgs,
    /// Most tokens to generate.
    pub max_tokens: Option<usize>,
}

/// A complete answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Its text, without thinking.
    pub content: String,
    /// Its tool calls.
    pub calls: Vec<ToolCall>,
    /// How it ended.
    pub end: End,
}

/// Asks, hands each piece to `show` as it comes, and returns the whole. Dropping the future stops the work.
pub async fn ask(
    model: &ChatModel,
    ask: &Ask<'_>,
    mut show: impl FnMut(&Delta) -> std::io::Result<()>,
) -> anyhow::Result<Outcome> {
    let prompt = model.prompt(ask.messages, ask.tools, Some(ask.think), Map::new())?;
    let SamplingArgs { temperature, top_p, top_k, min_p, seed } = *ask.sampling;
    let generation = model.engine.submit(Request {
        sampling: SamplingParams { temperature, top_p, top_k, min_p, seed, ..SamplingParams::default() },
        max_tokens: ask.max_tokens,
        ..Request::new(prompt.tokens)
    })?;
    let form = Form::Turn { thinking: prompt.thinking, tools: ask.tools };
    let mut answer = Answer::new(generation, form, Record::default());
    let mut progress = Prefill::default();
    let (mut content, mut calls) = (String::new(), Vec::<ToolCall>::new());
    loop {
        let (deltas, end) = match answer.next().await.map_err(anyhow::Error::msg)? {
            News::Prefill { done, total, .. } => {
                progress.update(done, total);
                continue;
            }
            News::Token { deltas, .. } => (deltas, None),
            News::End { deltas, end } => (deltas, Some(end)),
        };
        progress.clear();
        for delta in deltas {
            show(&delta)?;
            match delta {
                Delta::Content(text) => content.push_str(&text),
                Delta::ToolCall { name } => calls.push(ToolCall { name, arguments: String::new() }),
                Delta::Arguments(json) => {
                    if let Some(call) = calls.last_mut() {
                        call.arguments.push_str(&json);
                    }
                }
                Delta::Reasoning(_) | Delta::ToolCallEnd => {}
            }
        }
        if let Some(end) = end {
            return Ok(Outcome { content, calls, end });
        }
    }
}
