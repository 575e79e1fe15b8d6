//! Typed access to the fields of a JSON object, with errors that name the field by its path.

use std::fmt::Display;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::ApiError;

/// One JSON object of a request and where it stands in the body.
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    /// The whole body.
    pub fn body(value: &'a Value) -> Result<Fields<'a>, ApiError> {
        match value {
            Value::Object(map) => Ok(Fields { map, path: String::new() }),
            other => Err(ApiError::malformed(format!("the body must be a JSON object, not {}", kind(other)))),
        }
    }

    /// An object inside the body, at `path`.
    pub fn at(value: &'a Value, path: impl Into<String>) -> Result<Fields<'a>, ApiError> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Fields { map, path }),
            other => Err(wrong_type(path, "an object", other)),
        }
    }

    /// Path of the field `name`.
    pub fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_string() } else { format!("{}.{name}", self.path) }
    }

    /// The field's value; `null` counts as absent.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        #[cfg(test)]
        RECORDED.with_borrow_mut(|fields| self.path.is_empty().then(|| fields.insert(name.to_string())));
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// A boolean.
    pub fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    /// A string.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.typed(name, "a string", Value::as_str)
    }

    /// A list.
    pub fn list(&self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        self.typed(name, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    /// An object.
    pub fn object(&self, name: &str) -> Result<Option<Fields<'a>>, ApiError> {
        self.get(name).map(|value| Fields::at(value, self.path(name))).transpose()
    }

    /// A number.
    pub fn number(&self, name: &str) -> Result<Option<f64>, ApiError> {
        self.typed(name, "a number", Value::as_f64)
    }

    /// A number within `range`.
    pub fn number_within(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let value = self.number(name)?;
        self.within(name, value, range)
    }

    /// A whole number within `range`. JSON knows one kind of number: `16.0` is as whole as `16`.
    pub fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let whole = |value: &Value| {
            let exact = value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from));
            let written = || value.as_f64().filter(|number| number.fract() == 0.0);
            exact.or_else(|| written().map(|number| number as i128))
        };
        let value = self.typed(name, "an integer", whole)?;
        let (low, high) = range.into_inner();
        let value = self.within(name, value, i128::from(low)..=i128::from(high))?;
        Ok(value.map(|value| value as i64))
    }

    /// Keys and values, in the order sent.
    pub fn entries(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.map.iter()
    }

    fn typed<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| wrong_type(self.path(name), expected, value)),
        }
    }

    fn within<T: PartialOrd + Display>(
        &self,
        name: &str,
        value: Option<T>,
        range: RangeInclusive<T>,
    ) -> Result<Option<T>, ApiError> {
        match value {
            Some(value) if !range.contains(&value) => {
                let path = self.path(name);
                let (low, high) = range.into_inner();
                let message = format!("`{path}` must lie between {low} and {high}, not {value}");
                Err(ApiError::invalid(path, message))
            }
            value => Ok(value),
        }
    }
}

#[cfg(test)]
thread_local! {
    /// The fields of bodies that were asked for in this thread.
    static RECORDED: std::cell::RefCell<std::collections::BTreeSet<String>> = const {
        std::cell::RefCell::new(std::collections::BTreeSet::new())
    };
}

/// What `read` gives, and which fields of a body it asked for, absent ones among them.
#[cfg(test)]
pub(crate) fn recorded<T>(read: impl FnOnce() -> T) -> (T, std::collections::BTreeSet<String>) {
    RECORDED.take();
    (read(), RECORDED.take())
}

/// The error for a value of the wrong JSON type.
pub fn wrong_type(path: impl Into<String>, expected: &str, found: &Value) -> ApiError {
    let path = path.into();
    let message = format!("`{path}` must be {expected}, not {}", kind(found));
    ApiError { code: Some("invalid_type"), ..ApiError::invalid(path, message) }
}

/// The error for a required field that is absent.
pub fn missing(path: impl Into<String>) -> ApiError {
    let path = path.into();
    let message = format!("`{path}` is required");
    ApiError { code: Some("missing_required_parameter"), ..ApiError::invalid(path, message) }
}

/// The error for a string at `path` that is none of `expected`, of which there is at least one.
pub fn not_among(path: impl Into<String>, expected: &[&str], found: &str) -> ApiError {
    let path = path.into();
    let quoted: Vec<String> = expected.iter().map(|name| format!("{name:?}")).collect();
    let expected = match quoted.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => quoted.concat(),
    };
    let message = format!("`{path}` must be {expected}, not {found:?}");
    ApiError::invalid(path, message)
}

/// What a JSON value is, for a sentence.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "this number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
