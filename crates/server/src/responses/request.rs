//! The body of `POST /v1/responses`, read field by field.

use lily_engine::constraint::Constraint;
use lily_engine::sampler::MAX_LOGPROBS;
use serde_json::{Map, Value, json};

use super::input;
use super::items::Wish;
use super::tools::Offered;
use crate::error::ApiError;
use crate::openai::constraints::{self, Asked};
use crate::openai::fields::{Fields, missing, not_among};
use crate::openai::request::{self, SamplingRequest, effort, sampling, stop};

/// What may be included beside the answer. All but the last two are about tools that Lily does not have, so that
/// there is nothing to include.
const INCLUDABLE: [&str; 8] = [
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    SEALED_REASONING,
    LOGPROBS,
];
const SEALED_REASONING: &str = "reasoning.encrypted_content";
const LOGPROBS: &str = "message.output_text.logprobs";

/// Most labels of a response, and the most characters of a label's name and value.
const MAX_METADATA: (usize, usize, usize) = (16, 64, 512);

/// Fields that an answer repeats, and what stands there where the request says nothing.
const ECHOED: [(&str, Value); 14] = [
    ("instructions", Value::Null),
    ("max_output_tokens", Value::Null),
    ("max_tool_calls", Value::Null),
    ("metadata", Value::Null),
    ("parallel_tool_calls", Value::Bool(true)),
    ("previous_response_id", Value::Null),
    ("prompt_cache_key", Value::Null),
    ("prompt_cache_retention", Value::Null),
    ("reasoning", Value::Null),
    ("safety_identifier", Value::Null),
    ("store", Value::Bool(true)),
    ("tools", Value::Array(Vec::new())),
    ("tool_choice", Value::Null),
    ("user", Value::Null),
];

/// What a client asked for. Ranges of the sampling fields are checked later, by
/// [`SamplingParams::validate`](lily_engine::sampler::SamplingParams::validate).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResponsesRequest {
    /// The model's name, where one was given.
    pub model: Option<String>,
    /// The request's own items, each with an id.
    pub items: Vec<Value>,
    /// The system text.
    pub instructions: Option<String>,
    /// The response that this one continues.
    pub previous: Option<String>,
    /// Tools that the model is told about, and what the answer must look like.
    pub offered: Offered,
    /// Whether to think before answering; `None` where the request says nothing.
    pub thinking: Option<bool>,
    /// Most tokens of thinking.
    pub thinking_budget: Option<usize>,
    /// Further variables for the chat template.
    pub template_variables: Map<String, Value>,
    /// How tokens are chosen.
    pub sampling: SamplingRequest,
    /// Alternatives per position to report beside the chosen token's log probability; `None`: no log
    /// probabilities.
    pub logprobs: Option<usize>,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// Most tokens to generate.
    pub max_tokens: Option<usize>,
    /// Go on past end-of-sequence tokens.
    pub ignore_eos: bool,
    /// What of the reasoning is wanted.
    pub wish: Wish,
    /// Whether the response is kept.
    pub store: bool,
    /// Whether the answer comes as events.
    pub stream: bool,
    /// Whether a stream tells how far the prompt has been read.
    pub return_progress: bool,
    /// Fields that the answer repeats.
    pub echo: Map<String, Value>,
}

impl ResponsesRequest {
    /// Reads a request body.
    pub fn parse(body: &[u8]) -> Result<ResponsesRequest, ApiError> {
        let value = crate::body::json(body)?;
        let body = Fields::body(&value)?;
        refuse_unsupported(&body)?;
        check_labels(&body)?;
        let (thinking, mut template_variables) = request::thinking(&body)?;
        let thinking_budget = request::thinking_budget(&body, &mut template_variables)?;
        let (thinking, summary) = reasoning(&body, thinking)?;
        let stream = body.boolean("stream")?.unwrap_or(false);
        request::include_usage(&body, stream)?;
        let included = included(&body)?;
        let top = body.integer("top_logprobs", 0..=MAX_LOGPROBS as i64)?.unwrap_or(0) as usize;
        let logprobs = (top > 0 || included.contains(&LOGPROBS)).then_some(top);
        let (format, asked) = text(&body)?;
        Ok(ResponsesRequest {
            model: body.text("model")?.map(str::to_string),
            items: input::items(&body)?,
            instructions: body.text("instructions")?.map(str::to_string),
            previous: body.text("previous_response_id")?.map(str::to_string),
            offered: Offered::read(&body, asked)?,
            thinking,
            thinking_budget,
            template_variables,
            sampling: sampling(&body)?,
            logprobs,
            stop: stop(&body)?,
            max_tokens: body.integer("max_output_tokens", 1..=i64::from(u32::MAX))?.map(|most| most as usize),
            ignore_eos: body.boolean("ignore_eos")?.unwrap_or(false),
            wish: Wish { summary, sealed: included.contains(&SEALED_REASONING) },
            store: body.boolean("store")?.unwrap_or(true),
            stream,
            return_progress: request::return_progress(&body, stream)?,
            echo: echo(&body, format, top),
        })
    }
}

