//! The gated delta rule for one value head over consecutive tokens.
//!
//! Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv:2412.06464), recurrent form. With
//! decay `g` and write strength `beta`, each row `i` of the state `S [value_dim, key_dim]` goes through
//!
//! ```text
//! d    = beta * (v[i] - g * (S[i] . k))
//! S[i] = fma(d, k, g * S[i])
//! o[i] = S[i] . q
//! ```
//!
//! # Order, work and memory
//!
//! Products are summed as [`Simd::sum`] says, sixteen sums over the keys' elements. Rows know nothing of each
//! other, so sixteen of them (8 KiB at a key of 128) take all the tokens of a call before the next sixteen,
//! and stay in the L1 cache meanwhile; the state comes from memory and goes back once per call. Decode reads
//! and writes the state once, which is its floor; prefill's floor is two dot products, one multiplication and
//! one multiply-add over the state per token. A Zen 5 core takes 1.4 us per head of 128x128 in decode and 0.6 to
//! 0.9 in prefill, where the arithmetic alone would take 0.5. Where there are registers for it (AVX-512), several tokens go
//! another way (`together`), which loads a state once a token instead of twice; the bits are the same.

use super::OutRows;
use super::simd::{Kernel, LANES, Simd, prefetch, run};
use crate::isa::Isa;

/// Rows of f32 that lie `stride` apart: columns of a wider matrix.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a> {
    /// From the first element wanted on.
    pub data: &'a [f32],
    /// Elements from one row to the next.
    pub stride: usize,
}

impl<'a> Strided<'a> {
    /// The first `len` elements of row `row`. Panics where they are outside.
    pub fn row(&self, row: usize, len: usize) -> &'a [f32] {
        &self.data[row * self.stride..][..len]
    }
}

/// What consecutive tokens bring to one value head; row t belongs to token t.
#[derive(Clone, Copy, Debug)]
pub struct DeltaTokens<'a> {
    /// Number of tokens.
    pub tokens: usize,
    /// Queries, `key_dim` each, normalised and scaled.
    pub queries: Strided<'a>,
    /// Keys, `key_dim` each, normalised.
    pub keys: Strided<'a>,
    /// Values, `value_dim` each.
    pub values: Strided<'a>,
    /// One `g` each.
    pub decays: Strided<'a>,
    /// One `beta` each.
    pub write_strengths: Strided<'a>,
}

/// Advances one head's `state`, `[value_dim, key_dim]`, by all tokens. Row t of `out` gets token t's output
/// in columns `first_col..first_col + value_dim`.
///
/// Panics where `key_dim` or `value_dim` is no multiple of sixteen, or where something is too short.
///
/// # Safety
/// No other thread touches those columns of `out` meanwhile.
pub unsafe fn delta_rule(
    isa: Isa,
    key_dim: usize,
    state: &mut [f32],
    tokens: &DeltaTokens<'_>,
    out: OutRows<'_>,
    first_col: usize,
) {
    assert!(key_dim > 0 && key_dim.is_multiple_of(LANES) && state.len().is_multiple_of(key_dim * LANES));
    run(isa, DeltaRule { key_dim, state, tokens, out, first_col });
}

struct DeltaRule<'a> {
    key_dim: usize,
    state: &'a mut [f32],
    tokens: &'a DeltaTokens<'a>,
    out: OutRows<'a>,
    first_col: usize,
}

impl Kernel for DeltaRule<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        let DeltaRule { key_dim, state, tokens, out, first_col } = self;
        let value_dim = state.len() / key_dim;
        if S::ROWS >= LANES && tokens.tokens > 1 && value_dim.is_multiple_of(TURNS * HALF) {
            // SAFETY: the lengths are those of this contract, and so is what `out` says.
            return unsafe { together::<S>(key_dim, state, tokens, out, first_col) };
        }
        for (block, state) in state.chunks_exact_mut(key_dim * LANES).enumerate() {
            for t in 0..tokens.tokens {
                let query = tokens.queries.row(t, key_dim);
                let key = tokens.keys.row(t, key_dim);
                let values = &tokens.values.row(t, value_dim)[block * LANES..(block + 1) * LANES];
                let decay = tokens.decays.row(t, 1)[0];
                let strength = tokens.write_strengths.row(t, 1)[0];
                let first = first_col + block * LANES;
                // SAFETY: slices have the lengths that the step reads and writes; `out` is ours by contract.
                unsafe {
                    let out = out.row(t, first..first + LANES);
                    if t + 1 < tokens.tokens {
                        step::<S, false>(state, query, key, values, decay, strength, out);
                    } else {
                        step::<S, true>(state, query, key, values, decay, strength, out);
                    }
                }
            }
        }
    }
}

