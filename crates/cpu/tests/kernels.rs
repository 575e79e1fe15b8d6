//! The fast kernels: right against f64, the same bits on every instruction set, and the same bits whatever
//! is computed beside a number.

use half::{bf16, f16};
use lily_cpu::isa::Isa;
use lily_cpu::kernels::activations::QuantizedRows;
use lily_cpu::kernels::attention::{
    KvElement, KvPages, KvRows, Partial, Queries, attend, attend_span, merge_spans, quantize_row, span_count,
};
use lily_cpu::kernels::delta::{DeltaTokens, Strided, delta_rule};
use lily_cpu::kernels::matmul::{Next, matmul_rows_then};
use lily_cpu::kernels::{OutRows, f32_ops, matmul};
use lily_cpu::pool::ThreadPool;
use lily_cpu::stages::attn_core;
use lily_model::geometry::AttentionGeometry;
use lily_model::weights::{Format, GROUP_SIZE, MatrixView};
use proptest::prelude::*;

/// xorshift64*: enough randomness for weights, the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Roughly normal, variance 1.
    fn normal(&mut self) -> f32 {
        let sum: f32 = (0..12).map(|_| (self.next() >> 40) as f32 / (1u64 << 24) as f32).sum();
        sum - 6.0
    }

    fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.normal()).collect()
    }
}

/// A matrix with its bytes, which start at an odd address as they may in a file.
struct Weights {
    rows: usize,
    cols: usize,
    format: Format,
    data: Vec<u8>,
    scales: Vec<u8>,
    biases: Vec<u8>,
}

impl Weights {
    fn random(format: Format, rows: usize, cols: usize, random: &mut Random) -> Weights {
        let mut data = vec![0];
        let (mut scales, mut biases) = (vec![0], vec![0]);
        match format {
            Format::Affine4 | Format::Affine8 => {
                data.extend((0..rows * format.row_bytes(cols)).map(|_| random.next() as u8));
                let steps = if format == Format::Affine4 { 15.0 } else { 255.0 };
                for _ in 0..rows * cols / GROUP_SIZE {
                    let scale = (0.5 + random.normal().abs()) / steps;
                    scales.extend(bf16::from_f32(scale).to_le_bytes());
                    biases
                        .extend(bf16::from_f32(-scale * steps * 0.5 + 0.01 * random.normal()).to_le_bytes());
                }
            }
            Format::Bf16 => {
                data.extend((0..rows * cols).flat_map(|_| bf16::from_f32(random.normal()).to_le_bytes()))
            }
            Format::F16 => {
                data.extend((0..rows * cols).flat_map(|_| f16::from_f32(random.normal()).to_le_bytes()))
            }
            Format::F32 => data.extend((0..rows * cols).flat_map(|_| random.normal().to_le_bytes())),
        }
        Weights { rows, cols, format, data, scales, biases }
    }

    fn view(&self) -> MatrixView<'_> {
        MatrixView {
            rows: self.rows,
            cols: self.cols,
            format: self.format,
            data: &self.data[1..],
            scales: &self.scales[1..],
            biases: &self.biases[1..],
        }
    }

    /// What element `(row, col)` stands for.
    fn value(&self, row: usize, col: usize) -> f64 {
        let data = &self.data[1..];
        let at = row * self.cols + col;
        let half = |bytes: &[u8], at: usize| [bytes[2 * at], bytes[2 * at + 1]];
        let affine = |q: u8| {
            let group = at / GROUP_SIZE;
            let scale = bf16::from_le_bytes(half(&self.scales[1..], group)).to_f64();
            scale * f64::from(q) + bf16::from_le_bytes(half(&self.biases[1..], group)).to_f64()
        };
        match self.format {
            Format::Affine4 => affine((data[at / 2] >> (4 * (at % 2))) & 15),
            Format::Affine8 => affine(data[at]),
            Format::Bf16 => bf16::from_le_bytes(half(data, at)).to_f64(),
            Format::F16 => f16::from_le_bytes(half(data, at)).to_f64(),
            Format::F32 => f32::from_le_bytes(data[4 * at..4 * at + 4].try_into().unwrap()).into(),
        }
    }

    /// `W[row, :] . x` in f64, and the sum of magnitudes that rounding errors are relative to.
    fn product(&self, row: usize, x: &[f64]) -> (f64, f64) {
        let terms = (0..self.cols).map(|col| self.value(row, col) * x[col]);
        terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
    }
}

