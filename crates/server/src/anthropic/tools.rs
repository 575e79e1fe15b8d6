//! `tools` and `tool_choice`, brought into the form of OpenAI's protocol, which the chat template renders.

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::openai::fields::{Fields, missing};

/// Reads the tools that the model is told about: none where `tool_choice` is `none`.
pub fn declared(body: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let tools = body.list("tools")?.unwrap_or_default();
    let tools = tools
        .iter()
        .enumerate()
        .map(|(index, tool)| one(&Fields::at(tool, format!("{}[{index}]", body.path("tools")))?))
        .collect::<Result<Vec<_>, _>>()?;
    let offered = offered(body, tools.is_empty())?;
    Ok(if offered { tools } else { Vec::new() })
}

fn one(tool: &Fields<'_>) -> Result<Value, ApiError> {
    if let Some(other) = tool.text("type")?.filter(|&kind| kind != "custom") {
        let path = tool.path("type");
        let message = format!(
            "`{path}` is {other:?}, a tool that runs at Anthropic or that the model would have to know; declare it with `input_schema`"
        );
        return Err(ApiError::unsupported(path, message));
    }
    for (name, reason) in [
        ("strict", "Lily does not enforce schemas on arguments"),
        ("defer_loading", "Lily has no tool search; the model sees every tool"),
    ] {
        if tool.boolean(name)? == Some(true) {
            let path = tool.path(name);
            let message = format!("`{path}` may not be true: {reason}");
            return Err(ApiError::unsupported(path, message));
        }
    }
    if tool.list("allowed_callers")?.is_some_and(|callers| callers.iter().any(|caller| caller != "direct")) {
        let path = tool.path("allowed_callers");
        let message = format!("`{path}` may hold \"direct\" only: Lily runs no code that could call a tool");
        return Err(ApiError::unsupported(path, message));
    }
    // Arguments come when they are complete, which every client must be ready for.
    tool.boolean("eager_input_streaming")?;
    let name =
        tool.text("name")?.filter(|name| !name.is_empty()).ok_or_else(|| missing(tool.path("name")))?;
    let mut function = json!({"name": name});
    if let Some(description) = tool.text("description")? {
        function["description"] = Value::from(description);
    }
    tool.object("input_schema")?.ok_or_else(|| missing(tool.path("input_schema")))?;
    function["parameters"] = tool.get("input_schema").cloned().unwrap_or_default();
    // The model reads a tool's whole declaration, so examples need no more than to stand there.
    if let Some(examples) = tool.list("input_examples")?.filter(|examples| !examples.is_empty()) {
        function["input_examples"] = Value::from(examples);
    }
    Ok(json!({"type": "function", "function": function}))
}

/// Whether `tool_choice` lets the model see the tools.
fn offered(body: &Fields<'_>, no_tools: bool) -> Result<bool, ApiError> {
    let Some(choice) = body.object("tool_choice")? else { return Ok(true) };
    let path = choice.path("type");
    let kind = choice.text("type")?.ok_or_else(|| missing(&path))?;
    if !no_tools && choice.boolean("disable_parallel_tool_use")? == Some(true) {
        let path = choice.path("disable_parallel_tool_use");
        let message = format!("`{path}` may not be true: Lily does not limit the model to one call");
        return Err(ApiError::unsupported(path, message));
    }
    match kind {
        "auto" => Ok(true),
        "none" => Ok(false),
        "any" | "tool" if no_tools => {
            Err(ApiError::invalid(&path, format!("`{path}` {kind:?} needs `tools`")))
        }
        "any" | "tool" => {
            let message = format!(
                "`{path}` {kind:?} is not supported: Lily cannot force a call; send \"auto\" or \"none\""
            );
            Err(ApiError::unsupported(path, message))
        }
        other => {
            let message = format!("`{path}` must be \"auto\", \"any\", \"tool\" or \"none\", not {other:?}");
            Err(ApiError::invalid(path, message))
        }
    }
}
