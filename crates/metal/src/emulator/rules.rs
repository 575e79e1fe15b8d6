//! What Metal leaves out of C++, looked for in the tokens.
//!
//! Names are taken for types where the source declares them so; what hides behind a macro is not seen here.

use std::collections::{HashMap, HashSet};

use super::spaces::is_builtin;
use super::tokens::{Kind, Token};
use super::translate::{Refused, SPACES};

/// Words that Metal does not have, and why a kernel has no use for them.
const WORDS: [(&str, &str); 16] = [
    ("double", "there are no doubles"),
    ("try", "there are no exceptions"),
    ("catch", "there are no exceptions"),
    ("throw", "there are no exceptions"),
    ("virtual", "there are no virtual functions"),
    ("goto", "there is no goto"),
    ("new", "there is no memory to allocate"),
    ("delete", "there is no memory to free"),
    ("dynamic_cast", "types are not known when a kernel runs"),
    ("typeid", "types are not known when a kernel runs"),
    ("const_cast", "it would hide what a pointer points to"),
    ("thread_local", "a thread's own variables are those of its functions"),
    ("register", "it is not Metal"),
    ("asm", "there is no assembly"),
    ("std", "there is no standard library but Metal's"),
    ("volatile", "it means another thing in the check of address spaces"),
];

/// The one header of Metal's that is called otherwise.
const PRIMITIVES: &str = "<MetalPerformancePrimitives/MetalPerformancePrimitives.h>";

/// Looks for what Metal would refuse.
///
/// # Errors
/// The first thing that it would.
pub fn check(tokens: &[Token]) -> Result<(), Refused> {
    includes(tokens)?;
    let solid: Vec<&Token> = tokens.iter().filter(|t| t.kind != Kind::Gap).collect();
    let rules = Rules { types: types(&solid), t: solid };
    for at in 0..rules.t.len() {
        rules.word(at)?;
        rules.lambda(at)?;
        rules.pointer(at)?;
    }
    rules.scopes()?;
    rules.recursion()
}

fn refuse<T>(token: &Token, what: impl Into<String>) -> Result<T, Refused> {
    Err(Refused { place: token.place.clone(), what: what.into() })
}

fn includes(tokens: &[Token]) -> Result<(), Refused> {
    for token in tokens.iter().filter(|t| t.kind == Kind::Gap && t.text.starts_with('#')) {
        let rest = token.text[1..].trim_start();
        if let Some(file) = rest.strip_prefix("include")
            && !file.trim_start().starts_with("<metal_")
            && file.trim() != PRIMITIVES
        {
            return refuse(token, format!("there is nothing to include as {}", file.trim()));
        }
    }
    Ok(())
}

/// Names of types that the source declares.
fn types<'a>(t: &[&'a Token]) -> HashSet<&'a str> {
    let mut types = HashSet::new();
    for (at, token) in t.iter().enumerate() {
        let next = t.get(at + 1).filter(|t| t.kind == Kind::Word);
        match token.text.as_str() {
            "struct" | "class" | "union" | "enum" | "typename" | "using" => {
                types.extend(next.map(|t| t.text.as_str()))
            }
            "typedef" => {
                let end = t[at..].iter().position(|t| t.is(";")).map_or(t.len(), |n| at + n);
                types.extend(t[at..end].last().map(|t| t.text.as_str()));
            }
            _ => {}
        }
    }
    types.extend(["void", "vec", "simdgroup_matrix", "atomic", "atomic_uint", "atomic_int", "atomic_float"]);
    types.remove("namespace");
    types.remove("metal");
    types
}

struct Rules<'a> {
    /// Tokens without gaps.
    t: Vec<&'a Token>,
    types: HashSet<&'a str>,
}

