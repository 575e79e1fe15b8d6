//! The types that tools declare for their parameters.

use std::collections::HashMap;

use serde_json::Value;

/// How many `$ref`, `anyOf` and `oneOf` may be nested before a type counts as unknown; hostile schemas refer
/// to themselves.
const MAX_DEPTH: usize = 8;

/// How a value is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// As the text of a string.
    String,
    /// As JSON, as long as it is JSON of the declared type.
    Json,
    /// More of it has to be seen.
    Open,
}

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

    /// The types that parameter `key` of `tool` may have; none where nothing is declared.
    pub(super) fn types(&self, tool: &str, key: &str) -> Vec<&str> {
        let Some(root) = self.parameters.get(tool) else { return Vec::new() };
        let schema = resolve(root, root).get("properties").and_then(|properties| properties.get(key));
        schema.map(|schema| declared_types(root, schema)).unwrap_or_default()
    }

    /// How a value is written of which `text` is the beginning.
    pub(super) fn spelling(&self, tool: &str, key: &str, text: &str) -> Spelling {
        let types = self.types(tool, key);
        let text = text.trim();
        if types.contains(&"string") {
            let may_be_null =
                types.contains(&"null") && ["null", "None"].iter().any(|null| null.starts_with(text));
            return if may_be_null { Spelling::Open } else { Spelling::String };
        }
        match text.chars().next() {
            _ if !types.is_empty() => Spelling::Json,
            None => Spelling::Open,
            Some('[' | '{') => Spelling::Json,
            Some(_) => Spelling::String,
        }
    }

    /// `value` as JSON text, by the declared type of parameter `key` of `tool`: see the
    /// [module's page](crate::tool_calls#arguments).
    pub(super) fn to_json(&self, tool: &str, key: &str, value: &str) -> String {
        let types = self.types(tool, key);
        let literal = value.trim();
        // In a list, as it will stand in an object: JSON that is nested too deep for a reader is no JSON.
        let json = serde_json::from_str::<[Value; 1]>(&format!("[{literal}]"));
        let taken_over = match (json, literal) {
            (Ok([json]), _) if is_allowed(&json, &types) => literal,
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

/// The schema that `schema` refers to, if it does.
pub(crate) fn resolve<'a>(root: &'a Value, schema: &'a Value) -> &'a Value {
    let mut schema = schema;
    for _ in 0..MAX_DEPTH {
        let path = schema.get("$ref").and_then(Value::as_str).and_then(|path| path.strip_prefix('#'));
        match path.and_then(|path| root.pointer(path)) {
            Some(target) => schema = target,
            None => break,
        }
    }
    schema
}

/// The types that `schema` names, through references into `root` and alternatives; those of its values where it
/// lists values and names no type.
pub(crate) fn declared_types<'a>(root: &'a Value, schema: &'a Value) -> Vec<&'a str> {
    let mut types = Vec::new();
    collect_types(root, schema, MAX_DEPTH, &mut types);
    types
}

fn collect_types<'a>(root: &'a Value, schema: &'a Value, depth: usize, types: &mut Vec<&'a str>) {
    if depth == 0 {
        return;
    }
    match schema.get("type") {
        Some(Value::String(name)) => types.push(name),
        Some(Value::Array(names)) => types.extend(names.iter().filter_map(Value::as_str)),
        _ => {
            types.extend(schema.get("enum").and_then(Value::as_array).into_iter().flatten().map(type_name));
            types.extend(schema.get("const").map(type_name));
        }
    }
    let reference = schema.get("$ref").and_then(Value::as_str).and_then(|path| path.strip_prefix('#'));
    if let Some(target) = reference.and_then(|path| root.pointer(path)) {
        collect_types(root, target, depth - 1, types);
    }
    for alternatives in ["anyOf", "oneOf", "allOf"].iter().filter_map(|key| schema.get(*key)?.as_array()) {
        for alternative in alternatives {
            collect_types(root, alternative, depth - 1, types);
        }
    }
}

/// JSON Schema's name for the type of a value.
fn type_name<'a>(value: &Value) -> &'a str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}
