//! The step block: what the host tells the kernels about one step, as bytes that both read alike.
//!
//! It is all that differs between two launches of the same plan. **Rows** are tokens; a **segment** is the run of rows
//! that belong to one sequence, in the order of their positions: one row each in decode, several where a prompt
//! goes through the decode kernels. All numbers are little-endian; each array has room for [`MAX_ROWS`].
//!
//! On a device without addresses (Metal) the three u64 of a segment are numbers: of the state in the pool of states, of
//! the first entry in the table of pages, whose entries are numbers of pages, and of the u32 among the sampled tokens.

use crate::decode::MAX_ROWS;

/// A row's token where it is the one that the device sampled last for its sequence.
pub const LAST_SAMPLED: u32 = u32::MAX;

const U32: usize = size_of::<u32>();
const U64: usize = size_of::<u64>();

/// Byte offsets of the block's fields.
#[derive(Clone, Copy, Debug)]
pub struct StepLayout;

impl StepLayout {
    /// u32: rows of the step.
    pub const ROWS: usize = 0;
    /// u32: segments of the step.
    pub const SEGMENTS: usize = U32;
    /// u32: rows that go through the head.
    pub const HEAD_ROWS: usize = 2 * U32;
    /// u32: left to the backend; 0 as [`write()`] leaves it.
    pub const TURN: usize = 3 * U32;
    /// u32 of each row: its token, or [`LAST_SAMPLED`].
    pub const TOKEN: usize = 4 * U32;
    /// u32 of each row: its absolute position.
    pub const POSITION: usize = Self::TOKEN + MAX_ROWS * U32;
    /// u32 of each row: the segment that it belongs to.
    pub const SEGMENT: usize = Self::POSITION + MAX_ROWS * U32;
    /// u32 of each segment: its first row.
    pub const FIRST_ROW: usize = Self::SEGMENT + MAX_ROWS * U32;
    /// u32 of each segment: its rows.
    pub const ROW_COUNT: usize = Self::FIRST_ROW + MAX_ROWS * U32;
    /// u32: the rows that go through the head, ascending.
    pub const HEAD_ROW: usize = Self::ROW_COUNT + MAX_ROWS * U32;
    /// u64 of each segment: address of the sequence's recurrent state.
    pub const STATE: usize = Self::HEAD_ROW + MAX_ROWS * U32;
    /// u64 of each segment: address of the sequence's table of pages, a u64 address each.
    pub const PAGES: usize = Self::STATE + MAX_ROWS * U64;
    /// u64 of each segment: address of the u32 that the sequence's sampled token is written to.
    pub const SAMPLED: usize = Self::PAGES + MAX_ROWS * U64;
    /// Size of the block.
    pub const BYTES: usize = Self::SAMPLED + MAX_ROWS * U64;
}

/// One sequence's part in a step.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// Its tokens, [`LAST_SAMPLED`] for the one that the device has.
    pub tokens: &'a [u32],
    /// Absolute position of the first.
    pub position: u32,
    /// Address of its recurrent state.
    pub state: u64,
    /// Address of its table of pages.
    pub pages: u64,
    /// Address of its sampled token.
    pub sampled: u64,
}

/// Writes a step down into `block`, of [`StepLayout::BYTES`] bytes. `head_rows` are the rows that want logits,
/// ascending.
///
/// Panics where there are more than [`MAX_ROWS`] rows.
pub fn write(block: &mut [u8], segments: &[Segment<'_>], head_rows: &[u32]) {
    let rows: usize = segments.iter().map(|segment| segment.tokens.len()).sum();
    assert!(
        rows <= MAX_ROWS && head_rows.len() <= rows,
        "{rows} rows, {} of them to the head",
        head_rows.len()
    );
    block.fill(0);
    put32(block, StepLayout::ROWS, 0, rows as u32);
    put32(block, StepLayout::SEGMENTS, 0, segments.len() as u32);
    put32(block, StepLayout::HEAD_ROWS, 0, head_rows.len() as u32);
    let mut row = 0;
    for (index, segment) in segments.iter().enumerate() {
        put32(block, StepLayout::FIRST_ROW, index, row as u32);
        put32(block, StepLayout::ROW_COUNT, index, segment.tokens.len() as u32);
        put64(block, StepLayout::STATE, index, segment.state);
        put64(block, StepLayout::PAGES, index, segment.pages);
        put64(block, StepLayout::SAMPLED, index, segment.sampled);
        for (offset, &token) in segment.tokens.iter().enumerate() {
            put32(block, StepLayout::TOKEN, row, token);
            put32(block, StepLayout::POSITION, row, segment.position + offset as u32);
            put32(block, StepLayout::SEGMENT, row, index as u32);
            row += 1;
        }
    }
    for (index, &row) in head_rows.iter().enumerate() {
        put32(block, StepLayout::HEAD_ROW, index, row);
    }
}

fn put32(block: &mut [u8], field: usize, index: usize, value: u32) {
    let at = field + index * U32;
    block[at..at + U32].copy_from_slice(&value.to_le_bytes());
}

fn put64(block: &mut [u8], field: usize, index: usize, value: u64) {
    let at = field + index * U64;
    block[at..at + U64].copy_from_slice(&value.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get32(block: &[u8], field: usize, index: usize) -> u32 {
        u32::from_le_bytes(block[field + index * 4..][..4].try_into().unwrap())
    }

    #[test]
    fn rows_follow_each_other_and_know_their_sequence() {
        let mut block = vec![0xaa; StepLayout::BYTES];
        let segment = |tokens, position| Segment { tokens, position, state: 1 << 40, pages: 2, sampled: 3 };
        write(&mut block, &[segment(&[7, 8, 9], 100), segment(&[LAST_SAMPLED], 5)], &[2, 3]);
        let of = |field, count| (0..count).map(|i| get32(&block, field, i)).collect::<Vec<_>>();
        assert_eq!(of(StepLayout::ROWS, 3), [4, 2, 2]);
        assert_eq!(of(StepLayout::TOKEN, 5), [7, 8, 9, LAST_SAMPLED, 0]);
        assert_eq!(of(StepLayout::POSITION, 4), [100, 101, 102, 5]);
        assert_eq!(of(StepLayout::SEGMENT, 4), [0, 0, 0, 1]);
        assert_eq!((of(StepLayout::FIRST_ROW, 2), of(StepLayout::ROW_COUNT, 2)), (vec![0, 3], vec![3, 1]));
        assert_eq!(of(StepLayout::HEAD_ROW, 2), [2, 3]);
        assert_eq!(of(StepLayout::STATE, 4), [0, 1 << 8, 0, 1 << 8]);
        assert!(StepLayout::STATE.is_multiple_of(8));
    }
}
