//! What is computed of one position's logits.

use serde::Serialize;

/// What a model says of the token after a position.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Natural logarithm of the probability of the token that does come next.
    pub logprob: f64,
    /// The likeliest token, the lowest id among equals.
    pub best: u32,
}

impl Row {
    /// Of the logits `[vocab]`, where `target` comes next.
    pub fn new(logits: &[f32], target: u32) -> Row {
        let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        let logprob = f64::from(logits[target as usize]) - log_total(logits);
        Row { logprob, best: best as u32 }
    }
}

/// Kullback-Leibler divergence of the distribution of the logits `subject` from that of `reference`, in nats: how much less
/// likely, in the mean of the logarithm, what the reference would write becomes. Never negative but for rounding, which is
/// cut off.
pub fn divergence(reference: &[f32], subject: &[f32]) -> f64 {
    let (total, other) = (log_total(reference), log_total(subject));
    let pairs = reference.iter().zip(subject).map(|(&p, &q)| (f64::from(p) - total, f64::from(q) - other));
    pairs.map(|(p, q)| p.exp() * (p - q)).sum::<f64>().max(0.0)
}

/// Logarithm of the sum of the exponentials.
fn log_total(logits: &[f32]) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    largest + logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_definition() {
        // Probabilities 1/2, 1/4, 1/4 and 1/4, 1/4, 1/2, from logits with any constant added.
        let (p, q) = ([3.0, 3.0 - 2f32.ln(), 3.0 - 2f32.ln()], [-2f32.ln(), -2f32.ln(), 0.0]);
        let row = Row::new(&p, 1);
        assert!((row.logprob - 0.25f64.ln()).abs() < 1e-6 && row.best == 0);
        // 1/2 ln 2 + 1/4 ln 1 + 1/4 ln 1/2
        assert!((divergence(&p, &q) - 0.25 * 2f64.ln()).abs() < 1e-6);
        assert_eq!(divergence(&p, &p), 0.0);
    }
}
