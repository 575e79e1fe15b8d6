//! Figures of an engine, for people, for monitoring and for tests.

use crate::backend::Memory;
use crate::prefix_cache::CacheCounts;

/// What an engine has done so far and what it holds, as of its last iteration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of state. With no request running, all that is used is the cache's, or on its way to the disk.
    pub memory: Memory,
    /// The prefix cache.
    pub cache: CacheCounts,
    /// Tokens of the prompts of requests that began.
    pub prompt_tokens: u64,
    /// Those among them that came from the prefix cache.
    pub cached_tokens: u64,
    /// Tokens chosen.
    pub generated_tokens: u64,
    /// Tokens that went through prefill: those of prompts that did not come from the cache, and those that were
    /// computed again after their sequence gave way.
    pub prefilled_tokens: u64,
    /// Snapshots that came from the disk.
    pub loaded: u64,
    /// Requests that ended, however they did.
    pub ended: u64,
    /// Times that a sequence gave its memory to older ones.
    pub gave_way: u64,
}
