//! Passes over a whole row of logits.
//!
//! Floating-point reductions keep their order, so the compiler may not vectorise them; keeping one partial
//! result per lane lets it. The lanes are fixed, and so are the results.

/// Partial results kept side by side.
const LANES: usize = 16;

/// The largest logit; -infinity for an empty row. No NaN.
pub(super) fn max(logits: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, logit);
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger)
}

/// The sum of `f` over a short piece of a row, in f32.
pub(super) fn sum_f32(logits: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane += f(logit);
        }
    }
    lanes.into_iter().chain(rest.iter().map(|&logit| f(logit))).sum()
}

/// The sum of `f` over the row.
pub(super) fn sum(logits: &[f32], f: impl Fn(f32) -> f64) -> f64 {
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane += f(logit);
        }
    }
    lanes.into_iter().chain(rest.iter().map(|&logit| f(logit))).sum()
}

/// Whether a logit is a number or -infinity: neither NaN nor +infinity.
pub(super) fn is_below_infinity(logit: f32) -> bool {
    logit < f32::INFINITY
}

/// [`is_below_infinity`] of every logit.
pub(super) fn all_below_infinity(logits: &[f32]) -> bool {
    logits.iter().fold(true, |all, &logit| all & is_below_infinity(logit))
}
