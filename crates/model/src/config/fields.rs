//! Typed access to the fields of a JSON object, with refusals in words.

use serde_json::{Map, Value};

use crate::error::Refusal;

/// Longest value that a refusal quotes, in characters.
const SHOWN_VALUE: usize = 80;

/// A value as a refusal quotes it.
pub fn show(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN_VALUE) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Typed access to one object, collecting refusals.
pub struct Fields<'a> {
    /// The object.
    pub object: &'a Map<String, Value>,
    /// What stands before its fields' names in messages.
    pub prefix: &'a str,
    /// What was refused so far.
    pub refusals: Vec<Refusal>,
}

impl<'a> Fields<'a> {
    /// The value of `field`; null counts as absent.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|v| !v.is_null())
    }

    /// Refuses the value `found` of `field`.
    pub fn refuse(&mut self, field: &str, found: String, supported: &str) {
        let field = format!("{}{field}", self.prefix);
        self.refusals.push(Refusal::Field { field, found, supported: supported.into() });
    }

    /// Refuses every value of `field` but `supported`; absent is accepted.
    pub fn only(&mut self, field: &str, supported: &Value) {
        if let Some(found) = self.get(field).filter(|v| *v != supported) {
            self.refuse(field, show(found), &supported.to_string());
        }
    }

    /// A required size from 1 to `max`; 0 stands for one that was refused.
    pub fn size(&mut self, field: &str, max: u64) -> usize {
        let found = self.get(field);
        match found.and_then(Value::as_u64) {
            Some(n) if (1..=max).contains(&n) => n as usize,
            _ => {
                let found = found.map_or("missing".into(), show);
                self.refuse(field, found, &format!("whole numbers from 1 to {max}"));
                0
            }
        }
    }

    /// A number, where there is one.
    pub fn number(&mut self, field: &str) -> Option<f64> {
        let found = self.get(field)?;
        if found.as_f64().is_none() {
            self.refuse(field, show(found), "a number");
        }
        found.as_f64()
    }

    /// A truth value, where there is one.
    pub fn bool(&mut self, field: &str) -> Option<bool> {
        let found = self.get(field)?;
        if found.as_bool().is_none() {
            self.refuse(field, show(found), "true and false");
        }
        found.as_bool()
    }
}
