//! The largest few of a long row.
//!
//! One pass keeps everything above a threshold in a buffer of twice the wanted size; when the buffer is full,
//! `select_nth_unstable` throws the smaller half away and raises the threshold. Soon almost nothing passes
//! the threshold and the pass runs at the speed of a comparison.

use std::cmp::Ordering;

use super::coarse;

/// Candidates that are sorted rather than halved once more.
const SORTED: usize = 32;

/// A token and its logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) token: u32,
    pub(super) logit: f32,
}

/// Larger logits first, then lower ids.
fn likelier_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

/// The `count` largest of `logits` (no NaN), largest first, lowest id among equals; -infinity is left out.
pub(super) fn top(logits: &[f32], count: usize) -> Vec<Candidate> {
    let count = count.min(logits.len());
    if count == 0 {
        return Vec::new();
    }
    let mut kept: Vec<Candidate> = Vec::with_capacity(2 * count);
    let mut threshold = f32::NEG_INFINITY;
    for (token, &logit) in (0..).zip(logits) {
        // Ids rise, so one that equals the threshold comes after enough others that are at least as large.
        if logit > threshold {
            if kept.len() == 2 * count {
                kept.select_nth_unstable_by(count - 1, likelier_first);
                kept.truncate(count);
                threshold = kept[count - 1].logit;
                if logit <= threshold {
                    continue;
                }
            }
            // 0.0 and -0.0 are equal logits, but total_cmp would tell them apart.
            kept.push(Candidate { token, logit: logit + 0.0 });
        }
    }
    kept.sort_unstable_by(likelier_first);
    kept.truncate(count);
    kept
}

/// Where a nucleus ends: its last candidate, and the weights up to it and up to the one before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cut {
    last: Candidate,
    after: u64,
    before: u64,
}

impl Cut {
    /// Whether a candidate is in the nucleus.
    pub(super) fn keeps(self, candidate: Candidate) -> bool {
        likelier_first(&candidate, &self.last) != Ordering::Greater
    }

    /// Whether the nucleus ends there however much `target`, a part of `total`, is off, as a coarse one may be.
    pub(super) fn is_certain(self, target: f64, total: f64) -> bool {
        coarse::exceeds(self.after as f64, target, total) == Some(true)
            && (self.before == 0 || coarse::exceeds(self.before as f64, target, total) == Some(false))
    }
}

/// Where the shortest head of `weighed`, likeliest first, ends that holds `enough`; `None` where all of it does not. Halves
/// are told apart and only the one that holds the end is looked at again, so that nothing is sorted but the last few.
/// Afterwards `weighed` is in another order.
pub(super) fn cut(mut weighed: &mut [(Candidate, u64)], enough: u64) -> Option<Cut> {
    let order = |a: &(Candidate, u64), b: &(Candidate, u64)| likelier_first(&a.0, &b.0);
    let mut before = 0;
    while weighed.len() > SORTED {
        let half = weighed.len() / 2;
        weighed.select_nth_unstable_by(half, order);
        let (likelier, others) = weighed.split_at_mut(half);
        let sum: u64 = likelier.iter().map(|&(_, weight)| weight).sum();
        if before + sum >= enough {
            weighed = likelier;
        } else {
            before += sum;
            weighed = others;
        }
    }
    weighed.sort_unstable_by(order);
    for &(last, weight) in &*weighed {
        let after = before + weight;
        if after >= enough {
            return Some(Cut { last, after, before });
        }
        before = after;
    }
    None
}
