//! The body of `POST /v1/chat/completions`, read field by field.
//!
//! [`ChatRequest::parse`] honours each field of the protocol or refuses it with its name and the reason;
//! nothing is silently dropped. Defaults that depend on the checkpoint are filled in later, by
//! [`crate::chat`].

use lily_engine::sampler::MAX_LOGPROBS;
use serde_json::{Map, Value};

use super::constraints::{self, Asked};
use super::fields::{Fields, missing, not_among, wrong_type};
use super::{messages, tools};
use crate::error::ApiError;

/// Most choices that one request may ask for: each is a sequence of its own.
pub(crate) const MAX_CHOICES: i64 = 16;
/// Highest temperature of OpenAI's protocol.
const MAX_TEMPERATURE: f64 = 2.0;

/// What a client asked for. Ranges of the sampling fields are checked later, by
/// [`SamplingParams::validate`](lily_engine::sampler::SamplingParams::validate).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatRequest {
    /// The model's name, where one was given.
    pub model: Option<String>,
    /// The conversation in the chat template's form.
    pub messages: Vec<Value>,
    /// Tools that the model is told about.
    pub tools: Vec<Value>,
    /// What the answer must look like.
    pub asked: Option<Asked>,
    /// Most tokens of thinking.
    pub thinking_budget: Option<usize>,
    /// Whether to think before answering; `None` where the request says nothing.
    pub thinking: Option<bool>,
    /// Further variables for the chat template.
    pub template_variables: Map<String, Value>,
    /// How tokens are chosen.
    pub sampling: SamplingRequest,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// Most tokens to generate.
    pub max_tokens: Option<usize>,
    /// Go on past end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Number of choices.
    pub n: usize,
    /// Whether the answer comes as events.
    pub stream: bool,
    /// Whether a stream ends with an event that carries `usage`.
    pub include_usage: bool,
    /// Whether a stream tells how far the prompt has been read.
    pub return_progress: bool,
    /// Alternatives per position to report beside the chosen token's log probability; `None`: no log
    /// probabilities.
    pub logprobs: Option<usize>,
}

/// Sampling fields as sent; `None` where absent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingRequest {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Mass of the nucleus.
    pub top_p: Option<f32>,
    /// Number of candidates; 0 is all.
    pub top_k: Option<usize>,
    /// Least probability, relative to the likeliest candidate's.
    pub min_p: Option<f32>,
    /// Seed of the random choices.
    pub seed: Option<u64>,
    /// Taken off the logit of each token that was generated already.
    pub presence_penalty: Option<f32>,
    /// Taken off the logit of a token once for each time that it was generated.
    pub frequency_penalty: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens seen already.
    pub repetition_penalty: Option<f32>,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
}

impl ChatRequest {
    /// Reads a request body.
    pub fn parse(body: &[u8]) -> Result<ChatRequest, ApiError> {
        let value = crate::body::json(body)?;
        let body = Fields::body(&value)?;
        refuse_unsupported(&body)?;
        let (thinking, mut template_variables) = thinking(&body)?;
        let thinking_budget = thinking_budget(&body, &mut template_variables)?;
        let tools = tools::declared(&body, constraints::asked(&body)?)?;
        let stream = body.boolean("stream")?.unwrap_or(false);
        let messages = body.list("messages")?.ok_or_else(|| missing("messages"))?;
        Ok(ChatRequest {
            model: body.text("model")?.map(str::to_string),
            messages: messages::normalise(messages, "messages")?,
            tools: tools.declared,
            asked: tools.asked,
            thinking,
            thinking_budget,
            template_variables,
            sampling: sampling(&body)?,
            stop: stop(&body)?,
            max_tokens: max_tokens(&body)?,
            ignore_eos: body.boolean("ignore_eos")?.unwrap_or(false),
            n: body.integer("n", 1..=MAX_CHOICES)?.unwrap_or(1) as usize,
            stream,
            include_usage: include_usage(&body, stream)?,
            return_progress: return_progress(&body, stream)?,
            logprobs: logprobs(&body)?,
        })
    }
}

