//! The same source as C++ in which an address space is part of a type, to be looked at and never run.
//!
//! C++ has one qualifier that a pointer cannot lose by itself and that means nothing else here: `volatile`. So the
//! source is written out four times, each time with another address space as `volatile` and the rest as nothing. A
//! pointer of one space that is used as one of another loses the qualifier where its own space has it, and the
//! compiler says so; where a cast takes it away, `-Wcast-qual` does.
//!
//! A thread's own variables have no keyword. Those whose address is taken, and arrays, get the qualifier where
//! `thread` has it, if they are of Metal's own types; structures do not, nor do pointers to them, since C++
//! would not copy them then.

use std::collections::HashSet;

use super::tokens::{Kind, Token};
use super::translate::{SPACES, is_unsuffixed_real};

/// Names of Metal's scalar types.
const SCALARS: [&str; 21] = [
    "bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float",
    "size_t", "int8_t", "uint8_t", "int16_t", "uint16_t", "int32_t", "uint32_t", "int64_t", "uint64_t",
];

/// Whether a name is that of a number or of a vector of them.
pub(super) fn is_builtin(name: &str) -> bool {
    let base = name.strip_prefix("packed_").unwrap_or(name);
    let scalar = |name: &str| SCALARS.contains(&name);
    scalar(base) || base.strip_suffix(['2', '3', '4']).is_some_and(scalar)
}

/// C++ to be compiled for its errors alone, with `LILY_SPACES` defined.
pub fn spaces(name: &str, tokens: &[Token]) -> String {
    let mut out = String::from("#include <metal_stdlib>\n");
    for space in SPACES {
        let mut pass = Pass {
            tokens,
            space,
            taken: addresses(tokens),
            out: String::new(),
            depth: 0,
            structures: vec![],
        };
        pass.run();
        out.push_str(&format!("namespace lily_{space} {{\n#line 1 \"{name}\"\n{}\n}}\n", pass.out));
    }
    out
}

/// Names whose address is taken somewhere.
fn addresses(tokens: &[Token]) -> HashSet<&str> {
    let solid: Vec<&Token> = tokens.iter().filter(|t| t.kind != Kind::Gap).collect();
    let operand = |t: &Token| t.kind != Kind::Mark || [")", "]"].contains(&t.text.as_str());
    solid
        .windows(3)
        .filter(|w| w[1].is("&") && (!operand(w[0]) || w[0].is("return")) && w[2].kind == Kind::Word)
        .map(|w| w[2].text.as_str())
        .collect()
}

struct Pass<'a> {
    tokens: &'a [Token],
    /// The address space that is `volatile` here.
    space: &'a str,
    taken: HashSet<&'a str>,
    out: String,
    /// Open brackets of any kind.
    depth: usize,
    /// Of the open braces, whether each is that of a structure.
    structures: Vec<bool>,
}

impl<'a> Pass<'a> {
    fn seek(&self, mut at: usize) -> usize {
        while self.tokens.get(at).is_some_and(|t| t.kind == Kind::Gap) {
            at += 1;
        }
        at
    }

    fn text(&self, at: usize) -> &'a str {
        self.tokens.get(at).map_or("", |t| &t.text)
    }

    fn before(&self, at: usize) -> &'a str {
        self.tokens[..at].iter().rev().find(|t| t.kind != Kind::Gap).map_or("", |t| &t.text)
    }

    fn run(&mut self) {
        let mut at = 0;
        let mut structure = false;
        while at < self.tokens.len() {
            let token = &self.tokens[at];
            let text = token.text.as_str();
            match text {
                _ if token.kind == Kind::Gap => self.out.push_str(text),
                "[" if self.text(at + 1) == "[" => {
                    let mut depth = 0;
                    while at < self.tokens.len() {
                        match self.text(at) {
                            "[" => depth += 1,
                            "]" => depth -= 1,
                            gap if gap.contains('\n') => self.out.push('\n'),
                            _ => {}
                        }
                        at += 1;
                        if depth == 0 {
                            break;
                        }
                    }
                    continue;
                }
                "kernel" => {}
                _ if token.kind == Kind::Word && SPACES.contains(&text) => self.qualifier(at),
                _ if token.kind == Kind::Number && is_unsuffixed_real(text) => {
                    self.out.push_str(text);
                    self.out.push('f');
                }
                _ => {
                    match text {
                        "struct" | "class" | "union" => structure = true,
                        ";" | "(" => structure = false,
                        "{" => {
                            self.structures.push(structure);
                            structure = false;
                        }
                        "}" => {
                            self.structures.pop();
                        }
                        _ => {}
                    }
                    if !token.in_macro {
                        match text {
                            "{" | "(" | "[" => self.depth += 1,
                            "}" | ")" | "]" => self.depth = self.depth.saturating_sub(1),
                            _ => {}
                        }
                    }
                    if self.space == "thread" && self.begins_own_variable(at) {
                        self.out.push_str("volatile ");
                    }
                    self.out.push_str(text);
                }
            }
            at += 1;
        }
    }

    fn qualifier(&mut self, at: usize) {
        let text = self.text(at);
        let next = self.text(self.seek(at + 1));
        let fixed = |t: &str| t == "const" || t == "constexpr";
        // What is constant at program scope and no pointer is a number for the compiler.
        let object = text == "constant" && self.depth == 0 && self.declares_object(at);
        let compile_time = next == "constexpr" || self.before(at) == "constexpr";
        let mut words = Vec::new();
        if text == "constant" && !fixed(next) && !fixed(self.before(at)) {
            words.push("const");
        }
        if text == self.space && !object && !compile_time && (text != "thread" || self.is_of_builtin(at)) {
            words.push("volatile");
        }
        self.out.push_str(&words.join(" "));
    }

    /// Whether what begins at `at` is declared without a pointer, a reference or an array.
    fn declares_object(&self, at: usize) -> bool {
        let end =
            self.tokens[at..].iter().find(|t| ["*", "&", "[", "(", "=", ";", "{"].contains(&t.text.as_str()));
        end.is_some_and(|t| ["=", ";", "{"].contains(&t.text.as_str()))
    }

    /// Whether the `thread` at `at` qualifies one of Metal's own types.
    fn is_of_builtin(&self, at: usize) -> bool {
        let mut next = self.seek(at + 1);
        while ["const", "volatile", "metal", "::"].contains(&self.text(next)) {
            next = self.seek(next + 1);
        }
        is_builtin(self.text(next)) || is_builtin(self.before(at))
    }

    /// Whether a statement begins at `at` that declares an array of Metal's own types, or a variable of one whose address
    /// is taken.
    fn begins_own_variable(&self, at: usize) -> bool {
        let statement = ["{", "}", ";"].contains(&self.before(at));
        if !statement
            || self.structures.last().is_none_or(|&structure| structure)
            || !is_builtin(self.text(at))
        {
            return false;
        }
        let mut depth = 0usize;
        let mut name_at = self.seek(at + 1);
        if self.tokens.get(name_at).is_none_or(|t| t.kind != Kind::Word) {
            return false;
        }
        let mut i = name_at;
        while i < self.tokens.len() {
            match self.text(i) {
                ";" => return false,
                "[" if depth == 0 && i == self.seek(name_at + 1) => return true,
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth = depth.saturating_sub(1),
                "," if depth == 0 => name_at = self.seek(i + 1),
                word if depth == 0 && i == name_at && self.taken.contains(word) => return true,
                _ => {}
            }
            i += 1;
        }
        false
    }
}
