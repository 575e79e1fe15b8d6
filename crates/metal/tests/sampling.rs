//! The GPU chooses the tokens that the host's sampler chooses, one for one: over the full model's vocabulary and made-up
//! logits, with the emulator's detectors on.
#![cfg(target_os = "linux")]

use std::collections::HashMap;
use std::time::Duration;

use lily_engine::meter::Meter;
use lily_engine::sampler::{self, Sampler, SamplingParams};
use lily_gpu::decode::{self, Shape};
use lily_gpu::layout::KvFormat;
use lily_gpu::plan::{Arg, Plan};
use lily_gpu::sampling::NONE;
use lily_gpu::stage::Stage;
use lily_gpu::step::{self, Segment, StepLayout};
use lily_gpu::target::Target;
use lily_metal::device::{Argument, Buffer, Completion, Device, Dispatch, Pass, Source, Touch};
use lily_metal::emulator::{Emulator, Memory, Options};
use lily_metal::sampling::{BROKEN, Recipe, Recipes};
use lily_metal::sources;
use lily_model::geometry::Geometry;
use lily_model::weights::Weights;

const ROWS: usize = 4;
/// A vocabulary of which the last part is a short one, and which the list cannot take whole.
const SHORT: usize = 3 * 2048 - 100;

fn gpu(seed: u64, tracked: bool) -> Emulator {
    Emulator::new(Options { seed, tracked }).unwrap()
}

fn written(gpu: &Emulator, bytes: impl IntoIterator<Item = u8>) -> Memory {
    let bytes: Vec<u8> = bytes.into_iter().collect();
    let memory = gpu.allocate("a test's", bytes.len()).unwrap();
    memory.write(0, &bytes);
    memory
}

fn words(memory: &Memory, count: usize) -> Vec<u32> {
    let mut bytes = vec![0; count * 4];
    memory.read(0, &mut bytes);
    bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

fn run(gpu: &Emulator, before: &[lily_metal::device::Transfer<Memory>], dispatches: &[Dispatch<Emulator>]) {
    let pass = Pass { label: "a test", before, dispatches, after: &[] };
    gpu.submit(&pass).unwrap().wait(Duration::MAX).unwrap_or_else(|error| panic!("{error}"));
}

/// Numbers that look random and are the same every time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        // splitmix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Nearly normal, with a deviation of one: the sum of four uniform numbers.
    fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: u32 = (0..4).map(|part| (bits >> (16 * part)) as u32 & 0xffff).sum();
        (sum as f32 / 65536.0 - 2.0) * 1.732
    }
}

/// What `body` writes for each of `inputs` to `out`, words of 64 bits, as a kernel behind `text`.
fn each<const IN: usize, const OUT: usize>(
    source: Source,
    body: &str,
    inputs: &[[u64; IN]],
) -> Vec<[u64; OUT]> {
    let gpu = gpu(1, false);
    let kernel = format!(
        "\nkernel void test(device const ulong* inputs [[buffer(0)]], device ulong* outputs [[buffer(1)]],\n\
         uint i [[thread_position_in_grid]]) {{ device const ulong* in = inputs + {IN} * i; device ulong* out = outputs + {OUT} * i; {body} }}\n"
    );
    let library = gpu.compile(&Source { text: source.text + &kernel, ..source }).unwrap();
    let input = written(&gpu, inputs.as_flattened().iter().flat_map(|word| word.to_le_bytes()));
    let output = gpu.allocate("results", inputs.len() * OUT * 8).unwrap();
    let touch = |memory: &Memory, writes: bool| Touch {
        buffer: memory.clone(),
        range: 0..memory.bytes(),
        reads: !writes,
        writes,
    };
    let argument = |memory: &Memory| Argument::Buffer { buffer: memory.clone(), offset: 0 };
    assert!(inputs.len().is_multiple_of(32));
    let dispatch = Dispatch {
        label: "test".into(),
        pipeline: gpu.pipeline(&library, "test").unwrap(),
        arguments: vec![argument(&input), argument(&output)],
        threadgroup_memory: vec![],
        grid: [inputs.len() as u32 / 32, 1, 1],
        threads: 32,
        waits_for: vec![],
        touches: vec![touch(&input, false), touch(&output, true)],
    };
    run(&gpu, &[], &[dispatch]);
    let words = words(&output, inputs.len() * OUT * 2);
    let words = words.as_chunks::<2>().0.iter().map(|[low, high]| u64::from(*high) << 32 | u64::from(*low));
    words.collect::<Vec<u64>>().as_chunks::<OUT>().0.to_vec()
}

