//! An emulated GPU whose passes are run stage by stage, with what lies in its memory read back.

use std::ops::Range;
use std::time::Duration;

use half::f16;
use lily_cpu::kernels::attention::quantize_row;
use lily_gpu::decode::{MAX_ROWS, Shape};
use lily_gpu::layout::{KvFormat, PAGE_TOKENS};
use lily_gpu::prompt::{self, PromptLayout};
use lily_gpu::step::{self, Segment, StepLayout};
use lily_metal::device::{Buffer, Completion, Device, Dispatch, Pass};
use lily_metal::emulator::{Emulator, Options};
use lily_metal::program::{self, Programs, StepPlace, Work};
use lily_metal::reach::Reach;
use lily_metal::sequence::Frozen;
use lily_metal::slot::Slot;
use lily_metal::store::Store;
use lily_metal::weights;
use lily_model::geometry::{Geometry, LayerKind};
use lily_model::weights::Weights;

/// Bytes of what the passes of prompts hand to each other.
const ROOM: u64 = 1 << 30;

/// A sequence's part in the traced pass.
pub struct Part {
    sequence: Frozen,
    /// Tokens that it had seen.
    pub position: usize,
    /// Tokens that the pass adds.
    pub tokens: Vec<u32>,
    /// Keys and values of the positions before them in each attention layer, as they were before they were stored.
    pub given: Vec<Cache>,
    /// Which of the sequence's pages each page of positions is.
    table: Vec<usize>,
}

impl Part {
    /// The same sequence far on: its full pages stand for all before `position`, over and over, and its last one for the page
    /// of `position`, which is as far in it as before.
    pub fn far(self, position: usize) -> Part {
        let (distinct, pages) = (self.position / PAGE_TOKENS, position / PAGE_TOKENS);
        assert_eq!((self.position % PAGE_TOKENS, self.tokens.len()), (position % PAGE_TOKENS, 1));
        let table = (0..pages).map(|page| page % distinct).chain([distinct]).collect();
        Part { position, table, ..self }
    }

    /// Where the caches of its sequence have `position`.
    pub fn place(&self, position: usize) -> usize {
        self.table[position / PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
    }
}

/// Keys and values of one layer.
pub struct Cache {
    head_dim: usize,
    /// Positions that there is room for.
    positions: usize,
    /// `[kv_heads, positions, head_dim]`, once of the keys and once of the values.
    rows: [Vec<f32>; 2],
}

impl Cache {
    fn new(geometry: &Geometry, positions: usize) -> Cache {
        let (head_dim, kv_heads) = (geometry.attention.head_dim, geometry.attention.kv_heads);
        let rows = [(); 2].map(|()| vec![0.0; kv_heads * positions * head_dim]);
        Cache { head_dim, positions, rows }
    }

    fn at(&self, position: usize, kv_head: usize) -> Range<usize> {
        let row = kv_head * self.positions + position;
        row * self.head_dim..(row + 1) * self.head_dim
    }

    /// A key.
    pub fn key(&self, position: usize, kv_head: usize) -> &[f32] {
        &self.rows[0][self.at(position, kv_head)]
    }

    /// A value.
    pub fn value(&self, position: usize, kv_head: usize) -> &[f32] {
        &self.rows[1][self.at(position, kv_head)]
    }
}

/// Recurrent matrices and tail of a layer.
pub type State = (Vec<f32>, Vec<f32>);

/// See the module's page.
pub struct Gpu {
    device: Emulator,
    programs: Programs<Emulator>,
    geometry: Geometry,
    store: Store<Emulator>,
    slot: Slot<Emulator>,
    /// How keys and values are stored.
    pub kv: KvFormat,
    /// The sequences of the traced pass.
    pub parts: Vec<Part>,
    /// Whether it is one of a prompt.
    pub is_prompt: bool,
    /// Dispatches of it that have run.
    done: usize,
}

impl Gpu {
    /// A GPU with `weights` that stores keys and values as `kv` says. Contexts of more than `short` tokens get attention's
    /// layout for long ones.
    pub fn new(weights: &Weights, options: Options, short: usize, kv: KvFormat, context: usize) -> Gpu {
        let device = Emulator::new(options).unwrap();
        let plans = program::plans(weights, device.info(), short, kv);
        let loaded = weights::load(&device, weights, &plans[0].1).unwrap();
        let prompts = program::prompt_plans(weights, device.info(), ROOM, kv);
        let prompt_rows = prompts.last().unwrap().0.rows;
        let programs = Programs::new(&device, &weights.geometry, kv, plans, prompts, loaded).unwrap();
        let store = Store::new(&device, &weights.geometry, kv, u64::MAX).unwrap();
        let slot = Slot::new(&device, context, prompt_rows).unwrap();
        let geometry = weights.geometry.clone();
        Gpu { device, programs, geometry, store, slot, kv, parts: Vec::new(), is_prompt: false, done: 0 }
    }