/// Fields that would change the answer in ways that Lily cannot: refused unless they ask for nothing.
fn refuse_unsupported(body: &Fields<'_>) -> Result<(), ApiError> {
    let refuse = |name: &str, reason: &str| {
        Err(ApiError::unsupported(name, format!("`{name}` is not supported: {reason}")))
    };
    for (name, reason) in [
        ("access_programs", "Lily belongs to none"),
        ("background_options", "Lily answers while the client waits"),
        ("conversation", "send `previous_response_id`, or the items themselves"),
        ("image", "Lily reads and answers in text only"),
        ("moderation", "Lily has no moderation model"),
        ("prompt", "Lily keeps no prompts; send `instructions` and `input`"),
    ] {
        if body.get(name).is_some() {
            return refuse(name, reason);
        }
    }
    if body.boolean("background")? == Some(true) {
        return refuse("background", "Lily answers while the client waits; send false");
    }
    if body.list("context_management")?.is_some_and(|edits| !edits.is_empty()) {
        return refuse("context_management", "Lily does not edit conversations; send shorter ones");
    }
    if body.text("service_tier")?.is_some_and(|tier| !matches!(tier, "auto" | "default")) {
        return refuse("service_tier", "there is one tier; send \"auto\" or \"default\"");
    }
    match body.text("truncation")? {
        None | Some("disabled") => Ok(()),
        Some("auto") => refuse("truncation", "Lily does not edit conversations; send \"disabled\""),
        Some(other) => Err(not_among("truncation", &["disabled", "auto"], other)),
    }
}

/// Fields that label a request.
fn check_labels(body: &Fields<'_>) -> Result<(), ApiError> {
    for name in ["prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"] {
        body.text(name)?;
    }
    body.object("prompt_cache_options")?;
    // It bounds calls of tools that run at OpenAI, of which there are none.
    body.integer("max_tool_calls", 1..=i64::from(u32::MAX))?;
    let Some(labels) = body.object("metadata")? else { return Ok(()) };
    let (most, longest_name, longest_value) = MAX_METADATA;
    if labels.entries().count() > most {
        return Err(ApiError::invalid("metadata", format!("`metadata` may hold {most} labels, not more")));
    }
    for (name, _) in labels.entries() {
        let path = labels.path(name);
        let value = labels.text(name)?.unwrap_or_default();
        if name.chars().count() > longest_name || value.chars().count() > longest_value {
            let message = format!(
                "`{path}` is too long: a label's name may have {longest_name} characters, its value {longest_value}"
            );
            return Err(ApiError::invalid(path, message));
        }
    }
    Ok(())
}

fn included<'a>(body: &Fields<'a>) -> Result<Vec<&'a str>, ApiError> {
    let mut included = Vec::new();
    for (index, value) in body.list("include")?.unwrap_or_default().iter().enumerate() {
        let name = value.as_str().unwrap_or_default();
        if !INCLUDABLE.contains(&name) {
            return Err(not_among(format!("include[{index}]"), &INCLUDABLE, &value.to_string()));
        }
        included.push(name);
    }
    Ok(included)
}

/// `reasoning`: whether to think, which may not contradict what was `said` elsewhere, and whether the reasoning
/// comes as a summary.
fn reasoning(body: &Fields<'_>, said: Option<bool>) -> Result<(Option<bool>, bool), ApiError> {
    let Some(reasoning) = body.object("reasoning")? else { return Ok((said, false)) };
    let path = reasoning.path("effort");
    let thinking = match reasoning.text("effort")?.map(|word| effort(&path, word)).transpose()? {
        Some(think) if said.is_some_and(|said| said != think) => {
            let message = format!("`{path}` contradicts another field of the request about thinking");
            return Err(ApiError::invalid(path, message));
        }
        think => think.or(said),
    };
    let mut summary = false;
    for name in ["summary", "generate_summary"] {
        match reasoning.text(name)? {
            None => {}
            Some("auto" | "concise" | "detailed") => summary = true,
            Some(other) => {
                return Err(not_among(reasoning.path(name), &["auto", "concise", "detailed"], other));
            }
        }
    }
    let refuse = |name: &str, reason: &str| {
        let path = reasoning.path(name);
        let message = format!("`{path}` is not supported: {reason}");
        Err(ApiError::unsupported(path, message))
    };
    match reasoning.text("context")? {
        None | Some("auto" | "current_turn") => {}
        Some(_) => {
            return refuse("context", "the chat template decides what old reasoning stays; send \"auto\"");
        }
    }
    match reasoning.text("mode")? {
        None | Some("standard") => Ok((thinking, summary)),
        Some(_) => refuse("mode", "there is one mode; send \"standard\""),
    }
}