#[test]
fn f64_by_integers_is_f64() {
    let mut random = Random(1);
    let number = |random: &mut Random| {
        let exponent = 1023 - 40 + random.below(80);
        // Mantissas of few bits make ties and cancellation; others are any.
        let mantissa = match random.below(4) {
            0 => (random.next() & 0xf) << 48,
            1 => 0xf_ffff_ffff_ffff - (random.next() & 3),
            _ => random.next() >> 12,
        };
        f64::from_bits(random.below(2) << 63 | exponent << 52 | mantissa)
    };
    let mut pairs: Vec<[u64; 2]> = Vec::new();
    for i in 0..40_000 {
        let a = number(&mut random);
        let b = match i % 8 {
            0 => -f64::from_bits(a.to_bits() + random.below(3)),
            1 => 0.0,
            2 => (random.below(1 << 20) as f64 + 0.5).copysign(a),
            _ => number(&mut random),
        };
        pairs.push([a.to_bits(), b.to_bits()]);
    }
    // Zero has one sign here.
    let bits = |x: f64| if x == 0.0 { 0 } else { x.to_bits() };
    let source = Source {
        name: "float64.h".into(),
        text: include_str!("../kernels/float64.h").replace("#pragma once", "")
            + "inline ulong bits(Double d) {\n\
               const ulong sign = ulong(d.negative) << 63, exponent = ulong(d.exponent + 1075) << 52;\n\
               return d.mantissa == 0 ? 0 : sign | exponent | (d.mantissa & 0xfffffffffffff); }\n",
        macros: vec![],
    };
    // The f32 is any but NaN and infinity, subnormal ones too.
    let body = "const Double a = of_bits(in[0]), b = of_bits(in[1]); const float f = as_type<float>(uint(in[0]));\n\
                out[0] = bits(add(a, b)); out[1] = bits(multiply(a, b)); out[2] = nearest(b); out[3] = whole(b);\n\
                out[4] = bits(of_integer(in[0] >> (in[1] & 63))); out[5] = isfinite(f) ? bits(of_float(f)) : 0;";
    for (pair, found) in pairs.iter().zip(each::<2, 6>(source, body, &pairs)) {
        let [a, b] = pair.map(f64::from_bits);
        let float = f32::from_bits(pair[0] as u32);
        let expected = [
            bits(a + b),
            bits(a * b),
            b.abs().round_ties_even() as u64,
            b.abs() as u64,
            bits((pair[0] >> (pair[1] & 63)) as f64),
            if float.is_finite() { bits(f64::from(float)) } else { 0 },
        ];
        assert_eq!(found, expected, "sum, product, integers, and conversions of {a:e} and {b:e}");
    }
}

#[test]
fn a_weight_is_the_samplers() {
    let mut random = Random(2);
    let mut cases = Vec::new();
    for i in 0..20_000u32 {
        let temperature = [1.0f32, 0.6, 0.05, 3.0, 1e-30, 1e30, 1e-40][i as usize % 7];
        let largest = 30.0 * random.normal();
        let distance = match i % 5 {
            0 => 0.0,
            1 => 31.0 * temperature * random.below(1 << 20) as f32 / (1 << 20) as f32,
            2 => temperature * (31.0 + 1e-4 * random.normal()),
            3 => 1e-3 * random.normal().abs(),
            _ => 40.0 * random.normal().abs(),
        };
        cases.push((largest - distance, largest, temperature));
    }
    let inputs: Vec<[u64; 2]> = cases
        .iter()
        .map(|&(logit, largest, temperature)| {
            let inverse = 1.0 / f64::from(temperature);
            [u64::from(largest.to_bits()) << 32 | u64::from(logit.to_bits()), inverse.to_bits()]
        })
        .collect();
    let found = each::<2, 1>(
        sources::source(Stage::Sample, &Geometry::qwen3_6_35b_a3b(), KvFormat::F16),
        "Scale scale; scale.largest = of_float(as_type<float>(uint(in[0] >> 32))); scale.inverse = of_bits(in[1]);\n\
         out[0] = weight_of(scale, as_type<float>(uint(in[0])));",
        &inputs,
    );
    let mut weighty = 0;
    for (&(logit, largest, temperature), [found]) in cases.iter().zip(found) {
        let expected = sampler::weight(logit, largest, temperature);
        assert_eq!(found, expected, "{logit} beside {largest} at {temperature}");
        weighty += usize::from(expected > 0 && expected < 1 << 44);
    }
    assert!(weighty > 5_000, "{weighty} of the weights are neither nothing nor all");
}

