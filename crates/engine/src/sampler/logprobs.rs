//! Log-probabilities of a row of logits.

use super::exp::exp_nonpositive;
use super::row;
use super::top::top;

/// What the model thought of the token that was chosen, and of the likeliest ones.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Natural logarithm of the chosen token's probability.
    pub chosen: f32,
    /// The likeliest tokens and their log-probabilities, likeliest first, lowest id among equals. Tokens of
    /// probability 0 are left out, so it can be shorter than asked for.
    pub top: Vec<(u32, f32)>,
}

/// Log-softmax of `logits` (no NaN, at least one above -infinity) at `chosen` and at the `count` likeliest.
pub(super) fn of_row(logits: &[f32], chosen: u32, count: usize) -> TokenLogprobs {
    let max = f64::from(row::max(logits));
    let sum = row::sum(logits, |logit| exp_nonpositive(f64::from(logit) - max));
    let log_sum = max + sum.ln();
    let logprob = |logit: f32| (f64::from(logit) - log_sum) as f32;
    TokenLogprobs {
        chosen: logprob(logits[chosen as usize]),
        top: top(logits, count).iter().map(|c| (c.token, logprob(c.logit))).collect(),
    }
}