/// One token for sixteen rows of the state. `LAST` asks the cache for the sixteen rows behind them meanwhile.
///
/// # Safety
/// `state` is `[16, key.len()]`, `query` as long as `key`, whose length sixteen divides; `values` and `out`
/// have sixteen elements.
#[inline(always)]
unsafe fn step<S: Simd, const LAST: bool>(
    state: &mut [f32],
    query: &[f32],
    key: &[f32],
    values: &[f32],
    decay: f32,
    strength: f32,
    out: &mut [f32],
) {
    let key_dim = key.len();
    let state = state.as_mut_ptr();
    // SAFETY: every vector lies inside its slice, by the lengths of the contract.
    unsafe {
        let mut recalled = [S::splat(0.0); LANES];
        for rows in (0..LANES).step_by(S::ROWS) {
            for at in (0..key_dim).step_by(LANES) {
                let k = S::load(key.as_ptr().add(at));
                for r in rows..rows + S::ROWS {
                    recalled[r] = S::fma(S::load(state.add(r * key_dim + at)), k, recalled[r]);
                }
            }
        }
        let g = S::splat(decay);
        let miss = S::sub(S::load(values.as_ptr()), S::mul(g, S::sum_each(&recalled)));
        let mut writes = [0.0f32; LANES];
        S::store(writes.as_mut_ptr(), S::mul(S::splat(strength), miss));
        let mut read = [S::splat(0.0); LANES];
        for rows in (0..LANES).step_by(S::ROWS) {
            for at in (0..key_dim).step_by(LANES) {
                let k = S::load(key.as_ptr().add(at));
                let q = S::load(query.as_ptr().add(at));
                for r in rows..rows + S::ROWS {
                    let place = state.add(r * key_dim + at);
                    if LAST {
                        prefetch(place.wrapping_add(LANES * key_dim).cast());
                    }
                    let s = S::fma(S::splat(writes[r]), k, S::mul(g, S::load(place)));
                    S::store(place, s);
                    read[r] = S::fma(s, q, read[r]);
                }
            }
        }
        S::store(out.as_mut_ptr(), S::sum_each(&read));
    }
}

/// Rows that take all tokens before the next ones do in [`together`]: half a vector, so that one [`Simd::sum_each`] brings together
/// what their query reads and what the next key recalls.
const HALF: usize = LANES / 2;
/// Blocks of such rows that take turns: while one's sums are brought together, the other's products go on.
const TURNS: usize = 2;

