//! The flags of `lily serve` and `lily-server`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::{CacheArgs, ModelArgs, at_least_one, bytes};

/// Arguments of `lily serve` and `lily-server`.
#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// The prefix cache.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// Address to listen on; the default is reached from this machine only
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8000)]
    pub port: u16,
    /// Name that clients call the model by [default: the checkpoint's]
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,
    /// Who is served.
    #[command(flatten)]
    pub access: AccessArgs,
    /// How many requests are taken.
    #[command(flatten)]
    pub places: PlaceArgs,
    /// What one request may take.
    #[command(flatten)]
    pub limits: LimitArgs,
    /// What is written down.
    #[command(flatten)]
    pub log: LogArgs,
}

/// Who is served.
#[derive(Clone, Debug, Default, Args)]
pub struct AccessArgs {
    /// Serve only requests that carry this key, as `Authorization: Bearer KEY` or `x-api-key: KEY`; can be given
    /// several times
    #[arg(long, value_name = "KEY")]
    pub api_key: Vec<String>,
    /// Take further keys from this file, one a line; empty lines and those that begin with # are skipped
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Let pages of this origin, such as `https://chat.example`, use the server from a browser; * is all; can be given
    /// several times
    #[arg(long, value_name = "ORIGIN")]
    pub cors_origin: Vec<String>,
}

/// How many requests are taken.
#[derive(Clone, Copy, Debug, Args)]
pub struct PlaceArgs {
    /// Answers that are generated at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    pub max_concurrent: usize,
    /// Answers that may wait for a place; one more is refused with status 429
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_queue: usize,
}

impl Default for PlaceArgs {
    fn default() -> PlaceArgs {
        PlaceArgs { max_concurrent: 8, max_queue: 64 }
    }
}

/// What one request may take.
#[derive(Clone, Copy, Debug, Args)]
pub struct LimitArgs {
    /// Largest body of a request
    #[arg(long, value_name = "BYTES", default_value = "16MiB", value_parser = bytes)]
    pub max_body: u64,
    /// Longest that the head of a request may take to arrive, and that an idle connection is kept
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub header_timeout: Duration,
    /// Longest that the body of a request may take to arrive
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds)]
    pub body_timeout: Duration,
    /// Longest that answers under way may go on after SIGTERM or Ctrl-C
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub grace: Duration,
}

/// What is written down.
#[derive(Clone, Debug, Args)]
pub struct LogArgs {
    /// Form of the log on standard error
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    /// What is logged: error, warn, info, debug, trace, or a filter such as lily_server=debug
    /// [default: RUST_LOG, else info]
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// Write prompts and answers into the log
    #[arg(long)]
    pub log_prompts: bool,
    /// Write each exchange (prompt, tokens, answer, what was read into it) into a file of its own in this directory,
    /// for bug reports
    #[arg(long, value_name = "DIR")]
    pub trace_dir: Option<PathBuf>,
}

/// Forms of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// A line for people.
    Text,
    /// A JSON object a line.
    Json,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "it must be a number of seconds".to_string())?;
    let time = Duration::try_from_secs_f64(seconds).ok().filter(|time| !time.is_zero());
    time.ok_or_else(|| "it must be more than 0 seconds".to_string())
}
