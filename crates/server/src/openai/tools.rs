//! `tools`, `tool_choice` and `parallel_tool_calls`.
//!
//! Tools are rendered into the prompt by the chat template; whether and how they are called is the model's
//! choice. What would have to be enforced while tokens are chosen is refused by name.

use serde_json::Value;

use super::fields::{Fields, missing, wrong_type};
use crate::error::ApiError;

/// Reads the tools that the model is told about: none where `tool_choice` is `"none"`.
pub fn declared(body: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let tools = body.list("tools")?.unwrap_or_default();
    for (index, tool) in tools.iter().enumerate() {
        check(&Fields::at(tool, format!("{}[{index}]", body.path("tools")))?)?;
    }
    let offered = offered(body, tools.is_empty())?;
    if !tools.is_empty() && body.boolean("parallel_tool_calls")? == Some(false) {
        let message = "`parallel_tool_calls` may not be false: Lily does not limit the model to one call";
        return Err(ApiError::unsupported("parallel_tool_calls", message));
    }
    Ok(if offered { tools.to_vec() } else { Vec::new() })
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
    if function.boolean("strict")? == Some(true) {
        let path = function.path("strict");
        let message = format!("`{path}` may not be true: Lily does not enforce schemas on arguments");
        return Err(ApiError::unsupported(path, message));
    }
    Ok(())
}

/// Whether `tool_choice` lets the model see the tools.
fn offered(body: &Fields<'_>, no_tools: bool) -> Result<bool, ApiError> {
    let refuse = |what: &str| {
        let message = format!(
            "`tool_choice` {what} is not supported: Lily cannot force a call; send \"auto\" or \"none\""
        );
        Err(ApiError::unsupported("tool_choice", message))
    };
    match body.get("tool_choice") {
        None => Ok(true),
        Some(Value::String(choice)) => match choice.as_str() {
            "none" => Ok(false),
            "auto" => Ok(true),
            "required" if no_tools => {
                Err(ApiError::invalid("tool_choice", "`tool_choice` \"required\" needs `tools`"))
            }
            "required" => refuse("\"required\""),
            other => {
                let message =
                    format!("`tool_choice` must be \"auto\", \"none\" or \"required\", not {other:?}");
                Err(ApiError::invalid("tool_choice", message))
            }
        },
        Some(Value::Object(_)) => refuse("naming a function"),
        Some(other) => Err(wrong_type("tool_choice", "a string or an object", other)),
    }
}