/// The kernels that choose tokens, of a plan for [`ROWS`] rows, with what they are bound to.
struct Choice {
    gpu: Emulator,
    vocab: usize,
    plan: Plan,
    first: usize,
    pipelines: HashMap<&'static str, <Emulator as Device>::Pipeline>,
    buffers: HashMap<String, Memory>,
    recipes: Recipes<Emulator>,
}

impl Choice {
    fn new(gpu: Emulator, vocab: usize) -> Choice {
        let mut geometry = Geometry::qwen3_6_35b_a3b();
        geometry.vocab = vocab;
        let shape = Shape { rows: ROWS, context: 64, sampled: true };
        let plan = decode::record(&Weights::outline(&geometry), Target::APPLE_MAX, shape);
        let first = plan.dispatches.iter().position(|dispatch| dispatch.stage == Stage::Sample).unwrap();
        let library = gpu.compile(&sources::source(Stage::Sample, &geometry, KvFormat::F16)).unwrap();
        let pipeline = |name: &'static str| (name, gpu.pipeline(&library, name).unwrap());
        let pipelines = plan.dispatches[first..].iter().map(|dispatch| pipeline(dispatch.kernel)).collect();
        let buffers = ["step", "row_recipes", "logits", "best", "notes", "sampled", "tokens"].map(|name| {
            let bytes = plan.buffers.iter().find(|buffer| buffer.name == name).unwrap().bytes;
            (name.to_owned(), gpu.allocate(name, bytes as usize).unwrap())
        });
        let recipes = Recipes::new(&gpu, vocab, 1 << 30).unwrap();
        Choice { gpu, vocab, plan, first, pipelines, buffers: buffers.into(), recipes }
    }

    /// The tokens of rows of logits; those without a recipe are greedy.
    fn tokens(
        &mut self,
        rows: &[(Option<&Recipe>, &[f32])],
        before: &[lily_metal::device::Transfer<Memory>],
    ) -> Vec<u32> {
        let segment =
            |row: usize| Segment { tokens: &[0], position: 0, state: 0, pages: 0, sampled: row as u64 };
        let segments: Vec<Segment<'_>> = (0..rows.len()).map(segment).collect();
        let mut block = vec![0; StepLayout::BYTES];
        step::write(&mut block, &segments, &(0..rows.len() as u32).collect::<Vec<_>>());
        self.buffers["step"].write(0, &block);
        let blocks = Target::APPLE_MAX.dense_blocks(self.vocab, ROWS);
        for (row, (recipe, logits)) in rows.iter().enumerate() {
            let number = recipe.map_or(NONE, Recipe::number);
            self.buffers["row_recipes"].write(row * 4, &number.to_le_bytes());
            let logits: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
            self.buffers["logits"].write(row * self.vocab * 4, &logits);
        }
        let best: Vec<u8> = rows.iter().flat_map(|(_, logits)| largest(logits, blocks)).collect();
        self.buffers["best"].write(0, &best);
        let place = |name: &str| match name {
            "recipes" => self.recipes.recipes().clone(),
            "tables" => self.recipes.tables().clone(),
            name => self.buffers[name].clone(),
        };
        let dispatches: Vec<Dispatch<Emulator>> = (self.first..self.plan.dispatches.len())
            .map(|index| {
                let dispatch = &self.plan.dispatches[index];
                let argument = |arg: &Arg| match *arg {
                    Arg::Buffer(id, offset) => Argument::Buffer {
                        buffer: place(&self.plan.buffers[id.0].name),
                        offset: offset as usize,
                    },
                    Arg::Value(value) => Argument::Bytes(value.to_le_bytes().into()),
                };
                let touch = |access: &lily_gpu::plan::Access| {
                    let buffer = place(&self.plan.buffers[access.buffer.0].name);
                    let range = 0..buffer.bytes();
                    Touch { buffer, range, reads: access.mode.reads(), writes: access.mode.writes() }
                };
                let waits_for = &self.plan.dependencies.waits_for[index];
                Dispatch {
                    label: dispatch.kernel.into(),
                    pipeline: self.pipelines[dispatch.kernel].clone(),
                    arguments: dispatch.args.iter().map(argument).collect(),
                    threadgroup_memory: vec![],
                    grid: dispatch.grid,
                    threads: dispatch.threads,
                    waits_for: waits_for.iter().filter_map(|at| at.checked_sub(self.first)).collect(),
                    touches: dispatch.accesses.iter().map(touch).collect(),
                }
            })
            .collect();
        run(&self.gpu, before, &dispatches);
        let tokens = words(&self.buffers["tokens"], rows.len());
        // What the next step begins with, too.
        let sampled = words(&self.buffers["sampled"], rows.len());
        assert_eq!(sampled, tokens);
        tokens
    }

