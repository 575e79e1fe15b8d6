//! From an answer's news to the protocol's words: the same pieces, joined for a whole answer or sent one by
//! one for a stream.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use lily_engine::engine::FinishReason;
use lily_engine::output::Delta as Part;
use lily_engine::sampler::TokenLogprobs;
use lily_model::tokenizer::Tokenizer;

use super::response::{
    Alternative, CompletionDetails, Delta, FunctionCall, FunctionDelta, LogProbs, Message, PromptDetails,
    TokenLogProb, ToolCall, ToolCallDelta, Usage,
};
use crate::answer::End;

/// An id that no other answer or call has: `prefix`, the time and a running number.
pub fn unique_id(prefix: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros());
    format!("{prefix}{time:x}{count:x}")
}

/// [`unique_id`], which nobody can guess either.
pub fn secret_id(prefix: &str) -> String {
    let random = || RandomState::new().build_hasher().finish();
    format!("{}{:016x}{:016x}", unique_id(prefix), random(), random())
}

/// The calls of one answer, which are numbered and known by the answer's id.
#[derive(Clone, Debug)]
pub struct Calls {
    /// See [`Answer::turn`](crate::answer::Answer::turn).
    pub turn: String,
    /// Calls so far.
    pub count: usize,
}

impl Calls {
    /// Of an answer that has called nothing yet.
    pub fn of(turn: &str) -> Calls {
        Calls { turn: turn.to_string(), count: 0 }
    }
}

/// Joins what became certain together to one delta.
pub fn delta(parts: Vec<Part>, calls: &mut Calls) -> Delta {
    let mut delta = Delta::default();
    for part in parts {
        match part {
            Part::Reasoning(text) => delta.reasoning_content.get_or_insert_default().push_str(&text),
            Part::Content(text) => delta.content.get_or_insert_default().push_str(&text),
            Part::ToolCall { name } => {
                delta.tool_calls.push(ToolCallDelta {
                    index: calls.count,
                    id: Some(format!("call_{}_{}", calls.turn, calls.count)),
                    r#type: Some("function"),
                    function: FunctionDelta { name: Some(name), arguments: String::new() },
                });
                calls.count += 1;
            }
            Part::Arguments(json) => {
                let index = calls.count.saturating_sub(1);
                match delta.tool_calls.last_mut() {
                    Some(call) if call.index == index => call.function.arguments.push_str(&json),
                    _ => delta.tool_calls.push(ToolCallDelta {
                        index,
                        id: None,
                        r#type: None,
                        function: FunctionDelta { name: None, arguments: json },
                    }),
                }
            }
            Part::ToolCallEnd => {}
        }
    }
    delta
}

/// Whether a delta says nothing.
pub fn is_empty(delta: &Delta) -> bool {
    delta.role.is_none()
        && delta.content.is_none()
        && delta.reasoning_content.is_none()
        && delta.tool_calls.is_empty()
}

/// Joins all that became certain to the model's turn.
pub fn message(parts: Vec<Part>, turn: &str) -> Message {
    let joined = delta(parts, &mut Calls::of(turn));
    let tool_calls: Vec<ToolCall> = joined
        .tool_calls
        .into_iter()
        .map(|call| ToolCall {
            id: call.id.unwrap_or_default(),
            r#type: "function",
            function: FunctionCall {
                name: call.function.name.unwrap_or_default(),
                arguments: call.function.arguments,
            },
        })
        .collect();
    let content = joined.content.or_else(|| tool_calls.is_empty().then(String::new));
    Message {
        role: "assistant",
        content,
        reasoning_content: joined.reasoning_content,
        tool_calls,
        refusal: None,
    }
}

/// The protocol's word for how an answer ended.
pub fn finish_reason(end: &End) -> &'static str {
    match end.reason {
        FinishReason::EndOfSequence | FinishReason::StopString if end.called => "tool_calls",
        reason => reason.as_str(),
    }
}

/// The totals of all choices of one request; its prompt counts once, and of it as cached what every
/// choice found: what one left for the others was not there before.
pub fn usage(ends: &[End]) -> Usage {
    let prompt_tokens = ends.first().map_or(0, |end| end.usage.prompt_tokens);
    let completion_tokens = ends.iter().map(|end| end.usage.completion_tokens).sum();
    Usage {
        prompt_tokens,
        completion_tokens,
        total_tokens: prompt_tokens + completion_tokens,
        prompt_tokens_details: PromptDetails {
            cached_tokens: ends.iter().map(|end| end.usage.cached_tokens).min().unwrap_or(0),
        },
        completion_tokens_details: CompletionDetails {
            reasoning_tokens: ends.iter().map(|end| end.reasoning_tokens).sum(),
        },
    }
}

/// Log probabilities of scored tokens.
pub fn log_probs(tokenizer: &Tokenizer, scored: &[(u32, TokenLogprobs)]) -> LogProbs {
    let spell = |id: u32| {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        (String::from_utf8_lossy(&bytes).into_owned(), bytes)
    };
    let content = scored
        .iter()
        .map(|(id, logprobs)| {
            let (token, bytes) = spell(*id);
            let top_logprobs = logprobs
                .top
                .iter()
                .map(|&(id, logprob)| {
                    let (token, bytes) = spell(id);
                    Alternative { token, logprob, bytes }
                })
                .collect();
            TokenLogProb { token, logprob: logprobs.chosen, bytes, top_logprobs }
        })
        .collect();
    LogProbs { content, refusal: None }
}
