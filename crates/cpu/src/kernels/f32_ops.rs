//! Vector f32 operations on slices.
//!
//! Element-wise ones treat each element alone; sums go into sixteen partial sums, element `i` into `i % 16`
//! by fused multiply-add, which are then added halves onto halves ([`Simd::sum`]). Slices need no particular
//! length or alignment. All panic where lengths disagree.

use super::simd::{Kernel, LANES, Simd, run};
use crate::isa::Isa;

/// `sum(a[i] * b[i])`.
pub fn dot(isa: Isa, a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    run(isa, Dot { a, b })
}

/// `y[i] = fma(a, x[i], y[i])`.
pub fn axpy(isa: Isa, a: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    run(isa, Axpy { a, x, y });
}

/// `x[i] *= factor`.
pub fn scale(isa: Isa, factor: f32, x: &mut [f32]) {
    run(isa, Scale { factor, x });
}

/// `out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]`.
pub fn rms_norm(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == weight.len() && x.len() == out.len());
    let factor = rms_factor(isa, x, eps);
    run(isa, ScaledProduct { factor, x, weight, out });
}

/// As [`rms_norm`], into `x` itself.
pub fn rms_norm_in_place(isa: Isa, x: &mut [f32], weight: &[f32], eps: f32) {
    assert_eq!(x.len(), weight.len());
    let factor = rms_factor(isa, x, eps);
    run(isa, ScaleBy { factor, weight, x });
}

fn rms_factor(isa: Isa, x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(isa, x, x) / x.len() as f32 + eps).sqrt()
}

/// `gate[i] = silu(gate[i]) * up[i]`, where `silu(x) = x / (1 + exp(-x))`.
pub fn silu_mul(isa: Isa, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len());
    run(isa, SiluMul { gate, up });
}

/// `x[i] *= sigmoid(gate[i])`.
pub fn sigmoid_gate(isa: Isa, gate: &[f32], x: &mut [f32]) {
    assert_eq!(gate.len(), x.len());
    run(isa, SigmoidGate { gate, x });
}

/// `x[i] = x[i] * sigmoid(gate[i]) * gate[i]`: SwiGLU.
pub fn silu_gate(isa: Isa, gate: &[f32], x: &mut [f32]) {
    assert_eq!(gate.len(), x.len());
    run(isa, SiluGate { gate, x });
}

/// `x[i] = exp(x[i])`; see [`Simd::exp`] for its error and its ends.
pub fn exp(isa: Isa, x: &mut [f32]) {
    run(isa, Exp { x });
}

/// `x[i] = exp(x[i] - max) / sum(exp(x - max))`. An empty slice stays empty.
pub fn softmax(isa: Isa, x: &mut [f32]) {
    let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum = run(isa, ExpSum { largest, x });
    scale(isa, 1.0 / sum, x);
}

/// One token of a causal depthwise convolution, then SiLU:
/// `out[c] = silu(taps[0][c] * inputs[0][c] + taps[1][c] * inputs[1][c] + ...)`, summed in that order.
///
/// `taps` is `[width, channels]` (the checkpoint's is its transpose), oldest first, as `inputs` are.
pub fn conv_silu(isa: Isa, taps: &[f32], inputs: &[&[f32]], out: &mut [f32]) {
    assert!(taps.len() == inputs.len() * out.len() && inputs.iter().all(|input| input.len() == out.len()));
    run(isa, ConvSilu { taps, inputs, out });
}

/// Runs `$body` for each vector of slices of `$len` elements, with loads and stores of the right length.
macro_rules! for_vectors {
    ($S:ident, $len:expr, |$at:ident, $load:ident, $store:ident| $body:block) => {{
        let len = $len;
        let mut $at = 0;
        // SAFETY: full vectors end at or before the end of the slices; the rest is moved with its length.
        unsafe {
            while $at + LANES <= len {
                macro_rules! $load {
                    ($from:expr) => {
                        $S::load($from.as_ptr().add($at))
                    };
                }
                #[allow(unused_macros)]
                macro_rules! $store {
                    ($to:expr, $v:expr) => {
                        $S::store($to.as_mut_ptr().add($at), $v)
                    };
                }
                $body
                $at += LANES;
            }
            if $at < len {
                macro_rules! $load {
                    ($from:expr) => {
                        $S::load_some($from.as_ptr().add($at), len - $at, 0.0)
                    };
                }
                #[allow(unused_macros)]
                macro_rules! $store {
                    ($to:expr, $v:expr) => {
                        $S::store_some($to.as_mut_ptr().add($at), len - $at, $v)
                    };
                }
                $body
            }
        }
    }};
}

/// `silu` of sixteen.
///
/// # Safety
/// The instruction set is there.
#[inline(always)]
unsafe fn silu<S: Simd>(x: S::F) -> S::F {
    // SAFETY: by contract.
    unsafe { S::mul(x, sigmoid::<S>(x)) }
}

