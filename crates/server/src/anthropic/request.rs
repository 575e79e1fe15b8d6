//! The body of `POST /v1/messages` and of `POST /v1/messages/count_tokens`, read field by field.

use lily_engine::constraint::Constraint;
use serde_json::Value;

use super::conversation::{self, Read};
use super::tools;
use crate::body;
use crate::error::ApiError;
use crate::openai::constraints::Asked;
use crate::openai::fields::{Fields, missing, not_among, wrong_type};
use crate::openai::request::{SamplingRequest, return_progress, sampling};

/// What a client asked for. Ranges of the sampling fields are checked later, by
/// [`SamplingParams::validate`](lily_engine::sampler::SamplingParams::validate).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MessagesRequest {
    /// The model's name, where one was given.
    pub model: Option<String>,
    /// The conversation in the chat template's form.
    pub conversation: Read,
    /// Tools that the model is told about.
    pub tools: Vec<Value>,
    /// What the answer must look like.
    pub asked: Option<Asked>,
    /// Whether and how to think before answering.
    pub thinking: Thinking,
    /// How tokens are chosen.
    pub sampling: SamplingRequest,
    /// Texts that end the answer and are not part of it.
    pub stop_sequences: Vec<String>,
    /// Most tokens to generate; whoever answers must have it.
    pub max_tokens: Option<usize>,
    /// Whether the answer comes as events.
    pub stream: bool,
    /// Whether a stream tells how far the prompt has been read.
    pub return_progress: bool,
}

/// The field `thinking`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Thinking {
    /// Whether to think; `None` where the request says nothing.
    pub enabled: Option<bool>,
    /// Most tokens of thinking.
    pub budget: Option<usize>,
    /// Whether the thinking is kept from the client.
    pub omitted: bool,
}

impl MessagesRequest {
    /// Reads a request body.
    pub fn parse(body: &[u8]) -> Result<MessagesRequest, ApiError> {
        let value = body::json(body)?;
        let body = Fields::body(&value)?;
        refuse_unsupported(&body)?;
        let tools = tools::declared(&body, format(&body)?)?;
        let stream = body.boolean("stream")?.unwrap_or(false);
        let max_tokens = body.integer("max_tokens", 1..=i64::from(u32::MAX))?.map(|most| most as usize);
        Ok(MessagesRequest {
            model: body.text("model")?.map(str::to_string),
            conversation: conversation::read(&body)?,
            tools: tools.declared,
            asked: tools.asked,
            thinking: thinking(&body, max_tokens)?,
            sampling: sampling(&body)?,
            stop_sequences: stop_sequences(&body)?,
            max_tokens,
            stream,
            return_progress: return_progress(&body, stream)?,
        })
    }
}

/// Fields that would change the answer in ways that Lily cannot: refused unless they ask for nothing.
fn refuse_unsupported(body: &Fields<'_>) -> Result<(), ApiError> {
    let refuse = |name: &str, reason: &str| {
        Err(ApiError::unsupported(name, format!("`{name}` is not supported: {reason}")))
    };
    for (name, reason) in
        [("container", "Lily runs no code"), ("diagnostics", "Lily keeps no requests to compare with")]
    {
        if body.get(name).is_some() {
            return refuse(name, reason);
        }
    }
    if body.list("mcp_servers")?.is_some_and(|servers| !servers.is_empty()) {
        return refuse("mcp_servers", "Lily reaches no other server; offer their tools in `tools`");
    }
    if body.text("service_tier")?.is_some_and(|tier| !matches!(tier, "auto" | "standard_only")) {
        return refuse("service_tier", "there is one tier; send \"auto\" or \"standard_only\"");
    }
    if body.text("speed")?.is_some_and(|speed| speed != "standard") {
        return refuse("speed", "there is one speed, as fast as it goes; send \"standard\"");
    }
    if let Some(config) = body.object("output_config")? {
        effort(&config)?;
    }
    refuse_edits(body)
}

