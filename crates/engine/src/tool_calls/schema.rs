//! The types that tools declare for their parameters.

use std::collections::HashMap;

use serde_json::Value;

/// How many `$ref`, `anyOf` and `oneOf` may be nested before a type counts as unknown; hostile schemas refer
/// to themselves.
const MAX_DEPTH: usize = 8;

/// Parameter schemas by tool name.
#[derive(Clone, Debug)]
pub(super) struct ToolSchemas {
    parameters: HashMap<String, Value>,
}

impl ToolSchemas {
    pub(super) fn new(tools: &[Value]) -> ToolSchemas {
        let parameters = tools
            .iter()
            .map(|tool| tool.get("function").unwrap_or(tool))
            .filter_map(|function| {
                let name = function.get("name")?.as_str()?;
                Some((name.to_owned(), function.get("parameters")?.clone()))
            })
            .collect();
        ToolSchemas { parameters }
    }

    /// `value` as JSON text, by the declared type of parameter `key` of `tool`: see the
    /// [module's page](crate::tool_calls#arguments).
    pub(super) fn to_json(&self, tool: &str, key: &str, value: &str) -> String {
        let mut types = Vec::new();
        if let Some(root) = self.parameters.get(tool)
            && let Some(schema) = root.get("properties").and_then(|properties| properties.get(key))
        {
            collect_types(root, schema, MAX_DEPTH, &mut types);
        }
        let literal = value.trim();
        let taken_over = match (serde_json::from_str(literal), literal) {
            (Ok(json), _) if is_allowed(&json, &types) => literal,
            // Python's spelling, which the model falls into.
            (_, "True") if types.contains(&"boolean") => "true",
            (_, "False") if types.contains(&"boolean") => "false",
            (_, "None") if types.contains(&"null") => "null",
            _ => return Value::from(value).to_string(),
        };
        taken_over.to_owned()
    }
}

/// Whether a value may stand for itself rather than be a string. Next to `string`, only `null` does: every
/// other text could be meant as the string that it is.
fn is_allowed(json: &Value, types: &[&str]) -> bool {
    let allows = |name| types.contains(&name);
    if types.is_empty() {
        return json.is_object() || json.is_array();
    }
    match json {
        Value::Null => allows("null"),
        _ if allows("string") => false,
        Value::Bool(_) => allows("boolean"),
        Value::Number(number) => {
            allows("number") || allows("integer") && number.as_f64().is_some_and(|n| n.fract() == 0.0)
        }
        Value::Array(_) => allows("array"),
        Value::Object(_) => allows("object"),
        Value::String(_) => false,
    }
}

/// The types that `schema` allows, through references into `root` and alternatives.
fn collect_types<'a>(root: &'a Value, schema: &'a Value, depth: usize, types: &mut Vec<&'a str>) {
    if depth == 0 {
        return;
    }
    match schema.get("type") {
        Some(Value::String(name)) => types.push(name),
        Some(Value::Array(names)) => types.extend(names.iter().filter_map(Value::as_str)),
        _ => {}
    }
    let reference = schema.get("$ref").and_then(Value::as_str).and_then(|path| path.strip_prefix('#'));
    if let Some(target) = reference.and_then(|path| root.pointer(path)) {
        collect_types(root, target, depth - 1, types);
    }
    for alternatives in ["anyOf", "oneOf"].iter().filter_map(|key| schema.get(*key)?.as_array()) {
        for alternative in alternatives {
            collect_types(root, alternative, depth - 1, types);
        }
    }
}
