//! Finding a tag in text that arrives in pieces.

/// Length of the longest end of `text` that is the beginning of `tag`, but not all of it: the part that has
/// to be held back until more is known.
pub(crate) fn partial_tag(text: &str, tag: &str) -> usize {
    let longest = text.len().min(tag.len() - 1);
    (1..=longest).rev().find(|&n| text.as_bytes().ends_with(&tag.as_bytes()[..n])).unwrap_or(0)
}

/// What the beginning of a text says about a tag that should stand there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tag {
    /// It stands there.
    Here,
    /// It may, once more text comes.
    Perhaps,
    /// It does not.
    Absent,
}

/// Whether `text` begins with `tag`.
pub(crate) fn starts_with_tag(text: &str, tag: &str) -> Tag {
    if text.starts_with(tag) {
        Tag::Here
    } else if tag.starts_with(text) {
        Tag::Perhaps
    } else {
        Tag::Absent
    }
}