/// The model thinks or it does not, as `thinking` says: every effort is the same to it.
fn effort(config: &Fields<'_>) -> Result<(), ApiError> {
    match config.text("effort")? {
        None | Some("low" | "medium" | "high" | "xhigh" | "max") => Ok(()),
        Some(other) => {
            let path = config.path("effort");
            let message = format!("`{path}` must be low, medium, high, xhigh or max, not {other:?}");
            Err(ApiError::invalid(path, message))
        }
    }
}

/// What the answer must look like: `output_config.format`, or `output_format`, its older name.
fn format(body: &Fields<'_>) -> Result<Option<Asked>, ApiError> {
    let current = body.object("output_config")?.map(|config| config.object("format")).transpose()?.flatten();
    let Some(format) = current.or(body.object("output_format")?) else { return Ok(None) };
    match format.text("type")?.ok_or_else(|| missing(format.path("type")))? {
        "json_schema" => {
            let field = format.path("schema");
            let schema = format.get("schema").ok_or_else(|| missing(&field))?.clone();
            Ok(Some(Asked { constraint: Constraint::Json { schema, strict: true }, field }))
        }
        other => Err(not_among(format.path("type"), &["json_schema"], other)),
    }
}

/// `context_management`: what it says about old thinking the chat template does anyway; all else would change
/// the conversation behind the client's back.
fn refuse_edits(body: &Fields<'_>) -> Result<(), ApiError> {
    let Some(management) = body.object("context_management")? else { return Ok(()) };
    for (index, edit) in management.list("edits")?.unwrap_or_default().iter().enumerate() {
        let edit = Fields::at(edit, format!("{}[{index}]", management.path("edits")))?;
        let kind = edit.text("type")?.ok_or_else(|| missing(edit.path("type")))?;
        if !kind.starts_with("clear_thinking") {
            let path = edit.path("type");
            let message = format!(
                "`{path}` {kind:?} is not supported: Lily does not edit conversations; send shorter ones"
            );
            return Err(ApiError::unsupported(path, message));
        }
    }
    Ok(())
}

fn thinking(body: &Fields<'_>, max_tokens: Option<usize>) -> Result<Thinking, ApiError> {
    let Some(thinking) = body.object("thinking")? else { return Ok(Thinking::default()) };
    let path = thinking.path("type");
    let enabled = match thinking.text("type")?.ok_or_else(|| missing(&path))? {
        "enabled" | "adaptive" => true,
        "disabled" => false,
        other => return Err(not_among(path, &["enabled", "adaptive", "disabled"], other)),
    };
    let omitted = match thinking.text("display")? {
        None | Some("summarized") => false,
        Some("omitted") => true,
        Some(other) => {
            return Err(not_among(thinking.path("display"), &["summarized", "omitted"], other));
        }
    };
    let path = thinking.path("budget_tokens");
    let budget = thinking.integer("budget_tokens", 1..=i64::from(u32::MAX))?.map(|budget| budget as usize);
    match (budget, max_tokens) {
        (Some(budget), Some(most)) if enabled && budget >= most => {
            let message = format!("`{path}` is {budget}; it must be less than `max_tokens`, which is {most}");
            Err(ApiError::invalid(path, message))
        }
        _ => Ok(Thinking { enabled: Some(enabled), budget: budget.filter(|_| enabled), omitted }),
    }
}

