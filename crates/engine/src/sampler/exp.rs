//! An exponential that is the same on every platform.
//!
//! `f64::exp` calls the system's mathematics library, whose last bit differs between systems; one bit is
//! enough to change a seeded choice. This one is additions and multiplications only, which IEEE 754 fixes,
//! and it vectorises.

use std::f64::consts::LOG2_E;

/// ln 2 in two parts, so that `k * LN_2_HIGH` is exact for every k that occurs (Cody and Waite).
const LN_2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
const LN_2_LOW: f64 = f64::from_bits(0x3dea_39ef_3579_3c76);

/// Adding 1.5 * 2^52 leaves a number's nearest integer in the lowest bits of the mantissa.
const ROUND: f64 = 6_755_399_441_055_744.0;

/// Below this the result is smaller than the smallest normal f64 and is given as 0.
const SMALLEST: f64 = -708.0;

/// 1/n! for n from 13 down to 0: the Taylor series, whose next term is below 4e-18 for |r| <= ln(2)/2.
const COEFFICIENTS: [f64; 14] = [
    1.0 / 6_227_020_800.0,
    1.0 / 479_001_600.0,
    1.0 / 39_916_800.0,
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5_040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    1.0 / 2.0,
    1.0,
    1.0,
];

/// e^x for x from -infinity to 0, within a few units in the last place.
pub(super) fn exp_nonpositive(x: f64) -> f64 {
    let clamped = if x < SMALLEST { SMALLEST } else { x };
    let shifted = clamped * LOG2_E + ROUND;
    let k = shifted - ROUND;
    let r = (clamped - k * LN_2_HIGH) - k * LN_2_LOW;
    let series = COEFFICIENTS.iter().fold(0.0, |sum, c| sum * r + c);
    let exponent = (shifted.to_bits() as i64) << (f64::MANTISSA_DIGITS - 1);
    let scaled = f64::from_bits((series.to_bits() as i64).wrapping_add(exponent) as u64);
    if x < SMALLEST { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_exponential() {
        assert_eq!(exp_nonpositive(0.0), 1.0);
        assert_eq!(exp_nonpositive(f64::NEG_INFINITY), 0.0);
        for i in 0..200_000 {
            let x = f64::from(i) * -0.0035;
            let (ours, theirs) = (exp_nonpositive(x), x.exp());
            let units = (ours.to_bits() as i64 - theirs.to_bits() as i64).abs();
            assert!(units <= 2, "e^{x}: {ours:e} is {units} units in the last place from {theirs:e}");
        }
    }
}
