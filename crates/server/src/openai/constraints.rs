//! What the answer must look like: `response_format`, the fields `regex` and `grammar`, and vLLM's names for them.
//!
//! | field | constraint |
//! |---|---|
//! | `response_format` `json_schema` | JSON of the schema; with `strict`, a keyword that cannot be enforced is refused |
//! | `response_format` `json_object` | any JSON object |
//! | `regex`, `guided_regex`, `structured_outputs.regex` | a regular expression |
//! | `grammar`, `guided_grammar`, `structured_outputs.grammar` | a Lark grammar |
//! | `guided_json`, `structured_outputs.json` | JSON of a schema |
//! | `guided_choice`, `structured_outputs.choice` | one of these texts |
//! | `structured_outputs.json_object` | any JSON object |
//!
//! A request names one of them.

use lily_engine::constraint::Constraint;
use serde_json::Value;

use super::fields::{Fields, missing, wrong_type};
use crate::error::ApiError;

/// A constraint and the field that asks for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// What is asked for.
    pub constraint: Constraint,
    /// Path of the field.
    pub field: String,
}

/// Reads the constraint of a request, if it has one.
pub fn asked(body: &Fields<'_>) -> Result<Option<Asked>, ApiError> {
    let mut found = Vec::new();
    found.extend(response_format(body)?);
    for (name, kind) in [("json", "guided_json"), ("regex", "guided_regex"), ("grammar", "guided_grammar")] {
        found.extend(named(body, kind, name)?);
    }
    found.extend(named(body, "guided_choice", "choice")?);
    for name in ["regex", "grammar"] {
        found.extend(named(body, name, name)?);
    }
    if let Some(outputs) = body.object("structured_outputs")? {
        for name in ["json", "regex", "grammar", "choice", "json_object"] {
            found.extend(named(&outputs, name, name)?);
        }
    }
    if let [first, second, ..] = found.as_slice() {
        let message = format!("`{}` and `{}` both constrain the answer; send one", first.field, second.field);
        return Err(ApiError::invalid(second.field.clone(), message));
    }
    Ok(found.pop())
}

fn response_format(body: &Fields<'_>) -> Result<Option<Asked>, ApiError> {
    let Some(format) = body.object("response_format")? else { return Ok(None) };
    let constraint = match format.text("type")?.ok_or_else(|| missing(format.path("type")))? {
        "text" => return Ok(None),
        "json_object" => Constraint::json_object(),
        "json_schema" => {
            let wrapped = format.object("json_schema")?.ok_or_else(|| missing(format.path("json_schema")))?;
            let schema = wrapped.get("schema").ok_or_else(|| missing(wrapped.path("schema")))?;
            let strict = wrapped.boolean("strict")?.unwrap_or(false);
            let field = wrapped.path("schema");
            return Ok(Some(Asked {
                constraint: Constraint::Json { schema: schema.clone(), strict },
                field,
            }));
        }
        other => {
            let message = format!(
                "`response_format.type` must be \"text\", \"json_object\" or \"json_schema\", not {other:?}"
            );
            return Err(ApiError::invalid("response_format", message));
        }
    };
    Ok(Some(Asked { constraint, field: "response_format".to_string() }))
}

/// The constraint in field `name`, whose form is that of `kind`.
fn named(fields: &Fields<'_>, name: &str, kind: &str) -> Result<Option<Asked>, ApiError> {
    let field = fields.path(name);
    let Some(value) = fields.get(name) else { return Ok(None) };
    let text = || value.as_str().map(str::to_string).ok_or_else(|| wrong_type(&*field, "a string", value));
    let constraint = match kind {
        "json" => {
            // Some clients send the schema as text.
            let schema = match value {
                Value::String(text) => serde_json::from_str(text).map_err(|error| {
                    ApiError::invalid(&*field, format!("`{field}` is no JSON schema: {error}"))
                })?,
                schema => schema.clone(),
            };
            Constraint::Json { schema, strict: false }
        }
        "json_object" => match fields.boolean(name)? {
            Some(true) => Constraint::json_object(),
            _ => return Ok(None),
        },
        "choice" => {
            let texts: Option<Vec<&str>> =
                value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
            let texts = texts.filter(|texts| !texts.is_empty());
            let texts = texts.ok_or_else(|| wrong_type(&*field, "a list of strings", value))?;
            let literals: Vec<String> = texts.iter().map(|text| Value::from(*text).to_string()).collect();
            Constraint::Lark(format!("start: {}", literals.join(" | ")))
        }
        "regex" => Constraint::Regex(text()?),
        _ => Constraint::Lark(text()?),
    };
    Ok(Some(Asked { constraint, field }))
}
