//! The products of a prompt (`kernels/gemm.h`), by themselves: bits, and what rounding the inputs costs.

use half::bf16;
use lily_metal::device::{Argument, Device, Dispatch, Source};
use lily_metal::emulator::{Emulator, Options};
use lily_metal::sources;
use lily_model::geometry::Geometry;

use crate::support::{SEEDS, all_of, bytes_of, floats, run, written};

/// Inputs that share a scale, a bias, and a row's power of two.
const GROUP: usize = 64;
/// Rows of a matrix: a whole tile of the kernel's and a part of one.
const COLUMNS: usize = 70;
/// Columns that a threadgroup multiplies, and its threads.
const TILE: usize = 64;
const THREADS: u32 = 128;
/// Rows that a threadgroup multiplies.
const BLOCKS: [usize; 4] = [8, 16, 32, 64];
/// The smallest distance between f32 numbers of size 1 to 2, halved: what a rounding loses at the most.
const ULP: f64 = 1.0 / (1 << 24) as f64;

/// What is multiplied: inputs of a row, bits of a weight, and whether the norm belongs to it.
#[derive(Clone, Copy, Debug)]
struct Shape {
    inputs: usize,
    bits: usize,
    norm: bool,
}

/// The demo's widths, one that no model has, and the widest of the model's.
const SHAPES: [Shape; 6] = [
    Shape { inputs: 64, bits: 4, norm: false },
    Shape { inputs: 256, bits: 4, norm: true },
    Shape { inputs: 256, bits: 8, norm: true },
    Shape { inputs: 512, bits: 4, norm: false },
    Shape { inputs: 192, bits: 8, norm: false },
    Shape { inputs: 4096, bits: 4, norm: false },
];