    /// A sequence that is to take `tokens` after `seen` others, of which nobody knows more than a state and a cache of
    /// `random` numbers.
    pub fn sequence(&mut self, seen: usize, tokens: &[u32], random: &mut Random) -> Part {
        let mut sequence = Frozen::empty(&mut self.store).unwrap();
        sequence.reserve(&mut self.store, seen + tokens.len()).unwrap();
        self.submit(&[]);
        let pools = self.store.pools();
        if seen > 0 {
            let floats = self.store.state.bytes() / size_of::<f32>();
            let state: Vec<u8> = (0..floats).flat_map(|_| (0.1 * random.normal()).to_le_bytes()).collect();
            pools.states.write(sequence.state().number() as usize * self.store.state.bytes(), &state);
        }
        let layers = self.geometry.count(LayerKind::Attention);
        let mut given: Vec<Cache> = (0..layers).map(|_| Cache::new(&self.geometry, seen)).collect();
        for rows in given.iter_mut().flat_map(|cache| &mut cache.rows) {
            rows.fill_with(|| random.normal());
        }
        for (index, page) in sequence.pages().enumerate() {
            // Positions of this page that were seen; the others stay zero.
            let known = index * PAGE_TOKENS..seen.min((index + 1) * PAGE_TOKENS);
            let bytes: Vec<u8> = given
                .iter()
                .flat_map(|cache| (0..self.geometry.attention.kv_heads).map(move |head| (cache, head)))
                .flat_map(|(cache, head)| stored(self.kv, cache, head, known.clone()))
                .collect();
            pools.pages.write(page as usize * bytes.len(), &bytes);
        }
        sequence.length = seen;
        let table = (0..sequence.pages().len()).collect();
        Part { sequence, position: seen, tokens: tokens.to_vec(), given, table }
    }

    /// Says what the next pass works on: all rows of `parts` go through the head.
    pub fn begin(&mut self, parts: Vec<Part>) {
        self.parts = parts;
        self.is_prompt = false;
        self.done = 0;
        let (mut tables, mut firsts) = (Vec::new(), Vec::new());
        for part in &self.parts {
            firsts.push(tables.len() as u64);
            let numbers: Vec<u32> = part.sequence.pages().collect();
            tables.extend(part.table.iter().map(|&page| numbers[page]));
        }
        let segments: Vec<Segment<'_>> = self
            .parts
            .iter()
            .zip(firsts)
            .map(|(part, pages)| Segment {
                tokens: &part.tokens,
                position: part.position as u32,
                state: u64::from(part.sequence.state().number()),
                pages,
                sampled: u64::from(part.sequence.state().token()),
            })
            .collect();
        let mut block = vec![0; StepLayout::BYTES];
        step::write(&mut block, &segments, &(0..self.rows() as u32).collect::<Vec<_>>());
        self.slot.write(&block, &tables, &[]);
    }

    /// Says that the next pass works on `part` as a prompt: as many of its last rows as may go through the head.
    pub fn begin_prompt(&mut self, part: Part) {
        let (state, position) = (u64::from(part.sequence.state().number()), part.position);
        let heads = part.tokens.len().min(MAX_ROWS);
        let skipped = part.tokens.len() - heads;
        let last = Segment {
            tokens: &part.tokens[skipped..],
            position: (position + skipped) as u32,
            state,
            pages: 0,
            sampled: u64::from(part.sequence.state().token()),
        };
        let mut block = vec![0; StepLayout::BYTES];
        step::write(&mut block, &[last], &(0..heads as u32).collect::<Vec<_>>());
        self.slot.write(&block, &part.sequence.pages().collect::<Vec<_>>(), &[]);
        let mut block = vec![0; PromptLayout::bytes(part.tokens.len())];
        prompt::write(&mut block, &part.tokens, position as u32, state, 0);
        self.slot.write_prompt(&block);
        self.parts = vec![part];
        self.is_prompt = true;
        self.done = 0;
    }

    /// Rows of the pass that go through the head: the last ones.
    pub fn head_rows(&self) -> usize {
        if self.is_prompt { self.rows().min(MAX_ROWS) } else { self.rows() }
    }

