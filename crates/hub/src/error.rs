//! What keeps a model from coming, in sentences that say what to do. Nothing that was fetched is lost by any of them.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// No name of a repository.
    #[error("{0:?} is no repository; name one as OWNER/NAME or OWNER/NAME@REVISION")]
    Name(String),
    /// No address.
    #[error("HF_ENDPOINT is {0:?}; it must be an address such as https://huggingface.co")]
    Endpoint(String),
    /// No token.
    #[error(
        "the token (HF_TOKEN, or the file that it is kept in) has characters that no token has; set it again"
    )]
    Token,
    /// Nowhere to put files.
    #[error(
        "there is no place for models: neither HF_HOME nor the user's own folder is known; set HF_HOME to a directory"
    )]
    NoHome,
    /// Nobody may be asked, and what is there is not enough.
    #[error(
        "{repo} is not here whole, and HF_HUB_OFFLINE keeps Lily from asking for it; `lily pull {repo}` without it brings the rest"
    )]
    Offline {
        /// What was asked for.
        repo: String,
    },
    /// The hub does not answer.
    #[error(
        "{endpoint} cannot be reached ({reason}); check the connection, the proxy and HF_ENDPOINT, then run the same command again: \
         it goes on from what is here"
    )]
    Unreachable {
        /// The hub's address.
        endpoint: String,
        /// Why.
        reason: String,
    },
    /// There is no such repository, revision or file.
    #[error("{endpoint} has no {what}; check the name and the revision (OWNER/NAME@REVISION)")]
    NotFound {
        /// The hub's address.
        endpoint: String,
        /// What was asked for.
        what: String,
    },
    /// The hub does not let this user read.
    #[error(
        "{endpoint} does not let you read {what} (status {status}): {}",
        if *with_token { "the token in use may not; accept the model's terms on its page, or set HF_TOKEN to another" }
        else { "the name is wrong, or a token is needed; check the name, or set HF_TOKEN" }
    )]
    Denied {
        /// The hub's address.
        endpoint: String,
        /// What was asked for.
        what: String,
        /// 401 or 403.
        status: u16,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// The hub wants fewer requests.
    #[error(
        "{endpoint} has too many requests{}; run the same command again then: it goes on from what is here. HF_TOKEN gives a higher limit",
        wait.map(|wait| format!(" and asks to wait {} s", wait.as_secs())).unwrap_or_default()
    )]
    Busy {
        /// The hub's address.
        endpoint: String,
        /// For how long.
        wait: Option<Duration>,
    },
    /// An answer that the hub does not give.
    #[error("{url} answered {problem}; check HF_ENDPOINT, or try again later: what is here stays")]
    Answer {
        /// What was asked.
        url: String,
        /// What came.
        problem: String,
    },
    /// A connection broke, again and again.
    #[error(
        "the connection was lost at {} of {} of {file} ({reason}{}); run the same command again when the line is back: it goes on \
         from there",
        size(*here), size(*of),
        if *attempts > 1 { format!("; {attempts} attempts in a row brought nothing") } else { String::new() }
    )]
    Lost {
        /// The file that was coming.
        file: String,
        /// Why.
        reason: String,
        /// Bytes of it that are here.
        here: u64,
        /// Bytes of it in all.
        of: u64,
        /// Attempts in a row that brought nothing.
        attempts: u32,
    },
    /// What is to come does not fit.
    #[error(
        "the disk of {} has {} free and {} are still to come: free {} more, or set HF_HOME to a directory on a larger disk; \
         what is here stays",
        dir.display(), size(*free), size(*needed), size(needed.saturating_sub(*free))
    )]
    TooSmall {
        /// Where files go.
        dir: PathBuf,
        /// Bytes that its disk offers.
        free: u64,
        /// Bytes that are not here yet.
        needed: u64,
    },
    /// The disk became full.
    #[error(
        "the disk is full (or files may not grow further) at {} of {} of {}: make room and run the same command again; it goes on from there",
        size(*here), size(*of), path.display()
    )]
    Full {
        /// The file that grew.
        path: PathBuf,
        /// Bytes of it that are here.
        here: u64,
        /// Bytes of it in all.
        of: u64,
    },
    /// Bytes that are not those that the hub has.
    #[error(
        "{file} came twice with other bytes than the hub has of it ({expected} expected, {found} found), and was taken away; something \
         between here and {endpoint} changes files: try another network or HF_ENDPOINT"
    )]
    Wrong {
        /// The file.
        file: String,
        /// The hub's hash of it.
        expected: String,
        /// The hash of what came.
        found: String,
        /// The hub's address.
        endpoint: String,
    },
    /// The system refused a file.
    #[error("{} cannot be used: {reason}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// What the system said.
        reason: io::Error,
    },
    /// Another worker failed first.
    #[error("stopped")]
    Stopped,
}

impl HubError {
    /// For `map_err` of what the system does with `path`.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> HubError {
        move |reason| HubError::Io { path: path.to_owned(), reason }
    }
}

/// Bytes for people.
fn size(bytes: u64) -> String {
    const UNITS: [(&str, u64); 3] = [("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1_000)];
    match UNITS.iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} bytes"),
    }
}
