//! One exchange, token by token, for a bug report: what the model read, what it wrote, and what was made of it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lily_engine::engine::Request;
use lily_engine::output::Delta;
use lily_model::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::chat_model::unix_time;

/// See the module's page.
#[derive(Debug)]
pub(super) struct Trace {
    id: String,
    directory: Option<Arc<Path>>,
    tokenizer: Tokenizer,
    began: u64,
    wishes: Value,
    prompt: Vec<u32>,
    answer: Vec<u32>,
    steps: Vec<Value>,
}

impl Trace {
    /// Files go to `directory`; without one, only the texts are kept.
    pub(super) fn new(
        id: &str,
        directory: Option<Arc<Path>>,
        tokenizer: Tokenizer,
        request: &Request,
    ) -> Trace {
        Trace {
            id: id.to_string(),
            directory,
            tokenizer,
            began: unix_time(),
            wishes: wishes(request),
            prompt: request.prompt.clone(),
            answer: Vec::new(),
            steps: Vec::new(),
        }
    }

    /// A token and what became of it; the last step has none.
    pub(super) fn step(&mut self, token: Option<u32>, text: &str, gap: Duration, deltas: &[Delta]) {
        self.answer.extend(token);
        if self.directory.is_some() {
            let parsed: Vec<Value> = deltas.iter().map(spelled).collect();
            let gap_ms = gap.as_secs_f64() * 1e3;
            self.steps.push(json!({"token": token, "gap_ms": gap_ms, "text": text, "parsed": parsed}));
        }
    }

    /// The prompt as the model read it.
    pub(super) fn prompt(&self) -> String {
        self.tokenizer.decode_with_special(&self.prompt)
    }

    /// The answer as the model wrote it.
    pub(super) fn answer(&self) -> String {
        self.tokenizer.decode_with_special(&self.answer)
    }

    /// Writes the file of this exchange, which ended as `finish` says.
    pub(super) fn write(&self, id: &str, finish: &str, reason: Option<&str>) {
        let Some(directory) = &self.directory else { return };
        let path = directory.join(format!("{}.json", self.id));
        let exchange = json!({
            "id": id,
            "lily": env!("CARGO_PKG_VERSION"),
            "began": self.began,
            "request": self.wishes,
            "prompt": self.prompt(),
            "prompt_tokens": self.prompt,
            "answer": self.answer(),
            "answer_tokens": self.answer,
            "steps": self.steps,
            "finish": finish,
            "reason": reason,
        });
        // A file for a bug report is worth the moment that it takes from other connections.
        if let Err(error) = std::fs::write(&path, format!("{exchange:#}\n")) {
            tracing::warn!(%error, path = %path.display(), "an exchange could not be written down");
        }
    }
}

/// What was asked beside the prompt.
fn wishes(request: &Request) -> Value {
    let sampling = &request.sampling;
    json!({
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": sampling.logit_bias,
        "seed": sampling.seed,
        "logprobs": sampling.logprobs,
        "max_tokens": request.max_tokens,
        "stop": request.stop,
        "ignore_eos": request.ignore_eos,
        "thinking_budget": request.thinking_budget,
        "constraint": request.constraint.as_ref().map(|constraint| format!("{constraint:?}")),
    })
}

fn spelled(delta: &Delta) -> Value {
    match delta {
        Delta::Reasoning(text) => json!({"reasoning": text}),
        Delta::Content(text) => json!({"content": text}),
        Delta::ToolCall { name } => json!({"tool_call": name}),
        Delta::Arguments(text) => json!({"arguments": text}),
        Delta::ToolCallEnd => json!({"tool_call_end": true}),
    }
}