impl Rules<'_> {
    fn is(&self, at: usize, text: &str) -> bool {
        self.t.get(at).is_some_and(|t| t.is(text))
    }

    fn is_any(&self, at: usize, texts: &[&str]) -> bool {
        texts.iter().any(|text| self.is(at, text))
    }

    /// Past the bracket that closes the one at `at`; angle brackets close at the same depth of the others.
    fn past(&self, at: usize) -> usize {
        let (open, close) = match self.t[at].text.as_str() {
            "(" => ("(", ")"),
            "[" => ("[", "]"),
            "{" => ("{", "}"),
            _ => ("<", ">"),
        };
        let mut depth = 0i32;
        for i in at..self.t.len() {
            if self.is(i, open) {
                depth += 1;
            } else if self.is(i, close) {
                depth -= 1;
            } else if open == "<" && self.is(i, ">>") {
                depth -= 2;
            } else if open == "<" && self.is_any(i, &[";", "{"]) {
                return at + 1;
            }
            if depth <= 0 {
                return i + 1;
            }
        }
        self.t.len()
    }

    fn word(&self, at: usize) -> Result<(), Refused> {
        let token = self.t[at];
        match WORDS.iter().find(|(word, _)| token.is(word)) {
            Some((word, why)) => refuse(token, format!("`{word}`: {why}")),
            None => Ok(()),
        }
    }

    fn lambda(&self, at: usize) -> Result<(), Refused> {
        let opens = self.is(at, "[") && !self.is(at + 1, "[") && at > 0 && !self.is(at - 1, "[");
        let before = self.t[at.max(1) - 1];
        let expression =
            before.is("return") || (before.kind == Kind::Mark && !before.is(")") && !before.is("]"));
        // An array of what angle brackets end, `vec<T, 4>[2]`, is none either.
        if opens && expression && !before.is(">") && !before.is("*") && !before.is("&") {
            return refuse(self.t[at], "there are no lambda expressions");
        }
        Ok(())
    }

    /// A type at `at` with a `*` or `&` behind it that no address space goes with.
    fn pointer(&self, at: usize) -> Result<(), Refused> {
        let token = self.t[at];
        let is_type =
            token.kind == Kind::Word && (is_builtin(&token.text) || self.types.contains(token.text.as_str()));
        if !is_type
            || (at > 0 && self.is_any(at - 1, &[".", "->", "struct", "class", "typename", "enum", "using"]))
        {
            return Ok(());
        }
        let qualifier = |t: &Token| t.is("const") || SPACES.iter().any(|space| t.is(space));
        let space = |t: &Token| SPACES.iter().any(|space| t.is(space));
        let mut has_space = self.t[..at]
            .iter()
            .rev()
            .take_while(|t| {
                qualifier(t)
                    || t.is("metal")
                    || t.is("::")
                    || t.is("constexpr")
                    || t.is("static")
                    || t.is("inline")
            })
            .any(|t| space(t));
        let mut i = at + 1;
        if self.is(i, "<") {
            i = self.past(i);
        }
        loop {
            while self.t.get(i).is_some_and(|t| qualifier(t)) {
                has_space = has_space || space(self.t[i]);
                i += 1;
            }
            if self.is_any(i, &["*", "&", "&&"]) {
                if !has_space {
                    return refuse(self.t[i], "a pointer or a reference has an address space");
                }
                // What points to the pointer has one of its own.
                has_space = false;
                i += 1;
                continue;
            }
            // `float (&x)[4]`, and not `float(*x)`.
            if self.is(i, "(") && self.is_any(i + 1, &["*", "&"]) {
                let after = self.past(i);
                if self.is(after, "(") && self.is(i + 1, "*") {
                    return refuse(self.t[i], "there are no pointers to functions");
                }
                if self.is(after, "[") && !has_space {
                    return refuse(self.t[i], "a pointer or a reference has an address space");
                }
            }
            return Ok(());
        }
    }

    /// Static variables in functions, and variables of the program that are not constant.
    fn scopes(&self) -> Result<(), Refused> {
        let mut braces: Vec<&str> = Vec::new();
        let mut kind = "";
        let mut parens = 0usize;
        for (at, token) in self.t.iter().enumerate().filter(|(_, t)| !t.in_macro) {
            let starts = at == 0 || self.is_any(at - 1, &["{", "}", ";"]) || self.t[at - 1].in_macro;
            match token.text.as_str() {
                "struct" | "class" | "union" | "enum" | "namespace" => kind = &token.text,
                ";" if parens == 0 => kind = "",
                "(" => {
                    parens += 1;
                    kind = "";
                }
                ")" => parens = parens.saturating_sub(1),
                "{" => {
                    braces.push(kind);
                    kind = "";
                }
                "}" => {
                    braces.pop();
                }
                "static" if braces.last().is_some_and(|kind| kind.is_empty()) => {
                    return refuse(token, "there are no static variables in functions");
                }
                _ => {}
            }
            let outside = braces.iter().all(|&kind| kind == "namespace");
            if outside && parens == 0 && starts && token.kind == Kind::Word {
                self.program_variable(at)?;
            }
        }
        Ok(())
    }

    fn program_variable(&self, at: usize) -> Result<(), Refused> {
        let mut i = at;
        let mut constant = false;
        while self.is_any(i, &["static", "const", "constexpr", "inline", "constant", "metal", "::"]) {
            constant = constant || self.is(i, "constant");
            i += 1;
        }
        let Some(kind) = self.t.get(i) else { return Ok(()) };
        if !is_builtin(&kind.text) && !self.types.contains(kind.text.as_str()) {
            return Ok(());
        }
        let mut name = i + 1;
        if self.is(name, "<") {
            name = self.past(name);
        }
        let declares = self.t.get(name).is_some_and(|t| t.kind == Kind::Word)
            && self.is_any(name + 1, &["=", ";", "[", "{"]);
        if declares && !constant {
            return refuse(self.t[name], "a variable of the program is `constant`");
        }
        Ok(())
    }

    /// Functions that call themselves, be it over others. Of functions of one name with as many parameters, one that
    /// seems to call itself is taken to call another.
    fn recursion(&self) -> Result<(), Refused> {
        // Name, where its body is.
        let mut functions: Vec<(&str, usize, usize)> = Vec::new();
        let mut at = 0;
        while at < self.t.len() {
            let named = self.t[at].kind == Kind::Word && self.is(at + 1, "(") && at > 0;
            if named && !self.t[at].in_macro {
                let mut after = self.past(at + 1);
                while self.is_any(after, &["const", "device", "constant", "thread", "threadgroup"]) {
                    after += 1;
                }
                let keyword = self.is_any(at, &["if", "for", "while", "switch"]);
                if self.is(after, "{") && !keyword {
                    functions.push((&self.t[at].text, after, self.past(after)));
                    at = after;
                }
            }
            at += 1;
        }
        let mut calls: HashMap<&str, HashSet<&str>> = HashMap::new();
        for &(name, from, to) in &functions {
            let twins = functions.iter().filter(|f| f.0 == name).count();
            for i in from..to {
                let mut next = i + 1;
                if self.is(next, "<") {
                    next = self.past(next);
                }
                let called = self.t[i].text.as_str();
                let known = functions.iter().any(|f| f.0 == called);
                let member = self.is_any(i - 1, &[".", "->"]);
                if known && self.is(next, "(") && !member && !(called == name && twins > 1) {
                    calls.entry(name).or_default().insert(called);
                }
            }
        }
        for &(name, from, _) in &functions {
            let mut seen = HashSet::new();
            let mut left: Vec<&str> = calls.get(name).into_iter().flatten().copied().collect();
            while let Some(called) = left.pop() {
                if called == name {
                    return refuse(self.t[from], format!("{name} calls itself: there is no recursion"));
                }
                if seen.insert(called) {
                    left.extend(calls.get(called).into_iter().flatten());
                }
            }
        }
        Ok(())
    }
}