/// Fields that would change the answer in ways that Lily cannot: refused unless they ask for nothing.
fn refuse_unsupported(body: &Fields<'_>) -> Result<(), ApiError> {
    let refuse = |name: &str, reason: &str| {
        Err(ApiError::unsupported(name, format!("`{name}` is not supported: {reason}")))
    };
    for (name, reason) in [
        ("audio", "Lily answers in text only"),
        ("function_call", "it is the old form; send `tool_choice`"),
        ("moderation", "Lily has no moderation model"),
        ("prediction", "Lily does not verify predicted text"),
        ("web_search_options", "Lily does not reach the network"),
        ("best_of", "Lily returns every choice that it generates; send `n`"),
    ] {
        if body.get(name).is_some() {
            return refuse(name, reason);
        }
    }
    if body.list("functions")?.is_some_and(|functions| !functions.is_empty()) {
        return refuse("functions", "it is the old form; send `tools`");
    }
    if body.boolean("store")? == Some(true) {
        return refuse("store", "Lily keeps no answers; send false");
    }
    if body.list("modalities")?.is_some_and(|modalities| modalities.iter().any(|m| m != "text")) {
        return refuse("modalities", "Lily answers in text only; send [\"text\"]");
    }
    if body.text("verbosity")?.is_some_and(|verbosity| verbosity != "medium") {
        return refuse("verbosity", "the model has no such setting; ask for it in the prompt");
    }
    if body.text("service_tier")?.is_some_and(|tier| !matches!(tier, "auto" | "default")) {
        return refuse("service_tier", "there is one tier; send \"auto\" or \"default\"");
    }
    Ok(())
}

/// Whether to think, said in any of three ways that may not contradict one another, and the other
/// template variables.
pub(crate) fn thinking(body: &Fields<'_>) -> Result<(Option<bool>, Map<String, Value>), ApiError> {
    let mut said = body.boolean("enable_thinking")?;
    let mut agree = |value: bool, path: &str| match said.replace(value) {
        Some(before) if before != value => {
            let message = format!("`{path}` contradicts another field of the request about thinking");
            Err(ApiError::invalid(path, message))
        }
        _ => Ok(()),
    };
    let mut variables = Map::new();
    if let Some(kwargs) = body.object("chat_template_kwargs")? {
        if let Some(value) = kwargs.boolean("enable_thinking")? {
            agree(value, &kwargs.path("enable_thinking"))?;
        }
        for (name, value) in kwargs.entries().filter(|(name, _)| *name != "enable_thinking") {
            if matches!(name.as_str(), "messages" | "tools" | "add_generation_prompt") {
                let path = kwargs.path(name);
                let message = format!("`{path}` may not be set: the request's own fields say it");
                return Err(ApiError::invalid(path, message));
            }
            variables.insert(name.clone(), value.clone());
        }
    }
    if let Some(word) = body.text("reasoning_effort")? {
        agree(effort("reasoning_effort", word)?, "reasoning_effort")?;
    }
    Ok((said, variables))
}

/// Whether to think, by a word for the effort. The model thinks or it does not: every effort above none is the same
/// to it.
pub(crate) fn effort(path: &str, word: &str) -> Result<bool, ApiError> {
    match word {
        "none" => Ok(false),
        "minimal" | "low" | "medium" | "high" | "xhigh" | "max" => Ok(true),
        other => {
            let words = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];
            Err(not_among(path, &words, other))
        }
    }
}

/// The most tokens of thinking, said as a field of the request or among the template's variables.
pub(crate) fn thinking_budget(
    body: &Fields<'_>,
    variables: &mut Map<String, Value>,
) -> Result<Option<usize>, ApiError> {
    let range = || 0..=i64::from(u32::MAX);
    let field = body.integer("thinking_budget", range())?;
    let variable = match body.object("chat_template_kwargs")? {
        Some(kwargs) => kwargs.integer("thinking_budget", range())?,
        None => None,
    };
    variables.remove("thinking_budget");
    match (field, variable) {
        (Some(field), Some(variable)) if field != variable => {
            let path = "chat_template_kwargs.thinking_budget";
            Err(ApiError::invalid(path, format!("`{path}` contradicts `thinking_budget`")))
        }
        (field, variable) => Ok(field.or(variable).map(|budget| budget as usize)),
    }
}

