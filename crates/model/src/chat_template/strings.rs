//! The methods of Python strings, lists and mappings.
//!
//! `minijinja-contrib` has most of them. Those below differ from Python there, or are missing: Python's
//! white space includes the separators U+001C to U+001F, positions count characters and not bytes, and
//! texts without letters are neither lower nor upper case.

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

/// Calls `method` of `value`, for methods that `minijinja` itself does not have.
pub(super) fn call_method(
    state: &State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(text, method, args)
    {
        return result;
    }
    // A slice or a filter's result is a list in Python too.
    if value.kind() == ValueKind::Iterable {
        let list: Value = value.try_iter()?.collect();
        return pycompat::unknown_method_callback(state, &list, method, args);
    }
    pycompat::unknown_method_callback(state, value, method, args)
}

/// `None` where the method is not one of those that are done here.
fn string_method(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    Some(match method {
        "strip" => stripped(text, args, strip),
        "lstrip" => stripped(text, args, lstrip),
        "rstrip" => stripped(text, args, rstrip),
        "split" => split(text, args, false),
        "rsplit" => split(text, args, true),
        "splitlines" => from_args(args).map(|(keep_ends,): (Option<bool>,)| {
            lines(text, keep_ends.unwrap_or(false)).into_iter().map(Value::from).collect()
        }),
        "partition" => from_args(args).and_then(|(separator,): (&str,)| {
            let found = nonempty(separator).map(|()| text.split_once(separator))?;
            let (head, tail) = found.unwrap_or((text, ""));
            Ok([head, if found.is_some() { separator } else { "" }, tail]
                .map(Value::from)
                .into_iter()
                .collect())
        }),
        "rpartition" => from_args(args).and_then(|(separator,): (&str,)| {
            let found = nonempty(separator).map(|()| text.rsplit_once(separator))?;
            let (head, tail) = found.unwrap_or(("", text));
            Ok([head, if found.is_some() { separator } else { "" }, tail]
                .map(Value::from)
                .into_iter()
                .collect())
        }),
        "removeprefix" => {
            from_args(args).map(|(prefix,): (&str,)| Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            from_args(args).map(|(suffix,): (&str,)| Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "find" => from_args(args).map(|(what,): (&str,)| position(text, text.find(what))),
        "rfind" => from_args(args).map(|(what,): (&str,)| position(text, text.rfind(what))),
        "count" => from_args(args).map(|(what,): (&str,)| Value::from(text.matches(what).count())),
        "islower" => from_args(args).map(|()| Value::from(has_only_case(text, char::is_lowercase))),
        "isupper" => from_args(args).map(|()| Value::from(has_only_case(text, char::is_uppercase))),
        "isspace" => from_args(args).map(|()| is_all(text, is_space)),
        "isdigit" | "isnumeric" => from_args(args).map(|()| is_all(text, char::is_numeric)),
        "isalnum" => from_args(args).map(|()| is_all(text, char::is_alphanumeric)),
        "isalpha" => from_args(args).map(|()| is_all(text, char::is_alphabetic)),
        _ => return None,
    })
}

/// White space as Python's `str.strip` and `str.split` see it.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Text without the given characters, or white space, at both ends.
pub(super) fn strip<'t>(text: &'t str, characters: Option<&str>) -> &'t str {
    lstrip(rstrip(text, characters), characters)
}

fn lstrip<'t>(text: &'t str, characters: Option<&str>) -> &'t str {
    match characters {
        Some(characters) => text.trim_start_matches(|c| characters.contains(c)),
        None => text.trim_start_matches(is_space),
    }
}

fn rstrip<'t>(text: &'t str, characters: Option<&str>) -> &'t str {
    match characters {
        Some(characters) => text.trim_end_matches(|c| characters.contains(c)),
        None => text.trim_end_matches(is_space),
    }
}

