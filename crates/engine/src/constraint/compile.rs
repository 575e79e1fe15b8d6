//! From a constraint to a matcher, within bounds.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lily_model::tokenizer::Tokenizer;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{InferenceCapabilities, TokEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use super::bounds::{self, MAX_TEXT};
use super::bridge::Bridge;
use super::tools;
use super::{Constraint, ConstraintError, Guide, Subject};

/// The longest time that a client waits for a grammar to be compiled. What `bounds` lets through takes less, on a
/// machine that has nothing else to do.
const MAX_TIME: Duration = Duration::from_secs(10);

/// Grammars that may be compiled at once, those given up included: what has run out of time cannot be stopped.
const MAX_COMPILING: usize = 8;

/// Stack of the compiling thread, of which only what is used takes memory: the compiler recurses over its input, at up
/// to 8 KB a level, and `bounds` lets through some thousand levels.
const STACK: usize = 256 * 1024 * 1024;

/// States of a grammar's automaton, of 1 to 2 KB each: the most memory that one answer can take.
const MAX_STATES: usize = 65_536;

/// Characters of an error message that are passed on; the rest quotes the grammar.
const MAX_REASON: usize = 300;

/// How `llguidance` says that no token may come next.
const NOTHING_FITS: &str = "NoExtensionBias";

/// White space allowed between two words of JSON: a line end and deep indentation.
const MAX_SPACES: usize = 64;

/// Compiles the constraints of one model.
pub(crate) struct Grammars {
    tokenizer: Tokenizer,
    vocab: usize,
    eos: Vec<u32>,
    /// The vocabulary's trie takes a moment and some megabytes: made when it is first needed.
    factory: OnceLock<Result<Arc<ParserFactory>, String>>,
    compiling: Arc<AtomicUsize>,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grammars({} tokens)", self.vocab)
    }
}

/// Counts one compilation for as long as it runs.
struct Compiling(Arc<AtomicUsize>);

impl Drop for Compiling {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Grammars {
    pub(crate) fn new(tokenizer: Tokenizer, vocab: usize, eos: &[u32]) -> Grammars {
        let (factory, compiling) = (OnceLock::new(), Arc::default());
        Grammars { tokenizer, vocab, eos: eos.to_vec(), factory, compiling }
    }

    /// Compiles `constraint`. It blocks: a moment for most, [`MAX_TIME`] at the most.
    pub(crate) fn compile(&self, constraint: &Constraint) -> Result<Guide, ConstraintError> {
        let subject = constraint.subject();
        let fail = |reason: String| ConstraintError { subject: subject.clone(), reason };
        let factory = self.factory().map_err(fail)?;
        let grammar = self.grammar(constraint)?;
        let running = Compiling(Arc::clone(&self.compiling));
        if self.compiling.fetch_add(1, Ordering::Relaxed) >= MAX_COMPILING {
            return Err(fail("too many grammars are being compiled; try again later".to_owned()));
        }
        let (sender, compiled) = sync_channel(1);
        let compile = move || {
            let _running = running;
            let mut matcher = Matcher::new(factory.create_parser(grammar));
            let outcome = match matcher.get_error() {
                Some(error) => Err(error),
                None if matcher.is_stopped() => Err("it allows no text but the empty one".to_owned()),
                None => match matcher.compute_mask() {
                    Ok(_) => Ok(matcher),
                    Err(error) if error.to_string().contains(NOTHING_FITS) => {
                        Err("it allows no text at all".to_owned())
                    }
                    Err(error) => Err(error.to_string()),
                },
            };
            // Nobody waits any more when the time is up.
            let _ = sender.send(outcome.map(Box::new));
        };
        let thread = std::thread::Builder::new().name("lily-grammar".to_owned()).stack_size(STACK);
        thread.spawn(compile).map_err(|error| fail(format!("the system refused a thread ({error})")))?;
        match compiled.recv_timeout(MAX_TIME) {
            Ok(Ok(matcher)) => Ok(Guide::new(matcher)),
            Ok(Err(error)) => Err(fail(brief(&error))),
            Err(RecvTimeoutError::Timeout) => Err(fail(format!(
                "compiling it takes more than {} seconds; make it smaller",
                MAX_TIME.as_secs()
            ))),
            Err(RecvTimeoutError::Disconnected) => Err(fail("compiling it failed".to_owned())),
        }
    }

    fn factory(&self) -> Result<Arc<ParserFactory>, String> {
        let make = || {
            // The trie asserts that no token is absurdly long.
            let made = catch_unwind(AssertUnwindSafe(|| {
                let bridge: TokEnv = Arc::new(Bridge::new(self.tokenizer.clone(), self.vocab, &self.eos));
                let slices = SlicedBiasComputer::general_slices();
                ParserFactory::new(&bridge, InferenceCapabilities::default(), &slices)
            }));
            let mut factory = made.map_err(|error| brief(&error.to_string()))?;
            let limits = factory.quiet().limits_mut();
            (limits.verbose_errors, limits.max_lexer_states) = (false, MAX_STATES);
            Ok(Arc::new(factory))
        };
        self.factory.get_or_init(make).clone()
    }

    fn grammar(&self, constraint: &Constraint) -> Result<TopLevelGrammar, ConstraintError> {
        let fail = |reason: String| ConstraintError { subject: constraint.subject(), reason };
        let bounded = |text: String| {
            if text.len() > MAX_TEXT {
                Err(fail(format!("it is longer than {MAX_TEXT} bytes")))
            } else {
                Ok(text)
            }
        };
        match constraint {
            Constraint::Json { schema, strict } => {
                check_schema(schema)?;
                bounded(schema.to_string())?;
                Ok(TopLevelGrammar::from_json_schema(with_options(schema, *strict)))
            }
            Constraint::Regex(regex) => {
                bounds::check_text(regex).map_err(fail)?;
                Ok(TopLevelGrammar::from_grammar(GrammarWithLexer::from_regex(regex)))
            }
            Constraint::Lark(grammar) => {
                bounds::check_text(grammar).map_err(fail)?;
                Ok(TopLevelGrammar::from_lark(grammar.clone()))
            }
            Constraint::Tools(choice) => {
                let marker = |marker: &str| self.tokenizer.token_id(marker);
                Ok(TopLevelGrammar::from_lark(bounded(tools::grammar(choice, &marker)?)?))
            }
        }
    }
}

/// A schema is an object or a boolean, within bounds.
pub(super) fn check_schema(schema: &Value) -> Result<(), ConstraintError> {
    let checked = match schema {
        Value::Object(_) | Value::Bool(_) => bounds::check_schema(schema),
        _ => Err("a schema is a JSON object, or true or false".to_owned()),
    };
    checked.map_err(|reason| ConstraintError { subject: Subject::JsonSchema, reason })
}

/// `schema` with what `llguidance` is to know about it, unless it says so itself.
pub(super) fn with_options(schema: &Value, strict: bool) -> Value {
    let mut schema = schema.clone();
    if let Value::Object(members) = &mut schema {
        let options =
            json!({"whitespace_pattern": format!("[ \\n\\r\\t]{{1,{MAX_SPACES}}}"), "lenient": !strict});
        members.entry("x-guidance").or_insert(options);
    }
    schema
}

/// The part of an error of `llguidance` that is about the grammar, as one line.
fn brief(error: &str) -> String {
    let text =
        error.split("<state>").next().unwrap_or_default().split("<backtrace>").next().unwrap_or_default();
    let text = text.replace("<non-verbose/>", "");
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().take(MAX_REASON).collect()
}