    /// Has `steps` tokens chosen as each of `asked` asks, a few of them in a pass, and holds them against the host's.
    fn check(&mut self, asked: &[SamplingParams], prompt: &[u32], steps: &[Vec<f32>]) {
        for group in asked.chunks(ROWS) {
            let mut before = Vec::new();
            let mut hosts: Vec<Sampler> =
                group.iter().map(|params| Sampler::new(params.clone(), prompt)).collect();
            let meter = Meter::default();
            let recipes: Vec<Recipe> = hosts
                .iter()
                .map(|host| {
                    let state = host.state().expect("a device can go on from it");
                    self.recipes.add(&self.gpu, &meter, &state, &mut before).unwrap()
                })
                .collect();
            for (turn, logits) in steps.iter().enumerate() {
                let rows: Vec<(Option<&Recipe>, &[f32])> =
                    recipes.iter().map(|recipe| (Some(recipe), &logits[..])).collect();
                let found = self.tokens(&rows, &before);
                before.clear();
                for ((host, found), params) in hosts.iter_mut().zip(found).zip(group) {
                    let expected = host.sample(&mut logits.clone()).unwrap().token;
                    assert_eq!(found, expected, "step {turn} of {params:?}");
                }
            }
        }
    }
}

/// What each of the head's `blocks` threadgroups leaves of a row: its largest logit and that one's token, or a NaN that it has.
fn largest(logits: &[f32], blocks: usize) -> Vec<u8> {
    let block = |number: usize| {
        let mut best = (f32::NEG_INFINITY, logits.len() as u32);
        for (token, &logit) in (0..).zip(logits).skip(number).step_by(blocks) {
            if logit > best.0 || logit.is_nan() {
                best = (logit, token);
            }
        }
        [best.0.to_bits(), best.1]
    };
    (0..blocks).flat_map(block).flat_map(u32::to_le_bytes).collect()
}

/// Bell-shaped, with favourites, and tokens that are never chosen.
fn bell(seed: u64, vocab: usize) -> Vec<f32> {
    let mut random = Random(seed);
    let mut logits: Vec<f32> = (0..vocab).map(|_| 2.5 * random.normal()).collect();
    for _ in 0..20 {
        logits[random.below(vocab as u64) as usize] = 14.0 + 2.0 * random.normal();
        logits[random.below(vocab as u64) as usize] = f32::NEG_INFINITY;
    }
    logits
}

/// Few values, so that many are equal.
fn ties(seed: u64, vocab: usize) -> Vec<f32> {
    let mut random = Random(seed);
    (0..vocab).map(|_| [-0.0, 0.0, 0.25, 0.5, -1.5, 2.0][random.below(6) as usize]).collect()
}

