//! `tools` and `tool_choice`, brought into the form of a chat's: the chat template renders that, and what it asks of
//! the answer is decided [there](crate::openai::tools).
//!
//! | tool | becomes |
//! |---|---|
//! | `function` | itself |
//! | `custom` | a function of one text, `input`; a regular expression for it is enforced |
//! | `namespace` | its functions, with the namespace before their names |
//! | `web_search`, `image_generation` | nothing: an offer that the model does not take up |
//! | others | refused |
//!
//! Codex offers `web_search` to every server. What an offer means is the server's choice, so an answer without it is
//! a right one; asking for it with `tool_choice` is refused.

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::openai::constraints::Asked;
use crate::openai::fields::{Fields, missing, not_among};
use crate::openai::tools::{self, Tools};

/// Stands between a namespace and the name of its tool, as the model reads it.
const NAMESPACE_SEPARATOR: &str = ".";
/// Tools of OpenAI's that are left out.
const LEFT_OUT: [&str; 4] = ["web_search", "web_search_2025_08_26", "web_search_preview", "image_generation"];

/// The tools of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Offered {
    /// In the template's form; empty where the model is not to know of any.
    pub declared: Vec<Value>,
    /// What the answer must look like because of them, or because of what was asked beside them.
    pub asked: Option<Asked>,
    all: Vec<Tool>,
}

/// One tool.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// What the model calls it.
    known_as: String,
    /// What the client calls it.
    pub name: String,
    /// Where the client found it.
    pub namespace: Option<String>,
    /// Whether its input is a text rather than arguments.
    pub custom: bool,
    /// Where it stands in the request.
    path: String,
}

impl Offered {
    /// Reads the tools of a request whose answer is to look as `asked`.
    pub fn read(body: &Fields<'_>, asked: Option<Asked>) -> Result<Offered, ApiError> {
        let (mut all, mut declared) = (Vec::new(), Vec::new());
        for (index, tool) in body.list("tools")?.unwrap_or_default().iter().enumerate() {
            let tool = Fields::at(tool, format!("{}[{index}]", body.path("tools")))?;
            read(&tool, None, &mut all, &mut declared)?;
        }
        let mut converted = json!({"tools": declared});
        if let Some(choice) = body.get("tool_choice") {
            converted["tool_choice"] = tool_choice(choice, &all)?;
        }
        if let Some(parallel) = body.boolean("parallel_tool_calls")? {
            converted["parallel_tool_calls"] = Value::Bool(parallel);
        }
        let Tools { declared, asked } = tools::declared(&Fields::body(&converted)?, asked)?;
        Ok(Offered { declared, asked, all })
    }

    /// The tool that the model called.
    pub fn called(&self, known_as: &str) -> Option<&Tool> {
        self.all.iter().find(|tool| tool.known_as == known_as)
    }

    /// What the model calls a tool.
    pub fn known_as(&self, name: &str, namespace: Option<&str>) -> String {
        known_as(name, namespace)
    }

    /// The place of a tool's schema in the request.
    pub fn schema_path(&self, known_as: &str) -> String {
        let tool = self.called(known_as);
        let custom = tool.is_some_and(|tool| tool.custom);
        let path = tool.map_or("tools", |tool| &tool.path);
        format!("{path}.{}", if custom { "format" } else { "parameters" })
    }
}

fn known_as(name: &str, namespace: Option<&str>) -> String {
    namespace.map_or(name.to_string(), |space| format!("{space}{NAMESPACE_SEPARATOR}{name}"))
}

/// A namespace around a tool: its name and what it says of itself.
type Namespace<'a> = (&'a str, &'a str);

fn read(
    tool: &Fields<'_>,
    space: Option<Namespace<'_>>,
    all: &mut Vec<Tool>,
    declared: &mut Vec<Value>,
) -> Result<(), ApiError> {
    let kind = tool.text("type")?.ok_or_else(|| missing(tool.path("type")))?;
    let function = match kind {
        "function" => function(tool, space)?,
        "custom" => custom(tool, space)?,
        "namespace" if space.is_none() => {
            let space = (required(tool, "name")?, tool.text("description")?.unwrap_or_default());
            let list = tool.list("tools")?.ok_or_else(|| missing(tool.path("tools")))?;
            for (index, inner) in list.iter().enumerate() {
                let inner = Fields::at(inner, format!("{}[{index}]", tool.path("tools")))?;
                read(&inner, Some(space), all, declared)?;
            }
            return Ok(());
        }
        left_out if LEFT_OUT.contains(&left_out) => {
            tracing::debug!(tool = left_out, "a tool that runs at OpenAI is left out");
            return Ok(());
        }
        other => {
            let path = tool.path("type");
            let message = format!(
                "`{path}` is {other:?}, a tool that Lily does not have; declare it as a \"function\" and run it yourself"
            );
            return Err(ApiError::unsupported(path, message));
        }
    };
    tools::check_callers(tool)?;
    let known_as = function["name"].as_str().unwrap_or_default().to_string();
    if all.iter().any(|other| other.known_as == known_as) {
        let path = tool.path("name");
        return Err(ApiError::invalid(&*path, format!("`{path}`: there are two tools named {known_as:?}")));
    }
    all.push(Tool {
        known_as,
        name: required(tool, "name")?.to_string(),
        namespace: space.map(|(name, _)| name.to_string()),
        custom: kind == "custom",
        path: tool.path("").trim_end_matches('.').to_string(),
    });
    declared.push(json!({"type": "function", "function": function}));
    Ok(())
}

