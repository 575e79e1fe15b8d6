//! The largest few of a long row.
//!
//! One pass keeps everything above a threshold in a buffer of twice the wanted size; when the buffer is full,
//! `select_nth_unstable` throws the smaller half away and raises the threshold. Soon almost nothing passes
//! the threshold and the pass runs at the speed of a comparison.

use std::cmp::Ordering;

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
