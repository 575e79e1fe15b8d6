//! From a row of logits to the next token.
//!
//! The order is fixed, and every step that is off costs nothing:
//!
//! 1. **logprobs** are taken from the logits as the model gave them, before anything below touches them. This
//!    is what vLLM calls raw logprobs, and what OpenAI's API reports: they say what the model thinks, not what
//!    the request allowed.
//! 2. **logit bias** is added.
//! 3. **penalties**, in vLLM's order: repetition (over prompt and generated tokens, as Hugging Face defines
//!    it), then frequency and presence (over generated tokens only, as OpenAI defines them).
//! 4. The **constraint** of a request takes out every token that its grammar does not allow.
//! 5. **temperature** 0 ends here with the largest logit, the lowest id among equals.
//! 6. Otherwise logits are divided by the temperature and filtered by **top_k**, then **top_p** over what
//!    top_k left, then **min_p** relative to the most probable token: the order of Hugging Face's warpers.
//! 7. One uniform number picks from what is left, by the cumulative sum in order of token id.
//!
//! From step 6 on the arithmetic is fixed to the bit: an exponential of Lily's own (`exp.rs`), a generator of Lily's
//! own (`random.rs`), and weights that are **integers**, in units of 2^-44 of the most probable token's. Sums of
//! integers have no order, so the same logits and seed give the same token on every platform, and on a device
//! whose thousand threads add them as they come ([`SamplerState`]).
//!
//! A vocabulary of 248,320 is never sorted: `top.rs` finds the largest few, and where a nucleus ends. Nor is it weighed
//! exactly where f32 gives the same token for certain (`coarse.rs`).

mod coarse;
mod exp;
mod logprobs;
mod params;
mod penalties;
mod random;
mod row;
mod state;
#[cfg(test)]
mod tests;
mod top;

pub use logprobs::TokenLogprobs;
pub use params::{InvalidParam, MAX_LOGPROBS, SamplingParams};
pub use state::SamplerState;

use coarse::Coarse;
use exp::exp_nonpositive;
use penalties::Penalties;
use random::Random;
use top::Candidate;

/// The weight of the most probable token. A sum of 2^19 weights fits into 63 bits.
const ONE: u64 = 1 << 44;
/// Weights below e^-31 are less than one unit and taken as zero: a whole vocabulary of them holds less than 10^-8.
const NEGLIGIBLE: f64 = -31.0;
/// Adding 2^52 leaves the nearest integer of a number below it in the bits of the mantissa.
const ROUND: f64 = (1u64 << 52) as f64;

/// Far more than a sum or a logarithm is off by, and so little that what lies within it is no work.
const NEAR: f64 = 1e-3;

/// What one call of [`Sampler::sample`] chose.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Present where [`SamplingParams::logprobs`] asked for them.
    pub logprobs: Option<TokenLogprobs>,
}

/// Why no token could be chosen.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// The model gave NaN or +infinity, which no arithmetic after it can mend.
    #[error("the logit of token {token} is {value}; the weights or the device are broken")]
    NotFinite {
        /// The first token concerned.
        token: u32,
        /// Its logit.
        value: f32,
    },
    /// Every logit is -infinity, or there are none.
    #[error("none of the {vocab} tokens may be chosen: every logit is -infinity")]
    NoCandidate {
        /// Length of the row.
        vocab: usize,
    },
}

/// Chooses the tokens of one sequence.
#[derive(Debug)]
pub struct Sampler {
    params: SamplingParams,
    penalties: Penalties,
    random: Random,
    /// The row as the model gave it, kept only while logprobs are wanted.
    raw: Vec<f32>,
    /// Sums of weights, where no filter bounds them: see [`coarse`].
    sums: Vec<f64>,
}

impl Sampler {
    /// A sampler for one sequence that starts with `prompt`. `params` should have passed
    /// [`SamplingParams::validate`]; values outside its ranges give poor tokens, not panics.
    pub fn new(params: SamplingParams, prompt: &[u32]) -> Sampler {
        let random = match params.seed {
            Some(seed) => Random::new(seed),
            None => Random::from_entropy(),
        };
        let penalties = Penalties::new(&params, prompt);
        Sampler { params, penalties, random, raw: Vec::new(), sums: Vec::new() }
    }

    /// Chooses the next token from `logits`, `[vocab]`, and counts it for the penalties. Bias and penalties
    /// are applied in place. -infinity means "never"; NaN and +infinity are errors.
    pub fn sample(&mut self, logits: &mut [f32]) -> Result<Sampled, SampleError> {
        self.sample_among(logits, |_| {})
    }

