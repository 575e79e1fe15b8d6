//! What a grammar may hold at the most, checked before it is compiled.
//!
//! `llguidance` counts most of the work that it does and gives up by itself, but not all of it: its compiler recurses
//! over rules and references, so that a chain of them overflows the stack, which ends the process; some keywords
//! cost the square of their number; and a large divisor makes an automaton that takes minutes, in a thread that
//! nobody can stop. Each bound here is several times what the largest schemas in use need, and what it lets through
//! was measured to compile in seconds: see `docs/lab/constraints.md`.

use std::collections::HashSet;

use serde_json::{Deserializer, Value};

/// The longest text of a schema or of a grammar made of schemas, in bytes, written without spaces.
pub(super) const MAX_TEXT: usize = 512 * 1024;

/// The longest text of a grammar that a client wrote: a rule takes ten bytes of it and 3 KB of stack.
const MAX_GRAMMAR: usize = 64 * 1024;

/// Levels that a schema and all that its references name may be deep together, which is how deep they can lead.
const MAX_LEVELS: usize = 8_000;

/// Pairs of properties in the same object, over all objects: each costs about a microsecond.
const MAX_PAIRS: usize = 2_000_000;

/// The largest divisor of `multipleOf`, counted in units of its last decimal: the automaton has as many states.
const MAX_DIVISOR: f64 = 10_000.0;

/// How a Lark grammar embeds a schema.
const EMBEDDED: &str = "%json";

/// Checks a regular expression or a grammar that a client wrote, and the schemas in it.
pub(super) fn check_text(text: &str) -> Result<(), String> {
    if text.len() > MAX_GRAMMAR {
        return Err(format!("it is longer than {MAX_GRAMMAR} bytes"));
    }
    for (at, _) in text.match_indices(EMBEDDED) {
        let mut schema = Deserializer::from_str(&text[at + EMBEDDED.len()..]).into_iter::<Value>();
        // What is no JSON is for the compiler to refuse.
        if let Some(Ok(schema)) = schema.next() {
            check_schema(&schema)?;
        }
    }
    Ok(())
}

/// Checks a schema.
pub(super) fn check_schema(schema: &Value) -> Result<(), String> {
    let mut found = Found::default();
    found.add(schema)?;
    if found.pairs > MAX_PAIRS {
        return Err("its objects have too many properties".to_owned());
    }
    let deepest = depth(schema);
    // A way through references comes by each of them once; one that is not found here is as deep as can be.
    let target = |reference: &&str| reference.strip_prefix('#').and_then(|pointer| schema.pointer(pointer));
    let levels = found.references.iter().map(|reference| target(reference).map_or(deepest, depth));
    if deepest + levels.sum::<usize>() > MAX_LEVELS {
        return Err(format!("its references lead too deep: they may name {MAX_LEVELS} levels together"));
    }
    Ok(())
}

/// What is counted in a schema.
#[derive(Default)]
struct Found<'a> {
    references: HashSet<&'a str>,
    pairs: usize,
}

impl<'a> Found<'a> {
    /// Adds what is in `value`, whose depth the reader of JSON has bounded.
    fn add(&mut self, value: &'a Value) -> Result<(), String> {
        match value {
            Value::Array(values) => values.iter().try_for_each(|value| self.add(value)),
            Value::Object(members) => members.iter().try_for_each(|(key, value)| {
                match (key.as_str(), value) {
                    ("$ref", Value::String(reference)) => {
                        self.references.insert(reference);
                    }
                    ("properties" | "patternProperties", Value::Object(properties)) => {
                        self.pairs += properties.len() * properties.len();
                    }
                    ("multipleOf", Value::Number(divisor)) => check_divisor(divisor)?,
                    _ => {}
                }
                self.add(value)
            }),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Ok(()),
        }
    }
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(values) => 1 + values.iter().map(depth).max().unwrap_or(0),
        Value::Object(members) => 1 + members.values().map(depth).max().unwrap_or(0),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
    }
}

fn check_divisor(divisor: &serde_json::Number) -> Result<(), String> {
    let text = divisor.to_string();
    let decimals = text.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    // An exponent makes a number too large or too small for the bound, but for those near 1, which need none.
    let units = divisor.as_f64().unwrap_or(f64::INFINITY).abs() * 10f64.powi(decimals as i32);
    if text.contains(['e', 'E']) || units > MAX_DIVISOR {
        return Err(format!(
            "`multipleOf` {divisor} is too large a divisor; {MAX_DIVISOR} units of its last decimal are the most"
        ));
    }
    Ok(())
}
