//! The part of a pass that belongs to one sequence.

use std::ops::Range;

use crate::sequence::Sequence;

/// Consecutive tokens of one sequence within a pass. A prefill pass has one segment of many rows, a decode
/// pass one row for each of its sequences.
#[derive(Debug)]
pub struct Segment<'a> {
    /// The sequence; the segment's first token stands at position `sequence.length`.
    pub sequence: &'a mut Sequence,
    /// The segment's rows in the pass.
    pub rows: Range<usize>,
}
