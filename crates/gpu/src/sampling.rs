//! Tokens chosen as requests ask, on a device without addresses: sizes that plan, host and kernels share.
//!
//! A sequence whose tokens are not simply the largest logits has a **recipe** in a pool, which the kernels advance
//! themselves, and **tables** of a u32 for each token in another one: how often it was seen, and its bias. What a row's
//! kernels hand to each other is its **notes**.

/// Bytes of a recipe.
pub const RECIPE_BYTES: usize = 96;
/// In place of a recipe's or a table's number: there is none.
pub const NONE: u32 = u32::MAX;
/// Threads of a threadgroup, and the tokens of each.
pub const THREADS: u32 = 256;
const TOKENS_EACH: usize = 8;
/// The most parts that a row is cut into: a thread has a part's sum.
pub const MOST_PARTS: usize = THREADS as usize;
/// Bytes of a row's notes: two u64 of each part, a histogram, and the tokens that it leaves undecided.
pub const NOTES_BYTES: usize =
    2 * MOST_PARTS * size_of::<u64>() + BINS * 3 * size_of::<u32>() + 16 + LIST * 2 * size_of::<u64>();
/// Bins of the histogram.
pub const BINS: usize = 2048;
/// Tokens that it may leave undecided before the whole row is looked through.
pub const LIST: usize = 4096;

/// Parts that a row of `vocab` logits is cut into, a threadgroup each.
pub fn parts(vocab: usize) -> usize {
    vocab.div_ceil(THREADS as usize * TOKENS_EACH)
}

/// Bytes of a table.
pub fn table_bytes(vocab: usize) -> usize {
    vocab * size_of::<u32>()
}