    /// As [`Sampler::sample`], among the tokens that `restrict` leaves: it sets the logits of all others to
    /// -infinity. So a constraint holds whatever bias and penalties say, and top_k, top_p and min_p filter what it
    /// allows; log-probabilities do not know of it.
    pub fn sample_among(
        &mut self,
        logits: &mut [f32],
        restrict: impl FnOnce(&mut [f32]),
    ) -> Result<Sampled, SampleError> {
        check_finite(logits)?;
        if self.params.logprobs.is_some() {
            self.raw.clear();
            self.raw.extend_from_slice(logits);
        }
        self.apply_bias(logits);
        self.penalties.apply(logits);
        restrict(logits);
        let best = argmax(logits).ok_or(SampleError::NoCandidate { vocab: logits.len() })?;
        let token = if self.params.is_greedy() { best.token } else { self.draw(logits, best) };
        self.penalties.record(token);
        let logprobs = self.params.logprobs.map(|count| logprobs::of_row(&self.raw, token, count));
        Ok(Sampled { token, logprobs })
    }

    /// What the next choices depend on, for a device that makes them; `None` where one cannot: log-probabilities are
    /// reported, or a token has two biases, whose sum would be rounded once.
    pub fn state(&self) -> Option<SamplerState> {
        SamplerState::of(&self.params, &self.penalties, &self.random)
    }

    /// A sampler that goes on from where `state` was taken.
    pub fn resume(state: SamplerState) -> Sampler {
        let SamplerState { params, counts, random } = state;
        let penalties = Penalties::resume(&params, counts);
        Sampler { params, penalties, random: Random::resume(random), raw: Vec::new(), sums: Vec::new() }
    }

    /// Notes that a device with this sampler's state has chosen `token`: from here on both go on alike.
    pub fn follow(&mut self, token: u32) {
        self.penalties.record(token);
        if !self.params.is_greedy() {
            self.random.next();
        }
    }

    fn apply_bias(&self, logits: &mut [f32]) {
        for &(token, bias) in &self.params.logit_bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = penalties::finite(*logit + bias);
            }
        }
    }

    /// One token at random from what the filters leave; `best` is always among it.
    fn draw(&mut self, logits: &[f32], best: Candidate) -> u32 {
        let scale = Scale::new(best.logit, self.params.temperature);
        let top_k = if self.params.top_k == 0 { logits.len() } else { self.params.top_k.min(logits.len()) };
        let top_p = f64::from(self.params.top_p);
        let coarse = Coarse::new(best.logit, self.params.temperature);
        let least = (f64::from(self.params.min_p) * ONE as f64) as u64;
        let fraction = self.random.next();

        let mut kept: Vec<(u32, u64)> = if top_k < logits.len() {
            let mut sorted = scale.weigh(&top::top(logits, top_k));
            let total = sorted.iter().map(|&(_, weight)| weight).sum();
            sorted.truncate(nucleus(&sorted, top_p, total));
            sorted.sort_unstable_by_key(|&(token, _)| token);
            sorted
        } else if top_p < 1.0 {
            let nucleus = self.row_nucleus(logits, scale, coarse, top_p);
            nucleus.into_iter().map(|(candidate, weight)| (candidate.token, weight)).collect()
        } else if least > 0 {
            let likely = scale.at_least(logits, least);
            likely.into_iter().map(|(candidate, weight)| (candidate.token, weight)).collect()
        } else {
            let certain = coarse.and_then(|coarse| coarse.pick(logits, fraction, &mut self.sums));
            let row = (0..).zip(logits.iter().map(|&logit| scale.weight(logit)));
            return certain.or_else(|| pick(row, fraction)).unwrap_or(best.token);
        };
        kept.retain(|&(_, weight)| weight >= least);
        pick(kept.iter().copied(), fraction).unwrap_or(best.token)
    }

    /// The nucleus of a whole row, in order of token id.
    fn row_nucleus(
        &mut self,
        logits: &[f32],
        scale: Scale,
        coarse: Option<Coarse>,
        top_p: f64,
    ) -> Vec<(Candidate, u64)> {
        let exact = || -> u64 { logits.iter().map(|&logit| scale.weight(logit)).sum() };
        let total = match coarse {
            Some(coarse) => coarse.sum(logits, &mut self.sums) * ONE as f64,
            None => exact() as f64,
        };
        // All weights below this together hold less than what may be missing, so the nucleus lies in the others.
        let threshold = (1.0 - top_p) * total * (1.0 - NEAR) / logits.len() as f64;
        let mut likely = scale.at_least(logits, (threshold as u64).max(1));
        let mut order = likely.clone();
        let mut cut = top::cut(&mut order, (top_p * total) as u64);
        if !cut.is_some_and(|cut| cut.is_certain(top_p * total, total)) {
            cut = top::cut(&mut order, share(top_p, exact()));
        }
        if let Some(cut) = cut {
            likely.retain(|&(candidate, _)| cut.keeps(candidate));
        }
        likely
    }
}

