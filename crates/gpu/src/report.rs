//! What a plan costs: kernels, dependent steps, bytes; operations and floors of a prompt; estimates chip by chip.

use std::fmt;

use crate::chips::Chip;
use crate::plan::{Plan, Role};
use crate::roofline::{Floors, Tally, Work};
use crate::stage::Stage;

const MB: f64 = 1e6;
const GIGA: f64 = 1e9;
const TERA: f64 = 1e12;
const MS: f64 = 1e-3;

/// Bytes that move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Read from the device's memory.
    pub read: u64,
    /// Written to it.
    pub written: u64,
}

impl Traffic {
    /// Both together.
    pub fn total(self) -> u64 {
        self.read + self.written
    }
}

impl Plan {
    /// What the dispatches of `stage` move of buffers with `role`; of all where they are `None`.
    pub fn traffic(&self, stage: Option<Stage>, role: Option<Role>) -> Traffic {
        let mut traffic = Traffic::default();
        let dispatches = self.dispatches.iter().filter(|d| stage.is_none_or(|stage| d.stage == stage));
        for access in dispatches.flat_map(|d| &d.accesses) {
            if role.is_none_or(|role| self.buffers[access.buffer.0].role == role) {
                traffic.read += if access.mode.reads() { access.traffic } else { 0 };
                traffic.written += if access.mode.writes() { access.traffic } else { 0 };
            }
        }
        traffic
    }

    /// Dispatches of a stage.
    pub fn kernels(&self, stage: Stage) -> usize {
        self.dispatches.iter().filter(|d| d.stage == stage).count()
    }
}

/// Prints a plan beside the bytes that cannot be avoided.
pub struct Summary<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// Bytes that the model itself asks for: weights in use, state, KV cache.
    pub floor: u64,
    /// Tokens that the plan computes, which the bytes are divided by.
    pub tokens: usize,
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Summary { plan, floor, tokens } = *self;
        let mb = |bytes: u64| bytes as f64 / MB / tokens as f64;
        let (kernels, edges) = (plan.dispatches.len(), plan.dependencies.edges());
        let chain = plan.dependencies.longest_chain().len();
        writeln!(
            f,
            "{kernels} kernels, {chain} of them in the longest dependent chain, {edges} dependencies"
        )?;
        writeln!(f)?;
        writeln!(f, "{:<12}{:>8}{:>11}{:>11}   MB a token, of them:", "stage", "kernels", "read", "written")?;
        writeln!(f, "{:42}{:>11}{:>9}{:>9}{:>13}", "", "weights", "state", "KV", "activations")?;
        let line = |f: &mut fmt::Formatter<'_>, name: &str, kernels: usize, stage: Option<Stage>| {
            let all = plan.traffic(stage, None);
            let of = |role| mb(plan.traffic(stage, Some(role)).total());
            writeln!(
                f,
                "{name:<12}{kernels:>8}{:>11.3}{:>11.3}{:>11.3}{:>9.3}{:>9.3}{:>13.3}",
                mb(all.read),
                mb(all.written),
                of(Role::Weights),
                of(Role::State),
                of(Role::Kv),
                of(Role::Activations) + of(Role::Step),
            )
        };
        for stage in Stage::ALL {
            line(f, stage.name(), plan.kernels(stage), Some(stage))?;
        }
        line(f, "all", kernels, None)?;
        writeln!(f)?;
        let moved = plan.traffic(None, None).total();
        writeln!(
            f,
            "{:.1} MB a token move; the model itself asks for {:.1} MB: {:.2} % over the floor",
            mb(moved),
            mb(floor),
            100.0 * (moved as f64 / floor as f64 - 1.0)
        )
    }
}

/// Prints stage by stage what a prompt takes, and what that takes at the least on a device.
pub struct PromptTable<'a> {
    /// All of its work.
    pub tally: &'a Tally,
    /// The device.
    pub chip: &'a Chip,
}

impl fmt::Display for PromptTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PromptTable { tally, chip } = *self;
        let device = format!("{} ({})", chip.name, Rates(chip));
        writeln!(
            f,
            "{:<12}{:>8}{:>12}{:>11}   ms at the least on {device}",
            "stage", "kernels", "MB", "GFLOP"
        )?;
        writeln!(f, "{:43}{:>14}{:>16}", "", "for bytes", "for operations")?;
        let line = |f: &mut fmt::Formatter<'_>, name: &str, work: Work, floors: Floors| {
            writeln!(
                f,
                "{name:<12}{:>8}{:>12.1}{:>11.1}{:>14.3}{:>16.3}",
                work.kernels,
                work.bytes as f64 / MB,
                work.operations as f64 / GIGA,
                floors.memory / MS,
                floors.arithmetic / MS,
            )
        };
        for stage in Stage::ALL {
            line(f, stage.name(), tally.stage(stage), tally.floors(stage, chip))?;
        }
        line(f, "all", tally.all(), tally.all_floors(chip))?;
        writeln!(f)?;
        let seconds = tally.floor(chip);
        writeln!(
            f,
            "The longer of both in every stage: {:.2} ms at the least, {:.0} tokens/s at the most on {}",
            seconds / MS,
            tally.tokens as f64 / seconds,
            chip.name
        )
    }
}

/// Prints what a pass may take on several chips. Nothing of it was measured, and it says so.
pub struct Estimates<'a> {
    /// The pass.
    pub tally: &'a Tally,
    /// The chips.
    pub chips: &'a [Chip],
}

impl fmt::Display for Estimates<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Estimate, not measured (docs/performance.md has what it assumes):")?;
        writeln!(
            f,
            "{:<10}{:>26}{:>14}{:>26}{:>16}",
            "chip", "rates", "floor, ms", "estimate, ms", "tokens/s"
        )?;
        for chip in self.chips {
            let estimate = self.tally.estimate(chip);
            let speed = |seconds: f64| self.tally.tokens as f64 / seconds;
            writeln!(
                f,
                "{:<10}{:>26}{:>14.2}{:>26}{:>16}",
                chip.name,
                Rates(chip).to_string(),
                self.tally.floor(chip) / MS,
                format!("{:.2} to {:.2}", estimate.start / MS, estimate.end / MS),
                format!("{:.0} to {:.0}", speed(estimate.end), speed(estimate.start)),
            )?;
        }
        Ok(())
    }
}

/// The rates of a device.
struct Rates<'a>(&'a Chip);

impl fmt::Display for Rates<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rates(chip) = self;
        let (bytes, operations) = (chip.bytes_per_second / GIGA, chip.operations_per_second / TERA);
        write!(f, "{bytes:.0} GB/s, {operations:.1} TFLOP/s")
    }
}
