//! The instruction sets against each other, at the corners: every number of tokens that a kernel takes at a
//! time, every length of a last group, the largest integers.

use half::bf16;
use lily_cpu::isa::Isa;
use lily_cpu::kernels::OutRows;
use lily_cpu::kernels::activations::QuantizedRows;
use lily_cpu::kernels::matmul::{Next, matmul_rows, matmul_rows_then};
use lily_model::weights::{Format, GROUP_SIZE, MatrixView};

const FORMATS: [Format; 2] = [Format::Affine4, Format::Affine8];

/// A matrix with its bytes.
struct Weights {
    rows: usize,
    cols: usize,
    format: Format,
    data: Vec<u8>,
    scales: Vec<u8>,
    biases: Vec<u8>,
}

impl Weights {
    /// Byte `i` of the packed weights is `byte(i)`; the scale and bias of group `i` are `affine(i)`.
    fn new(
        format: Format,
        [rows, groups]: [usize; 2],
        byte: impl Fn(usize) -> u8,
        affine: impl Fn(usize) -> [f32; 2],
    ) -> Weights {
        let cols = groups * GROUP_SIZE;
        let part = |part: usize| {
            (0..rows * groups).flat_map(|group| bf16::from_f32(affine(group)[part]).to_le_bytes()).collect()
        };
        let data = (0..rows * format.row_bytes(cols)).map(byte).collect();
        Weights { rows, cols, format, data, scales: part(0), biases: part(1) }
    }

    fn view(&self) -> MatrixView<'_> {
        MatrixView {
            rows: self.rows,
            cols: self.cols,
            format: self.format,
            data: &self.data,
            scales: &self.scales,
            biases: &self.biases,
        }
    }

    fn times(&self, isa: Isa, x: &QuantizedRows) -> Vec<f32> {
        let mut out = vec![f32::NAN; x.rows() * self.rows];
        // SAFETY: one thread.
        unsafe { matmul_rows(isa, self.view(), 0..self.rows, x, x.all(), OutRows::new(&mut out, self.rows)) };
        out
    }
}

fn quantized(x: &[f32], cols: usize) -> QuantizedRows {
    let mut rows = QuantizedRows::new();
    rows.quantize(Isa::Portable, x, cols);
    rows
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// `LILY_EXPECT_ISA` names, separated by commas, the instruction sets that whoever runs the tests counts on:
/// where one is missing its kernels are not tested, and a green result would not say so.
#[test]
fn the_instruction_sets_that_are_counted_on_are_here() {
    let expected = std::env::var("LILY_EXPECT_ISA").unwrap_or_default();
    for name in expected.split(',').filter(|name| !name.is_empty()) {
        let isa = Isa::parse(name)
            .unwrap_or_else(|| panic!("LILY_EXPECT_ISA: no instruction set is called {name}"));
        assert!(isa.is_available(), "LILY_EXPECT_ISA: this machine has no {isa}");
    }
}

#[test]
fn every_number_of_tokens_and_of_groups_gives_the_same_bits() {
    // Two whole panels and a part of one.
    const ROWS: usize = 37;
    for format in FORMATS {
        // One group, an odd number, one more than a tile has, one more than scales are unpacked of at a time.
        for groups in [1, 7, 9, 33] {
            let byte = |i: usize| (i * 7919 % 251) as u8 ^ (i / 13) as u8;
            let affine = |i: usize| [0.01 + (i % 17) as f32 / 64.0, (i % 23) as f32 / 8.0 - 1.0];
            let w = Weights::new(format, [ROWS, groups], byte, affine);
            // One more than a matrix instruction takes, than two do, than are packed at a time.
            for tokens in (1..=14).chain([16, 17, 33, 257]) {
                let x: Vec<f32> =
                    (0..tokens * w.cols).map(|i| (i * 6151 % 1013) as f32 / 500.0 - 1.0).collect();
                let x = quantized(&x, w.cols);
                let portable = bits(&w.times(Isa::Portable, &x));
                for isa in Isa::available() {
                    assert!(
                        bits(&w.times(isa, &x)) == portable,
                        "{isa}, {format:?}: {tokens} tokens, {groups} groups"
                    );
                }
            }
        }
    }
}

#[test]
fn rows_of_the_models_widths_give_the_same_bits_however_they_are_cut() {
    // Six strips of the narrower rows, and more rows than are a whole number of them.
    for (rows, groups) in [(96, 32), (96, 64), (96, 8), (37, 32), (37, 64)] {
        let byte = |i: usize| (i * 7919 % 251) as u8 ^ (i / 13) as u8;
        let affine = |i: usize| [0.01 + (i % 17) as f32 / 64.0, (i % 23) as f32 / 8.0 - 1.0];
        let w = Weights::new(Format::Affine4, [rows, groups], byte, affine);
        for tokens in [1, 2] {
            let x: Vec<f32> = (0..tokens * w.cols).map(|i| (i * 6151 % 1013) as f32 / 500.0 - 1.0).collect();
            let x = quantized(&x, w.cols);
            let portable = bits(&w.times(Isa::Portable, &x));
            for isa in Isa::available() {
                let whole = bits(&w.times(isa, &x));
                assert!(whole == portable, "{isa}: {rows} rows of {groups} groups, {tokens} tokens");
                let mut out = vec![f32::NAN; tokens * rows];
                let cuts = [0, 16, 21, rows.min(64), rows];
                for cut in cuts.windows(2) {
                    let next = Next::rows(&w.view(), cut[1].min(rows - 1));
                    let to = OutRows::new(&mut out, rows);
                    // SAFETY: one thread.
                    unsafe { matmul_rows_then(isa, w.view(), cut[0]..cut[1], &x, x.all(), to, next) };
                }
                assert!(
                    bits(&out) == portable,
                    "{isa}: {rows} rows of {groups} groups in pieces, {tokens} tokens"
                );
            }
        }
    }
}

#[test]
fn the_largest_integers_neither_saturate_nor_wrap() {
    const GROUPS: usize = 3;
    for format in FORMATS {
        let w = Weights::new(format, [16, GROUPS], |_| 0xff, |_| [1.0, 0.0]);
        let largest = if format == Format::Affine4 { 15.0 } else { 255.0 };
        let exact = largest * w.cols as f32;
        for tokens in 1..=7 {
            // All activations of a token at one end of the scale, tokens in turn at the one and the other.
            let sign = |token: usize| if token.is_multiple_of(2) { 1.0 } else { -1.0 };
            let x: Vec<f32> = (0..tokens * w.cols).map(|i| sign(i / w.cols)).collect();
            let x = quantized(&x, w.cols);
            for isa in Isa::available() {
                for (i, got) in w.times(isa, &x).into_iter().enumerate() {
                    let want = exact * sign(i / w.rows);
                    assert!((got - want).abs() <= 1e-6 * exact, "{isa}, {format:?}: {got} is not {want}");
                }
            }
        }
    }
}
