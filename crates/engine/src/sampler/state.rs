//! What a sampler's choices depend on, handed to a device that makes them.

use super::params::SamplingParams;
use super::penalties::Penalties;
use super::random::Random;

/// Everything that the next choice depends on beside the logits. With it a device chooses what
/// [`Sampler::sample`](super::Sampler::sample) would, and advances it in the same way: the token counts from then
/// on, and unless the choice is greedy one number is drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerState {
    /// What was asked for. [`SamplingParams::logprobs`] is `None`, and no token has two biases.
    pub params: SamplingParams,
    /// How often the answer holds each token, in no order; 0 for one that only the prompt holds. Empty where there
    /// are no penalties.
    pub counts: Vec<(u32, u32)>,
    /// State of xoshiro256++; a draw is the upper 53 bits of its next number.
    pub random: [u64; 4],
}

impl SamplerState {
    /// `None` where no device can go on from it: see [`Sampler::state`](super::Sampler::state).
    pub(super) fn of(
        params: &SamplingParams,
        penalties: &Penalties,
        random: &Random,
    ) -> Option<SamplerState> {
        let mut biased: Vec<u32> = params.logit_bias.iter().map(|&(token, _)| token).collect();
        biased.sort_unstable();
        if params.logprobs.is_some() || biased.windows(2).any(|pair| pair[0] == pair[1]) {
            return None;
        }
        let (params, counts) = (params.clone(), penalties.counts());
        Some(SamplerState { params, counts, random: random.state() })
    }
}