    /// Rows of the pass.
    pub fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.tokens.len()).sum()
    }

    /// Rows of each part.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        let mut end = 0;
        let ranges = self.parts.iter().map(|part| {
            end += part.tokens.len();
            end - part.tokens.len()..end
        });
        ranges.collect()
    }

    /// Runs the pass up to and with the next dispatch of `kernel`, whatever its name ends in.
    pub fn until(&mut self, kernel: &str) {
        let context = self.parts.iter().map(|part| part.position + part.tokens.len()).max().unwrap();
        let rows = self.rows();
        let shape = Shape { rows, context, sampled: false };
        let work = if self.is_prompt { Work::Prompt(shape) } else { Work::Step(shape) };
        let plan = self.programs.plan(work);
        let plain = |name: &'static str| {
            let name = name.split("_prefill").next().unwrap_or(name);
            name.trim_end_matches("_batch").trim_end_matches("_long")
        };
        // What a stage of a prompt ends with.
        let kernel = match kernel {
            "delta_core" if self.is_prompt => "delta_norm",
            "attn_merge" if self.is_prompt => "attn_core",
            "moe_down" if self.is_prompt => "moe_sum",
            kernel => kernel,
        };
        let more = plan.dispatches[self.done..].iter().position(|dispatch| plain(dispatch.kernel) == kernel);
        let end = self.done + more.unwrap_or_else(|| panic!("{kernel} is not ahead")) + 1;
        let mut reach = Reach::default();
        for part in &self.parts {
            reach.add(&self.store, &part.sequence, part.tokens.len());
        }
        let place = StepPlace { number: 0, slot: &self.slot, store: &self.store, reach: &reach };
        let dispatches = self.programs.dispatches(work, &place).unwrap();
        // What ran before needs no edge any more.
        let part: Vec<Dispatch<Emulator>> = dispatches[self.done..end]
            .iter()
            .cloned()
            .map(|mut dispatch| {
                dispatch.waits_for =
                    dispatch.waits_for.iter().filter_map(|at| at.checked_sub(self.done)).collect();
                dispatch
            })
            .collect();
        self.done = end;
        self.submit(&part);
    }

    fn submit(&mut self, dispatches: &[Dispatch<Emulator>]) {
        let pass = Pass { label: "part of a pass", before: self.store.pending(), dispatches, after: &[] };
        let completion = self.device.submit(&pass).unwrap();
        self.store.submitted();
        completion.wait(Duration::MAX).unwrap_or_else(|error| panic!("{error}"));
    }

    fn bytes(&self, buffer: &<Emulator as Device>::Buffer, offset: usize, bytes: usize) -> Vec<u8> {
        let mut copy = vec![0; bytes];
        buffer.read(offset, &mut copy);
        copy
    }

    fn floats_at(&self, buffer: &<Emulator as Device>::Buffer, first: usize, count: usize) -> Vec<f32> {
        let bytes = self.bytes(buffer, first * 4, count * 4);
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    /// The first `count` words of a buffer of the plan.
    pub fn words(&self, name: &str, count: usize) -> Vec<u32> {
        let (buffer, offset) =
            self.slot.place(name).or_else(|| Some((self.programs.workspace(name)?, 0))).unwrap();
        let bytes = self.bytes(buffer, offset, count * 4);
        bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
    }

    /// The first `count` numbers of a buffer of the plan.
    pub fn floats(&self, name: &str, count: usize) -> Vec<f32> {
        self.words(name, count).into_iter().map(f32::from_bits).collect()
    }

    /// Writes a buffer of the plan, from its first number on.
    pub fn write(&self, name: &str, numbers: &[f32]) {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.programs.workspace(name).unwrap().write(0, &bytes);
    }

    /// The residual stream.
    pub fn x(&self) -> Vec<f32> {
        self.floats("x", self.rows() * self.geometry.hidden)
    }

    /// Where a layer stands among those of its kind.
    fn ordinal(&self, index: usize) -> usize {
        let layers = &self.geometry.layers;
        layers[..index].iter().filter(|&&kind| kind == layers[index]).count()
    }

    /// Recurrent matrices and tail of a layer, of each part.
    pub fn states(&self, index: usize) -> Vec<State> {
        let delta = &self.geometry.delta;
        let (matrices, tail) = (delta.state_elements(), delta.conv_tail_elements());
        let layers = self.geometry.count(LayerKind::Delta);
        let ordinal = self.ordinal(index);
        let pool = self.store.pools().states;
        let state = |part: &Part| {
            let start = part.sequence.state().number() as usize * self.store.state.bytes() / 4;
            (
                self.floats_at(&pool, start + ordinal * matrices, matrices),
                self.floats_at(&pool, start + layers * matrices + ordinal * tail, tail),
            )
        };
        self.parts.iter().map(state).collect()
    }

    /// Where a layer's part of page `number` begins in the pool, and its bytes.
    fn layer_of(&self, number: u32, index: usize) -> (usize, usize) {
        let bytes = self.store.kv.layer_bytes();
        (number as usize * self.store.kv.page_bytes() + self.ordinal(index) * bytes, bytes)
    }

    /// A layer's cache of a part, with what the pass wrote.
    pub fn cache(&self, part: &Part, index: usize) -> Cache {
        let attention = &self.geometry.attention;
        let (kv_heads, dim) = (attention.kv_heads, attention.head_dim);
        let mut cache = Cache::new(&self.geometry, part.sequence.pages().len() * PAGE_TOKENS);
        let pool = self.store.pools().pages;
        for (page, number) in part.sequence.pages().enumerate() {
            let (start, layer_bytes) = self.layer_of(number, index);
            let bytes = self.bytes(&pool, start, layer_bytes);
            for (head, bytes) in bytes.chunks_exact(layer_bytes / kv_heads).enumerate() {
                let rows = restored(self.kv, bytes, dim);
                for position in 0..PAGE_TOKENS {
                    let to = cache.at(page * PAGE_TOKENS + position, head);
                    for (cache, rows) in cache.rows.iter_mut().zip(&rows) {
                        cache[to.clone()].copy_from_slice(&rows[position * dim..(position + 1) * dim]);
                    }
                }
            }
        }
        cache
    }

    /// The given cache of a part, in which layer `index` has its place.
    pub fn given<'a>(&self, part: &'a Part, index: usize) -> &'a Cache {
        &part.given[self.ordinal(index)]
    }
}

