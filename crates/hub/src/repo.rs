//! The name of a repository on the hub, with a revision.

use std::fmt;
use std::str::FromStr;

use crate::error::HubError;

/// The revision that is meant where none is said.
const DEFAULT_REVISION: &str = "main";
/// Hex digits of a commit.
const COMMIT_DIGITS: usize = 40;
/// Longest name of a repository, owner included, as the hub has it.
const MOST_NAME: usize = 96;

/// A repository of a model at a revision: `OWNER/NAME` or `OWNER/NAME@REVISION`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repo {
    name: String,
    revision: String,
}

impl Repo {
    /// Owner and name, with a slash between them.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A branch, a tag or a commit.
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// Whether the revision is a commit, which names the same files for ever.
    pub fn is_commit(&self) -> bool {
        is_commit(&self.revision)
    }
}

impl FromStr for Repo {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Repo, HubError> {
        let (name, revision) = text.split_once('@').unwrap_or((text, DEFAULT_REVISION));
        let parts: Vec<&str> = name.split('/').collect();
        // The same characters as the hub allows; names become folders here, so nothing else may pass.
        let is_part = |part: &&str| {
            part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
                && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
                && !part.contains("..")
                && !part.contains("--")
        };
        let is_name = parts.len() == 2 && parts.iter().all(is_part) && name.len() <= MOST_NAME;
        let is_step = |step: &str| {
            !step.is_empty() && step != "." && step != ".." && !step.contains(['\\', ':', '?', '#', '%'])
        };
        let is_revision =
            revision.split('/').all(is_step) && !revision.contains(|c: char| c.is_control() || c == ' ');
        if is_name && is_revision {
            Ok(Repo { name: name.to_owned(), revision: revision.to_owned() })
        } else {
            Err(HubError::Name(text.to_owned()))
        }
    }
}

impl fmt::Display for Repo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if self.revision != DEFAULT_REVISION { write!(f, "@{}", self.revision) } else { Ok(()) }
    }
}

/// Whether `text` is a commit: the hub's own form, forty digits in lower case.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == COMMIT_DIGITS && is_hex(text)
}

/// Whether `text` is nothing but hexadecimal digits in lower case.
pub(crate) fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_with_and_without_a_revision() {
        let repo: Repo = "mlx-community/Qwen3.6-35B-A3B-4bit".parse().unwrap();
        assert_eq!((repo.name(), repo.revision()), ("mlx-community/Qwen3.6-35B-A3B-4bit", "main"));
        let repo: Repo = "a/b@refs/pr/3".parse().unwrap();
        assert_eq!((repo.name(), repo.revision(), repo.is_commit()), ("a/b", "refs/pr/3", false));
        assert_eq!(repo.to_string(), "a/b@refs/pr/3");
        assert!(format!("a/b@{}", "0a".repeat(20)).parse::<Repo>().unwrap().is_commit());
    }

    #[test]
    fn nothing_that_would_leave_the_cache_is_a_name() {
        let wrong = [
            "", "b", "a/b/c", "../b", "a/..", "/a/b", "a/b@", "a/b@../x", "a/b@x//y", "a/b c", "a--b/c",
            "a/b@\\x",
        ];
        for text in wrong {
            assert!(text.parse::<Repo>().is_err(), "{text}");
        }
    }
}
