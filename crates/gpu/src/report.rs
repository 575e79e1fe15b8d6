//! What a plan costs: kernels, dependent steps, bytes.

use std::fmt;

use crate::plan::{Plan, Role};
use crate::stage::Stage;

const MB: f64 = 1e6;

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
