//! The prompt block: what the host tells the kernels about a pass over many tokens of one sequence.
//!
//! As the step block of decode ([`crate::step`]) it is all that differs between two launches of the same plan. All
//! numbers are little-endian; the tokens stand behind the block's head.

const U32: usize = size_of::<u32>();
const U64: usize = size_of::<u64>();

/// Byte offsets of the block's fields.
#[derive(Clone, Copy, Debug)]
pub struct PromptLayout;

impl PromptLayout {
    /// u32: tokens of the pass.
    pub const ROWS: usize = 0;
    /// u32: absolute position of the first.
    pub const POSITION: usize = U32;
    /// u64: address of the sequence's recurrent state.
    pub const STATE: usize = 2 * U32;
    /// u64: address of the sequence's table of pages, a u64 address each.
    pub const PAGES: usize = Self::STATE + U64;
    /// u32 of each token.
    pub const TOKENS: usize = Self::PAGES + 2 * U64;

    /// Size of a block with room for `rows` tokens.
    pub const fn bytes(rows: usize) -> usize {
        Self::TOKENS + rows * U32
    }
}

/// Writes a pass over `tokens` down into `block`, which has at least [`PromptLayout::bytes`] for them; returns how
/// many bytes say it. `position` is the first token's, `state` and `pages` are addresses.
///
/// Panics where the block is too small.
pub fn write(block: &mut [u8], tokens: &[u32], position: u32, state: u64, pages: u64) -> usize {
    let bytes = PromptLayout::bytes(tokens.len());
    let block = &mut block[..bytes];
    let mut put = |at: usize, value: &[u8]| block[at..at + value.len()].copy_from_slice(value);
    put(PromptLayout::ROWS, &(tokens.len() as u32).to_le_bytes());
    put(PromptLayout::POSITION, &position.to_le_bytes());
    put(PromptLayout::STATE, &state.to_le_bytes());
    put(PromptLayout::PAGES, &pages.to_le_bytes());
    for (index, token) in tokens.iter().enumerate() {
        put(PromptLayout::TOKENS + index * U32, &token.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_stand_behind_the_head() {
        let mut block = vec![0xaa; PromptLayout::bytes(4)];
        assert_eq!(write(&mut block, &[7, 8, 9], 100, 1 << 40, 2), PromptLayout::bytes(3));
        let word = |at: usize| u32::from_le_bytes(block[at..at + 4].try_into().unwrap());
        assert_eq!((word(PromptLayout::ROWS), word(PromptLayout::POSITION)), (3, 100));
        assert_eq!((word(PromptLayout::STATE + 4), word(PromptLayout::PAGES)), (1 << 8, 2));
        assert_eq!([0, 1, 2].map(|token| word(PromptLayout::TOKENS + 4 * token)), [7, 8, 9]);
        assert_eq!(PromptLayout::TOKENS, 32);
    }
}
