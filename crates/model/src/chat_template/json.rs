//! The filter `tojson`, which Hugging Face replaces by Python's `json.dumps(value, ensure_ascii=False, …)`:
//! `", "` and `": "` between elements, keys in their own order, nothing escaped for HTML.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::python;

/// How to print, as the keyword arguments of `json.dumps` say it.
struct Style {
    ensure_ascii: bool,
    /// What one level of nesting is indented by; everything on one line where absent.
    indent: Option<String>,
    between_items: String,
    after_key: String,
    sort_keys: bool,
}

/// `value | tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let argument = |index: usize, name: &str| match args.get(index) {
        Some(given) => Ok(Some(given.clone())),
        None => kwargs.get::<Option<Value>>(name),
    };
    let ensure_ascii = argument(0, "ensure_ascii")?.is_some_and(|flag| flag.is_true());
    let indent = match argument(1, "indent")? {
        Some(indent) if indent.is_none() => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_string(),
            // Python indents by nothing, on lines of their own, where the number is negative.
            None => " ".repeat(checked_indent(i64::try_from(indent)?)?),
        }),
        None => None,
    };
    let separators = argument(2, "separators")?.filter(|given| !given.is_none());
    let (between_items, after_key) = match separators {
        Some(pair) => {
            let pair = pair.try_iter()?.map(|text| python::str(&text)).collect::<Result<Vec<_>, _>>()?;
            let [between_items, after_key] = <[String; 2]>::try_from(pair).map_err(|_| {
                Error::new(ErrorKind::InvalidOperation, "separators must be a pair of strings")
            })?;
            (between_items, after_key)
        }
        None if indent.is_some() => (",".to_string(), ": ".to_string()),
        None => (", ".to_string(), ": ".to_string()),
    };
    let sort_keys = argument(3, "sort_keys")?.is_some_and(|flag| flag.is_true());
    kwargs.assert_all_used()?;

    let style = Style { ensure_ascii, indent, between_items, after_key, sort_keys };
    let mut out = String::new();
    style.print(&mut out, value, 0)?;
    Ok(out)
}

/// Indents beyond this serve no reader and would multiply into the size of memory.
fn checked_indent(spaces: i64) -> Result<usize, Error> {
    const WIDEST: i64 = 64;
    if spaces > WIDEST {
        let message = format!("tojson indents by at most {WIDEST} spaces, not {spaces}");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    Ok(usize::try_from(spaces).unwrap_or(0))
}

impl Style {
    fn print(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > python::MAX_DEPTH {
            return Err(python::too_deep());
        }
        match value.kind() {
            ValueKind::String => self.string(out, value.as_str().unwrap_or_default()),
            ValueKind::Map => {
                let mut pairs: Vec<(String, Value)> = python::pairs(value)
                    .map(|(key, item)| Ok((key_text(&key)?, item)))
                    .collect::<Result<_, Error>>()?;
                if self.sort_keys {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                out.push('{');
                let empty = pairs.is_empty();
                for (index, (key, item)) in pairs.iter().enumerate() {
                    self.before_item(out, index, depth);
                    self.string(out, key);
                    out.push_str(&self.after_key);
                    self.print(out, item, depth + 1)?;
                }
                self.before_end(out, empty, depth);
                out.push('}');
            }
            ValueKind::Seq | ValueKind::Iterable => {
                out.push('[');
                let mut empty = true;
                for (index, item) in value.try_iter()?.enumerate() {
                    empty = false;
                    self.before_item(out, index, depth);
                    self.print(out, &item, depth + 1)?;
                }
                self.before_end(out, empty, depth);
                out.push(']');
            }
            _ => out.push_str(&scalar(value)?),
        }
        Ok(())
    }

    fn before_item(&self, out: &mut String, index: usize, depth: usize) {
        if index > 0 {
            out.push_str(&self.between_items);
        }
        self.new_line(out, depth + 1);
    }

    fn before_end(&self, out: &mut String, empty: bool, depth: usize) {
        if !empty {
            self.new_line(out, depth);
        }
    }

    fn new_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn string(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                _ if c < ' ' || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a String cannot fail.
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                _ => out.push(c),
            }
        }
        out.push('"');
    }
}

/// A key as JSON spells it: Python turns numbers, booleans and None into text.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.as_str() {
        Some(text) => Ok(text.to_string()),
        None => scalar(key),
    }
}

fn scalar(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::None => Ok("null".to_string()),
        ValueKind::Bool => Ok(value.is_true().to_string()),
        ValueKind::Number => Ok(match python::number(value).as_str() {
            "nan" => "NaN".to_string(),
            "inf" => "Infinity".to_string(),
            "-inf" => "-Infinity".to_string(),
            finite => finite.to_string(),
        }),
        kind => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("tojson cannot print a value of type {kind}"),
        )),
    }
}