/// `1 / (1 + exp(-x))` of sixteen.
///
/// # Safety
/// The instruction set is there.
#[inline(always)]
unsafe fn sigmoid<S: Simd>(x: S::F) -> S::F {
    // SAFETY: by contract.
    unsafe {
        let one = S::splat(1.0);
        S::div(one, S::add(one, S::exp(S::sub(S::splat(0.0), x))))
    }
}

struct Dot<'a> {
    a: &'a [f32],
    b: &'a [f32],
}

impl Kernel for Dot<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) -> f32 {
        let Dot { a, b } = self;
        // SAFETY: by contract.
        let mut acc = unsafe { S::splat(0.0) };
        for_vectors!(S, a.len(), |at, load, store| {
            acc = S::fma(load!(a), load!(b), acc);
        });
        // SAFETY: by contract.
        unsafe { S::sum(acc) }
    }
}

struct Axpy<'a> {
    a: f32,
    x: &'a [f32],
    y: &'a mut [f32],
}

impl Kernel for Axpy<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        let Axpy { a, x, y } = self;
        for_vectors!(S, x.len(), |at, load, store| {
            let v = S::fma(S::splat(a), load!(x), load!(y));
            store!(y, v);
        });
    }
}

struct Scale<'a> {
    factor: f32,
    x: &'a mut [f32],
}

impl Kernel for Scale<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        let Scale { factor, x } = self;
        for_vectors!(S, x.len(), |at, load, store| {
            let v = S::mul(S::splat(factor), load!(x));
            store!(x, v);
        });
    }
}

struct ScaledProduct<'a> {
    factor: f32,
    x: &'a [f32],
    weight: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for ScaledProduct<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        let ScaledProduct { factor, x, weight, out } = self;
        for_vectors!(S, x.len(), |at, load, store| {
            let v = S::mul(S::mul(load!(x), S::splat(factor)), load!(weight));
            store!(out, v);
        });
    }
}

struct ScaleBy<'a> {
    factor: f32,
    weight: &'a [f32],
    x: &'a mut [f32],
}

impl Kernel for ScaleBy<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        let ScaleBy { factor, weight, x } = self;
        for_vectors!(S, x.len(), |at, load, store| {
            let v = S::mul(S::mul(load!(x), S::splat(factor)), load!(weight));
            store!(x, v);
        });
    }
}

struct SiluMul<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        let SiluMul { gate, up } = self;
        for_vectors!(S, gate.len(), |at, load, store| {
            let v = S::mul(silu::<S>(load!(gate)), load!(up));
            store!(gate, v);
        });
    }
}

struct SiluGate<'a> {
    gate: &'a [f32],
    x: &'a mut [f32],
}

impl Kernel for SiluGate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        let SiluGate { gate, x } = self;
        for_vectors!(S, x.len(), |at, load, store| {
            let gate = load!(gate);
            let v = S::mul(S::mul(load!(x), sigmoid::<S>(gate)), gate);
            store!(x, v);
        });
    }
}

struct SigmoidGate<'a> {
    gate: &'a [f32],
    x: &'a mut [f32],
}

impl Kernel for SigmoidGate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        let SigmoidGate { gate, x } = self;
        for_vectors!(S, gate.len(), |at, load, store| {
            let v = S::mul(load!(x), sigmoid::<S>(load!(gate)));
            store!(x, v);
        });
    }
}

struct Exp<'a> {
    x: &'a mut [f32],
}

impl Kernel for Exp<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        let Exp { x } = self;
        for_vectors!(S, x.len(), |at, load, store| {
            let v = S::exp(load!(x));
            store!(x, v);
        });
    }
}

struct ExpSum<'a> {
    largest: f32,
    x: &'a mut [f32],
}

impl Kernel for ExpSum<'_> {
    type Output = f32;

    /// Exponentials in place, and their sum.
    #[inline(always)]
    unsafe fn compute<S: Simd>(self) -> f32 {
        let ExpSum { largest, x } = self;
        for_vectors!(S, x.len(), |at, load, store| {
            let v = S::exp(S::sub(load!(x), S::splat(largest)));
            store!(x, v);
        });
        // SAFETY: by contract.
        let mut acc = unsafe { S::splat(0.0) };
        for_vectors!(S, x.len(), |at, load, store| {
            acc = S::add(acc, load!(x));
        });
        // SAFETY: by contract.
        unsafe { S::sum(acc) }
    }
}

struct ConvSilu<'a> {
    taps: &'a [f32],
    inputs: &'a [&'a [f32]],
    out: &'a mut [f32],
}

impl Kernel for ConvSilu<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn compute<S: Simd>(self) {
        let ConvSilu { taps, inputs, out } = self;
        let channels = out.len();
        for_vectors!(S, channels, |at, load, store| {
            let mut sum = S::splat(0.0);
            for (taps, input) in taps.chunks_exact(channels).zip(inputs) {
                sum = S::fma(load!(taps), load!(input), sum);
            }
            store!(out, silu::<S>(sum));
        });
    }
}