/// The weight of a logit beside the largest one, at a temperature above 0: what a device that chooses tokens has to
/// compute to the bit. 2^44 for the largest.
pub fn weight(logit: f32, largest: f32, temperature: f32) -> u64 {
    Scale::new(largest, temperature).weight(logit)
}

/// Turns a logit into its weight, [`ONE`] for the most probable token.
#[derive(Clone, Copy)]
struct Scale {
    max: f64,
    /// One divided by the temperature.
    inverse: f64,
}

impl Scale {
    fn new(max: f32, temperature: f32) -> Scale {
        Scale { max: f64::from(max), inverse: 1.0 / f64::from(temperature) }
    }

    fn weigh(self, candidates: &[Candidate]) -> Vec<(u32, u64)> {
        candidates.iter().map(|c| (c.token, self.weight(c.logit))).collect()
    }

    fn weight(self, logit: f32) -> u64 {
        let exponent = (f64::from(logit) - self.max) * self.inverse;
        let rounded = exp_nonpositive(exponent) * ONE as f64 + ROUND;
        let weight = rounded.to_bits() & (ROUND as u64 - 1);
        if exponent < NEGLIGIBLE { 0 } else { weight }
    }

    /// The tokens of a row whose weight is at least `least`, which is above 0, in order of their ids.
    fn at_least(self, logits: &[f32], least: u64) -> Vec<(Candidate, u64)> {
        // Most are told by a comparison; those near the bound, by their weight.
        let exponent = ((least as f64 - 0.5) / ONE as f64).ln() - NEAR;
        let near = ((self.max + exponent / self.inverse) as f32).next_down();
        let candidates = (0..).zip(logits).filter(|&(_, &logit)| logit >= near);
        // 0.0 and -0.0 are equal logits, but total_cmp would tell them apart.
        let weighed =
            candidates.map(|(token, &logit)| (Candidate { token, logit: logit + 0.0 }, self.weight(logit)));
        weighed.filter(|&(_, weight)| weight >= least).collect()
    }
}

/// Length of the shortest head of `sorted` (likeliest first) that holds `top_p` of `total`, at least 1.
fn nucleus(sorted: &[(u32, u64)], top_p: f64, total: u64) -> usize {
    if top_p == 1.0 {
        return sorted.len();
    }
    let (mut mass, enough) = (0, share(top_p, total));
    let last = sorted.iter().position(|&(_, weight)| {
        mass += weight;
        mass >= enough
    });
    last.map_or(sorted.len(), |last| last + 1)
}

/// `top_p` of `total`, rounded down.
fn share(top_p: f64, total: u64) -> u64 {
    (top_p * total as f64) as u64
}

/// The token at `fraction` (of 2^53) of the cumulative sum of the weights, taken in the order given.
fn pick(weighted: impl Iterator<Item = (u32, u64)> + Clone, fraction: u64) -> Option<u32> {
    let total: u64 = weighted.clone().map(|(_, weight)| weight).sum();
    let target = ((u128::from(fraction) * u128::from(total)) >> f64::MANTISSA_DIGITS) as u64;
    let mut mass = 0;
    weighted.into_iter().find_map(|(token, weight)| {
        mass += weight;
        (mass > target).then_some(token)
    })
}

/// The largest logit, the lowest id among equals; `None` where every one is -infinity.
fn argmax(logits: &[f32]) -> Option<Candidate> {
    let logit = row::max(logits);
    if logit == f32::NEG_INFINITY {
        return None;
    }
    let token = logits.iter().position(|&l| l == logit)?;
    Some(Candidate { token: token as u32, logit })
}

fn check_finite(logits: &[f32]) -> Result<(), SampleError> {
    // The position is looked for only when there is one: a pass without an early exit is faster.
    if row::all_below_infinity(logits) {
        return Ok(());
    }
    match logits.iter().position(|&logit| !row::is_below_infinity(logit)) {
        Some(token) => Err(SampleError::NotFinite { token: token as u32, value: logits[token] }),
        None => Ok(()),
    }
}
