//! What the system allows this process, where that can be too little for the model or the server.

use super::report::{Limit, gb};
use crate::machine::{self, Resource};

/// Connections, files of weights and of the prefix cache, with room to spare. Below it a busy server may refuse
/// connections.
const ENOUGH_FILES: u64 = 1024;
/// Addresses beside the mapped weights: code, stacks of threads, state and caches.
const ADDRESSES_BESIDE: u64 = 8 << 30;

/// The limits, where the system tells them, for a model of so many mapped bytes.
pub fn all(weight_bytes: u64) -> Vec<Limit> {
    let files = machine::limit(Resource::OpenFiles).map(open_files);
    let addresses = machine::limit(Resource::AddressSpace).map(|limit| address_space(limit, weight_bytes));
    let memory = machine::memory_bytes().zip(machine::installed_bytes()).map(|(may, has)| memory(may, has));
    [files, addresses, memory].into_iter().flatten().collect()
}

fn open_files(limit: u64) -> Limit {
    let advice = (limit < ENOUGH_FILES)
        .then(|| format!("a busy server can run out of them: `ulimit -n {ENOUGH_FILES}` before it starts"));
    let value = if limit == u64::MAX { "unlimited".to_owned() } else { limit.to_string() };
    Limit { name: "open files", value, advice, blocks: false }
}

fn address_space(limit: u64, weight_bytes: u64) -> Limit {
    let needed = weight_bytes.saturating_add(ADDRESSES_BESIDE);
    let advice = (limit < needed).then(|| {
        format!(
            "the weights cannot be mapped: `ulimit -v unlimited`, or at least {}",
            needed.div_ceil(1 << 10)
        )
    });
    let value = if limit == u64::MAX { "unlimited".to_owned() } else { gb(limit) };
    Limit { name: "address space", value, blocks: advice.is_some(), advice }
}

/// What this process `may` have of the memory that the machine `has`.
fn memory(may: u64, has: u64) -> Limit {
    let advice = (may < has).then(|| {
        format!(
            "its control group may have no more of the machine's {}: raise the container's limit",
            gb(has)
        )
    });
    Limit { name: "memory", value: gb(may), advice, blocks: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_are_too_low_say_how_they_are_raised() {
        assert_eq!(open_files(1 << 20).advice, None);
        let files = open_files(256);
        assert!(files.advice.unwrap().contains("ulimit -n 1024") && !files.blocks);
        assert!(!address_space(u64::MAX, 19 << 30).blocks);
        let addresses = address_space(20 << 30, 19 << 30);
        assert!(addresses.blocks && addresses.advice.unwrap().contains("ulimit -v unlimited"));
        assert_eq!(memory(8 << 30, 8 << 30).advice, None);
        assert!(memory(8 << 30, 16 << 30).advice.unwrap().contains("17.2 GB"));
    }
}
