//! `sample`: the greedy token of a row of logits. Other kinds of sampling are the engine's.

/// Independent running maxima: enough for the compiler to use whole vector registers.
const LANES: usize = 16;

/// The index of the largest logit, the lowest index among equals. NaN is never the largest.
pub fn greedy(logits: &[f32]) -> u32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut largest = [f32::NEG_INFINITY; LANES];
    let (blocks, rest) = logits.as_chunks::<LANES>();
    for block in blocks {
        for (largest, &logit) in largest.iter_mut().zip(block) {
            *largest = larger(*largest, logit);
        }
    }
    let largest = largest.into_iter().chain(rest.iter().copied()).fold(f32::NEG_INFINITY, larger);
    logits.iter().position(|&logit| logit == largest).unwrap_or(0) as u32
}

#[cfg(test)]
mod tests {
    use super::greedy;

    #[test]
    fn the_first_of_the_largest_wins_wherever_it_stands() {
        for len in [1, 2, 15, 16, 17, 100] {
            for best in 0..len {
                let mut logits = vec![-1.0; len];
                logits[best..].fill(2.5);
                assert_eq!(greedy(&logits), best as u32);
            }
        }
    }

    #[test]
    fn nan_and_infinities_are_no_obstacle() {
        assert_eq!(greedy(&[f32::NAN, f32::NEG_INFINITY, -3.0, f32::NAN]), 2);
        assert_eq!(greedy(&[1.0, f32::INFINITY]), 1);
        assert_eq!(greedy(&[f32::NAN; 20]), 0);
    }
}
