//! Signs of life on standard error: only where that is a terminal, gone when the work is done.

use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{DecimalBytes, HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Prompts shorter than this are read too fast for a bar to be anything but a flicker.
const SHOWN_PREFILL: usize = 512;
/// How often a spinner turns.
const TICK: Duration = Duration::from_millis(100);

/// How often a download that nobody watches says how far it is.
const LINE_EVERY: Duration = Duration::from_secs(30);

/// A spinner with a text beside it.
pub fn spinner(text: &'static str) -> ProgressBar {
    let spinner = ProgressBar::with_draw_target(None, target());
    spinner.set_message(text);
    if std::io::stderr().is_terminal() {
        spinner.enable_steady_tick(TICK);
    }
    spinner
}

/// A bar over bytes to be written.
pub fn bytes(text: &'static str) -> ProgressBar {
    bar(0, text, "{msg} [{bar:40}] {bytes}/{total_bytes} {eta}")
}

/// A bar over the items of a list.
pub fn items(total: usize, text: &'static str) -> ProgressBar {
    bar(total, text, "{msg} [{bar:40}] {pos}/{len} {eta}")
}

/// Shows how far files have come: a bar in a terminal, elsewhere a line now and then.
pub struct Download {
    bar: ProgressBar,
    /// When the last line was written; `None` where there is a bar.
    last_line: Option<Mutex<Instant>>,
}

impl Download {
    /// Of `bytes` bytes, `here` of which are here already and say nothing of the speed.
    pub fn new(bytes: u64, here: u64) -> Download {
        const TEMPLATE: &str = "{msg} [{bar:30}] {decimal_bytes}/{decimal_total_bytes} \
                                {decimal_bytes_per_sec}, {eta} left";
        let bar = bar(0, "fetching", TEMPLATE);
        bar.set_length(bytes);
        bar.set_position(here);
        bar.reset_eta();
        let last_line = (!std::io::stderr().is_terminal()).then(|| Mutex::new(Instant::now()));
        Download { bar, last_line }
    }

    /// So many bytes more are here.
    pub fn fetched(&self, bytes: u64) {
        self.bar.inc(bytes);
        let Some(last_line) = &self.last_line else { return };
        let mut last = last_line.lock().unwrap_or_else(PoisonError::into_inner);
        if last.elapsed() >= LINE_EVERY {
            *last = Instant::now();
            eprintln!("lily: {}", self.line());
        }
    }

    /// So many bytes are not here any more.
    pub fn taken_away(&self, bytes: u64) {
        self.bar.dec(bytes);
    }

    /// Writes a line above the bar.
    pub fn say(&self, line: &str) {
        self.bar.suspend(|| eprintln!("lily: {line}"));
    }

    /// Takes the bar off the screen.
    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }

    fn line(&self) -> String {
        let bar = &self.bar;
        format!(
            "{} of {} fetched, {}/s, {} left",
            DecimalBytes(bar.position()),
            DecimalBytes(bar.length().unwrap_or_default()),
            DecimalBytes(bar.per_sec() as u64),
            HumanDuration(bar.eta())
        )
    }
}

/// Shows how far a long prompt has been read.
#[derive(Default)]
pub struct Prefill {
    bar: Option<ProgressBar>,
}

impl Prefill {
    /// `done` of `total` tokens have been read.
    pub fn update(&mut self, done: usize, total: usize) {
        if total >= SHOWN_PREFILL {
            let bar = self.bar.get_or_insert_with(|| {
                bar(total, "reading the prompt", "{msg} [{bar:40}] {pos}/{len} {eta}")
            });
            bar.set_position(done as u64);
        }
    }

    /// Takes the bar off the screen; the answer begins.
    pub fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

fn bar(total: usize, text: &'static str, template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total as u64), target());
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(text);
    bar
}

fn target() -> ProgressDrawTarget {
    // Draws nothing where standard error is no terminal.
    ProgressDrawTarget::stderr()
}
