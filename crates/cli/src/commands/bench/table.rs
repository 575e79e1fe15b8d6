//! The report as a person reads it in a terminal.

use std::fmt;

use super::report::{Decode, Floor, Prefill, Report, Speed, StageSeconds};

const GB: f64 = 1e9;

/// The report, to be printed.
pub struct Table<'a>(pub &'a Report);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.0;
        write!(f, "{} on {}; {}", report.model, report.backend, report.machine.cpu)?;
        match report.machine.memory_bytes {
            Some(bytes) => writeln!(f, ", {:.1} GB", bytes as f64 / GB)?,
            None => writeln!(f)?,
        }
        let start = &report.start;
        writeln!(
            f,
            "loaded in {:.3} s; first token {:.3} s after the start, prompt of {} tokens",
            start.load_seconds, start.first_token_seconds, start.prompt_tokens
        )?;
        if !report.prefill.is_empty() {
            writeln!(
                f,
                "\n{:>10}{:>12}{:>22}{:>14}{:>11}",
                "prefill", "tokens/s", "lowest .. highest", "first token", "of limit"
            )?;
        }
        for Prefill { tokens, tokens_per_second, time_to_first_token_seconds, floor, .. } in &report.prefill {
            write!(f, "{tokens:>10}")?;
            write_speed(f, tokens_per_second)?;
            writeln!(f, "{:>12.3} s{:>11}", time_to_first_token_seconds, percent(floor.as_ref()))?;
        }
        if !report.decode.is_empty() {
            writeln!(
                f,
                "\n{:>10}{:>12}{:>22}{:>14}{:>11}",
                "decode at", "tokens/s", "lowest .. highest", "must move", "of limit"
            )?;
        }
        for Decode { depth, tokens_per_second, bytes_per_token, floor, .. } in &report.decode {
            write!(f, "{depth:>10}")?;
            write_speed(f, tokens_per_second)?;
            writeln!(f, "{:>11.3} GB{:>11}", *bytes_per_token as f64 / GB, percent(floor.as_ref()))?;
        }
        for Decode { depth, stages, .. } in &report.decode {
            write_stages(f, *depth, stages.as_deref().unwrap_or_default())?;
        }
        writeln!(f)?;
        write_memory(f, report)?;
        write_limits(f, report)
    }
}

fn write_speed(f: &mut fmt::Formatter<'_>, speed: &Speed) -> fmt::Result {
    let spread = format!("{:.1} .. {:.1}", speed.lowest, speed.highest);
    write!(f, "{:>12.1}{spread:>22}", speed.median)
}

/// The stages of a token by themselves, in the order in which they first ran.
fn write_stages(f: &mut fmt::Formatter<'_>, depth: usize, stages: &[StageSeconds]) -> fmt::Result {
    let total: f64 = stages.iter().map(|stage| stage.seconds).sum();
    if stages.is_empty() {
        return Ok(());
    }
    writeln!(f, "\n{:>10}{:>12}{:>12}{:>9}", format!("at {depth}"), "kernels", "ms", "part")?;
    for StageSeconds { stage, kernels, seconds } in stages {
        writeln!(f, "{stage:>10}{kernels:>12}{:>12.3}{:>7.1} %", 1e3 * seconds, 100.0 * seconds / total)?;
    }
    writeln!(f, "{:>10}{:>12}{:>12.3}", "all", "", 1e3 * total)
}

fn percent(floor: Option<&Floor>) -> String {
    floor.map_or("-".into(), |floor| format!("{:.1} %", 100.0 * floor.fraction))
}

fn write_memory(f: &mut fmt::Formatter<'_>, report: &Report) -> fmt::Result {
    let Some(memory) = &report.memory else { return Ok(()) };
    write!(f, "memory: peak {:.2} GB", memory.peak_resident_bytes as f64 / GB)?;
    if let (Some(own), Some(mapped)) = (memory.resident_anonymous_bytes, memory.resident_mapped_bytes) {
        write!(f, ", of it {:.2} GB its own and {:.2} GB mapped files", own as f64 / GB, mapped as f64 / GB)?;
    }
    writeln!(f, "; weights {:.2} GB", memory.weight_bytes as f64 / GB)
}

fn write_limits(f: &mut fmt::Formatter<'_>, report: &Report) -> fmt::Result {
    let Some(limits) = &report.limits else { return Ok(()) };
    write!(f, "limits: memory read at {:.1} GB/s bounds decode", limits.read_bytes_per_second / GB)?;
    match limits.matrix_ops_per_second {
        Some(ops) => writeln!(f, ", {:.0} GOP/s of matrix products bound prefill", ops / GB),
        None => writeln!(f),
    }
}
