//! `tools`, `tool_choice` and `parallel_tool_calls`.
//!
//! Tools are rendered into the prompt by the chat template. Whether they are called is the model's choice, unless
//! the request says otherwise:
//!
//! | request | the answer |
//! |---|---|
//! | `tool_choice` `"none"` | knows of no tools |
//! | `"auto"` | is free, unless one of the rows below applies |
//! | `"required"` | consists of calls |
//! | one function named | is one call of it |
//! | `allowed_tools` | may, or must, call some of the tools |
//! | `parallel_tool_calls` false | holds at most one call |
//! | a tool with `strict` | holds only calls whose arguments follow their schemas |
//! | `response_format` beside tools | is calls, or else JSON of the format |
//!
//! Wherever a row constrains the answer, the arguments of all tools follow their schemas; `strict` adds that a
//! schema which cannot be enforced is refused.

use lily_engine::constraint::{Constraint, Prose, ToolChoice};
use serde_json::Value;

use super::constraints::Asked;
use super::fields::{Fields, missing, not_among, wrong_type};
use crate::error::ApiError;

/// What a request says about tools.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tools {
    /// Those that the model is told about.
    pub declared: Vec<Value>,
    /// What the answer must look like because of them, or because of what was asked beside them.
    pub asked: Option<Asked>,
}

/// How an answer calls.
struct Mode {
    /// It has to.
    forced: bool,
    /// More than once.
    parallel: bool,
    /// These tools alone; all where `None`.
    names: Option<Vec<String>>,
}

/// Reads the tools of a request whose answer is to look as `asked`.
pub fn declared(body: &Fields<'_>, asked: Option<Asked>) -> Result<Tools, ApiError> {
    let tools = body.list("tools")?.unwrap_or_default();
    for (index, tool) in tools.iter().enumerate() {
        check(&Fields::at(tool, format!("{}[{index}]", body.path("tools")))?)?;
    }
    let parallel = body.boolean("parallel_tool_calls")?.unwrap_or(true);
    let Some(mode) = mode(body, tools, parallel)? else { return Ok(Tools { declared: Vec::new(), asked }) };
    if tools.is_empty() {
        return Ok(Tools { declared: Vec::new(), asked });
    }
    let callable: Vec<Value> = tools
        .iter()
        .filter(|tool| mode.names.as_ref().is_none_or(|names| names.iter().any(|n| n == name(tool))))
        .cloned()
        .collect();
    let strict = |tool: &Value| tool["function"]["strict"] == true;
    let prose = match asked {
        _ if mode.forced => Some(Prose::None),
        Some(Asked { constraint: Constraint::Json { schema, strict }, .. }) => {
            Some(Prose::Json { schema, strict })
        }
        Some(Asked { field, .. }) => {
            let message = format!("`{field}` cannot be combined with `tools`; send `tool_choice` \"none\"");
            return Err(ApiError::invalid(field, message));
        }
        None => {
            let constrained = !mode.parallel || mode.names.is_some() || callable.iter().any(strict);
            constrained.then_some(Prose::Free)
        }
    };
    let asked = prose.map(|prose| Asked {
        constraint: Constraint::Tools(ToolChoice { tools: callable, prose, parallel: mode.parallel }),
        field: "tools".to_string(),
    });
    Ok(Tools { declared: tools.to_vec(), asked })
}

fn name(tool: &Value) -> &str {
    tool["function"]["name"].as_str().unwrap_or_default()
}

fn check(tool: &Fields<'_>) -> Result<(), ApiError> {
    match tool.text("type")?.ok_or_else(|| missing(tool.path("type")))? {
        "function" => {}
        other => {
            let path = tool.path("type");
            let message = format!("`{path}` is {other:?}, and Lily offers tools of type \"function\" only");
            return Err(ApiError::unsupported(path, message));
        }
    }
    let function = tool.object("function")?.ok_or_else(|| missing(tool.path("function")))?;
    match function.text("name")? {
        None | Some("") => return Err(missing(function.path("name"))),
        Some(_) => {}
    }
    function.text("description")?;
    function.object("parameters")?;
    function.boolean("strict")?;
    Ok(())
}