/// The activations that quantized row `row` stands for, in natural order.
fn dequantized(x: &QuantizedRows, row: usize) -> Vec<f64> {
    (0..x.cols())
        .map(|i| {
            let (group, within) = (i / GROUP_SIZE, i % GROUP_SIZE);
            let place = group * GROUP_SIZE + (within % 2) * GROUP_SIZE / 2 + within / 2;
            f64::from(x.q(row)[place]) * f64::from(x.scales(row)[group])
        })
        .collect()
}

fn int8(isa: Isa, w: &Weights, rows: std::ops::Range<usize>, x: &QuantizedRows, tokens: &[u32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; tokens.len() * w.rows];
    let next = Next::rows(&w.view(), rows.start);
    // SAFETY: one thread.
    unsafe { matmul_rows_then(isa, w.view(), rows, x, tokens, OutRows::new(&mut out, w.rows), next) };
    out
}

fn f32_form(isa: Isa, w: &Weights, rows: std::ops::Range<usize>, x: &[f32], tokens: &[u32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; tokens.len() * w.rows];
    // SAFETY: one thread.
    unsafe { matmul::matmul_rows_f32(isa, w.view(), rows, x, tokens, OutRows::new(&mut out, w.rows)) };
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn this_machine_has_an_instruction_set_and_names_round_trip() {
    assert_eq!(Isa::available()[0], Isa::Portable);
    assert!(Isa::available().contains(&Isa::detect()));
    for isa in Isa::ALL {
        assert_eq!(Isa::parse(isa.name()), Some(isa));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Within a half step of the input, halves to even, the same bytes everywhere.
    #[test]
    fn quantization_is_to_the_nearest_step(groups in 1usize..5, size in -20i32..20, seed in 1u64..) {
        let mut random = Random(seed);
        let cols = groups * GROUP_SIZE;
        let mut x = random.normals(cols);
        x.iter_mut().for_each(|x| *x *= 2f32.powi(size));
        x[..GROUP_SIZE * (groups / 3)].fill(0.0);
        let mut portable = QuantizedRows::new();
        portable.quantize(Isa::Portable, &x, cols);
        for (i, value) in dequantized(&portable, 0).into_iter().enumerate() {
            let step = f64::from(portable.scales(0)[i / GROUP_SIZE]);
            prop_assert!((value - f64::from(x[i])).abs() <= 0.5001 * step);
        }
        for isa in Isa::available() {
            let mut other = QuantizedRows::new();
            other.quantize(isa, &x, cols);
            prop_assert_eq!(other.q(0), portable.q(0));
            prop_assert_eq!(bits(other.scales(0)), bits(portable.scales(0)));
            prop_assert_eq!(bits(other.sums(0)), bits(portable.sums(0)));
        }
    }

    /// int8: f32 rounding away from the exact product of what the bytes stand for, the same bits on every
    /// instruction set and for every row range and token list.
    #[test]
    fn int8_products_are_right_and_bit_identical(
        wide in any::<bool>(), rows in 1usize..70, groups in 1usize..70, count in 1usize..24, seed in 1u64..,
    ) {
        let mut random = Random(seed);
        let format = if wide { Format::Affine8 } else { Format::Affine4 };
        let w = Weights::random(format, rows, groups * GROUP_SIZE, &mut random);
        let mut x = QuantizedRows::new();
        x.quantize(Isa::Portable, &random.normals(count * w.cols), w.cols);
        let portable = int8(Isa::Portable, &w, 0..rows, &x, x.all());
        for _ in 0..8 {
            let (t, r) = (random.next() as usize % count, random.next() as usize % rows);
            let (exact, size) = w.product(r, &dequantized(&x, t));
            prop_assert!((f64::from(portable[t * rows + r]) - exact).abs() <= 4e-6 * size + 1e-6);
        }
        for isa in Isa::available() {
            prop_assert_eq!(bits(&int8(isa, &w, 0..rows, &x, x.all())), bits(&portable), "{}", isa);
            let start = random.next() as usize % rows;
            let range = start..start + 1 + random.next() as usize % (rows - start);
            let tokens: Vec<u32> = (0..1 + random.next() % 9).map(|_| random.next() as u32 % count as u32).collect();
            let some = int8(isa, &w, range.clone(), &x, &tokens);
            for (i, &t) in tokens.iter().enumerate() {
                let (some, all) = (&some[i * rows..][range.clone()], &portable[t as usize * rows..][range.clone()]);
                prop_assert_eq!(bits(some), bits(all), "{}", isa);
            }
            prop_assert!(some[..start].iter().all(|v| v.is_nan()), "outside the row range");
        }
    }

    /// f32: as above, for every format.
    #[test]
    fn f32_products_are_right_and_bit_identical(
        format in prop::sample::select(vec![Format::Affine4, Format::Affine8, Format::Bf16, Format::F16, Format::F32]),
        rows in 1usize..20, groups in 1usize..6, extra in 0usize..40, count in 1usize..10, seed in 1u64..,
    ) {
        let mut random = Random(seed);
        let cols = groups * GROUP_SIZE + if format.is_affine() { 0 } else { extra };
        let w = Weights::random(format, rows, cols, &mut random);
        let x = random.normals(count * cols);
        let tokens: Vec<u32> = (0..count as u32).collect();
        let portable = f32_form(Isa::Portable, &w, 0..rows, &x, &tokens);
        for t in 0..count {
            let exact: Vec<f64> = x[t * cols..(t + 1) * cols].iter().map(|&v| v.into()).collect();
            for r in 0..rows {
                let (sum, size) = w.product(r, &exact);
                prop_assert!((f64::from(portable[t * rows + r]) - sum).abs() <= 2e-6 * size + 1e-6);
            }
        }
        for isa in Isa::available() {
            prop_assert_eq!(bits(&f32_form(isa, &w, 0..rows, &x, &tokens)), bits(&portable), "{}", isa);
            let one = f32_form(isa, &w, rows - 1..rows, &x, &[count as u32 - 1]);
            prop_assert_eq!(one[rows - 1].to_bits(), portable[count * rows - 1].to_bits(), "{}", isa);
        }
    }

    /// Element-wise operations and sums: f32 rounding away from f64, the same bits on every instruction set.
    #[test]
    fn f32_operations_are_right_and_bit_identical(len in 1usize..200, seed in 1u64..) {
        let mut random = Random(seed);
        let (a, b) = (random.normals(len), random.normals(len));
        let all = |isa| {
            let mut results = vec![f32_ops::dot(isa, &a, &b)];
            let mut y = b.clone();
            f32_ops::axpy(isa, 0.7, &a, &mut y);
            results.extend(&y);
            f32_ops::rms_norm(isa, &a, &b, 1e-6, &mut y);
            results.extend(&y);
            y.copy_from_slice(&a);
            f32_ops::silu_mul(isa, &mut y, &b);
            results.extend(&y);
            y.copy_from_slice(&a);
            f32_ops::softmax(isa, &mut y);
            results.extend(&y);
            results
        };
        let (x, z) = (|i: usize| f64::from(a[i]), |i: usize| f64::from(b[i]));
        let mean = (0..len).map(|i| x(i) * x(i)).sum::<f64>() / len as f64;
        let total: f64 = (0..len).map(|i| x(i).exp()).sum();
        let mut exact = vec![(0..len).map(|i| x(i) * z(i)).sum::<f64>()];
        exact.extend((0..len).map(|i| f64::from(0.7f32) * x(i) + z(i)));
        exact.extend((0..len).map(|i| x(i) / (mean + 1e-6).sqrt() * z(i)));
        exact.extend((0..len).map(|i| x(i) / (1.0 + (-x(i)).exp()) * z(i)));
        exact.extend((0..len).map(|i| x(i).exp() / total));
        let portable = all(Isa::Portable);
        // Terms of a dot product cancel, so its rounding is measured against their sizes and not against their sum.
        let terms: f64 = (0..len).map(|i| (x(i) * z(i)).abs()).sum();
        for (place, (got, want)) in portable.iter().zip(exact).enumerate() {
            let size = if place == 0 { terms } else { want.abs() };
            let wrong = (f64::from(*got) - want).abs();
            prop_assert!(wrong <= 1e-6 * size + 1e-6, "{} is not {} (value {})", got, want, place);
        }
        for isa in Isa::available() {
            prop_assert_eq!(bits(&all(isa)), bits(&portable), "{}", isa);
        }
    }

    /// The state and the outputs follow the rule, and do not depend on where the tokens are cut.
    #[test]
    fn the_delta_rule_is_right_and_independent_of_chunks(tokens in 1usize..12, cut in 0usize..12, seed in 1u64..) {
        const DIM: usize = 128;
        const HEADS: usize = 2;
        let mut random = Random(seed);
        let norm = (DIM as f32).sqrt();
        let mut rows = |scale: f32| -> Vec<f32> {
            random.normals(tokens * HEADS * DIM).into_iter().map(|v| v * scale).collect()
        };
        let (q, k, v) = (rows(1.0 / norm / norm), rows(1.0 / norm), rows(1.0));
        let gates: Vec<f32> = (0..2 * tokens).map(|_| 1.0 / (1.0 + random.normal().exp())).collect();
        let start = random.normals(DIM * DIM);
        let pass = |isa: Isa, cuts: &[usize]| {
            let (mut state, mut out) = (start.clone(), vec![0.0; tokens * HEADS * DIM]);
            for cut in cuts.windows(2) {
                let rows = |data| Strided { data: data_from(data, cut[0] * HEADS * DIM + DIM), stride: HEADS * DIM };
                let chunk = DeltaTokens {
                    tokens: cut[1] - cut[0],
                    queries: rows(&q),
                    keys: rows(&k),
                    values: rows(&v),
                    decays: Strided { data: data_from(&gates, 2 * cut[0]), stride: 2 },
                    write_strengths: Strided { data: data_from(&gates, 2 * cut[0] + 1), stride: 2 },
                };
                let out = OutRows::new(&mut out, HEADS * DIM).from_row(cut[0]);
                // SAFETY: one thread.
                unsafe { delta_rule(isa, DIM, &mut state, &chunk, out, DIM) };
            }
            (bits(&state), bits(&out))
        };
        let mut exact: Vec<f64> = start.iter().map(|&s| s.into()).collect();
        let mut want = Vec::new();
        for t in 0..tokens {
            let row = |data: &[f32]| -> Vec<f64> {
                data[t * HEADS * DIM + DIM..][..DIM].iter().map(|&v| v.into()).collect()
            };
            let (q, k, v) = (row(&q), row(&k), row(&v));
            let (g, beta) = (f64::from(gates[2 * t]), f64::from(gates[2 * t + 1]));
            for (state, v) in exact.chunks_exact_mut(DIM).zip(v) {
                let recalled: f64 = state.iter().zip(&k).map(|(s, k)| g * s * k).sum();
                let write = beta * (v - recalled);
                state.iter_mut().zip(&k).for_each(|(s, k)| *s = g * *s + write * k);
                want.push(state.iter().zip(&q).map(|(s, q)| s * q).sum::<f64>());
            }
        }
        let whole = pass(Isa::Portable, &[0, tokens]);
        for (t, want) in want.chunks_exact(DIM).enumerate() {
            for (got, want) in whole.1[t * HEADS * DIM + DIM..].iter().zip(want) {
                prop_assert!((f64::from(f32::from_bits(*got)) - want).abs() <= 1e-5);
            }
        }
        for isa in Isa::available() {
            prop_assert_eq!(&pass(isa, &[0, tokens]), &whole, "{}", isa);
            prop_assert_eq!(&pass(isa, &[0, cut.min(tokens), tokens]), &whole, "{}", isa);
        }
    }

    /// Attention is right, and a query's bits do not depend on the queries beside it or on how its context
    /// was shared out.
    #[test]
    fn attention_is_right_and_independent_of_chunks(
        first in prop::sample::select(vec![0usize, 5, 63, 64, 1000, 1023, 1024, 2100]),
        tokens in 1usize..20, heads in 1usize..10, seed in 1u64..,
    ) {
        right_and_independent::<f16>(first, tokens, heads, seed)?;
        right_and_independent::<i8>(first, tokens, heads, seed)?;
    }

    /// A row of 8 bits is off by half its scale, and attention over such a cache from the plain form by no more than
    /// that makes of it: scores move by `d` at the most, weights by the factor `exp(2 d)`, and values by half a scale.
    #[test]
    fn eight_bits_move_attention_within_their_bound(positions in 1usize..200, seed in 1u64..) {
        let mut random = Random(seed);
        let cache = Cache::<i8>::random(positions, &mut random);
        // A quotient, a product and the scale are rounded to f32 on the way, each of up to 127 steps.
        let rounded = 3.0 * 127.0 * f64::from(f32::EPSILON);
        for rows in [&cache.keys, &cache.values] {
            for ((given, stored), half) in rows.given.iter().zip(&rows.stored).zip(rows.half_steps()) {
                prop_assert!(given.iter().zip(stored).all(|(g, s)| (g - s).abs() <= half * (1.0 + rounded)));
            }
        }
        let query = random.normals(Cache::<i8>::DIM);
        let got = cache.attend(Isa::detect(), &query, positions - 1, 0..1, 1);
        let geometry = AttentionGeometry {
            heads: 1, kv_heads: 1, head_dim: Cache::<i8>::DIM, rotary_dim: 16, rope_theta: 1e7,
        };
        let plain = |rows: &Rows<i8>| -> Vec<Vec<f32>> {
            rows.given.iter().map(|row| row.iter().map(|v| *v as f32).collect()).collect()
        };
        let (keys, values) = (plain(&cache.keys), plain(&cache.values));
        // The stage has its own scale, and a gate that is a half where its input is 0.
        let scaled: Vec<f32> =
            query.iter().map(|q| q * Cache::<i8>::SCALE * (Cache::<i8>::DIM as f32).sqrt()).collect();
        let mut want = vec![0.0; Cache::<i8>::DIM];
        let gate = vec![0.0; Cache::<i8>::DIM];
        attn_core::reference(
            &geometry, positions - 1, &scaled, &gate, |p, _| &keys[p], |p, _| &values[p], &mut want,
        );
        let largest = |steps: Vec<f64>| steps.into_iter().fold(0.0, f64::max);
        let norm: f64 = query.iter().map(|q| f64::from(q.abs() * Cache::<i8>::SCALE)).sum();
        let moved = norm * largest(cache.keys.half_steps());
        let value = cache.values.given.iter().flatten().fold(0.0, |most: f64, v| most.max(v.abs()));
        let bound = largest(cache.values.half_steps()) + ((2.0 * moved).exp() - 1.0) * value + 1e-5;
        for (got, half) in got.iter().zip(want) {
            let error = (f64::from(*got) - 2.0 * f64::from(half)).abs();
            prop_assert!(error <= bound, "{} beyond {}", error, bound);
        }
    }
}

#[test]
fn rows_of_8_bits_hold_the_ends_and_what_is_no_number() {
    let mut to = [7i8; 4];
    assert_eq!((quantize_row(&[0.0, -0.0, 0.0, 0.0], &mut to), to), (0.0, [0; 4]));
    assert_eq!((quantize_row(&[-127.0, 63.6, 127.0, f32::NAN], &mut to), to), (1.0, [-127, 64, 127, 0]));
    let scale = quantize_row(&[f32::NEG_INFINITY, f32::MAX, 1.0, f32::INFINITY], &mut to);
    assert_eq!((scale, to), (f32::MAX / 127.0, [-127, 127, 0, 127]));
}

fn right_and_independent<T: Element>(
    first: usize,
    tokens: usize,
    heads: usize,
    seed: u64,
) -> Result<(), TestCaseError> {
    let mut random = Random(seed);
    let cache = Cache::<T>::random(first + tokens, &mut random);
    let width = heads * Cache::<T>::DIM;
    let queries = random.normals(tokens * width);
    let portable = cache.attend(Isa::Portable, &queries, first, 0..tokens, heads);
    for t in [0, tokens - 1] {
        for h in 0..heads {
            let at = t * width + h * Cache::<T>::DIM;
            let want = cache.exact(&queries[at..at + Cache::<T>::DIM], first + t + 1);
            for (got, want) in portable[at..].iter().zip(want) {
                prop_assert!((f64::from(*got) - want).abs() <= 1e-5, "{} is not {}", got, want);
            }
        }
    }
    for isa in Isa::available() {
        prop_assert_eq!(
            bits(&cache.attend(isa, &queries, first, 0..tokens, heads)),
            bits(&portable),
            "{}",
            isa
        );
        let t = random.next() as usize % tokens;
        let row = bits(&portable[t * width..][..width]);
        prop_assert_eq!(bits(&cache.attend(isa, &queries, first, t..t + 1, heads)), row.clone(), "{}", isa);
        prop_assert_eq!(bits(&cache.attend_in_spans(isa, &queries, first, t, heads)), row, "{}", isa);
    }
    Ok(())
}

/// `data[from..]`, empty past the end.
fn data_from(data: &[f32], from: usize) -> &[f32] {
    &data[from.min(data.len())..]
}

/// An element type of the cache, as tests make and read rows of it.
trait Element: KvElement {
    /// What nothing may come of, because it was not written.
    const UNWRITTEN: Self;

    /// The elements of a row, and their scale where there is one.
    fn row(row: &[f32]) -> (Vec<Self>, f32);

    fn value(self) -> f64;
}

impl Element for f16 {
    const UNWRITTEN: f16 = f16::NAN;

    fn row(row: &[f32]) -> (Vec<f16>, f32) {
        (row.iter().map(|v| f16::from_f32(*v)).collect(), 1.0)
    }

    fn value(self) -> f64 {
        self.to_f64()
    }
}

impl Element for i8 {
    const UNWRITTEN: i8 = i8::MIN;

    fn row(row: &[f32]) -> (Vec<i8>, f32) {
        let mut to = vec![0; row.len()];
        let scale = quantize_row(row, &mut to);
        (to, scale)
    }

    fn value(self) -> f64 {
        f64::from(self)
    }
}

/// The keys or the values of a cache.
struct Rows<T> {
    /// Elements and scales of each page.
    pages: Vec<(Vec<T>, Vec<f32>)>,
    /// What each row was made of.
    given: Vec<Vec<f64>>,
    /// What it says.
    stored: Vec<Vec<f64>>,
}

impl<T: Element> Rows<T> {
    fn random(positions: usize, random: &mut Random) -> Rows<T> {
        let (mut given, mut stored) = (Vec::new(), Vec::new());
        let mut page = |page: usize| {
            let (mut elements, mut scales) = (Vec::new(), Vec::new());
            for _ in 0..Cache::<T>::PAGE.min(positions - page * Cache::<T>::PAGE) {
                let row = random.normals(Cache::<T>::DIM);
                let (held, scale) = T::row(&row);
                given.push(row.iter().map(|v| f64::from(*v)).collect());
                stored.push(held.iter().map(|v| v.value() * f64::from(scale)).collect());
                elements.extend(held);
                scales.push(scale);
            }
            elements.resize(Cache::<T>::PAGE * Cache::<T>::DIM, T::UNWRITTEN);
            scales.resize(Cache::<T>::PAGE, f32::NAN);
            (elements, scales)
        };
        let pages = (0..positions.div_ceil(Cache::<T>::PAGE)).map(&mut page).collect();
        Rows { pages, given, stored }
    }

    fn page(&self, page: usize) -> KvRows<'_, T> {
        let (elements, scales) = &self.pages[page];
        KvRows { elements, scales }
    }

    /// Half the scale of each row.
    fn half_steps(&self) -> Vec<f64> {
        let scales = self.pages.iter().flat_map(|(_, scales)| scales);
        scales.take(self.given.len()).map(|scale| f64::from(*scale) / 2.0).collect()
    }
}

/// A paged cache of one KV head.
struct Cache<T> {
    keys: Rows<T>,
    values: Rows<T>,
}

impl<T: Element> Cache<T> {
    const DIM: usize = 48;
    const PAGE: usize = 64;
    const SCALE: f32 = 0.3;

    fn random(positions: usize, random: &mut Random) -> Cache<T> {
        Cache { keys: Rows::random(positions, random), values: Rows::random(positions, random) }
    }

    fn with<R>(&self, body: impl FnOnce(&KvPages<'_, T>) -> R) -> R {
        body(&KvPages {
            pages: self.keys.pages.len(),
            keys: &|page| self.keys.page(page),
            values: &|page| self.values.page(page),
            page_positions: Self::PAGE,
            head_dim: Self::DIM,
        })
    }

    fn queries(queries: &[f32], first: usize, tokens: std::ops::Range<usize>, heads: usize) -> Queries<'_> {
        let stride = heads * Self::DIM;
        Queries {
            data: Strided { data: &queries[tokens.start * stride..], stride },
            tokens: tokens.len(),
            heads,
            first_position: first + tokens.start,
            scale: Self::SCALE,
        }
    }

    fn attend(
        &self,
        isa: Isa,
        queries: &[f32],
        first: usize,
        tokens: std::ops::Range<usize>,
        heads: usize,
    ) -> Vec<f32> {
        let queries = Self::queries(queries, first, tokens.clone(), heads);
        let mut out = vec![0.0; tokens.len() * heads * Self::DIM];
        let rows = OutRows::new(&mut out, heads * Self::DIM);
        // SAFETY: one thread.
        self.with(|kv| unsafe { attend(isa, kv, &queries, rows, 0) });
        out
    }

    fn attend_in_spans(
        &self,
        isa: Isa,
        queries: &[f32],
        first: usize,
        token: usize,
        heads: usize,
    ) -> Vec<f32> {
        let queries = Self::queries(queries, first, token..token + 1, heads);
        let mut spans = vec![Partial::new(); span_count(first + token)];
        for (span, to) in spans.iter_mut().enumerate().rev() {
            self.with(|kv| attend_span(isa, kv, &queries, span, to));
        }
        let mut out = vec![0.0; heads * Self::DIM];
        merge_spans(isa, &spans, &mut out);
        out
    }

    /// One query over what the first `seen` positions say, in f64.
    fn exact(&self, query: &[f32], seen: usize) -> Vec<f64> {
        let weights: Vec<f64> = self.keys.stored[..seen]
            .iter()
            .map(|key| {
                let score: f64 = key.iter().zip(query).map(|(k, q)| k * f64::from(*q)).sum();
                (score * f64::from(Self::SCALE)).exp()
            })
            .collect();
        let total: f64 = weights.iter().sum();
        let mut out = vec![0.0; Self::DIM];
        for (value, weight) in self.values.stored.iter().zip(&weights) {
            out.iter_mut().zip(value).for_each(|(out, v)| *out += weight / total * v);
        }
        out
    }
}

/// A cache of another element type gives what its values say.
#[test]
fn attention_reads_f32_and_bf16_caches() {
    fn attended<T: KvElement>(element: impl Fn(f32) -> T) -> Vec<Vec<u32>> {
        let mut random = Random(7);
        let small: Vec<f32> = (0..64 * 16).map(|_| (random.next() % 16) as f32 / 8.0 - 1.0).collect();
        let page: Vec<T> = small.iter().map(|&v| element(v)).collect();
        let query = random.normals(3 * 16);
        let pages = |_| KvRows { elements: &page[..], scales: &[] };
        let kv = KvPages { pages: 1, keys: &pages, values: &pages, page_positions: 64, head_dim: 16 };
        let queries = Queries {
            data: Strided { data: &query, stride: 48 },
            tokens: 1,
            heads: 3,
            first_position: 40,
            scale: 1.0,
        };
        Isa::available()
            .into_iter()
            .map(|isa| {
                let mut out = vec![0.0; 48];
                // SAFETY: one thread.
                unsafe { attend(isa, &kv, &queries, OutRows::new(&mut out, 48), 0) };
                bits(&out)
            })
            .collect()
    }
    let in_f32 = attended(|v| v);
    assert!(in_f32.iter().all(|out| out == &in_f32[0]));
    assert_eq!(attended(bf16::from_f32), in_f32);
    assert_eq!(attended(f16::from_f32), in_f32);
}

#[test]
fn exp_has_the_error_that_it_states_and_the_same_bits_everywhere() {
    let x: Vec<f32> = (-87_300..88_370).map(|i| i as f32 / 1000.0).collect();
    let mut portable = x.clone();
    f32_ops::exp(Isa::Portable, &mut portable);
    for (x, got) in x.iter().zip(&portable) {
        let exact = f64::from(*x).exp();
        assert!((f64::from(*got) / exact - 1.0).abs() <= 2e-7, "exp({x}) is {got}");
    }
    for isa in Isa::available() {
        let mut other = x.clone();
        f32_ops::exp(isa, &mut other);
        assert_eq!(bits(&other), bits(&portable), "{isa}");
        let mut ends = [f32::NEG_INFINITY, -1e30, -87.34, 0.0, 1e30, f32::INFINITY];
        f32_ops::exp(isa, &mut ends);
        assert_eq!(ends[..4], [0.0, 0.0, 0.0, 1.0], "{isa}");
        assert!(ends[4].is_finite() && ends[4] == ends[5] && ends[4] > 2e38, "{isa}");
    }
}

#[test]
fn threads_share_a_matrix_and_change_nothing() {
    let mut random = Random(11);
    let w = Weights::random(Format::Affine4, 333, 512, &mut random);
    let mut x = QuantizedRows::new();
    let exact = random.normals(5 * 512);
    x.quantize(Isa::detect(), &exact, 512);
    let want = int8(Isa::detect(), &w, 0..333, &x, x.all());
    let want_f32 = f32_form(Isa::detect(), &w, 0..333, &exact, x.all());
    for threads in [1, 2, 3, 7] {
        let pool = ThreadPool::new(threads);
        let mut out = vec![0.0; 5 * 333];
        matmul::matmul(&pool, Isa::detect(), w.view(), &x, &mut out);
        assert_eq!(bits(&out), bits(&want), "{threads} threads");
        matmul::matmul_f32(&pool, Isa::detect(), w.view(), &exact, &mut out);
        assert_eq!(bits(&out), bits(&want_f32), "{threads} threads");
    }
}
