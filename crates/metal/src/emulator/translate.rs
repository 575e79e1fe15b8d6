//! Metal source as C++ that a compiler of the host takes, line for line.
//!
//! What differs is little: kernels become functions with an entry point each, attributes say where its arguments
//! come from, threadgroup variables become references to memory that a threadgroup's threads share, and numbers
//! with a point are floats. Address spaces are left out: whether they are right is for
//! [`rules`](super::rules) and [`spaces`](super::spaces) to say.

use std::fmt::Write;

use super::tokens::{Kind, Place, Token};

/// A source that cannot be translated: it is not Metal, or uses what the emulator does not know.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {what}")]
pub struct Refused {
    /// Where.
    pub place: Place,
    /// Why.
    pub what: String,
}

/// A kernel that can be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name that the host knows.
    pub name: String,
    /// Declarations of threadgroup variables in it.
    pub sites: Vec<u32>,
}

/// Translated source.
#[derive(Clone, Debug)]
pub struct Translation {
    /// C++.
    pub text: String,
    /// Its kernels.
    pub entries: Vec<Entry>,
}

/// A kernel's definition.
struct Kernel {
    name: String,
    is_template: bool,
    /// `lily::Attribute<...>` for each parameter.
    attributes: Vec<String>,
    buffers: Vec<String>,
    sites: Vec<u32>,
}

/// The address spaces of Metal that kernels name.
pub const SPACES: [&str; 4] = ["device", "constant", "threadgroup", "thread"];

/// Attributes of parameters that are numbers.
const BUILT_IN: [&str; 12] = [
    "thread_position_in_grid",
    "threads_per_grid",
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "thread_position_in_threadgroup",
    "threads_per_threadgroup",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "threads_per_simdgroup",
    "thread_execution_width",
];

/// Translates a file.
///
/// # Errors
/// The first thing that cannot be.
pub fn translate(tokens: &[Token]) -> Result<Translation, Refused> {
    let mut translator =
        Translator { tokens, out: String::new(), kernels: Vec::new(), instances: Vec::new(), sites: 0 };
    translator.file()?;
    translator.finish()
}

struct Translator<'a> {
    tokens: &'a [Token],
    out: String,
    kernels: Vec<Kernel>,
    /// Instances of templates: host name, name, arguments with their brackets.
    instances: Vec<(String, String, String)>,
    sites: u32,
}