/// What `tool_choice` says; `None` where the model is not to know of tools.
fn mode(body: &Fields<'_>, tools: &[Value], parallel: bool) -> Result<Option<Mode>, ApiError> {
    let all = |forced| Some(Mode { forced, parallel, names: None });
    match body.get("tool_choice") {
        None => Ok(all(false)),
        Some(Value::String(choice)) => match choice.as_str() {
            "none" => Ok(None),
            "auto" => Ok(all(false)),
            "required" if tools.is_empty() => {
                Err(ApiError::invalid("tool_choice", "`tool_choice` \"required\" needs `tools`"))
            }
            "required" => Ok(all(true)),
            other => Err(not_among("tool_choice", &["auto", "none", "required"], other)),
        },
        Some(Value::Object(_)) => named(body, tools, parallel).map(Some),
        Some(other) => Err(wrong_type("tool_choice", "a string or an object", other)),
    }
}

/// A `tool_choice` that names tools.
fn named(body: &Fields<'_>, tools: &[Value], parallel: bool) -> Result<Mode, ApiError> {
    let choice = body.object("tool_choice")?.ok_or_else(|| missing("tool_choice"))?;
    let known = |function: &Fields<'_>| {
        let wanted = function.text("name")?.ok_or_else(|| missing(function.path("name")))?;
        if tools.iter().any(|tool| name(tool) == wanted) {
            return Ok(wanted.to_string());
        }
        let message = format!("`tool_choice` names {wanted:?}, which `tools` does not declare");
        Err(ApiError::invalid("tool_choice", message))
    };
    match choice.text("type")?.ok_or_else(|| missing("tool_choice.type"))? {
        "function" => {
            let function = choice.object("function")?.ok_or_else(|| missing("tool_choice.function"))?;
            Ok(Mode { forced: true, parallel: false, names: Some(vec![known(&function)?]) })
        }
        "allowed_tools" => {
            let allowed =
                choice.object("allowed_tools")?.ok_or_else(|| missing("tool_choice.allowed_tools"))?;
            let forced = match allowed.text("mode")? {
                None | Some("auto") => false,
                Some("required") => true,
                Some(other) => return Err(not_among(allowed.path("mode"), &["auto", "required"], other)),
            };
            let mut names = Vec::new();
            for (index, tool) in allowed.list("tools")?.unwrap_or_default().iter().enumerate() {
                let tool = Fields::at(tool, format!("{}[{index}]", allowed.path("tools")))?;
                let function = tool.object("function")?.ok_or_else(|| missing(tool.path("function")))?;
                names.push(known(&function)?);
            }
            if names.is_empty() {
                return Err(missing(allowed.path("tools")));
            }
            Ok(Mode { forced, parallel, names: Some(names) })
        }
        other => {
            let message =
                format!("`tool_choice.type` must be \"function\" or \"allowed_tools\", not {other:?}");
            Err(ApiError::invalid("tool_choice", message))
        }
    }
}

/// Refuses a tool that the model would have to search for, or that something other than the model would call: members
/// of a tool that Anthropic's messages and OpenAI's responses have in common.
pub fn check_callers(tool: &Fields<'_>) -> Result<(), ApiError> {
    if tool.boolean("defer_loading")? == Some(true) {
        let path = tool.path("defer_loading");
        let message = format!("`{path}` may not be true: Lily has no tool search; the model sees every tool");
        return Err(ApiError::unsupported(path, message));
    }
    if tool.list("allowed_callers")?.is_some_and(|callers| callers.iter().any(|caller| caller != "direct")) {
        let path = tool.path("allowed_callers");
        let message = format!("`{path}` may hold \"direct\" only: Lily runs no code that could call a tool");
        return Err(ApiError::unsupported(path, message));
    }
    Ok(())
}
