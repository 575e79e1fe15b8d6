//! Stop strings, found in text that arrives in pieces.
//!
//! A stop string can begin in one token and end in another, so text that could still become one is held back;
//! everything else is let through at once. The first stop string to be *complete* ends the text, as when one
//! reads character by character; among those complete at the same character the longest wins, so that the
//! least is shown. The stop string itself is never shown. How the text is cut into pieces changes nothing.

/// The most stop strings a request may name.
pub const MAX_STOP_STRINGS: usize = 64;

/// The longest stop string, in bytes: it bounds both the text held back and the work per token.
pub const MAX_STOP_BYTES: usize = 1024;

/// A list of stop strings that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidStop {
    /// More than [`MAX_STOP_STRINGS`].
    #[error("stop holds {count} strings; the most is {MAX_STOP_STRINGS}")]
    TooMany {
        /// How many were given.
        count: usize,
    },
    /// An empty string would stop before the first token.
    #[error("stop string {index} is empty; leave it out")]
    Empty {
        /// Its place in the list, from 0.
        index: usize,
    },
    /// Longer than [`MAX_STOP_BYTES`].
    #[error("stop string {index} has {bytes} bytes; the most is {MAX_STOP_BYTES}")]
    TooLong {
        /// Its place in the list, from 0.
        index: usize,
        /// Its length.
        bytes: usize,
    },
}

/// What [`StopMatcher::push`] lets through.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Released {
    /// Text that is certainly not part of a stop string.
    pub text: String,
    /// Whether a stop string was completed; nothing comes after this.
    pub stopped: bool,
}

/// Looks for stop strings in one sequence's text.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    /// The stop string that was found, by its place in `stops`.
    found: Option<usize>,
}

impl StopMatcher {
    /// A matcher for `stops`, of which there may be none.
    pub fn new(stops: Vec<String>) -> Result<StopMatcher, InvalidStop> {
        if stops.len() > MAX_STOP_STRINGS {
            return Err(InvalidStop::TooMany { count: stops.len() });
        }
        for (index, stop) in stops.iter().enumerate() {
            if stop.is_empty() {
                return Err(InvalidStop::Empty { index });
            }
            if stop.len() > MAX_STOP_BYTES {
                return Err(InvalidStop::TooLong { index, bytes: stop.len() });
            }
        }
        Ok(StopMatcher { stops, held: String::new(), found: None })
    }

    /// Takes the next piece of text and lets through what can be. After a stop everything is swallowed.
    pub fn push(&mut self, piece: &str) -> Released {
        if self.found.is_some() {
            return Released { text: String::new(), stopped: true };
        }
        let seen = self.held.len();
        self.held.push_str(piece);
        if let Some((start, index)) = self.first_match(seen) {
            self.found = Some(index);
            let mut text = std::mem::take(&mut self.held);
            text.truncate(start);
            return Released { text, stopped: true };
        }
        let rest = self.held.split_off(self.undecided_from());
        Released { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// The text still held back, which turned out not to be a stop string because nothing follows.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The stop string that ended the text, by its place in the list.
    pub fn found(&self) -> Option<usize> {
        self.found
    }

    /// Where the first completed stop string starts in `held`, of which `seen` bytes were searched before, and
    /// its place in the list.
    fn first_match(&self, seen: usize) -> Option<(usize, usize)> {
        let ends = self.held[seen..].char_indices().map(|(i, c)| seen + i + c.len_utf8());
        for end in ends {
            let text = &self.held[..end];
            let complete = self.stops.iter().enumerate().filter(|(_, stop)| text.ends_with(stop.as_str()));
            if let Some((index, longest)) = complete.max_by_key(|(_, stop)| stop.len()) {
                return Some((end - longest.len(), index));
            }
        }
        None
    }

    /// Where the longest end of `held` starts that is the beginning of a stop string.
    fn undecided_from(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let earliest = self.held.len().saturating_sub(longest.saturating_sub(1));
        let starts = (earliest..self.held.len()).filter(|&i| self.held.is_char_boundary(i));
        for start in starts {
            if self.stops.iter().any(|stop| stop.starts_with(&self.held[start..])) {
                return start;
            }
        }
        self.held.len()
    }
}