fn stop_sequences(body: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let list = body.list("stop_sequences")?.unwrap_or_default();
    list.iter()
        .enumerate()
        .map(|(index, value)| {
            let text = value.as_str().map(str::to_string);
            text.ok_or_else(|| wrong_type(format!("stop_sequences[{index}]"), "a string", value))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with(field: &str, value: Value) -> Result<MessagesRequest, ApiError> {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000});
        body[field] = value;
        MessagesRequest::parse(body.to_string().as_bytes())
    }

    #[test]
    fn every_unsupported_field_is_refused_by_its_name() {
        let tool = |field: &str, value: Value| {
            let mut tool = json!({"name": "f", "input_schema": {"type": "object"}});
            tool[field] = value;
            json!([tool])
        };
        let cases = [
            ("container", json!("c"), "container"),
            (
                "context_management",
                json!({"edits": [{"type": "clear_tool_uses_1"}]}),
                "context_management.edits[0].type",
            ),
            ("diagnostics", json!({}), "diagnostics"),
            ("mcp_servers", json!([{"url": "x"}]), "mcp_servers"),
            ("service_tier", json!("priority"), "service_tier"),
            ("speed", json!("fast"), "speed"),
            ("tools", json!([{"type": "bash_20250124", "name": "bash"}]), "tools[0].type"),
            ("tools", tool("defer_loading", json!(true)), "tools[0].defer_loading"),
            ("tools", tool("allowed_callers", json!(["code_execution"])), "tools[0].allowed_callers"),
        ];
        for (field, value, path) in cases {
            let error = with(field, value).expect_err(path);
            assert_eq!(error.param.as_deref(), Some(path));
            assert!(error.message.contains(path), "{}", error.message);
        }
    }

    #[test]
    fn values_outside_the_protocol_are_refused_by_their_field() {
        let cases = [
            ("max_tokens", json!(0), "max_tokens"),
            ("max_tokens", json!("10"), "max_tokens"),
            ("model", json!(7), "model"),
            ("output_config", json!({"effort": "lots"}), "output_config.effort"),
            ("output_config", json!({"format": {"type": "yaml"}}), "output_config.format.type"),
            ("output_config", json!({"format": {"type": "json_schema"}}), "output_config.format.schema"),
            ("stop_sequences", json!("x"), "stop_sequences"),
            ("stop_sequences", json!([1]), "stop_sequences[0]"),
            ("stream", json!("true"), "stream"),
            ("system", json!({}), "system"),
            ("temperature", json!("hot"), "temperature"),
            ("thinking", json!({}), "thinking.type"),
            ("thinking", json!({"type": "between_tools"}), "thinking.type"),
            ("thinking", json!({"type": "enabled", "budget_tokens": 2000}), "thinking.budget_tokens"),
            ("thinking", json!({"type": "enabled", "display": "all"}), "thinking.display"),
            ("tool_choice", json!({"type": "any"}), "tool_choice.type"),
            ("tool_choice", json!({"type": "sometimes"}), "tool_choice.type"),
            ("tools", json!([{"name": "f"}]), "tools[0].input_schema"),
            ("tools", json!([{"input_schema": {}}]), "tools[0].name"),
        ];
        for (field, value, path) in cases {
            let error = with(field, value).expect_err(path);
            assert_eq!(error.param.as_deref(), Some(path));
            assert!(error.message.contains(path), "{}", error.message);
        }
    }

    #[test]
    fn labels_and_foreign_fields_change_nothing() {
        let plain = with("foreign", json!({"a": 1})).unwrap();
        for (field, value) in [
            ("betas", json!(["b"])),
            ("cache_control", json!({"type": "ephemeral"})),
            ("context_management", json!({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})),
            ("inference_geo", json!("eu")),
            ("mcp_servers", json!([])),
            ("metadata", json!({"user_id": "u"})),
            ("output_config", json!({"effort": "high"})),
            ("service_tier", json!("auto")),
            ("speed", json!("standard")),
            ("temperature", Value::Null),
            ("tool_choice", json!({"type": "auto"})),
            ("tools", json!([])),
        ] {
            assert_eq!(with(field, value).expect(field), plain, "{field}");
        }
    }

    #[test]
    fn tools_take_the_form_that_the_template_renders() {
        let tools = json!([{"name": "f", "description": "d", "input_schema": {"type": "object"}, "type": "custom",
            "cache_control": {"type": "ephemeral"}, "input_examples": [{"a": 1}]}]);
        assert_eq!(
            with("tools", tools).unwrap().tools,
            [json!({"type": "function", "function": {"name": "f", "description": "d",
                "parameters": {"type": "object"}, "input_examples": [{"a": 1}]}})]
        );
    }
}
