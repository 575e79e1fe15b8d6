//! How much of a device's memory a model is to take.

use std::collections::BTreeMap;

use crate::plan::{Plan, Role};

/// How much context is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// So many tokens; less is an error.
    Exactly(usize),
    /// So many tokens, or fewer where there is no room.
    AtMost(usize),
}

impl Context {
    /// No more than `most`.
    pub fn within(self, most: usize) -> Context {
        match self {
            Context::Exactly(tokens) => Context::Exactly(tokens.min(most)),
            Context::AtMost(tokens) => Context::AtMost(tokens.min(most)),
        }
    }
}

/// Names and bytes of the buffers of `roles`, which plans share where they have the same names.
pub fn shared_buffers<'a>(
    plans: impl IntoIterator<Item = &'a Plan>,
    roles: &[Role],
) -> BTreeMap<&'a str, u64> {
    let mut sizes = BTreeMap::new();
    for buffer in plans.into_iter().flat_map(|plan| &plan.buffers).filter(|b| roles.contains(&b.role)) {
        let size = sizes.entry(buffer.name.as_str()).or_insert(0);
        *size = buffer.bytes.max(*size);
    }
    sizes
}
