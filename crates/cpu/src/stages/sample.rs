//! `sample`: the greedy token of a row of logits. Other kinds of sampling are the engine's.

/// The index of the largest logit, the lowest index among equals. NaN is never the largest.
pub fn greedy(logits: &[f32]) -> u32 {
    let mut best = 0;
    let mut largest = f32::NEG_INFINITY;
    for (index, &logit) in logits.iter().enumerate() {
        if logit > largest {
            (best, largest) = (index, logit);
        }
    }
    best as u32
}
