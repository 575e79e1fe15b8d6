//! The body of `POST /v1/completions`, read field by field.

use lily_engine::sampler::MAX_LOGPROBS;
use serde_json::Value;

use super::fields::{Fields, missing, wrong_type};
use super::request::{MAX_CHOICES, SamplingRequest, include_usage, return_progress, sampling, stop};
use crate::body;
use crate::error::ApiError;

/// The protocol's own default.
const DEFAULT_MAX_TOKENS: i64 = 16;
/// Most sequences that the prompts and choices of one request may come to.
const MAX_SEQUENCES: usize = 64;

/// What a client asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CompletionRequest {
    /// The model's name, where one was given.
    pub model: Option<String>,
    /// Each is continued on its own.
    pub prompts: Vec<RawPrompt>,
    /// How tokens are chosen.
    pub sampling: SamplingRequest,
    /// Texts that end a continuation and are not part of it.
    pub stop: Vec<String>,
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// Go on past end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Continuations of each prompt.
    pub n: usize,
    /// Whether the prompt comes back before its continuation.
    pub echo: bool,
    /// Whether the answer comes as events.
    pub stream: bool,
    /// Whether a stream ends with an event that carries `usage`.
    pub include_usage: bool,
    /// Whether a stream tells how far prompts have been read.
    pub return_progress: bool,
    /// Alternatives per position to report beside the chosen token's log probability; `None`: no log
    /// probabilities.
    pub logprobs: Option<usize>,
}

/// A prompt without a chat template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RawPrompt {
    /// Text; markers in it act as such.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

impl CompletionRequest {
    /// Reads a request body.
    pub fn parse(body: &[u8]) -> Result<CompletionRequest, ApiError> {
        let value = body::json(body)?;
        let body = Fields::body(&value)?;
        let prompts = prompts(body.get("prompt").ok_or_else(|| missing("prompt"))?)?;
        let n = body.integer("n", 1..=MAX_CHOICES)?.unwrap_or(1) as usize;
        refuse_unsupported(&body, n)?;
        if prompts.len() * n > MAX_SEQUENCES {
            let message = format!(
                "`prompt` holds {} prompts for {n} choices each; a request may come to {MAX_SEQUENCES} at the most",
                prompts.len()
            );
            return Err(ApiError::invalid("prompt", message));
        }
        let stream = body.boolean("stream")?.unwrap_or(false);
        let echo = body.boolean("echo")?.unwrap_or(false);
        let logprobs = body.integer("logprobs", 0..=MAX_LOGPROBS as i64)?.map(|count| count as usize);
        if echo && logprobs.is_some() {
            let message =
                "`logprobs` is not supported with `echo`: Lily keeps no log probabilities of the prompt";
            return Err(ApiError::unsupported("logprobs", message));
        }
        let max_tokens = body.integer("max_tokens", 1..=i64::from(u32::MAX))?.unwrap_or(DEFAULT_MAX_TOKENS);
        Ok(CompletionRequest {
            model: body.text("model")?.map(str::to_string),
            prompts,
            sampling: sampling(&body)?,
            stop: stop(&body)?,
            max_tokens: max_tokens as usize,
            ignore_eos: body.boolean("ignore_eos")?.unwrap_or(false),
            n,
            echo,
            stream,
            include_usage: include_usage(&body, stream)?,
            return_progress: return_progress(&body, stream)?,
            logprobs,
        })
    }
}

fn refuse_unsupported(body: &Fields<'_>, n: usize) -> Result<(), ApiError> {
    if body.text("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
        let message = "`suffix` is not supported: Lily writes on from a prompt and not up to a suffix";
        return Err(ApiError::unsupported("suffix", message));
    }
    if body.integer("best_of", 1..=MAX_CHOICES)?.is_some_and(|best_of| best_of as usize != n) {
        let message = format!(
            "`best_of` must equal `n`, which is {n}: Lily returns every continuation that it generates"
        );
        return Err(ApiError::unsupported("best_of", message));
    }
    Ok(())
}