fn required<'a>(tool: &Fields<'a>, name: &str) -> Result<&'a str, ApiError> {
    tool.text(name)?.filter(|text| !text.is_empty()).ok_or_else(|| missing(tool.path(name)))
}

/// Name and description of a tool as the model reads them.
fn head(tool: &Fields<'_>, space: Option<Namespace<'_>>) -> Result<Value, ApiError> {
    let mut function = json!({"name": known_as(required(tool, "name")?, space.map(|(name, _)| name))});
    let said = [space.map_or("", |(_, text)| text), tool.text("description")?.unwrap_or_default()];
    let said: Vec<&str> = said.into_iter().filter(|text| !text.is_empty()).collect();
    if !said.is_empty() {
        function["description"] = Value::String(said.join("\n"));
    }
    Ok(function)
}

fn function(tool: &Fields<'_>, space: Option<Namespace<'_>>) -> Result<Value, ApiError> {
    let mut function = head(tool, space)?;
    tool.object("parameters")?;
    if let Some(parameters) = tool.get("parameters") {
        function["parameters"] = parameters.clone();
    }
    if tool.boolean("strict")? == Some(true) {
        function["strict"] = Value::Bool(true);
    }
    Ok(function)
}

fn custom(tool: &Fields<'_>, space: Option<Namespace<'_>>) -> Result<Value, ApiError> {
    let mut function = head(tool, space)?;
    let mut input = json!({"type": "string"});
    if let Some(format) = tool.object("format")? {
        match required(&format, "type")? {
            "text" => {}
            "grammar" => match required(&format, "syntax")? {
                "regex" => {
                    input["pattern"] = Value::String(format!("^(?:{})$", required(&format, "definition")?));
                    function["strict"] = Value::Bool(true);
                }
                "lark" => {
                    let path = format.path("syntax");
                    let message = format!(
                        "`{path}` \"lark\" is not supported for a tool's input; send \"regex\", or no grammar"
                    );
                    return Err(ApiError::unsupported(path, message));
                }
                other => return Err(not_among(format.path("syntax"), &["regex", "lark"], other)),
            },
            other => return Err(not_among(format.path("type"), &["text", "grammar"], other)),
        }
    }
    function["parameters"] = json!({"type": "object", "properties": {"input": input}, "required": ["input"]});
    Ok(function)
}

/// `tool_choice` in a chat's words.
fn tool_choice(choice: &Value, all: &[Tool]) -> Result<Value, ApiError> {
    let Value::Object(_) = choice else { return Ok(choice.clone()) };
    let choice = Fields::at(choice, "tool_choice")?;
    match required(&choice, "type")? {
        "function" | "custom" => chosen(&choice, all),
        "allowed_tools" => {
            let mut names = Vec::new();
            for (index, tool) in choice.list("tools")?.unwrap_or_default().iter().enumerate() {
                let tool = Fields::at(tool, format!("{}[{index}]", choice.path("tools")))?;
                match required(&tool, "type")? {
                    "function" | "custom" => names.push(chosen(&tool, all)?),
                    left_out if LEFT_OUT.contains(&left_out) => {}
                    other => return Err(unknown(&tool, other)),
                }
            }
            let mode = choice.text("mode")?.unwrap_or("auto");
            Ok(json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}))
        }
        other => Err(unknown(&choice, other)),
    }
}

fn unknown(choice: &Fields<'_>, kind: &str) -> ApiError {
    let path = choice.path("type");
    let message = format!("`{path}` is {kind:?}, a tool that Lily does not have; name a function");
    ApiError::unsupported(path, message)
}

fn chosen(choice: &Fields<'_>, all: &[Tool]) -> Result<Value, ApiError> {
    let name = required(choice, "name")?;
    let space = choice.text("namespace")?;
    let tool =
        all.iter().find(|tool| tool.name == name && (space.is_none() || tool.namespace.as_deref() == space));
    let Some(tool) = tool else {
        let path = choice.path("name");
        let message = format!("`{path}` is {name:?}, which `tools` does not declare");
        return Err(ApiError::invalid(path, message));
    };
    Ok(json!({"type": "function", "function": {"name": tool.known_as}}))
}
