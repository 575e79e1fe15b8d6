//! Metal source as tokens, comments and white space kept, so that what is put together again has the same lines.

use std::fmt;

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A name or a keyword.
    Word,
    /// A number, with its suffix.
    Number,
    /// A string or a character, with its quotes.
    Literal,
    /// An operator or a bracket. `[[` and `]]` are two tokens each, since `a[b[i]]` ends with the latter.
    Mark,
    /// White space, comments, and whole lines of the preprocessor other than `#define`.
    Gap,
}

/// A piece of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// What it is.
    pub kind: Kind,
    /// Its text.
    pub text: String,
    /// Where it begins.
    pub place: Place,
    /// Whether it is part of a `#define`.
    pub in_macro: bool,
}

impl Token {
    /// Whether it is this name or mark.
    pub fn is(&self, text: &str) -> bool {
        matches!(self.kind, Kind::Word | Kind::Mark) && self.text == text
    }
}

/// A line of a file, as `#line` has it.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Place {
    /// The file.
    pub file: String,
    /// From 1.
    pub line: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// Marks of more than one character that must not fall apart.
const LONG_MARKS: [&str; 20] = [
    "<<=", ">>=", "...", "::", "->", "++", "--", "<<", "&&", "||", "==", "!=", "<=", ">=", "+=", "-=", "*=",
    "/=", "|=", "##",
];

/// Takes source apart. Joined again, the tokens are the source.
pub fn tokens(file: &str, source: &str) -> Vec<Token> {
    let mut out = Vec::new();
    let mut place = Place { file: file.into(), line: 1 };
    let mut rest = source;
    let mut in_macro = false;
    let mut at_line_start = true;
    while !rest.is_empty() {
        if at_line_start && rest.starts_with('#') && !is_define(rest) {
            let length = directive_length(rest);
            let (line, after) = rest.split_at(length);
            out.push(Token { kind: Kind::Gap, text: line.into(), place: place.clone(), in_macro: false });
            match line_directive(line) {
                // The number is that of the line after this one.
                Some((number, named)) => {
                    place.line = number.saturating_sub(1);
                    place.file = named.unwrap_or(place.file);
                }
                None => place.line += newlines(line),
            }
            rest = after;
            continue;
        }
        if at_line_start && rest.starts_with('#') {
            in_macro = true;
        }
        let (kind, length) = next(rest);
        let (text, after) = rest.split_at(length);
        let ends_line = text.contains('\n') && kind == Kind::Gap;
        // A line that is continued is still the macro's.
        if ends_line && !text.starts_with('\\') && !text.starts_with("/*") {
            in_macro = false;
        }
        out.push(Token { kind, text: text.into(), place: place.clone(), in_macro });
        place.line += newlines(text);
        if kind != Kind::Gap {
            at_line_start = false;
        } else if ends_line && !text.starts_with('\\') {
            at_line_start = true;
        }
        rest = after;
    }
    out
}

fn newlines(text: &str) -> u32 {
    text.bytes().filter(|&b| b == b'\n').count() as u32
}

fn is_define(line: &str) -> bool {
    line[1..].trim_start_matches([' ', '\t']).starts_with("define")
}

/// Up to the end of its line, which is not part of it, over lines that are continued.
fn directive_length(source: &str) -> usize {
    let bytes = source.as_bytes();
    (0..bytes.len()).find(|&i| bytes[i] == b'\n' && bytes[i - 1] != b'\\').unwrap_or(bytes.len())
}

fn line_directive(line: &str) -> Option<(u32, Option<String>)> {
    let rest = line[1..].trim_start().strip_prefix("line")?.trim();
    let (number, name) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let name = name.trim().trim_matches('"');
    Some((number.parse().ok()?, (!name.is_empty()).then(|| name.to_owned())))
}

/// Kind and length of the first token.
fn next(source: &str) -> (Kind, usize) {
    let bytes = source.as_bytes();
    let until =
        |from: usize, end: &str| source[from..].find(end).map_or(source.len(), |at| from + at + end.len());
    let first = source.chars().next().unwrap_or(' ');
    match first {
        '/' if source.starts_with("//") => (Kind::Gap, source.find('\n').unwrap_or(source.len())),
        '/' if source.starts_with("/*") => (Kind::Gap, until(2, "*/")),
        '\\' if source.starts_with("\\\n") => (Kind::Gap, 2),
        '\n' => (Kind::Gap, 1),
        c if c.is_whitespace() => {
            (Kind::Gap, source.find(|c: char| !c.is_whitespace() || c == '\n').unwrap_or(source.len()).max(1))
        }
        '"' | '\'' => {
            let mut at = 1;
            while at < bytes.len() && bytes[at] != first as u8 {
                at += 1 + usize::from(bytes[at] == b'\\');
            }
            (Kind::Literal, (at + 1).min(bytes.len()))
        }
        c if c.is_alphabetic() || c == '_' => {
            (Kind::Word, source.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(source.len()))
        }
        c if c.is_ascii_digit() || (c == '.' && bytes.get(1).is_some_and(u8::is_ascii_digit)) => {
            let mut at = 0;
            while at < bytes.len() {
                let sign = matches!(bytes[at], b'+' | b'-')
                    && (matches!(bytes[at - 1], b'p' | b'P')
                        || (matches!(bytes[at - 1], b'e' | b'E') && !source.starts_with("0x")));
                if !(bytes[at].is_ascii_alphanumeric() || bytes[at] == b'.' || bytes[at] == b'\'' || sign) {
                    break;
                }
                at += 1;
            }
            (Kind::Number, at)
        }
        _ => match LONG_MARKS.iter().find(|mark| source.starts_with(**mark)) {
            Some(mark) => (Kind::Mark, mark.len()),
            None => (Kind::Mark, first.len_utf8()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "#include <metal_stdlib>\n#define F(x) \\\n  (x + 1.5)\nkernel void k(device float* p [[buffer(0)]]) {\n\
                          #line 7 \"other.h\"\n  p[a[i]] = 0x1p-3 + 'c'; // done\n}";

    #[test]
    fn tokens_joined_are_the_source() {
        let all: String = tokens("k.metal", SOURCE).into_iter().map(|t| t.text).collect();
        assert_eq!(all, SOURCE);
    }

    #[test]
    fn a_token_knows_its_line_and_whether_it_is_a_macros() {
        let all = tokens("k.metal", SOURCE);
        let find = |text: &str| all.iter().find(|t| t.text == text).unwrap();
        assert_eq!(find("kernel").place.to_string(), "k.metal:4");
        assert_eq!(find("0x1p-3").place.to_string(), "other.h:7");
        assert!(find("1.5").in_macro && !find("kernel").in_macro);
    }
}