pub(crate) fn sampling(body: &Fields<'_>) -> Result<SamplingRequest, ApiError> {
    let number = |name| body.number(name).map(|number| number.map(|value| value as f32));
    Ok(SamplingRequest {
        temperature: body.number_within("temperature", 0.0..=MAX_TEMPERATURE)?.map(|t| t as f32),
        top_p: number("top_p")?,
        // -1 is how some clients say "all".
        top_k: body.integer("top_k", -1..=i64::from(u32::MAX))?.map(|k| k.max(0) as usize),
        min_p: number("min_p")?,
        seed: body.integer("seed", i64::MIN..=i64::MAX)?.map(|seed| seed as u64),
        presence_penalty: number("presence_penalty")?,
        frequency_penalty: number("frequency_penalty")?,
        repetition_penalty: number("repetition_penalty")?,
        logit_bias: logit_bias(body)?,
    })
}

fn logit_bias(body: &Fields<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(map) = body.object("logit_bias")? else { return Ok(Vec::new()) };
    map.entries()
        .map(|(key, _)| {
            let token = key.parse().map_err(|_| {
                ApiError::invalid("logit_bias", format!("`logit_bias` key {key:?} is not a token id"))
            })?;
            let bias = map.number(key)?.ok_or_else(|| missing(map.path(key)))?;
            Ok((token, bias as f32))
        })
        .collect()
}

pub(crate) fn stop(body: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    match body.get("stop") {
        None => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![text.clone()]),
        Some(Value::Array(list)) => list
            .iter()
            .enumerate()
            .map(|(index, value)| {
                let text = value.as_str().map(str::to_string);
                text.ok_or_else(|| wrong_type(format!("stop[{index}]"), "a string", value))
            })
            .collect(),
        Some(other) => Err(wrong_type("stop", "a string or a list of strings", other)),
    }
}

fn max_tokens(body: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let old = body.integer("max_tokens", 1..=i64::from(u32::MAX))?;
    let new = body.integer("max_completion_tokens", 1..=i64::from(u32::MAX))?;
    match (old, new) {
        (Some(old), Some(new)) if old != new => Err(ApiError::invalid(
            "max_tokens",
            format!("`max_tokens` is {old} and `max_completion_tokens` is {new}; send one of them"),
        )),
        (old, new) => Ok(new.or(old).map(|tokens| tokens as usize)),
    }
}

pub(crate) fn include_usage(body: &Fields<'_>, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = body.object("stream_options")? else { return Ok(false) };
    if !stream {
        let message = "`stream_options` may be sent only where `stream` is true";
        return Err(ApiError::invalid("stream_options", message));
    }
    // Padding against traffic analysis: of no use on a loopback, and it changes no content.
    options.boolean("include_obfuscation")?;
    Ok(options.boolean("include_usage")?.unwrap_or(false))
}

pub(crate) fn return_progress(body: &Fields<'_>, stream: bool) -> Result<bool, ApiError> {
    match body.boolean("return_progress")? {
        Some(true) if !stream => {
            let message = "`return_progress` may be true only where `stream` is true";
            Err(ApiError::invalid("return_progress", message))
        }
        wanted => Ok(wanted.unwrap_or(false)),
    }
}

