//! Signs of life on standard error: only where that is a terminal, gone when the work is done.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Prompts shorter than this are read too fast for a bar to be anything but a flicker.
const SHOWN_PREFILL: usize = 512;
/// How often a spinner turns.
const TICK: Duration = Duration::from_millis(100);

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
