//! `tools` and `tool_choice`, brought into the form of OpenAI's protocol: the chat template renders it, and what it
//! asks of the answer is decided [there](crate::openai::tools).

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::openai::constraints::Asked;
use crate::openai::fields::{Fields, missing, not_among};
use crate::openai::tools::{self, Tools};

/// Reads the tools of a request whose answer is to look as `asked`.
pub fn declared(body: &Fields<'_>, asked: Option<Asked>) -> Result<Tools, ApiError> {
    let tools = body.list("tools")?.unwrap_or_default();
    let tools = tools
        .iter()
        .enumerate()
        .map(|(index, tool)| one(&Fields::at(tool, format!("{}[{index}]", body.path("tools")))?))
        .collect::<Result<Vec<_>, _>>()?;
    let mut converted = json!({});
    if let Some(choice) = body.object("tool_choice")? {
        let parallel = !choice.boolean("disable_parallel_tool_use")?.unwrap_or(false);
        converted = json!({"tool_choice": tool_choice(&choice, &tools)?, "parallel_tool_calls": parallel});
    }
    converted["tools"] = Value::Array(tools);
    tools::declared(&Fields::body(&converted)?, asked)
}

fn one(tool: &Fields<'_>) -> Result<Value, ApiError> {
    if let Some(other) = tool.text("type")?.filter(|&kind| kind != "custom") {
        let path = tool.path("type");
        let message = format!(
            "`{path}` is {other:?}, a tool that runs at Anthropic or that the model would have to know; declare it with `input_schema`"
        );
        return Err(ApiError::unsupported(path, message));
    }
    tools::check_callers(tool)?;
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
    if tool.boolean("strict")? == Some(true) {
        function["strict"] = Value::Bool(true);
    }
    // The model reads a tool's whole declaration, so examples need no more than to stand there.
    if let Some(examples) = tool.list("input_examples")?.filter(|examples| !examples.is_empty()) {
        function["input_examples"] = Value::from(examples);
    }
    Ok(json!({"type": "function", "function": function}))
}

/// `tool_choice` in OpenAI's words.
fn tool_choice(choice: &Fields<'_>, tools: &[Value]) -> Result<Value, ApiError> {
    let path = choice.path("type");
    match choice.text("type")?.ok_or_else(|| missing(&path))? {
        kind @ ("any" | "tool") if tools.is_empty() => {
            Err(ApiError::invalid(&path, format!("`{path}` {kind:?} needs `tools`")))
        }
        kind @ ("auto" | "none") => Ok(Value::from(kind)),
        "any" => Ok(Value::from("required")),
        "tool" => {
            let path = choice.path("name");
            let name = choice.text("name")?.ok_or_else(|| missing(&path))?;
            if tools.iter().all(|tool| tool["function"]["name"] != name) {
                let message = format!("`{path}` is {name:?}, which `tools` does not declare");
                return Err(ApiError::invalid(path, message));
            }
            Ok(json!({"type": "function", "function": {"name": name}}))
        }
        other => Err(not_among(path, &["auto", "any", "tool", "none"], other)),
    }
}