impl Translator<'_> {
    fn refuse<T>(&self, at: usize, what: impl Into<String>) -> Result<T, Refused> {
        let place = self.tokens.get(at).or(self.tokens.last()).map(|t| t.place.clone()).unwrap_or_default();
        Err(Refused { place, what: what.into() })
    }

    /// The first token from `at` on that is not a gap.
    fn seek(&self, mut at: usize) -> usize {
        while at < self.tokens.len() && self.tokens[at].kind == Kind::Gap {
            at += 1;
        }
        at
    }

    fn is(&self, at: usize, text: &str) -> bool {
        self.tokens.get(at).is_some_and(|t| t.is(text))
    }

    fn before(&self, at: usize) -> Option<&Token> {
        self.tokens[..at].iter().rev().find(|t| t.kind != Kind::Gap)
    }

    /// Whether an attribute begins here: two brackets without anything between.
    fn opens_attribute(&self, at: usize) -> bool {
        self.is(at, "[") && self.is(at + 1, "[")
    }

    /// Past the bracket that closes the one at `at`.
    fn past(&self, at: usize) -> Result<usize, Refused> {
        let mut depth = 0usize;
        for (i, token) in self.tokens.iter().enumerate().skip(at) {
            match token.text.as_str() {
                _ if token.kind != Kind::Mark => {}
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => {
                    depth = depth.saturating_sub(1);
                    if depth == 0 {
                        return Ok(i + 1);
                    }
                }
                _ => {}
            }
        }
        self.refuse(at, "a bracket is never closed")
    }

    /// Past the `>` that closes the `<` at `at`.
    fn past_angles(&self, at: usize) -> Result<usize, Refused> {
        let mut depth = 0i32;
        let mut i = at;
        while i < self.tokens.len() {
            match self.tokens[i].text.as_str() {
                "<" => depth += 1,
                ">" => depth -= 1,
                ">>" => depth -= 2,
                "(" | "[" => i = self.past(i)? - 1,
                ";" | "{" => break,
                _ => {}
            }
            i += 1;
            if depth <= 0 {
                return Ok(i);
            }
        }
        self.refuse(at, "template brackets are never closed")
    }

    fn text(&self, from: usize, to: usize) -> String {
        let parts = self.tokens[from..to].iter().map(|t| if t.kind == Kind::Gap { " " } else { &t.text });
        parts.collect::<String>().trim().to_owned()
    }

    /// As many line ends as the tokens have.
    fn keep_lines(&mut self, from: usize, to: usize) {
        let lines: usize = self.tokens[from..to].iter().map(|t| t.text.matches('\n').count()).sum();
        self.out.extend(std::iter::repeat_n('\n', lines));
    }

    fn file(&mut self) -> Result<(), Refused> {
        let mut at = 0;
        // The kernel whose body this is, and where that ends.
        let mut body: Option<(usize, usize)> = None;
        let mut template = false;
        while at < self.tokens.len() {
            let token = &self.tokens[at];
            if body.is_some_and(|(_, end)| at >= end) {
                body = None;
            }
            match token.text.as_str() {
                _ if token.kind == Kind::Gap => self.out.push_str(&token.text),
                "template" => {
                    let next = self.seek(at + 1);
                    if self.opens_attribute(next) {
                        at = self.instance(at, next)?;
                        continue;
                    }
                    template = true;
                    let end = self.past_angles(next)?;
                    for i in at..end {
                        self.plain(i)?;
                    }
                    at = end;
                    continue;
                }
                "kernel" if !token.in_macro => {
                    let end = self.kernel(at, template)?;
                    body = Some((self.kernels.len() - 1, end));
                    template = false;
                }
                "threadgroup" if self.declares_variable(at) => {
                    at = self.variable(at, body.map(|(kernel, _)| kernel))?;
                    continue;
                }
                "[" if self.opens_attribute(at) => {
                    let end = self.past(at)?;
                    self.keep_lines(at, end);
                    at = end;
                    continue;
                }
                "{" | ";" => {
                    template = false;
                    self.plain(at)?;
                }
                _ => self.plain(at)?,
            }
            at += 1;
        }
        Ok(())
    }

    /// One token that needs nothing of its surroundings.
    fn plain(&mut self, at: usize) -> Result<(), Refused> {
        let token = &self.tokens[at];
        let next = self.tokens.get(self.seek(at + 1));
        match token.text.as_str() {
            text if token.kind == Kind::Word && SPACES.contains(&text) => {
                // `uint thread` would be a name, and Metal has none of these.
                let qualifies = next.is_some_and(|t| {
                    t.kind == Kind::Word || ["*", "&", "::", "{", "("].contains(&t.text.as_str())
                }) || token.in_macro;
                if !qualifies {
                    return self.refuse(at, format!("`{text}` is a keyword of Metal, not a name"));
                }
                let constant = |t: Option<&Token>| t.is_some_and(|t| t.is("const") || t.is("constexpr"));
                if text == "constant" && !constant(next) && !constant(self.before(at)) {
                    self.out.push_str("const");
                }
            }
            text if token.kind == Kind::Number && is_unsuffixed_real(text) => {
                self.out.push_str(text);
                self.out.push('f');
            }
            text => self.out.push_str(text),
        }
        Ok(())
    }

    /// Whether `threadgroup` at `at` begins the declaration of a variable: a statement without pointers and
    /// references.
    fn declares_variable(&self, at: usize) -> bool {
        if !self.before(at).is_some_and(|t| ["{", "}", ";"].contains(&t.text.as_str())) {
            return false;
        }
        let mut i = at;
        while i < self.tokens.len() {
            match self.tokens[i].text.as_str() {
                ";" | "=" => return true,
                "*" | "&" | "(" => return false,
                "[" => i = self.past(i).unwrap_or(self.tokens.len()) - 1,
                "<" => i = self.past_angles(i).unwrap_or(self.tokens.len()) - 1,
                _ => {}
            }
            i += 1;
        }
        false
    }

    /// `threadgroup T a[2][3], b;`
    fn variable(&mut self, at: usize, kernel: Option<usize>) -> Result<usize, Refused> {
        let Some(kernel) = kernel else {
            return self.refuse(at, "a threadgroup variable is declared outside of a kernel");
        };
        // The type goes up to the first name that an array size, a comma or the end follows.
        let mut name = self.seek(at + 1);
        loop {
            let mut next = self.seek(name + 1);
            if self.is(next, "<") {
                next = self.seek(self.past_angles(next)?);
            } else if ["[", ",", ";", "="].iter().any(|mark| self.is(next, mark)) {
                break;
            }
            if self.is(next, ";") || next >= self.tokens.len() {
                return self.refuse(at, "a threadgroup variable without a name");
            }
            name = next;
        }
        let kind = self.text(at + 1, name);
        let first = self.sites;
        let mut declarations = format!("using LilyType{first} = {kind};");
        loop {
            let dims = name + 1;
            let mut end = self.seek(dims);
            while self.is(end, "[") {
                end = self.seek(self.past(end)?);
            }
            let (site, called, dims) = (self.sites, self.tokens[name].text.clone(), self.text(dims, end));
            let _ = write!(
                declarations,
                " LilyType{first} (&{called}){dims} = lily::threadgroup_variable<LilyType{first}{dims}, {site}>();"
            );
            self.kernels[kernel].sites.push(site);
            self.sites += 1;
            if self.is(end, ";") {
                self.out.push_str(&declarations);
                self.keep_lines(at, end);
                return Ok(end + 1);
            }
            if !self.is(end, ",") {
                return self.refuse(end, "a threadgroup variable cannot be initialised");
            }
            name = self.seek(end + 1);
        }
    }

    /// The head of a kernel at `kernel`, whose parameters are taken down; nothing but the word itself is
    /// translated. Returns where its body ends.
    fn kernel(&mut self, at: usize, is_template: bool) -> Result<usize, Refused> {
        let void = self.seek(at + 1);
        let name = self.seek(void + 1);
        let open = self.seek(name + 1);
        if !self.is(void, "void")
            || self.tokens.get(name).is_none_or(|t| t.kind != Kind::Word)
            || !self.is(open, "(")
        {
            return self.refuse(at, "a kernel is declared as `kernel void name(parameters)`");
        }
        let close = self.past(open)? - 1;
        let mut kernel = Kernel {
            name: self.tokens[name].text.clone(),
            is_template,
            attributes: Vec::new(),
            buffers: Vec::new(),
            sites: Vec::new(),
        };
        let mut from = open + 1;
        let mut i = from;
        while i <= close {
            if i == close || self.is(i, ",") {
                if self.seek(from) < i {
                    self.parameter(&mut kernel, from, i)?;
                }
                from = i + 1;
                i += 1;
            } else if self.is(i, "(") || self.is(i, "[") {
                i = self.past(i)?;
            } else if self.is(i, "<") {
                i = self.past_angles(i)?;
            } else {
                i += 1;
            }
        }
        let body = self.seek(close + 1);
        if !self.is(body, "{") {
            return self.refuse(body, "a kernel is defined where it is declared");
        }
        let end = self.past(body)?;
        self.kernels.push(kernel);
        self.out.push_str("LILY_KERNEL");
        Ok(end)
    }

    fn parameter(&self, kernel: &mut Kernel, from: usize, to: usize) -> Result<(), Refused> {
        let Some(open) = (from..to).find(|&i| self.opens_attribute(i)) else {
            return self
                .refuse(self.seek(from), format!("a parameter of kernel {} has no attribute", kernel.name));
        };
        let word = self.seek(open + 2);
        let name = self.tokens[word].text.clone();
        let argument = self.seek(word + 1);
        match name.as_str() {
            "buffer" | "threadgroup" if self.is(argument, "(") => {
                let index = self.text(argument, self.past(argument)?);
                kernel.attributes.push(format!("lily::Attribute<lily::Built::{name}, {index}>"));
                if name == "buffer" {
                    kernel.buffers.push(index);
                }
            }
            _ if BUILT_IN.contains(&name.as_str()) => {
                kernel.attributes.push(format!("lily::Attribute<lily::Built::{name}>"));
            }
            _ => return self.refuse(word, format!("the emulator does not know the attribute [[{name}]]")),
        }
        Ok(())
    }

    /// `template [[host_name("x")]] kernel void name<arguments>(...);`, also in the form with `decltype`.
    fn instance(&mut self, at: usize, attribute: usize) -> Result<usize, Refused> {
        let after = self.past(attribute)?;
        let Some(host) = self.tokens[attribute..after].iter().find(|t| t.kind == Kind::Literal) else {
            return self.refuse(at, "an instance of a kernel has a host_name");
        };
        let host = host.text.trim_matches('"').to_owned();
        let Some(end) = (after..self.tokens.len()).find(|&i| self.is(i, ";")) else {
            return self.refuse(at, "an instance of a kernel ends with a semicolon");
        };
        // The name is the last word that angle brackets follow, before the parameters.
        let mut found = None;
        let mut i = after;
        while i < end {
            let next = self.seek(i + 1);
            if self.is(i, "decltype") {
                i = self.past(next)?;
            } else if self.tokens[i].kind == Kind::Word && self.is(next, "<") {
                let past = self.past_angles(next)?;
                found = Some((self.tokens[i].text.clone(), self.text(next, past)));
                break;
            } else {
                i += 1;
            }
        }
        let Some((name, arguments)) = found else {
            return self.refuse(at, "an instance of a kernel names a template with its arguments");
        };
        self.instances.push((host, name, arguments));
        self.keep_lines(at, end);
        Ok(end + 1)
    }

    fn finish(self) -> Result<Translation, Refused> {
        let Translator { tokens, mut out, kernels, instances, .. } = self;
        let mut entries = Vec::new();
        out.push_str("\n#line 1 \"entry points\"\n");
        let mut entry = |host: &str, call: &str, kernel: &Kernel| {
            let (attributes, buffers) = (kernel.attributes.join(", "), &kernel.buffers);
            let bits: String = buffers.iter().map(|index| format!(" | 1ull << {index}")).collect();
            let _ = write!(
                out,
                "extern \"C\" {{ LILY_UNTRACKED void lily_entry_{host}(const LilyThread* t) {{ lily::Call<&{call}{}{attributes}>::run(t); }}\n\
                 extern const unsigned long long lily_buffers_{host}; const unsigned long long lily_buffers_{host} = 0{bits}; }}\n",
                if attributes.is_empty() { "" } else { ", " }
            );
            entries.push(Entry { name: host.into(), sites: kernel.sites.clone() });
        };
        for kernel in kernels.iter().filter(|k| !k.is_template) {
            entry(&kernel.name, &kernel.name, kernel);
        }
        for (host, name, arguments) in &instances {
            let Some(kernel) = kernels.iter().find(|k| k.is_template && k.name == *name) else {
                let place = tokens.first().map(|t| t.place.clone()).unwrap_or_default();
                return Err(Refused {
                    place,
                    what: format!("{host} is an instance of {name}, which is no kernel"),
                });
            };
            entry(host, &format!("{name}{arguments}"), kernel);
        }
        Ok(Translation { text: out, entries })
    }
}

/// A number with a point or an exponent and nothing that says of which type it is: a float in Metal.
pub(super) fn is_unsuffixed_real(number: &str) -> bool {
    let lower = number.to_ascii_lowercase();
    let last = lower.chars().last().unwrap_or(' ');
    if let Some(hex) = lower.strip_prefix("0x") {
        return hex.contains('p') && last.is_ascii_digit();
    }
    (lower.contains('.') || lower.contains('e')) && (last.is_ascii_digit() || last == '.')
}
