//! Repetition, frequency and presence penalties.
//!
//! Repetition: Keskar et al., "CTRL" (arXiv 1909.05858), section 4.1, over prompt and answer as Hugging Face's
//! `RepetitionPenaltyLogitsProcessor` applies it. Frequency and presence: OpenAI's API reference,
//! `logit -= count * frequency_penalty + (count > 0) * presence_penalty`, over the answer alone.

use std::collections::HashMap;

use super::params::SamplingParams;

/// The penalties of a request and the tokens that they apply to.
#[derive(Debug)]
pub(super) struct Penalties {
    repetition: f32,
    presence: f32,
    frequency: f32,
    /// How often the answer holds each token; 0 for one that only the prompt holds.
    counts: HashMap<u32, u32>,
}

impl Penalties {
    pub(super) fn new(params: &SamplingParams, prompt: &[u32]) -> Penalties {
        let mut counts = HashMap::new();
        if params.repetition_penalty != 1.0 {
            counts.extend(prompt.iter().map(|&token| (token, 0)));
        }
        Penalties::with(params, counts)
    }

    /// The penalties of `params` after so many of each token.
    pub(super) fn resume(params: &SamplingParams, counts: Vec<(u32, u32)>) -> Penalties {
        Penalties::with(params, counts.into_iter().collect())
    }

    fn with(params: &SamplingParams, counts: HashMap<u32, u32>) -> Penalties {
        Penalties {
            repetition: params.repetition_penalty,
            presence: params.presence_penalty,
            frequency: params.frequency_penalty,
            counts,
        }
    }

    /// How often the answer holds each token that counts, in no order.
    pub(super) fn counts(&self) -> Vec<(u32, u32)> {
        self.counts.iter().map(|(&token, &count)| (token, count)).collect()
    }

    fn is_off(&self) -> bool {
        self.repetition == 1.0 && self.presence == 0.0 && self.frequency == 0.0
    }

    /// Counts a token of the answer.
    pub(super) fn record(&mut self, token: u32) {
        if !self.is_off() {
            *self.counts.entry(token).or_default() += 1;
        }
    }

    /// Changes the logits of the tokens seen so far. Costs one visit per distinct token.
    pub(super) fn apply(&self, logits: &mut [f32]) {
        if self.is_off() {
            return;
        }
        for (&token, &count) in &self.counts {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            let repeated = if *logit > 0.0 { *logit / self.repetition } else { *logit * self.repetition };
            let presence = if count > 0 { self.presence } else { 0.0 };
            *logit = finite(repeated - count as f32 * self.frequency - presence);
        }
    }
}

/// `logit` without the overflow that an extreme penalty or bias can cause: -infinity still means "never", but
/// nothing becomes certain by accident.
pub(super) fn finite(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) }
}