/// What a page has of a KV head whose positions `known` of `cache` it holds from its first on.
fn stored(format: KvFormat, cache: &Cache, head: usize, known: Range<usize>) -> Vec<u8> {
    let dim = cache.head_dim;
    let rows = |part: usize| known.clone().map(move |position| &cache.rows[part][cache.at(position, head)]);
    match format {
        KvFormat::F16 => {
            let mut halves = [(); 2].map(|()| vec![f16::ZERO; PAGE_TOKENS * dim]);
            for (position, (key, value)) in rows(0).zip(rows(1)).enumerate() {
                for element in 0..dim {
                    halves[0][position * dim + element] = f16::from_f32(key[element]);
                    halves[1][element * PAGE_TOKENS + position] = f16::from_f32(value[element]);
                }
            }
            halves.concat().iter().flat_map(|half| half.to_le_bytes()).collect()
        }
        KvFormat::Q8 => {
            let mut elements = [(); 2].map(|()| vec![0i8; PAGE_TOKENS * dim]);
            let mut scales = [[0f32; PAGE_TOKENS]; 2];
            for part in 0..2 {
                let stored = elements[part].chunks_exact_mut(dim).zip(&mut scales[part]);
                for (row, (stored, scale)) in rows(part).zip(stored) {
                    *scale = quantize_row(row, stored);
                }
            }
            let elements = elements.concat().into_iter().map(|element| element as u8);
            elements.chain(scales.concat().iter().flat_map(|scale| scale.to_le_bytes())).collect()
        }
    }
}

/// Keys and values, `[PAGE_TOKENS, dim]` each, of what a page has of a KV head.
fn restored(format: KvFormat, bytes: &[u8], dim: usize) -> [Vec<f32>; 2] {
    let count = PAGE_TOKENS * dim;
    match format {
        KvFormat::F16 => {
            let (keys, values) = bytes.as_chunks::<2>().0.split_at(count);
            let float = |half: &[u8; 2]| f16::from_le_bytes(*half).to_f32();
            let value = |at: usize| float(&values[at % dim * PAGE_TOKENS + at / dim]);
            [keys.iter().map(float).collect(), (0..count).map(value).collect()]
        }
        KvFormat::Q8 => {
            let (elements, scales) = bytes.split_at(2 * count);
            let scales: Vec<f32> =
                scales.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            let row = |(row, scale): (&[u8], &f32)| -> Vec<f32> {
                row.iter().map(|&element| f32::from(element as i8) * scale).collect()
            };
            let mut rows = elements.chunks_exact(dim).zip(&scales).map(row);
            [(); 2].map(|()| rows.by_ref().take(PAGE_TOKENS).flatten().collect())
        }
    }
}

/// Numbers that look random and are the same every time.
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        // splitmix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number of a range.
    pub fn within(&mut self, range: Range<usize>) -> usize {
        range.start + (self.next() % range.len() as u64) as usize
    }

    /// Nearly normal, with a deviation of one: the sum of four uniform numbers.
    pub fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: u32 = (0..4).map(|part| (bits >> (16 * part)) as u32 & 0xffff).sum();
        (sum as f32 / 65536.0 - 2.0) * 1.732
    }
}