/// `text`: the format as the answer repeats it, and what it asks of the answer.
fn text(body: &Fields<'_>) -> Result<(Value, Option<Asked>), ApiError> {
    let elsewhere = constraints::asked(body)?;
    let plain = json!({"type": "text"});
    let Some(text) = body.object("text")? else { return Ok((plain, elsewhere)) };
    if text.text("verbosity")?.is_some_and(|verbosity| verbosity != "medium") {
        let path = text.path("verbosity");
        let message =
            format!("`{path}` is not supported: the model has no such setting; ask for it in the prompt");
        return Err(ApiError::unsupported(path, message));
    }
    let Some(format) = text.object("format")? else { return Ok((plain, elsewhere)) };
    let asked = match format.text("type")?.ok_or_else(|| missing(format.path("type")))? {
        "text" => return Ok((plain, elsewhere)),
        "json_object" => Asked { constraint: Constraint::json_object(), field: format.path("type") },
        "json_schema" => {
            let field = format.path("schema");
            let schema = format.get("schema").ok_or_else(|| missing(&field))?.clone();
            format.text("name")?.ok_or_else(|| missing(format.path("name")))?;
            let strict = format.boolean("strict")?.unwrap_or(false);
            Asked { constraint: Constraint::Json { schema, strict }, field }
        }
        other => return Err(not_among(format.path("type"), &["text", "json_object", "json_schema"], other)),
    };
    if let Some(elsewhere) = elsewhere {
        let message =
            format!("`{}` and `{}` both constrain the answer; send one", elsewhere.field, asked.field);
        return Err(ApiError::invalid(asked.field, message));
    }
    Ok((text.get("format").cloned().unwrap_or(plain), Some(asked)))
}