/// A kernel `rows_N` for each of the sizes of blocks.
fn source(shape: Shape, blocks: &[usize]) -> Source {
    let Shape { inputs, bits, norm } = shape;
    let mut text = "#include \"gemm.h\"
struct Count { uint rows; };
template <int ROWS, int COUNT, int K, int BITS, bool NORM>
kernel void products(device const uint* words [[buffer(0)]], device const ushort* scales [[buffer(1)]],
                     device const ushort* biases [[buffer(2)]], device const float* norm [[buffer(3)]],
                     device const float* x [[buffer(4)]], device float* out [[buffer(5)]], device float* out_inverses [[buffer(6)]],
                     constant Count& count [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
                     uint thread_index [[thread_index_in_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 aligned[Block<ROWS>::ROOM / 4];
  threadgroup float inverses[ROWS];
  threadgroup float* room = (threadgroup float*)aligned;
  const uint first = group.x * ROWS;
  ConsecutiveRows rows;
  rows.first = x + ulong(first) * K, rows.stride = K, rows.count = min(count.rows - first, uint(ROWS));
  MatrixColumns<COUNT, K, BITS> columns;
  columns.all = matrix(words, scales, biases), columns.first = group.y * COLUMNS;
  gemm<ROWS, K, BITS, NORM>(rows, columns, norm, room, inverses, thread_index, simd, lane);
  for (uint i = thread_index; i < rows.count * COLUMNS; i += GEMM_THREADS) {
    const uint r = i / COLUMNS, n = i % COLUMNS;
    if (columns.first + n < uint(COUNT)) out[(first + r) * COUNT + columns.first + n] = result(room, r, n / 4 * 4)[n % 4];
  }
  if (NORM && group.y == 0 && thread_index < rows.count) out_inverses[first + thread_index] = inverses[thread_index];
}
"
    .to_owned();
    for rows in blocks {
        let of = format!("products<{rows}, {COLUMNS}, {inputs}, {bits}, {norm}>");
        text += &format!("template [[host_name(\"rows_{rows}\")]] [[kernel]] decltype({of}) {of};\n");
    }
    sources::complete("products.metal", &text, &Geometry::qwen3_6_35b_a3b())
}

/// Numbers that look random and are the same every time.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// Between -1 and 1.
    fn number(&mut self) -> f32 {
        self.bits() as f32 / (1u32 << 31) as f32 - 1.0
    }

    /// Nearly of the normal distribution.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.number()).sum::<f32>() / 2.0
    }
}

/// Rows of inputs and a matrix, as the kernel gets them.
struct Case {
    shape: Shape,
    rows: usize,
    x: Vec<f32>,
    norm: Vec<f32>,
    words: Vec<u32>,
    scales: Vec<bf16>,
    biases: Vec<bf16>,
}

impl Case {
    /// `is_even`: inputs of all groups are equally large.
    fn new(shape: Shape, rows: usize, is_even: bool) -> Case {
        let Shape { inputs, bits, .. } = shape;
        let mut random = Random(rows as u64);
        let groups = COLUMNS * inputs / GROUP;
        let x = (0..rows * inputs).map(|at| {
            // Groups of very different sizes side by side, some of nothing, some with one large number.
            let size = match at / GROUP % 7 {
                _ if is_even => 1.0,
                0 if at % GROUP == 5 => 1e4,
                1 => 0.0,
                2 => 1e-30,
                _ => 2f32.powi((at / GROUP % 5) as i32 - 2),
            };
            size * random.normal()
        });
        let x = x.collect();
        let norm = (0..inputs).map(|_| 1.0 + 0.5 * random.number()).collect();
        let words = (0..COLUMNS * inputs * bits / 32).map(|_| random.bits()).collect();
        let scales: Vec<bf16> =
            (0..groups).map(|_| bf16::from_f32((1.5 + random.number()) / (1 << bits) as f32)).collect();
        let centre = (1 << (bits - 1)) as f32;
        let biases =
            scales.iter().map(|s| bf16::from_f32(-centre * s.to_f32() * (1.0 + 0.2 * random.number())));
        let biases = biases.collect();
        Case { shape, rows, x, norm, words, scales, biases }
    }

    /// Row `r` as it is multiplied: times the norm's weight.
    fn row(&self, r: usize) -> Vec<f32> {
        let row = &self.x[r * self.shape.inputs..][..self.shape.inputs];
        row.iter().zip(&self.norm).map(|(x, norm)| if self.shape.norm { x * norm } else { *x }).collect()
    }

    /// Weight `k` of column `n`: the whole number.
    fn weight(&self, n: usize, k: usize) -> i64 {
        let Shape { inputs, bits, .. } = self.shape;
        let at = (n * inputs + k) * bits;
        i64::from(self.words[at / 32] >> (at % 32) & ((1 << bits) - 1))
    }

    /// What a threadgroup for each `block` rows and each tile makes of it: results, and 1 / rms of each row.
    fn multiply(
        &self,
        gpu: &Emulator,
        library: &<Emulator as Device>::Library,
        block: usize,
    ) -> (Vec<f32>, Vec<f32>) {
        let name = format!("rows_{block}");
        let pipeline = match gpu.info().has_metal4 {
            true => gpu.tensor_pipeline(library, &name, THREADS),
            false => gpu.pipeline(library, &name),
        };
        let shorts = |values: &[bf16]| bytes_of(values, |v| v.to_bits().to_le_bytes());
        let inputs = [
            written(gpu, "words", &bytes_of(&self.words, u32::to_le_bytes)),
            written(gpu, "scales", &shorts(&self.scales)),
            written(gpu, "biases", &shorts(&self.biases)),
            written(gpu, "norm", &bytes_of(&self.norm, f32::to_le_bytes)),
            written(gpu, "x", &bytes_of(&self.x, f32::to_le_bytes)),
        ];
        let out = gpu.allocate("out", self.rows * COLUMNS * 4).unwrap();
        let inverses = gpu.allocate("inverses", self.rows * 4).unwrap();
        let buffers = inputs.iter().chain([&out, &inverses]);
        let mut arguments: Vec<_> =
            buffers.map(|m| Argument::Buffer { buffer: m.clone(), offset: 0 }).collect();
        arguments.push(Argument::Bytes((self.rows as u32).to_le_bytes().to_vec()));
        let reads = inputs.iter().map(|m| all_of(m, true, false));
        run(
            gpu,
            Dispatch {
                label: format!("{:?}, {} rows", self.shape, self.rows),
                pipeline: pipeline.unwrap(),
                arguments,
                threadgroup_memory: vec![],
                grid: [self.rows.div_ceil(block) as u32, COLUMNS.div_ceil(TILE) as u32, 1],
                threads: THREADS,
                waits_for: vec![],
                touches: reads.chain([&out, &inverses].map(|m| all_of(m, false, true))).collect(),
            },
        );
        (floats(&out), if self.shape.norm { floats(&inverses) } else { vec![] })
    }

    /// Compares results with what they are defined to be, and with the plain product; returns how far they are from that, as a
    /// part of its length.
    fn check(&self, found: &[f32]) -> f64 {
        let groups = self.shape.inputs / GROUP;
        let (mut squares, mut errors) = (0.0, 0.0);
        for r in 0..self.rows {
            let row = self.row(r);
            let rounded: Vec<Rounded> = row.chunks_exact(GROUP).map(Rounded::new).collect();
            for n in 0..COLUMNS {
                let mut total = 0f32;
                // The same without the roundings of f32, then without those of the inputs; how large its terms are; what the inputs' roundings may make of it.
                let (mut exact, mut plain, mut size, mut lost) = (0f64, 0f64, 0f64, 0f64);
                for (g, group) in rounded.iter().enumerate() {
                    let (scale, bias) =
                        (self.scales[n * groups + g].to_f32(), self.biases[n * groups + g].to_f32());
                    let weights = (0..GROUP).map(|k| self.weight(n, g * GROUP + k));
                    let sum: i64 = weights.clone().zip(&group.q).map(|(w, q)| w * q).sum();
                    let term = scale.mul_add(sum as f32, bias * group.sum() as f32);
                    total = group.power.mul_add(term, total);

                    let (scale, bias, power) = (f64::from(scale), f64::from(bias), f64::from(group.power));
                    let (product, offset) = (power * scale * sum as f64, power * bias * group.sum() as f64);
                    exact += product + offset;
                    size += product.abs() + offset.abs();
                    for (w, x) in weights.zip(&row[g * GROUP..]) {
                        let weight = scale * w as f64 + bias;
                        plain += weight * f64::from(*x);
                        lost += weight.abs() * power / 2.0;
                    }
                }
                let (at, found) = (format!("{:?}, row {r}, column {n}", self.shape), found[r * COLUMNS + n]);
                assert_eq!(found.to_bits(), total.to_bits(), "{at}: {found} and {total}");
                // Two roundings of a group's term, or three with its sum, and one of the total.
                let bound = (groups + 3) as f64 * ULP * size;
                assert!((f64::from(found) - exact).abs() <= bound, "{at}: {found} and {exact}");
                assert!((f64::from(found) - plain).abs() <= bound + lost, "{at}: {found} and {plain}");
                squares += plain * plain;
                errors += (f64::from(found) - plain).powi(2);
            }
        }
        (errors / squares).sqrt()
    }
}

/// A row's group as whole numbers.
struct Rounded {
    power: f32,
    q: Vec<i64>,
}

impl Rounded {
    fn new(inputs: &[f32]) -> Rounded {
        let largest = inputs.iter().fold(0f32, |most, x| most.max(x.abs()));
        // The largest is 1024 to 2048 of it, unless that is below the normal numbers.
        let exponent = ((largest.to_bits() >> 23) as i32 - 127 - 10).max(-126);
        let power = 2f64.powi(exponent);
        let q = inputs.iter().map(|x| (f64::from(*x) / power).round_ties_even() as i64).collect();
        Rounded { power: power as f32, q }
    }

    fn sum(&self) -> i64 {
        self.q.iter().sum()
    }
}

/// Multiplies in blocks of all sizes and compares with the definition; returns how far results are from the plain ones.
fn check(gpu: &Emulator, library: &<Emulator as Device>::Library, case: &Case) -> f64 {
    let Case { shape, rows, .. } = case;
    let blocks = blocks(gpu);
    let (first, inverses) = case.multiply(gpu, library, blocks[0]);
    let error = case.check(&first);
    for (inverse, row) in inverses.iter().zip(case.x.chunks_exact(shape.inputs)) {
        let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / shape.inputs as f64;
        let expected = (mean + f64::from(Geometry::qwen3_6_35b_a3b().rms_eps)).sqrt().recip();
        assert!((f64::from(*inverse) / expected - 1.0).abs() < 1e-6, "{shape:?}: {inverse} and {expected}");
    }
    for block in &blocks[1..] {
        let (other, other_inverses) = case.multiply(gpu, library, *block);
        let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(
            same(&first, &other) && same(&inverses, &other_inverses),
            "{shape:?}, {rows} rows in blocks of {block}"
        );
    }
    error
}

/// Of a library with tensors, blocks of 64 rows are other than elsewhere.
fn blocks(gpu: &Emulator) -> &'static [usize] {
    if gpu.info().has_metal4 { &BLOCKS[3..] } else { &BLOCKS }
}

