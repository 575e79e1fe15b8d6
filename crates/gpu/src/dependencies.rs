//! Which dispatch has to wait for which, from the bytes that they touch.
//!
//! Two dispatches conflict where they touch the same byte and one of them writes it: read after write, write
//! after read, write after write. The later one then waits for the earlier. Of all such pairs only those are
//! kept as edges that no way over others implies, so that a graph has the fewest edges and a pass the fewest
//! barriers.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::plan::{Access, Dispatch};

/// Edges between the dispatches of a plan, reduced.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dependencies {
    /// For each dispatch, those that it waits for directly, ascending.
    pub waits_for: Vec<Vec<usize>>,
}

impl Dependencies {
    /// Number of edges.
    pub fn edges(&self) -> usize {
        self.waits_for.iter().map(Vec::len).sum()
    }

    /// The longest chain of dispatches of which each waits for the one before it: the pass cannot be done in
    /// fewer dependent steps.
    pub fn longest_chain(&self) -> Vec<usize> {
        // Length of the longest chain that ends with a dispatch, and the one before it on that chain.
        let mut ends: Vec<(usize, Option<usize>)> = Vec::with_capacity(self.waits_for.len());
        for earlier in &self.waits_for {
            let before = earlier.iter().copied().max_by_key(|&i| ends[i].0);
            ends.push((before.map_or(1, |i| ends[i].0 + 1), before));
        }
        let mut next = (0..ends.len()).max_by_key(|&i| ends[i].0);
        let mut chain = Vec::new();
        while let Some(dispatch) = next {
            chain.push(dispatch);
            next = ends[dispatch].1;
        }
        chain.reverse();
        chain
    }
}

/// An access of a dispatch that is already recorded.
struct Earlier {
    dispatch: usize,
    range: Range<u64>,
    writes: bool,
}

/// The edges of `dispatches`, which are in the order of the program.
pub fn derive(dispatches: &[Dispatch]) -> Dependencies {
    let buffers = dispatches.iter().flat_map(|d| &d.accesses).map(|a| a.buffer.0 + 1).max().unwrap_or(0);
    let mut history: Vec<Vec<Earlier>> = (0..buffers).map(|_| Vec::new()).collect();
    let mut ancestors: Vec<Bits> = Vec::with_capacity(dispatches.len());
    let mut waits_for = Vec::with_capacity(dispatches.len());
    for (index, dispatch) in dispatches.iter().enumerate() {
        let conflicts: BTreeSet<usize> = dispatch
            .accesses
            .iter()
            .flat_map(|access| history[access.buffer.0].iter().filter(|earlier| conflict(earlier, access)))
            .map(|earlier| earlier.dispatch)
            .collect();
        let mut known = Bits::new(dispatches.len());
        let mut direct = Vec::new();
        // The latest first: whatever it waits for itself needs no edge.
        for &earlier in conflicts.iter().rev() {
            if !known.has(earlier) {
                direct.push(earlier);
                known.join(&ancestors[earlier]);
                known.set(earlier);
            }
        }
        direct.reverse();
        waits_for.push(direct);
        ancestors.push(known);
        for access in &dispatch.accesses {
            let (range, writes) = (access.range.clone(), access.mode.writes());
            history[access.buffer.0].push(Earlier { dispatch: index, range, writes });
        }
    }
    Dependencies { waits_for }
}

fn conflict(earlier: &Earlier, access: &Access) -> bool {
    // An empty range has no bytes, wherever it stands.
    let shared = earlier.range.start.max(access.range.start)..earlier.range.end.min(access.range.end);
    (earlier.writes || access.mode.writes()) && !shared.is_empty()
}

/// A set of dispatches.
#[derive(Clone)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(count: usize) -> Bits {
        Bits(vec![0; count.div_ceil(u64::BITS as usize)])
    }

    fn has(&self, index: usize) -> bool {
        self.0[index / 64] >> (index % 64) & 1 == 1
    }

    fn set(&mut self, index: usize) {
        self.0[index / 64] |= 1 << (index % 64);
    }

    fn join(&mut self, other: &Bits) {
        for (word, other) in self.0.iter_mut().zip(&other.0) {
            *word |= other;
        }
    }
}