/// A text, a list of tokens, or a list of either.
fn prompts(prompt: &Value) -> Result<Vec<RawPrompt>, ApiError> {
    const EXPECTED: &str = "a string, a list of token ids, or a list of either";
    let prompts = match prompt {
        Value::String(text) => vec![RawPrompt::Text(text.clone())],
        Value::Array(list) if list.first().is_some_and(Value::is_number) => {
            vec![RawPrompt::Tokens(tokens(list, "prompt")?)]
        }
        Value::Array(list) => list
            .iter()
            .enumerate()
            .map(|(index, prompt)| match prompt {
                Value::String(text) => Ok(RawPrompt::Text(text.clone())),
                Value::Array(list) => tokens(list, &format!("prompt[{index}]")).map(RawPrompt::Tokens),
                other => {
                    Err(wrong_type(format!("prompt[{index}]"), "a string or a list of token ids", other))
                }
            })
            .collect::<Result<_, _>>()?,
        other => return Err(wrong_type("prompt", EXPECTED, other)),
    };
    let empty = |prompt: &RawPrompt| match prompt {
        RawPrompt::Text(text) => text.is_empty(),
        RawPrompt::Tokens(tokens) => tokens.is_empty(),
    };
    if prompts.is_empty() || prompts.iter().any(empty) {
        return Err(ApiError::invalid("prompt", "`prompt` is empty; give at least one token to go on from"));
    }
    Ok(prompts)
}

/// Token ids; whether the model has them is not checked here.
pub(crate) fn tokens(list: &[Value], path: &str) -> Result<Vec<u32>, ApiError> {
    list.iter()
        .enumerate()
        .map(|(index, value)| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| wrong_type(format!("{path}[{index}]"), "a token id", value))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with(field: &str, value: Value) -> Result<CompletionRequest, ApiError> {
        let mut body = json!({"prompt": "Once"});
        body[field] = value;
        CompletionRequest::parse(body.to_string().as_bytes())
    }

    #[test]
    fn a_prompt_is_text_or_tokens_or_several_of_them() {
        let text = |text: &str| RawPrompt::Text(text.to_string());
        let cases = [
            (json!("Once"), vec![text("Once")]),
            (json!([1, 2]), vec![RawPrompt::Tokens(vec![1, 2])]),
            (json!(["a", "b"]), vec![text("a"), text("b")]),
            (json!([[1], [2, 3]]), vec![RawPrompt::Tokens(vec![1]), RawPrompt::Tokens(vec![2, 3])]),
        ];
        for (prompt, expected) in cases {
            assert_eq!(with("prompt", prompt).unwrap().prompts, expected);
        }
    }

    #[test]
    fn what_is_not_done_is_refused_by_its_name() {
        let many: Vec<_> = (0..65).map(|_| "a").collect();
        let cases = [
            ("best_of", json!(2), "best_of"),
            ("logprobs", json!(true), "logprobs"),
            ("logprobs", json!(21), "logprobs"),
            ("max_tokens", json!(0), "max_tokens"),
            ("n", json!(17), "n"),
            ("prompt", json!(""), "prompt"),
            ("prompt", json!([]), "prompt"),
            ("prompt", json!([[]]), "prompt"),
            ("prompt", json!([1, -1]), "prompt[1]"),
            ("prompt", json!([1, "a"]), "prompt[1]"),
            ("prompt", json!(["a", 1]), "prompt[1]"),
            ("prompt", json!(many), "prompt"),
            ("prompt", json!({}), "prompt"),
            ("prompt", Value::Null, "prompt"),
            ("stream_options", json!({"include_usage": true}), "stream_options"),
            ("suffix", json!("end"), "suffix"),
        ];
        for (field, value, path) in cases {
            let error = with(field, value).expect_err(path);
            assert_eq!(error.param.as_deref(), Some(path));
            assert!(error.message.contains(field), "{}", error.message);
        }
        let body = json!({"prompt": "a", "echo": true, "logprobs": 1}).to_string();
        assert_eq!(CompletionRequest::parse(body.as_bytes()).unwrap_err().param.as_deref(), Some("logprobs"));
    }

    #[test]
    fn defaults_are_the_protocols() {
        let plain = with("user", json!("ann")).unwrap();
        assert_eq!((plain.max_tokens, plain.n, plain.echo, plain.stream), (16, 1, false, false));
        for (field, value) in [("best_of", json!(1)), ("suffix", Value::Null), ("logprobs", Value::Null)] {
            assert_eq!(with(field, value).expect(field), plain, "{field}");
        }
    }
}