fn compiled(gpu: &Emulator, shape: Shape) -> <Emulator as Device>::Library {
    let plain = source(shape, blocks(gpu));
    let source = if gpu.info().has_metal4 { plain.with_tensors() } else { plain };
    gpu.compile(&source).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn products_have_the_bits_that_they_are_defined_to_have_in_blocks_of_any_size() {
    let gpu = Emulator::new(Options { seed: 1, tracked: false }).unwrap();
    for shape in SHAPES {
        let library = compiled(&gpu, shape);
        let rows: &[usize] = if shape.inputs > 1000 { &[33] } else { &[1, 31, 150, 300] };
        for &rows in rows {
            check(&gpu, &library, &Case::new(shape, rows, false));
        }
    }
}

#[test]
fn tensors_give_the_same_bits() {
    let gpu = Emulator::with_tensors(Options { seed: 3, tracked: false }).unwrap();
    for shape in &SHAPES[1..5] {
        check(&gpu, &compiled(&gpu, *shape), &Case::new(*shape, 65, false));
    }
}

#[test]
fn rounding_the_inputs_changes_a_product_by_less_than_a_step_of_the_largest() {
    let gpu = Emulator::new(Options { seed: 2, tracked: false }).unwrap();
    for shape in SHAPES {
        let error = check(&gpu, &compiled(&gpu, shape), &Case::new(shape, 16, true));
        println!("{shape:?}: {error:e} of the length of a plain product");
        assert!(error < 1.0 / 1024.0, "{shape:?}: {error}");
    }
}

#[test]
fn products_race_nowhere_under_any_seed() {
    for seed in SEEDS {
        let options = Options { seed, tracked: true };
        for gpu in [Emulator::new(options).unwrap(), Emulator::with_tensors(options).unwrap()] {
            for bits in [4, 8] {
                let shape = Shape { inputs: 2 * GROUP, bits, norm: true };
                check(&gpu, &compiled(&gpu, shape), &Case::new(shape, 9, false));
            }
        }
    }
}
