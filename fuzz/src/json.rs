//! JSON made of arbitrary bytes: any at all, or such that a schema allows.

use arbitrary::{Result, Unstructured};
use serde_json::{Map, Number, Value};

/// Levels below which nothing is nested.
const DEEPEST: usize = 12;
/// Levels of [`nested`]: more than the server's JSON reader and the chat template take.
const NESTED: usize = 200;
/// Most members of what is made up.
const LONGEST: usize = 4;
/// Texts that mean something somewhere.
const WORDS: [&str; 40] = [
    "",
    " ",
    "\n",
    "a",
    "user",
    "assistant",
    "system",
    "tool",
    "developer",
    "text",
    "f",
    "function",
    "auto",
    "required",
    "none",
    "json_object",
    "json_schema",
    "high",
    "input_text",
    "output_text",
    "tool_use",
    "tool_result",
    "thinking",
    "object",
    "string",
    "integer",
    "array",
    "call_1",
    "é日😀",
    "a\u{301}\r\0",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<parameter=x>",
    "{\"a\": 1}",
    "lily-demo",
];
/// Numbers at which something begins or ends.
const NUMBERS: [f64; 16] = [
    0.0,
    1.0,
    2.0,
    -1.0,
    0.5,
    1.5,
    16.0,
    17.0,
    64.0,
    1024.0,
    4096.0,
    4294967295.0,
    4294967296.0,
    1e19,
    1e300,
    -0.0,
];

/// Any value.
pub fn value(u: &mut Unstructured<'_>, depth: usize) -> Result<Value> {
    Ok(match u.int_in_range(0..=if depth < DEEPEST { 7 } else { 3 })? {
        0 => Value::Null,
        1 => Value::Bool(u.arbitrary()?),
        2 => number(u)?,
        3 => Value::String(text(u)?),
        4 => nested(u)?,
        5 => (0..u.int_in_range(0..=LONGEST)?).map(|_| value(u, depth + 1)).collect::<Result<_>>()?,
        _ => {
            let mut map = Map::new();
            for _ in 0..u.int_in_range(0..=LONGEST)? {
                map.insert(text(u)?, value(u, depth + 1)?);
            }
            Value::Object(map)
        }
    })
}

/// A known word, words joined, or any text.
pub fn text(u: &mut Unstructured<'_>) -> Result<String> {
    Ok(match u.int_in_range(0..=3)? {
        0 => u.arbitrary::<&str>()?.to_string(),
        1 => {
            let words = (0..u.int_in_range(1..=LONGEST)?).map(|_| u.choose(&WORDS).copied());
            words.collect::<Result<String>>()?
        }
        _ => u.choose(&WORDS)?.to_string(),
    })
}

fn number(u: &mut Unstructured<'_>) -> Result<Value> {
    Ok(match u.int_in_range(0..=3)? {
        0 => Value::from(u.arbitrary::<i64>()?),
        1 => Number::from_f64(u.arbitrary()?).map_or(Value::Null, Value::Number),
        _ => {
            let number = *u.choose(&NUMBERS)?;
            let whole = number as i64;
            if whole as f64 == number { Value::from(whole) } else { Value::from(number) }
        }
    })
}

/// Lists or objects in one another.
fn nested(u: &mut Unstructured<'_>) -> Result<Value> {
    let mut value = Value::String(text(u)?);
    let lists = u.arbitrary()?;
    for _ in 0..u.int_in_range(0..=NESTED)? {
        value = if lists {
            Value::Array(vec![value])
        } else {
            Value::Object([("a".to_string(), value)].into_iter().collect())
        };
    }
    Ok(value)
}

/// A value that `schema` of an OpenAPI `document` allows; now and then one that it does not.
pub fn allowed(u: &mut Unstructured<'_>, document: &Value, schema: &Value, depth: usize) -> Result<Value> {
    if depth > DEEPEST || u.ratio(1, 24)? {
        return value(u, depth);
    }
    if let Some(reference) = schema["$ref"].as_str() {
        let schema = document.pointer(reference.trim_start_matches('#')).unwrap_or(&Value::Null);
        return allowed(u, document, schema, depth + 1);
    }
    for choice in ["oneOf", "anyOf", "enum"] {
        if let Some(options) = schema[choice].as_array().filter(|options| !options.is_empty()) {
            let option = u.choose(options)?;
            return if choice == "enum" {
                Ok(option.clone())
            } else {
                allowed(u, document, option, depth + 1)
            };
        }
    }
    if let Some(parts) = schema["allOf"].as_array() {
        let mut whole = Map::new();
        for part in parts {
            if let Value::Object(part) = allowed(u, document, part, depth + 1)? {
                whole.extend(part);
            }
        }
        return Ok(Value::Object(whole));
    }
    if let Some(value) = schema.get("const") {
        return Ok(value.clone());
    }
    let kind = match &schema["type"] {
        Value::Array(kinds) if !kinds.is_empty() => u.choose(kinds)?,
        kind => kind,
    };
    Ok(match kind.as_str() {
        Some("null") => Value::Null,
        Some("boolean") => Value::Bool(u.arbitrary()?),
        Some("integer" | "number") => number(u)?,
        Some("string") => Value::String(text(u)?),
        Some("array") => {
            let items =
                (0..u.int_in_range(0..=LONGEST)?).map(|_| allowed(u, document, &schema["items"], depth + 1));
            items.collect::<Result<_>>()?
        }
        Some("object") => object(u, document, schema, depth)?,
        _ => value(u, depth)?,
    })
}

fn object(u: &mut Unstructured<'_>, document: &Value, schema: &Value, depth: usize) -> Result<Value> {
    let mut map = Map::new();
    for (name, schema_of_it) in schema["properties"].as_object().into_iter().flatten() {
        let required = schema["required"].as_array().is_some_and(|names| names.iter().any(|it| it == name));
        let (part, whole) = if required { (30, 31) } else { (1, 5) };
        if u.ratio(part, whole)? {
            map.insert(name.clone(), allowed(u, document, schema_of_it, depth + 1)?);
        }
    }
    if u.ratio(1, 12)? {
        map.insert(text(u)?, value(u, depth + 1)?);
    }
    Ok(Value::Object(map))
}
