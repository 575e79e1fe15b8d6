//! What a command leaves: a report on standard output, as a table or in JSON, and a picture in a file.

use std::fmt::Display;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, bail};
use serde::Serialize;

/// Prints `report` in JSON where that is asked for, else `table`.
pub fn print(report: &impl Serialize, table: impl Display, json: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, report)?;
        writeln!(out)?;
    } else {
        write!(out, "{table}")?;
    }
    Ok(())
}

/// Refuses a place for the picture before minutes are spent on it.
pub fn check_picture_place(path: &Path) -> anyhow::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if path.is_dir() || !folder.is_dir() {
        bail!("--plot {} is not a file in a folder that exists; choose another place", path.display());
    }
    Ok(())
}

/// Writes the picture.
pub fn write_picture(path: &Path, svg: &str) -> anyhow::Result<()> {
    std::fs::write(path, svg).with_context(|| {
        format!("the picture cannot be written to {}; choose another place with --plot", path.display())
    })
}
