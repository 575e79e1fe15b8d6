//! A small random number generator that gives the same numbers everywhere and for ever.
//!
//! xoshiro256++ 1.0, seeded through SplitMix64, by David Blackman and Sebastiano Vigna
//! (<https://prng.di.unimi.it>; both are in the public domain). Its own, because a dependency may change its
//! stream between versions, and then a seed would no longer give the same text.

use std::hash::{BuildHasher, Hasher, RandomState};

/// The generator's state.
#[derive(Clone, Debug)]
pub(super) struct Random {
    state: [u64; 4],
}

impl Random {
    /// The stream of `seed`.
    pub(super) fn new(seed: u64) -> Random {
        let mut z = seed;
        let state = std::array::from_fn(|_| split_mix(&mut z));
        Random { state }
    }

    /// A stream that differs each time.
    pub(super) fn from_entropy() -> Random {
        // The standard library seeds its hash maps from the operating system.
        Random::new(RandomState::new().build_hasher().finish())
    }

    /// The generator that goes on from `state`.
    pub(super) fn resume(state: [u64; 4]) -> Random {
        Random { state }
    }

    /// What the next numbers depend on.
    pub(super) fn state(&self) -> [u64; 4] {
        self.state
    }

    /// The next number, uniform below 2^53: the upper bits of the generator's.
    pub(super) fn next(&mut self) -> u64 {
        self.next_word() >> (u64::BITS - f64::MANTISSA_DIGITS)
    }

    fn next_word(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let shifted = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= shifted;
        s[3] = s[3].rotate_left(45);
        result
    }
}

fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First outputs of SplitMix64 from seed 1234567, as widely published (for example at Rosetta Code).
    #[test]
    fn split_mix_gives_the_published_numbers() {
        let mut state = 1_234_567;
        let numbers: Vec<u64> = (0..3).map(|_| split_mix(&mut state)).collect();
        assert_eq!(
            numbers,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    /// First outputs of xoshiro256++ from the state 1, 2, 3, 4, as in the reference implementation's ports.
    #[test]
    fn xoshiro_gives_the_published_numbers() {
        let mut random = Random { state: [1, 2, 3, 4] };
        let numbers: Vec<u64> = (0..4).map(|_| random.next_word()).collect();
        assert_eq!(numbers, [41_943_041, 58_720_359, 3_588_806_011_781_223, 3_591_011_842_654_386]);
    }

    #[test]
    fn uniform_numbers_fill_the_unit_interval() {
        let mut random = Random::new(7);
        let numbers: Vec<f64> = (0..10_000).map(|_| random.next() as f64 / (1u64 << 53) as f64).collect();
        assert!(numbers.iter().all(|u| (0.0..1.0).contains(u)));
        let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
        assert!((mean - 0.5).abs() < 0.01, "the mean of 10,000 uniform numbers is {mean}");
    }
}