/// All tokens, where what the next token's key recalls is summed while a token is written.
///
/// # Safety
/// As [`delta_rule`], in whose words `state` is `[value_dim, key_dim]`; `TURNS * HALF` divides `value_dim`.
#[inline(always)]
unsafe fn together<S: Simd>(
    key_dim: usize,
    state: &mut [f32],
    tokens: &DeltaTokens<'_>,
    out: OutRows<'_>,
    first_col: usize,
) {
    let value_dim = state.len() / key_dim;
    for (turn, state) in state.chunks_exact_mut(TURNS * HALF * key_dim).enumerate() {
        let first = turn * TURNS * HALF;
        let mut sums = [[0.0; LANES]; TURNS];
        for (state, sums) in state.chunks_exact(HALF * key_dim).zip(&mut sums) {
            // SAFETY: a key is as long as the state's rows.
            unsafe { recall::<S>(state, tokens.keys.row(0, key_dim), sums) };
        }
        for t in 0..tokens.tokens {
            let of_token = OfToken {
                query: tokens.queries.row(t, key_dim),
                key: tokens.keys.row(t, key_dim),
                next: tokens.keys.row((t + 1).min(tokens.tokens - 1), key_dim),
                decay: tokens.decays.row(t, 1)[0],
                strength: tokens.write_strengths.row(t, 1)[0],
            };
            let values = tokens.values.row(t, value_dim)[first..][..TURNS * HALF].chunks_exact(HALF);
            // SAFETY: these columns are ours by contract.
            let out = unsafe { out.row(t, first_col + first..first_col + first + TURNS * HALF) };
            let blocks = state.chunks_exact_mut(HALF * key_dim).zip(&mut sums);
            for (((state, sums), values), out) in blocks.zip(values).zip(out.chunks_exact_mut(HALF)) {
                // SAFETY: `of_token` has rows of `key_dim`, and there are eight values.
                unsafe {
                    if t + 1 < tokens.tokens {
                        write::<S, true>(state, of_token, values, sums);
                    } else {
                        write::<S, false>(state, of_token, values, sums);
                    }
                }
                out.copy_from_slice(&sums[..HALF]);
            }
        }
    }
}

/// What a token brings to [`write`].
#[derive(Clone, Copy)]
struct OfToken<'a> {
    query: &'a [f32],
    key: &'a [f32],
    /// The next token's key.
    next: &'a [f32],
    decay: f32,
    strength: f32,
}

/// What `key` recalls of eight rows, into the second half of `sums`.
///
/// # Safety
/// `state` is `[8, key.len()]`, whose length sixteen divides.
#[inline(always)]
unsafe fn recall<S: Simd>(state: &[f32], key: &[f32], sums: &mut [f32; LANES]) {
    // SAFETY: every vector lies inside its slice, by the lengths of the contract.
    unsafe {
        let mut all = [S::splat(0.0); LANES];
        for at in (0..key.len()).step_by(LANES) {
            let k = S::load(key.as_ptr().add(at));
            for r in 0..HALF {
                all[HALF + r] = S::fma(S::load(state.as_ptr().add(r * key.len() + at)), k, all[HALF + r]);
            }
        }
        S::store(sums.as_mut_ptr(), S::sum_each(&all));
    }
}

/// One token for eight rows, of which its key recalls the second half of `sums`: leaves there what its query reads, then, with `NEXT`, what
/// the next key recalls. Without it the cache is asked for the rows behind.
///
/// # Safety
/// As [`recall`]; all keys and the query are as long, and there are eight `values`.
#[inline(always)]
unsafe fn write<S: Simd, const NEXT: bool>(
    state: &mut [f32],
    token: OfToken<'_>,
    values: &[f32],
    sums: &mut [f32; LANES],
) {
    let OfToken { query, key, next, decay, strength } = token;
    let key_dim = key.len();
    let state = state.as_mut_ptr();
    // SAFETY: every vector lies inside its slice, by the lengths of the contract.
    unsafe {
        let g = S::splat(decay);
        let recalled = S::load_some(sums[HALF..].as_ptr(), HALF, 0.0);
        let miss = S::sub(S::load_some(values.as_ptr(), HALF, 0.0), S::mul(g, recalled));
        let mut writes = [0.0f32; LANES];
        S::store(writes.as_mut_ptr(), S::mul(S::splat(strength), miss));
        let mut all = [S::splat(0.0); LANES];
        for at in (0..key_dim).step_by(LANES) {
            let k = S::load(key.as_ptr().add(at));
            let q = S::load(query.as_ptr().add(at));
            let n = S::load(next.as_ptr().add(at));
            for r in 0..HALF {
                let place = state.add(r * key_dim + at);
                if !NEXT {
                    prefetch(place.wrapping_add(TURNS * HALF * key_dim).cast());
                }
                let s = S::fma(S::splat(writes[r]), k, S::mul(g, S::load(place)));
                S::store(place, s);
                all[r] = S::fma(s, q, all[r]);
                if NEXT {
                    all[HALF + r] = S::fma(s, n, all[HALF + r]);
                }
            }
        }
        S::store(sums.as_mut_ptr(), S::sum_each(&all));
    }
}