fn request(seed: u64, change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    let mut params = SamplingParams { temperature: 1.0, seed: Some(seed), ..SamplingParams::default() };
    change(&mut params);
    params
}

/// One of each filter, of all together, of penalties and biases, at low and high temperatures.
fn requests(vocab: usize) -> Vec<SamplingParams> {
    let last = vocab as u32 - 1;
    vec![
        request(1, |_| {}),
        request(2, |p| (p.temperature, p.top_k, p.top_p) = (0.6, 20, 0.95)),
        request(3, |p| p.top_p = 0.9),
        request(4, |p| p.min_p = 0.05),
        request(5, |p| {
            (p.top_k, p.top_p, p.min_p, p.temperature) = (50, 0.8, 0.02, 1.5);
            (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) = (1.2, 0.5, 0.25);
            p.logit_bias = vec![(7, 12.0), (last, 15.0), (3, -100.0)];
        }),
        request(6, |p| (p.temperature, p.top_p, p.min_p) = (2.0, 0.99, 0.001)),
        request(7, |p| (p.temperature, p.repetition_penalty, p.presence_penalty) = (0.0, 1.02, 0.4)),
        request(8, |p| (p.temperature, p.logit_bias) = (0.0, vec![(last, 60.0)])),
        request(9, |p| (p.temperature, p.frequency_penalty, p.presence_penalty) = (0.0, 0.5, 0.1)),
    ]
}

#[test]
fn tokens_over_the_full_vocabulary_are_the_hosts() {
    let vocab = Geometry::qwen3_6_35b_a3b().vocab;
    let prompt: Vec<u32> = (0..200).map(|i| i * 37).collect();
    let steps = [bell(1, vocab), ties(2, vocab)];
    Choice::new(gpu(1, false), vocab).check(&requests(vocab), &prompt, &steps);
}

#[test]
fn no_thread_does_what_it_must_not() {
    for seed in [1, 2] {
        // The same row again and again: what was chosen is penalized the more.
        let row = bell(seed, SHORT);
        let likely = (0..SHORT as u32).filter(|&token| row[token as usize] > 10.0);
        let prompt: Vec<u32> = likely.step_by(2).collect();
        let mut steps = vec![row; 8];
        steps.extend([ties(seed, SHORT), vec![0.5; SHORT]]);
        Choice::new(gpu(seed, true), SHORT).check(&requests(SHORT), &prompt, &steps);
    }
}

#[test]
fn a_row_that_is_broken_has_no_token_and_the_others_have_theirs() {
    let mut choice = Choice::new(gpu(3, true), SHORT);
    let (mut before, meter) = (Vec::new(), Meter::default());
    let good = bell(1, SHORT);
    let spoilt = |value: f32| {
        let mut logits = good.clone();
        logits[4321] = value;
        logits
    };
    let (nan, infinite, none) = (spoilt(f32::NAN), spoilt(f32::INFINITY), vec![f32::NEG_INFINITY; SHORT]);
    for params in requests(SHORT) {
        let mut host = Sampler::new(params, &[]);
        let state = host.state().unwrap();
        let recipe: Vec<Recipe> = (0..ROWS)
            .map(|_| choice.recipes.add(&choice.gpu, &meter, &state, &mut before).unwrap())
            .collect();
        let rows = [
            (Some(&recipe[0]), &nan[..]),
            (Some(&recipe[1]), &good),
            (None, &good),
            (Some(&recipe[2]), &infinite),
        ];
        let expected = host.sample(&mut good.clone()).unwrap().token;
        let greedy = Sampler::new(SamplingParams::default(), &[]).sample(&mut good.clone()).unwrap().token;
        assert_eq!(choice.tokens(&rows, &before), [BROKEN, expected, greedy, BROKEN]);
        before.clear();
        // A bias makes nothing of what is not there.
        assert_eq!(choice.tokens(&[(Some(&recipe[3]), &none)], &[]), [BROKEN]);
    }
    assert_eq!(choice.tokens(&[(None, &nan), (None, &infinite), (None, &none)], &[]), [BROKEN; 3]);
}
