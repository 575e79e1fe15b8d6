//! The environment that templates run in: `minijinja`'s, brought to the state in which Hugging Face's
//! `apply_chat_template` sets up Jinja2 (`transformers`, `utils/chat_template_utils.py`).

use std::fmt;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::{json, python, strings};

/// A template's `raise_exception`, on its way out of the renderer.
#[derive(Debug)]
pub(super) struct Refusal(pub(super) String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

/// An environment without templates.
pub(super) fn new() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_formatter(|output, _, value| Ok(fmt::Write::write_str(output, &python::str(value)?)?));
    environment.set_unknown_method_callback(strings::call_method);

    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);

    environment.add_filter("tojson", json::tojson);
    environment.add_filter("string", |value: &Value| python::str(value));
    environment.add_filter("trim", trim);
    environment.add_filter("join", join);
    environment.add_filter("items", items);

    environment.add_test("sequence", is_sequence);
    environment.add_test("iterable", is_iterable);
    environment.add_test("number", |value: &Value| {
        // Python's bool is an int.
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
    });
    environment
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let refusal = Refusal(python::str(message)?);
    Err(Error::new(ErrorKind::InvalidOperation, "raised by the template").with_source(refusal))
}

/// The local time in C's `strftime` notation.
fn strftime_now(format: &str) -> Result<String, Error> {
    strftime(&chrono::Local::now().naive_local(), format)
}

fn strftime(time: &chrono::NaiveDateTime, format: &str) -> Result<String, Error> {
    use chrono::format::StrftimeItems;
    let items = StrftimeItems::new(format).parse().map_err(|_| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not know the format {format:?}"))
    })?;
    Ok(time.format_with_items(items.iter()).to_string())
}

/// Jinja2 strips the characters of `characters`, or white space.
fn trim(value: &Value, characters: Option<&str>) -> Result<String, Error> {
    Ok(strings::strip(&python::str(value)?, characters).to_string())
}

/// Jinja2 joins the `str()` of each element, or of an attribute of each.
fn join(state: &State, value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let joiner = match args.first() {
        Some(joiner) => Some(joiner.clone()),
        None => kwargs.get::<Option<Value>>("d")?,
    };
    let attribute = match args.get(1) {
        Some(attribute) => Some(attribute.clone()),
        None => kwargs.get::<Option<Value>>("attribute")?,
    };
    kwargs.assert_all_used()?;
    let joiner = joiner.map_or(Ok(String::new()), |joiner| python::str(&joiner))?;
    let values = match attribute {
        None => value.clone(),
        Some(attribute) => {
            let by: Kwargs = [("attribute", attribute)].into_iter().collect();
            state.apply_filter("map", &[value.clone(), Value::from(by)])?
        }
    };
    let pieces = values.try_iter()?.map(|piece| python::str(&piece)).collect::<Result<Vec<_>, _>>()?;
    Ok(pieces.join(&joiner))
}

/// Pairs of a mapping; an undefined one has none, anything else is refused.
fn items(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() {
        return Ok(Value::from(Vec::<Value>::new()));
    }
    if value.kind() != ValueKind::Map {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("can only get item pairs from a mapping, not from a {}", value.kind()),
        ));
    }
    Ok(python::pairs(value).map(|(key, item)| Value::from(vec![key, item])).collect())
}

/// What has a length and elements by position or key: in Python also strings and mappings.
fn is_sequence(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined => true,
        ValueKind::Iterable => value.len().is_some(),
        _ => false,
    }
}

fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn strftime_prints_what_python_prints() {
        let time = chrono::NaiveDate::from_ymd_opt(2024, 3, 7).unwrap().and_hms_opt(9, 5, 2).unwrap();
        // Recorded from datetime(2024, 3, 7, 9, 5, 2).strftime(format) of CPython 3.12.
        for (format, expected) in [
            ("%Y-%m-%d", "2024-03-07"),
            ("%d %b %Y", "07 Mar 2024"),
            ("%A, %B %-d, %Y", "Thursday, March 7, 2024"),
            ("%H:%M:%S %p %I", "09:05:02 AM 09"),
            ("%y %j %a %%", "24 067 Thu %"),
        ] {
            assert_eq!(strftime(&time, format).unwrap(), expected, "{format}");
        }
        assert!(strftime(&time, "%Q").is_err());
    }
}