/// What the answer repeats of the request.
fn echo(body: &Fields<'_>, format: Value, top_logprobs: usize) -> Map<String, Value> {
    let field = |(name, default)| (String::from(name), body.get(name).cloned().unwrap_or(default));
    let mut echo: Map<String, Value> = ECHOED.into_iter().map(field).collect();
    // Where the protocol knows no null.
    for (name, default) in [("metadata", json!({})), ("reasoning", json!({})), ("tool_choice", json!("auto"))]
    {
        if echo[name].is_null() {
            echo[name] = default;
        }
    }
    let reasoning = |name: &str| body.get("reasoning").and_then(|r| r.get(name)).cloned().unwrap_or_default();
    echo["reasoning"] = json!({"effort": reasoning("effort"), "summary": reasoning("summary")});
    echo.insert("text".to_string(), json!({"format": format, "verbosity": "medium"}));
    echo.insert("top_logprobs".to_string(), Value::from(top_logprobs));
    echo.insert("truncation".to_string(), Value::from("disabled"));
    echo.insert("service_tier".to_string(), Value::from("default"));
    echo
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(field: &str, value: Value) -> Result<ResponsesRequest, ApiError> {
        let mut body = json!({"input": "hi"});
        body[field] = value;
        ResponsesRequest::parse(body.to_string().as_bytes())
    }

    #[test]
    fn what_lily_does_not_do_is_refused_by_its_name() {
        let tool = |tool: Value| json!([tool]);
        let function = |field: &str, value: Value| {
            let mut tool = json!({"type": "function", "name": "f"});
            tool[field] = value;
            json!([tool])
        };
        let lark = json!({"type": "custom", "name": "c", "format":
            {"type": "grammar", "syntax": "lark", "definition": "start: \"a\""}});
        for (field, value, path) in [
            ("background", json!(true), "background"),
            ("context_management", json!([{"type": "compaction"}]), "context_management"),
            ("conversation", json!("conv_1"), "conversation"),
            ("moderation", json!({"model": "m"}), "moderation"),
            ("prompt", json!({"id": "p"}), "prompt"),
            ("reasoning", json!({"context": "all_turns"}), "reasoning.context"),
            ("reasoning", json!({"mode": "pro"}), "reasoning.mode"),
            ("service_tier", json!("flex"), "service_tier"),
            ("text", json!({"verbosity": "low"}), "text.verbosity"),
            ("tools", tool(json!({"type": "file_search", "vector_store_ids": []})), "tools[0].type"),
            ("tools", tool(json!({"type": "local_shell"})), "tools[0].type"),
            ("tools", tool(json!({"type": "mcp", "server_label": "x"})), "tools[0].type"),
            ("tools", tool(lark), "tools[0].format.syntax"),
            ("tools", function("defer_loading", json!(true)), "tools[0].defer_loading"),
            ("tools", function("allowed_callers", json!(["programmatic"])), "tools[0].allowed_callers"),
            ("tool_choice", json!({"type": "web_search_preview"}), "tool_choice.type"),
            ("truncation", json!("auto"), "truncation"),
        ] {
            let error = with(field, value).expect_err(path);
            assert_eq!(error.param.as_deref(), Some(path), "{}", error.message);
            assert_eq!(error.code, Some("unsupported_parameter"), "{path}");
            assert!(error.message.contains(path), "{}", error.message);
        }
    }

    #[test]
    fn values_outside_the_protocol_are_refused_by_their_field() {
        let long = "x".repeat(513);
        for (field, value, path) in [
            ("include", json!(["everything"]), "include[0]"),
            ("input", json!([]), "input"),
            ("input", json!([{"text": "hi"}]), "input[0].type"),
            ("input", Value::Null, "input"),
            ("instructions", json!(["x"]), "instructions"),
            ("max_output_tokens", json!(0), "max_output_tokens"),
            ("metadata", json!({"a": long}), "metadata.a"),
            ("metadata", json!({"a": 1}), "metadata.a"),
            ("model", json!(7), "model"),
            ("previous_response_id", json!(7), "previous_response_id"),
            ("reasoning", json!({"effort": "lots"}), "reasoning.effort"),
            ("reasoning", json!({"summary": "short"}), "reasoning.summary"),
            ("store", json!("no"), "store"),
            ("stream", json!("true"), "stream"),
            ("temperature", json!(2.1), "temperature"),
            ("text", json!({"format": {"type": "yaml"}}), "text.format.type"),
            ("text", json!({"format": {"type": "json_schema", "name": "x"}}), "text.format.schema"),
            ("tool_choice", json!("sometimes"), "tool_choice"),
            ("tool_choice", json!({"type": "function", "name": "f"}), "tool_choice.name"),
            ("tools", json!([{"type": "function"}]), "tools[0].name"),
            ("tools", json!([{"name": "f"}]), "tools[0].type"),
            (
                "tools",
                json!([{"type": "custom", "name": "f"}, {"type": "function", "name": "f"}]),
                "tools[1].name",
            ),
            ("top_logprobs", json!(21), "top_logprobs"),
            ("truncation", json!("some"), "truncation"),
        ] {
            let error = with(field, value).expect_err(path);
            assert_eq!(error.param.as_deref(), Some(path), "{}", error.message);
            assert!(error.message.contains(path), "{}", error.message);
        }
    }

    #[test]
    fn labels_defaults_and_foreign_fields_change_nothing_but_their_echo() {
        let comparable =
            |request: ResponsesRequest| ResponsesRequest { items: Vec::new(), echo: Map::new(), ..request };
        let plain = comparable(with("foreign", json!({"a": 1})).unwrap());
        assert!(plain.store && !plain.stream && plain.logprobs.is_none());
        for (field, value) in [
            ("background", json!(false)),
            ("client_metadata", json!({"a": "b"})),
            ("include", json!(["file_search_call.results"])),
            ("max_tool_calls", json!(3)),
            ("metadata", json!({"a": "b"})),
            ("parallel_tool_calls", json!(true)),
            ("prompt_cache_key", json!("k")),
            ("reasoning", json!({"context": "auto"})),
            ("safety_identifier", json!("s")),
            ("service_tier", json!("auto")),
            ("temperature", Value::Null),
            ("text", json!({"format": {"type": "text"}, "verbosity": "medium"})),
            ("tool_choice", json!("auto")),
            ("tools", json!([{"type": "web_search", "external_web_access": false}])),
            ("truncation", json!("disabled")),
            ("user", json!("ann")),
        ] {
            assert_eq!(comparable(with(field, value).expect(field)), plain, "{field}");
        }
    }

    #[test]
    fn namespaces_stand_before_the_names_of_their_tools() {
        let tools = json!([{"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [
            {"type": "function", "name": "close", "description": "Close one.", "parameters": {"type": "object"}}]}]);
        assert_eq!(
            with("tools", tools).unwrap().offered.declared,
            [json!({"type": "function", "function": {"name": "agents.close",
                "description": "Helpers.\nClose one.", "parameters": {"type": "object"}}})]
        );
    }
}