fn logprobs(body: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let wanted = body.boolean("logprobs")?.unwrap_or(false);
    let top = body.integer("top_logprobs", 0..=MAX_LOGPROBS as i64)?;
    match (wanted, top) {
        (false, Some(1..)) => {
            Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs` to be true"))
        }
        (false, _) => Ok(None),
        (true, top) => Ok(Some(top.unwrap_or(0) as usize)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with(field: &str, value: Value) -> Result<ChatRequest, ApiError> {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
        body[field] = value;
        ChatRequest::parse(body.to_string().as_bytes())
    }

    #[test]
    fn every_unsupported_field_is_refused_by_its_name() {
        let cases = [
            ("audio", json!({"voice": "alloy", "format": "wav"})),
            ("best_of", json!(2)),
            ("function_call", json!("auto")),
            ("functions", json!([{"name": "f"}])),
            ("modalities", json!(["text", "audio"])),
            ("moderation", json!({"model": "m"})),
            ("prediction", json!({"type": "content", "content": "x"})),
            ("service_tier", json!("flex")),
            ("store", json!(true)),
            ("verbosity", json!("low")),
            ("web_search_options", json!({})),
        ];
        for (field, value) in cases {
            let error = with(field, value).expect_err(field);
            assert_eq!(error.param.as_deref(), Some(field));
            assert_eq!(error.code, Some("unsupported_parameter"), "{field}");
            assert!(error.message.contains(&format!("`{field}")), "{}", error.message);
        }
    }

    #[test]
    fn values_outside_the_protocol_are_refused_by_their_field() {
        let cases = [
            ("enable_thinking", json!("yes")),
            ("grammar", json!(7)),
            ("logit_bias", json!({"fish": 1})),
            ("logprobs", json!(1)),
            ("max_completion_tokens", json!(0)),
            ("max_tokens", json!("10")),
            ("model", json!(7)),
            ("n", json!(0)),
            ("reasoning_effort", json!("lots")),
            ("regex", json!(["a"])),
            ("response_format", json!({"type": "yaml"})),
            ("seed", json!(1.5)),
            ("stop", json!({"text": "x"})),
            ("stream", json!("true")),
            ("stream_options", json!({"include_usage": true})),
            ("temperature", json!(2.1)),
            ("thinking_budget", json!(-1)),
            ("tool_choice", json!("sometimes")),
            ("tool_choice", json!({"type": "function", "function": {"name": "undeclared"}})),
            ("tools", json!({})),
            ("top_k", json!(-2)),
            ("top_logprobs", json!(3)),
        ];
        for (field, value) in cases {
            let error = with(field, value).expect_err(field);
            assert_eq!(error.param.as_deref(), Some(field));
            assert!(error.message.contains(field), "{}", error.message);
        }
    }

    #[test]
    fn defaults_nulls_labels_and_foreign_fields_change_nothing() {
        let plain = with("user", json!("ann")).unwrap();
        assert_eq!((plain.n, plain.stream, plain.max_tokens), (1, false, None));
        for (field, value) in [
            ("foreign", json!({"a": 1})),
            ("functions", json!([])),
            ("metadata", json!({"a": "b"})),
            ("modalities", json!(["text"])),
            ("parallel_tool_calls", json!(true)),
            ("prompt_cache_key", json!("k")),
            ("response_format", json!({"type": "text"})),
            ("safety_identifier", json!("s")),
            ("service_tier", json!("auto")),
            ("store", json!(false)),
            ("temperature", Value::Null),
            ("tool_choice", json!("auto")),
            ("tools", json!([])),
            ("verbosity", json!("medium")),
        ] {
            assert_eq!(with(field, value).expect(field), plain, "{field}");
        }
    }

    #[test]
    fn whole_numbers_are_whole_however_they_are_written() {
        assert_eq!(with("max_tokens", json!(16.0)).unwrap(), with("max_tokens", json!(16)).unwrap());
        assert_eq!(with("seed", json!(-2e3)).unwrap(), with("seed", json!(-2000)).unwrap());
        for seed in [json!(u64::MAX), json!(1e30), json!(-1e19)] {
            let error = with("seed", seed).unwrap_err();
            assert!(error.message.contains("must lie between"), "{}", error.message);
        }
    }

    #[test]
    fn thinking_is_said_in_three_ways_that_must_agree() {
        assert_eq!(with("enable_thinking", json!(true)).unwrap().thinking, Some(true));
        assert_eq!(with("reasoning_effort", json!("none")).unwrap().thinking, Some(false));
        assert_eq!(with("reasoning_effort", json!("high")).unwrap().thinking, Some(true));
        let request = with("chat_template_kwargs", json!({"enable_thinking": false, "x": 1})).unwrap();
        assert_eq!(request.thinking, Some(false));
        assert_eq!(Value::Object(request.template_variables), json!({"x": 1}));
        let body = json!({"messages": [{"role": "user", "content": "hi"}],
            "enable_thinking": true, "reasoning_effort": "none"});
        let error = ChatRequest::parse(body.to_string().as_bytes()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("reasoning_effort"));
    }

    #[test]
    fn bodies_that_are_no_object_are_malformed() {
        for body in ["", "{", "[]", "null", "{\"messages\": [}", "\"hi\"", "{\"a\":1e999}"] {
            let error = ChatRequest::parse(body.as_bytes()).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param), (400, None), "{body}");
        }
        let error = ChatRequest::parse(b"{}").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("messages"));
    }
}
