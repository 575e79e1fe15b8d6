//! Weights of a whole row to four digits, at several times the speed of exact ones.
//!
//! A seeded choice is defined in integers, which an exponential in f64 gives. Nearly always f32 is enough to know it: a
//! choice is returned only where no error within [`ERROR`] could change it. The others are left to the integers: one in a
//! hundred where a thousand tokens share the weight, nearly none where a few hold it, most where it lies on a whole
//! vocabulary evenly. So this changes the time that a choice takes and never the choice.
//!
//! Sums of blocks come first, then the weights of the one block that the choice falls into.

use super::row;

/// Weights that are summed in f32 before they go into a sum in f64.
const BLOCK: usize = 256;

/// Bound of the relative error of a weight and of a sum of them. The exponent, at most 31 in magnitude, is rounded three
/// times on its way (31 * 3 * 2^-24 = 6e-6), the series and 16 additions add 2e-6; this is 3e-5.
const ERROR: f64 = 1.0 / 32_768.0;

/// Bound of what rounding to units and taking the least weights as zero come to, as part of the whole: 262,144 times 2^-45
/// and e^-31 are 1.7e-8.
const NEGLECTED: f64 = 3e-8;

/// Exponents below this are weights of zero, as elsewhere.
const NEGLIGIBLE: f32 = super::NEGLIGIBLE as f32;

/// ln 2 in two parts, so that `k * LN_2_HIGH` is exact for every k that occurs (Cody and Waite).
const LN_2_HIGH: f32 = f32::from_bits(0x3f31_8000);
const LN_2_LOW: f32 = f32::from_bits(0xb95e_8083);

/// Adding 1.5 * 2^23 leaves a number's nearest integer in the lowest bits of the mantissa.
const ROUND: f32 = 12_582_912.0;

/// 1/n! for n from 7 down to 0: the next term is below 6e-9 for |r| <= ln(2)/2.
const COEFFICIENTS: [f32; 8] =
    [1.0 / 5_040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// How logits become weights.
#[derive(Clone, Copy)]
pub(super) struct Coarse {
    max: f32,
    inverse_temperature: f32,
}

/// Whether `value`, which may be off by [`ERROR`], is above or below `bound`, which may be, too; `None` where nobody
/// can tell. Both are parts of `total`.
pub(super) fn exceeds(value: f64, bound: f64, total: f64) -> Option<bool> {
    let margin = ERROR * (value + bound) + NEGLECTED * total;
    ((value - bound).abs() > margin).then_some(value > bound)
}

impl Coarse {
    /// Weights relative to that of `max`; `None` where the temperature is too small for f32.
    pub(super) fn new(max: f32, temperature: f32) -> Option<Coarse> {
        let inverse_temperature = temperature.recip();
        inverse_temperature.is_finite().then_some(Coarse { max, inverse_temperature })
    }

    fn weight(self, logit: f32) -> f32 {
        exp((logit - self.max) * self.inverse_temperature)
    }

    /// The sums of the row's blocks, into `sums`; returns the sum of all.
    pub(super) fn sum(self, logits: &[f32], sums: &mut Vec<f64>) -> f64 {
        sums.clear();
        sums.extend(
            logits.chunks(BLOCK).map(|block| f64::from(row::sum_f32(block, |logit| self.weight(logit)))),
        );
        sums.iter().sum()
    }

    /// The token at `fraction` (of 2^53) of the cumulative sum, where that is certain.
    pub(super) fn pick(self, logits: &[f32], fraction: u64, sums: &mut Vec<f64>) -> Option<u32> {
        let total = self.sum(logits, sums);
        let target = fraction as f64 / (1u64 << f64::MANTISSA_DIGITS) as f64 * total;
        let mut before = 0.0;
        let block = sums.iter().position(|sum| {
            let within = before + sum > target;
            before += if within { 0.0 } else { *sum };
            within
        })?;
        for (token, &logit) in (0..).zip(logits).skip(block * BLOCK).take(BLOCK) {
            let after = before + f64::from(self.weight(logit));
            if after > target {
                let certain = exceeds(after, target, total)? && !exceeds(before, target, total)?;
                return certain.then_some(token);
            }
            before = after;
        }
        None
    }
}

/// e^x for x from -infinity to 0; 0 below [`NEGLIGIBLE`].
fn exp(x: f32) -> f32 {
    let clamped = if x < NEGLIGIBLE { NEGLIGIBLE } else { x };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let k = shifted - ROUND;
    let r = (clamped - k * LN_2_HIGH) - k * LN_2_LOW;
    let series = COEFFICIENTS.iter().fold(0.0, |sum, c| sum * r + c);
    let scaled =
        f32::from_bits(series.to_bits().wrapping_add(shifted.to_bits() << (f32::MANTISSA_DIGITS - 1)));
    if x < NEGLIGIBLE { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_exponential_to_six_digits() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        for i in 0..310_000 {
            let x = i as f32 * -0.0001;
            let (ours, theirs) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((ours / theirs - 1.0).abs() < 1e-6, "e^{x}: {ours:e}, not {theirs:e}");
        }
    }

    #[test]
    fn what_it_picks_is_what_exact_weights_give_and_it_leaves_few_to_them() {
        let mut random = super::super::random::Random::new(3);
        let mut undecided = 0;
        for round in 0..400 {
            let temperature = [0.1, 0.7, 1.0, 2.0][round % 4];
            let logits: Vec<f32> = (0..1_000)
                .map(|_| (random.next() as f64 / (1u64 << 53) as f64 * 40.0 - 20.0) as f32)
                .collect();
            let max = row::max(&logits);
            let scale = super::super::Scale::new(max, temperature);
            let weights = || (0..).zip(logits.iter().map(|&logit| scale.weight(logit)));
            let coarse = Coarse::new(max, temperature).unwrap();
            for _ in 0..25 {
                let fraction = random.next();
                match coarse.pick(&logits, fraction, &mut Vec::new()) {
                    Some(token) => assert_eq!(Some(token), super::super::pick(weights(), fraction)),
                    None => undecided += 1,
                }
            }
        }
        assert!(undecided < 200, "{undecided} of 10,000");
    }
}
