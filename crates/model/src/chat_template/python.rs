//! `str()` and `repr()`: how Python prints a value.

use std::fmt::Write;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Nesting at which printing gives up; Python's own recursion limit is of this order.
pub(super) const MAX_DEPTH: usize = 500;

/// `str(value)`; an undefined value prints as nothing, as in Jinja2.
pub(super) fn str(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_string());
    }
    if value.is_undefined() {
        return Ok(String::new());
    }
    let mut out = String::new();
    repr(&mut out, value, 0)?;
    Ok(out)
}

fn repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Map => {
            out.push('{');
            for (index, (key, item)) in pairs(value).enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                repr(out, &key, depth + 1)?;
                out.push_str(": ");
                repr(out, &item, depth + 1)?;
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                repr(out, &item, depth + 1)?;
            }
            out.push(']');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// Keys and values of a mapping, in order.
pub(super) fn pairs(value: &Value) -> impl Iterator<Item = (Value, Value)> + use<> {
    value.as_object().and_then(|object| object.try_iter_pairs()).into_iter().flatten()
}

pub(super) fn too_deep() -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("a value is nested more than {MAX_DEPTH} deep"))
}

/// `repr` of an int or a float.
pub(super) fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => self::float(float),
        _ => value.to_string(),
    }
}

/// `float.__repr__`: the shortest digits that read back to the same number, with an exponent below 1e-4 and
/// from 1e16 on.
pub(super) fn float(value: f64) -> String {
    /// Decimal exponents that Python writes without an `e`.
    const PLAIN: std::ops::Range<i32> = -4..16;
    if value.is_nan() {
        return "nan".to_string();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_string();
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if PLAIN.contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

/// `repr` of a string: single quotes unless it holds some and no double ones.
fn quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if c == quote => {
                out.push('\\');
                out.push(c);
            }
            _ if is_printable(c) => out.push(c),
            _ => {
                // Writing to a String cannot fail.
                let _ = match c as u32 {
                    code @ 0..=0xFF => write!(out, "\\x{code:02x}"),
                    code @ 0x100..=0xFFFF => write!(out, "\\u{code:04x}"),
                    code => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// Python's `str.isprintable` of one character. The standard library escapes by the same Unicode categories
/// where it prints a string for debugging, apart from quotes and backslashes, and apart from combining
/// characters at the very start.
fn is_printable(c: char) -> bool {
    matches!(c, '"' | '\'' | '\\') || format!("a{c}").escape_debug().nth(1) == Some(c)
}

#[cfg(test)]
mod tests {
    use minijinja::Value;

    #[test]
    fn values_print_as_python_prints_them() {
        // Recorded from str(json.loads(text)) of CPython 3.12.
        for (json, expected) in [
            ("true", "True"),
            ("null", "None"),
            ("0", "0"),
            ("18446744073709551615", "18446744073709551615"),
            ("-9223372036854775808", "-9223372036854775808"),
            ("1.0", "1.0"),
            ("-0.0", "-0.0"),
            ("0.1", "0.1"),
            ("3.141592653589793", "3.141592653589793"),
            ("1e15", "1000000000000000.0"),
            ("1e16", "1e+16"),
            ("1.5e300", "1.5e+300"),
            ("0.0001", "0.0001"),
            ("0.00001", "1e-05"),
            ("5e-324", "5e-324"),
            ("123456789.123456789", "123456789.12345679"),
            ("9007199254740993.0", "9007199254740992.0"),
            (r#"["a", 1, 2.0, false, null]"#, "['a', 1, 2.0, False, None]"),
            (r#"{"it's": {"x": []}, "b": "say \"hi\""}"#, r#"{"it's": {'x': []}, 'b': 'say "hi"'}"#),
            (
                r#"["both ' and \"", "\\ \n \t \u0001 \u00a0 \u200b é 日 😀"]"#,
                r#"['both \' and "', '\\ \n \t \x01 \xa0 \u200b é 日 😀']"#,
            ),
        ] {
            let value: serde_json::Value = serde_json::from_str(json).unwrap();
            assert_eq!(super::str(&Value::from_serialize(value)).unwrap(), expected, "{json}");
        }
    }
}
