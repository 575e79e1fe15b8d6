//! What can be wrong with a checkpoint, in sentences that a person can act on.

use std::fmt;

/// Refusals that one message spells out; the rest are counted, so that a wrong file does not fill the screen.
const SHOWN_REFUSALS: usize = 8;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The operating system refused a file or directory.
    #[error("cannot read {file}: {reason}")]
    Io {
        /// The path.
        file: String,
        /// What the system said.
        reason: std::io::Error,
    },
    /// A file is there and is not what it should be.
    #[error("{file}: {problem}")]
    File {
        /// The path.
        file: String,
        /// What is wrong with it, and what was expected.
        problem: String,
    },
    /// The files are sound, and the model in them is not one that Lily runs.
    #[error("{}", list(.0))]
    Refused(Vec<Refusal>),
    /// Something could not be written.
    #[error("cannot write {file}: {reason}")]
    Write {
        /// The path.
        file: String,
        /// What the system said.
        reason: std::io::Error,
    },
    /// The disk cannot hold what was to be written.
    #[error("{dir} has {free} bytes free and {needed} are needed: free {} more, or choose another disk", needed.saturating_sub(*free))]
    DiskFull {
        /// Where the files were to go.
        dir: String,
        /// Bytes that would be written.
        needed: u64,
        /// Bytes that the file system offers.
        free: u64,
    },
}

impl ModelError {
    /// A [`ModelError::File`].
    pub fn file(file: impl Into<String>, problem: impl Into<String>) -> ModelError {
        ModelError::File { file: file.into(), problem: problem.into() }
    }
}

/// One thing that Lily cannot run: where it stands, what was found, what would have been read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A field of `config.json`.
    #[error("config.json: `{field}` is {found}; Lily supports {supported}")]
    Field {
        /// The field's path, such as `text_config.hidden_size`.
        field: String,
        /// The value found, as JSON, or `missing`.
        found: String,
        /// The values that would have been accepted.
        supported: String,
    },
    /// A tensor of the weight files.
    #[error("tensor `{name}` is {found}; expected {expected}")]
    Tensor {
        /// The tensor's name, as the files have it where it is there, else without a prefix.
        name: String,
        /// Its type and shape, or `missing`.
        found: String,
        /// The types and shapes that would have been accepted.
        expected: String,
    },
}

fn list(refusals: &[Refusal]) -> String {
    struct List<'a>(&'a [Refusal]);
    impl fmt::Display for List<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            for (i, refusal) in self.0.iter().take(SHOWN_REFUSALS).enumerate() {
                let separator = if i == 0 { "" } else { "\n" };
                write!(f, "{separator}{refusal}")?;
            }
            match self.0.len().saturating_sub(SHOWN_REFUSALS) {
                0 => Ok(()),
                more => write!(f, "\nand {more} more; `lily inspect` lists all of them"),
            }
        }
    }
    List(refusals).to_string()
}
