//! The expert routing of a prompt, alone: choice, histogram, prefix sum, scatter and block map against plain Rust, for every kind of
//! distribution of tokens over experts. The experts are as many as the full model has.

use std::time::Duration;

use lily_cpu::stages::moe_route::{Choice, choose};
use lily_gpu::layout::KvFormat;
use lily_gpu::prefill::metal::{BLOCKS, SORT_ROWS};
use lily_gpu::prompt::{self, PromptLayout};
use lily_gpu::stage::Stage;
use lily_metal::device::{Argument, Buffer, Completion, Device, Dispatch, Pass, Touch};
use lily_metal::emulator::{Emulator, Memory, Options};
use lily_metal::sources;
use lily_model::geometry::Geometry;

/// Words of a row's choice, as the kernels keep it.
const CHOICE_WORDS: usize = 32;
const BLOCK_WORDS: usize = 4;

/// Which logit an expert has for a row.
pub type Logits = fn(row: usize, expert: usize) -> f32;

/// Numbers without a pattern, between 0 and 1.
fn mixed(row: usize, expert: usize) -> f32 {
    let bits = (row as u32).wrapping_mul(0x9e37_79b9) ^ (expert as u32).wrapping_mul(0x85eb_ca6b);
    (bits.wrapping_mul(0xc2b2_ae35) >> 8) as f32 / (1 << 24) as f32
}

/// Every row wants the same eight, the eighth expert most.
pub fn all_on_the_same(_: usize, expert: usize) -> f32 {
    -(expert as f32 - 7.0).abs()
}

/// Nobody has a preference: among equals the lower number is first.
pub fn no_preference(_: usize, _: usize) -> f32 {
    0.0
}

/// Most experts are wanted by nobody, and those that are by some more than by others.
pub fn none_on_most(row: usize, expert: usize) -> f32 {
    if expert.is_multiple_of(17) { mixed(row, expert) - expert as f32 / 300.0 } else { -9.0 }
}

struct Routing {
    gpu: Emulator,
    geometry: Geometry,
    /// What has been written before the next dispatch.
    prompt: Memory,
    logits: Memory,
    choice: Memory,
    histogram: Memory,
    sorted: Memory,
    blocks: Memory,
}

impl Routing {
    fn new(seed: u64, tracked: bool, rows: usize, logits: Logits) -> Routing {
        let gpu = Emulator::new(Options { seed, tracked }).unwrap();
        let geometry = Geometry::qwen3_6_35b_a3b();
        let (experts, slots) = (geometry.moe.experts, rows * (geometry.moe.top_k + 1));
        let stride = (experts + 1).next_multiple_of(16);
        let words = |label: &str, words: usize| gpu.allocate(label, words * 4).unwrap();
        let mut block = vec![0; PromptLayout::bytes(rows)];
        prompt::write(&mut block, &vec![0; rows], 0, 0, 0);
        let (prompt, all) = (gpu.allocate("prompt", block.len()).unwrap(), words("router", rows * stride));
        prompt.write(0, &block);
        let numbers = (0..rows * stride).map(|at| logits(at / stride, at % stride));
        all.write(0, &numbers.flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>());
        Routing {
            prompt,
            logits: all,
            choice: words("choice", rows * CHOICE_WORDS),
            histogram: words("histogram", rows.div_ceil(SORT_ROWS) * experts),
            sorted: words("sorted", slots),
            // No block is smaller than the smallest but an expert's last.
            blocks: words("blocks", BLOCK_WORDS * (2 + slots / BLOCKS[0] + experts)),
            gpu,
            geometry,
        }
    }

    /// Runs both kernels over `rows` rows.
    fn run(&self, rows: usize, block_rows: usize) {
        let library =
            self.gpu.compile(&sources::source(Stage::MoeRoute, &self.geometry, KvFormat::F16)).unwrap();
        let dispatch =
            |kernel: &str, bound: &[(&Memory, bool)], value: Option<u32>, waits_for: Vec<usize>| {
                let argument =
                    |&(buffer, _): &(&Memory, bool)| Argument::Buffer { buffer: buffer.clone(), offset: 0 };
                let value = value.map(|value| Argument::Bytes(value.to_le_bytes().into()));
                Dispatch::<Emulator> {
                    label: kernel.to_owned(),
                    pipeline: self.gpu.pipeline(&library, kernel).unwrap(),
                    arguments: bound.iter().map(argument).chain(value).collect(),
                    threadgroup_memory: vec![],
                    // More threadgroups than there is work for.
                    grid: [rows.div_ceil(SORT_ROWS) as u32 + 1, 1, 1],
                    threads: 256,
                    waits_for,
                    touches: bound
                        .iter()
                        .map(|&(buffer, writes)| Touch {
                            buffer: buffer.clone(),
                            range: 0..buffer.bytes(),
                            reads: !writes,
                            writes,
                        })
                        .collect(),
                }
            };
        let Routing { prompt, logits, choice, histogram, sorted, blocks, .. } = self;
        let dispatches = [
            dispatch(
                "moe_select_prefill",
                &[(prompt, false), (logits, false), (choice, true), (histogram, true)],
                None,
                vec![],
            ),
            dispatch(
                "moe_sort_prefill",
                &[(prompt, false), (choice, false), (histogram, false), (sorted, true), (blocks, true)],
                Some(block_rows as u32),
                vec![0],
            ),
        ];
        let pass = Pass { label: "routing", before: &[], dispatches: &dispatches, after: &[] };
        self.gpu.submit(&pass).unwrap().wait(Duration::MAX).unwrap_or_else(|error| panic!("{error}"));
    }
}

fn words(memory: &Memory, count: usize) -> Vec<u32> {
    let mut bytes = vec![0; count * 4];
    memory.read(0, &mut bytes);
    bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

/// Routes `rows` rows and compares with plain Rust; panics where something differs.
pub fn check(seed: u64, tracked: bool, rows: usize, block_rows: usize, logits: Logits) {
    let routing = Routing::new(seed, tracked, rows, logits);
    routing.run(rows, block_rows);
    let moe = &routing.geometry.moe;
    let slots = moe.top_k + 1;
    let mut of_expert = vec![Vec::new(); moe.experts + 1];
    for row in 0..rows {
        let mut logits: Vec<f32> = (0..moe.experts).map(|expert| logits(row, expert)).collect();
        let mut choices = vec![Choice::default(); moe.top_k];
        choose(&mut logits, &mut choices);
        for (place, choice) in choices.iter().enumerate() {
            of_expert[choice.expert as usize].push((row * slots + place) as u32);
        }
        of_expert[moe.experts].push((row * slots + moe.top_k) as u32);
    }
    let expected: Vec<u32> = of_expert.concat();
    assert_eq!(words(&routing.sorted, rows * slots), expected, "slots of {rows} rows");
    let (mut blocks, mut first) = (Vec::new(), 0);
    for (expert, slots) in of_expert.iter().enumerate() {
        for block in slots.chunks(block_rows) {
            blocks.extend([expert as u32, first, block.len() as u32, 0]);
            first += block.len() as u32;
        }
    }
    let found = words(&routing.blocks, BLOCK_WORDS + blocks.len());
    assert_eq!(found[0] as usize, blocks.len() / BLOCK_WORDS, "blocks of {rows} rows");
    assert_eq!(found[BLOCK_WORDS..], blocks, "blocks of {rows} rows");
}
