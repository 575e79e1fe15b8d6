//! The log on standard error.

use anyhow::anyhow;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::args::{LogArgs, LogFormat};

/// Starts to log as `args` say: to standard error, in colour where that is a terminal.
///
/// # Errors
/// A level that is none.
pub fn start(args: &LogArgs) -> anyhow::Result<()> {
    let filter = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into());
    let filter = match &args.log_level {
        Some(level) => filter.parse(level).map_err(|error| {
            anyhow!(
                "--log-level {level:?} is none of error, warn, info, debug and trace, and no filter: {error}"
            )
        })?,
        None => filter.from_env_lossy(),
    };
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match args.log_format {
        LogFormat::Text => log.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init(),
        LogFormat::Json => {
            log.json().flatten_event(true).with_current_span(false).with_span_list(false).init()
        }
    }
    Ok(())
}