fn stripped(
    text: &str,
    args: &[Value],
    strip: for<'t> fn(&'t str, Option<&str>) -> &'t str,
) -> Result<Value, Error> {
    let (characters,): (Option<&str>,) = from_args(args)?;
    Ok(Value::from(strip(text, characters)))
}

/// `split(sep=None, maxsplit=-1)` and, from the right, `rsplit`.
fn split(text: &str, args: &[Value], from_right: bool) -> Result<Value, Error> {
    let (args, kwargs): (Rest<Value>, Kwargs) = from_args(args)?;
    let argument = |index: usize, name: &str| match args.get(index) {
        Some(given) => Ok(Some(given.clone())),
        None => kwargs.get::<Option<Value>>(name),
    };
    let separator = argument(0, "sep")?.filter(|given| !given.is_none());
    let most = match argument(1, "maxsplit")? {
        Some(most) => usize::try_from(i64::try_from(most)?).unwrap_or(usize::MAX),
        None => usize::MAX,
    };
    kwargs.assert_all_used()?;

    let pieces: Vec<&str> = match &separator {
        Some(separator) => {
            let separator = separator.as_str().ok_or_else(|| {
                Error::new(ErrorKind::InvalidOperation, "split takes a string or none to split at")
            })?;
            nonempty(separator)?;
            let pieces = most.saturating_add(1);
            if from_right {
                let mut pieces: Vec<&str> = text.rsplitn(pieces, separator).collect();
                pieces.reverse();
                pieces
            } else {
                text.splitn(pieces, separator).collect()
            }
        }
        None if from_right => {
            let mut pieces = Vec::new();
            let mut rest = rstrip(text, None);
            while !rest.is_empty() {
                match rest.char_indices().rev().find(|&(_, c)| is_space(c)) {
                    Some((at, c)) if pieces.len() < most => {
                        pieces.push(&rest[at + c.len_utf8()..]);
                        rest = rstrip(&rest[..at], None);
                    }
                    _ => {
                        pieces.push(rest);
                        rest = "";
                    }
                }
            }
            pieces.reverse();
            pieces
        }
        None => {
            let mut pieces = Vec::new();
            let mut rest = lstrip(text, None);
            while !rest.is_empty() {
                match rest.find(is_space) {
                    Some(at) if pieces.len() < most => {
                        pieces.push(&rest[..at]);
                        rest = lstrip(&rest[at..], None);
                    }
                    _ => {
                        pieces.push(rest);
                        rest = "";
                    }
                }
            }
            pieces
        }
    };
    Ok(pieces.into_iter().map(Value::from).collect())
}

/// `splitlines`: Python ends lines at more characters than the line feed.
fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    let ends_line = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    while !rest.is_empty() {
        let end = rest.find(ends_line).unwrap_or(rest.len());
        let terminator = match rest[end..].chars().next() {
            Some('\r') if rest[end..].starts_with("\r\n") => 2,
            Some(c) => c.len_utf8(),
            None => 0,
        };
        lines.push(&rest[..if keep_ends { end + terminator } else { end }]);
        rest = &rest[end + terminator..];
    }
    lines
}

fn nonempty(separator: &str) -> Result<(), Error> {
    if separator.is_empty() {
        return Err(Error::new(ErrorKind::InvalidOperation, "cannot split at an empty separator"));
    }
    Ok(())
}

/// A byte offset as the number of characters before it; -1 for none.
fn position(text: &str, byte: Option<usize>) -> Value {
    match byte {
        Some(byte) => Value::from(text[..byte].chars().count()),
        None => Value::from(-1),
    }
}

/// Whether all cased characters are of one case, and there is one.
fn has_only_case(text: &str, case: fn(char) -> bool) -> bool {
    let mut cased = text.chars().filter(|c| c.is_lowercase() || c.is_uppercase()).peekable();
    cased.peek().is_some() && cased.all(case)
}

/// Python's `is…` methods are false for the empty string.
fn is_all(text: &str, property: fn(char) -> bool) -> Value {
    Value::from(!text.is_empty() && text.chars().all(property))
}
