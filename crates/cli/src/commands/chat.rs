//! `lily chat`: one question, or a conversation in the terminal.

use std::io::{IsTerminal, Read, Write};
use std::time::Duration;

use anyhow::{Context, bail};
use lily_engine::engine::FinishReason;
use lily_engine::output::Delta;
use lily_server::answer::End;
use lily_server::chat_model::ChatModel;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::args::{ChatArgs, PlaceArgs, SamplingArgs};
use crate::conversation::{Ask, Outcome, ask};
use crate::session::{self, Session};

/// What stands before a question.
const PROMPT: &str = "> ";
/// Dim text, and back.
const DIM: (&str, &str) = ("\x1b[2m", "\x1b[0m");

const HELP: &str = "\
/help           this list
/think on|off   let the model think before it answers, or not
/system TEXT    instructions that the model sees before the conversation; no TEXT takes them away
/reset          forget the conversation
/quit           leave, as Ctrl-D does
Ctrl-C stops an answer.";

/// Answers the question of `args`, or talks.
pub fn run(args: &ChatArgs) -> anyhow::Result<()> {
    let question = match &args.question {
        Some(question) => Some(question.clone()),
        None if std::io::stdin().is_terminal() => None,
        None => Some(read_question()?),
    };
    let Session { model, memory, chosen } = session::start(&args.model, &args.cache, PlaceArgs::default())?;
    if args.stats {
        eprintln!("lily: {} on {} ({chosen})", model.name, model.engine.description());
    }
    if args.stats || !memory.is_resident() {
        eprintln!("lily: {memory}");
    }
    // One thread is enough to wait for an answer and for Ctrl-C; the engine has its own.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let engine = model.engine.clone();
    let mut chat = Chat::new(args, model, runtime);
    let outcome = match question {
        Some(question) => chat.once(&question),
        None => chat.interactive(),
    };
    // What is to outlive the program may still be on its way to the disk.
    engine.shutdown(Duration::ZERO);
    outcome
}

fn read_question() -> anyhow::Result<String> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("standard input cannot be read")?;
    if text.trim().is_empty() {
        bail!("there is no question: give one as an argument or on standard input");
    }
    Ok(text)
}

/// A conversation under way.
struct Chat {
    model: ChatModel,
    runtime: Runtime,
    sampling: SamplingArgs,
    max_tokens: Option<usize>,
    think: bool,
    stats: bool,
    system: Option<String>,
    /// Questions and answers so far, in the template's form.
    turns: Vec<Value>,
}

impl Chat {
    fn new(args: &ChatArgs, model: ChatModel, runtime: Runtime) -> Chat {
        Chat {
            model,
            runtime,
            sampling: args.sampling.clone(),
            max_tokens: args.max_tokens,
            think: args.model.think,
            stats: args.stats,
            system: args.system.clone(),
            turns: Vec::new(),
        }
    }

    fn once(&mut self, question: &str) -> anyhow::Result<()> {
        if !self.turn(question)? {
            bail!("the answer was stopped");
        }
        Ok(())
    }

    fn interactive(&mut self) -> anyhow::Result<()> {
        eprintln!("lily: {} on {}", self.model.name, self.model.engine.description());
        eprintln!("lily: ask away; /help lists the commands, Ctrl-D leaves");
        let mut editor = DefaultEditor::new()?;
        loop {
            let line = match editor.readline(PROMPT) {
                Ok(line) => line,
                Err(ReadlineError::Interrupted) => continue,
                Err(ReadlineError::Eof) => return Ok(()),
                Err(error) => return Err(error).context("the terminal cannot be read"),
            };
            let line = line.trim();
            if line.is_empty() {
                continue;
            }
            editor.add_history_entry(line)?;
            match line.strip_prefix('/') {
                Some("quit") => return Ok(()),
                Some(command) => self.command(command),
                None => match self.turn(line) {
                    Ok(true) => {}
                    Ok(false) => eprintln!("lily: stopped"),
                    Err(error) if crate::is_broken_pipe(&error) => return Err(error),
                    Err(error) => eprintln!("lily: {error:#}"),
                },
            }
        }
    }

    fn command(&mut self, command: &str) {
        let (name, rest) = command.split_once(' ').unwrap_or((command, ""));
        match (name, rest.trim()) {
            ("help", "") => println!("{HELP}"),
            ("reset", "") => self.turns.clear(),
            ("think", "on") => self.think = true,
            ("think", "off") => self.think = false,
            ("think", _) => eprintln!("lily: say /think on or /think off"),
            ("system", "") => self.system = None,
            ("system", text) => self.system = Some(text.to_string()),
            _ => eprintln!("lily: there is no command /{command}; /help lists them"),
        }
    }

    /// Asks, prints the answer and remembers both; false where Ctrl-C stopped it. A question that was not
    /// answered leaves no trace.
    fn turn(&mut self, question: &str) -> anyhow::Result<bool> {
        let user = json!({"role": "user", "content": question});
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        let messages: Vec<Value> = system.chain(self.turns.iter().cloned()).chain([user.clone()]).collect();
        let wishes = Ask {
            messages: &messages,
            tools: &[],
            think: self.think,
            sampling: &self.sampling,
            max_tokens: self.max_tokens,
        };
        let mut printer = Printer::new();
        let answer = self.runtime.block_on(async {
            tokio::select! {
                answer = ask(&self.model, &wishes, |delta| printer.print(delta)) => answer.map(Some),
                stopped = tokio::signal::ctrl_c() => stopped.map(|()| None).map_err(Into::into),
            }
        });
        printer.end()?;
        let Some(Outcome { content, end, .. }) = answer? else { return Ok(false) };
        if self.stats {
            eprintln!("lily: {}", stats(&end));
        }
        if end.reason == FinishReason::Length {
            eprintln!("lily: the answer was cut off at its token limit");
        }
        self.turns.push(user);
        self.turns.push(json!({"role": "assistant", "content": content}));
        Ok(true)
    }
}

/// How fast an answer came.
fn stats(end: &End) -> String {
    format!(
        "{} tokens read in {:.2} s ({:.1}/s), {} written in {:.2} s ({:.1}/s)",
        end.usage.prompt_tokens,
        end.timings.prefill.as_secs_f64(),
        end.prefill_rate(),
        end.usage.completion_tokens,
        end.timings.decode.as_secs_f64(),
        end.decode_rate()
    )
}

/// Prints an answer as it comes: thinking dim and only to a terminal, so that what goes to a file or another
/// program is the answer alone.
struct Printer {
    terminal: bool,
    dim: bool,
    printed: bool,
}

impl Printer {
    fn new() -> Printer {
        Printer { terminal: std::io::stdout().is_terminal(), dim: false, printed: false }
    }

    fn print(&mut self, delta: &Delta) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        match delta {
            Delta::Reasoning(text) if self.terminal => {
                if !self.dim {
                    out.write_all(DIM.0.as_bytes())?;
                    self.dim = true;
                }
                out.write_all(text.as_bytes())?;
                self.printed = true;
            }
            Delta::Content(text) => {
                if self.dim {
                    write!(out, "{}\n\n", DIM.1)?;
                    self.dim = false;
                }
                out.write_all(text.as_bytes())?;
                self.printed = true;
            }
            Delta::Reasoning(_) | Delta::ToolCall { .. } | Delta::Arguments(_) | Delta::ToolCallEnd => {}
        }
        out.flush()
    }

    fn end(&mut self) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        if self.dim {
            out.write_all(DIM.1.as_bytes())?;
        }
        if self.printed {
            out.write_all(b"\n")?;
        }
        out.flush()
    }
}
