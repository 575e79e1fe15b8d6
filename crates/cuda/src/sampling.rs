//! Tokens chosen on the card as a request asks: what `kernels/sample.cu` needs beside a pass.
//!
//! A sequence that asks for more than the greedy token has a [`Recipe`] on the card, which the kernels advance
//! themselves. They follow a pass with such a sequence in it as launches of their own, so that greedy steps pay
//! nothing.

use std::ffi::c_void;
use std::sync::Arc;

use lily_engine::backend::BackendError;
use lily_engine::meter::Charge;
use lily_engine::sampler::{SamplerState, SamplingParams};
use lily_gpu::decode::MAX_ROWS;

use crate::driver::{Gpu, Kernel, Memory, Module};
use crate::error::CudaError;
use crate::pages::Store;

/// Bytes of `struct Sampling`, and where its tables begin behind it.
const RECIPE_BYTES: usize = 80;
const TABLES_AT: usize = 256;
/// Bytes of a token's count, and of its bias.
const ENTRY: usize = size_of::<u32>();

/// How a sequence's tokens are chosen, on the card.
#[derive(Debug)]
pub struct Recipe {
    memory: Memory,
    adjusts: bool,
    filters: bool,
    _charge: Charge,
}

impl Recipe {
    /// Writes `state` down, for a model of `vocab` tokens.
    pub fn new(store: &Store, vocab: usize, state: &SamplerState) -> Result<Recipe, BackendError> {
        const WHAT: &str = "the sampling tables of a sequence";
        let SamplerState { params, counts, random } = state;
        let penalized = params.repetition_penalty != 1.0
            || params.presence_penalty != 0.0
            || params.frequency_penalty != 0.0;
        let biased = !params.logit_bias.is_empty();
        let table = vocab * ENTRY;
        let bias_at = TABLES_AT + if penalized { table } else { 0 };
        let bytes = bias_at + if biased { table } else { 0 };
        let charge = store.meter.charge(WHAT, bytes)?;
        let memory = store.gpu.allocate(WHAT, bytes)?;
        let at = |offset: usize, has: bool| if has { memory.address() + offset as u64 } else { 0 };

        let mut block = vec![0; bytes];
        let head = head(params, random, at(TABLES_AT, penalized), at(bias_at, biased));
        block[..RECIPE_BYTES].copy_from_slice(&head);
        let mut put = |table: usize, token: u32, entry: [u8; ENTRY]| {
            if (token as usize) < vocab {
                let start = table + token as usize * ENTRY;
                block[start..start + ENTRY].copy_from_slice(&entry);
            }
        };
        if penalized {
            counts.iter().for_each(|&(token, count)| put(TABLES_AT, token, (count + 1).to_le_bytes()));
        }
        params.logit_bias.iter().for_each(|&(token, bias)| put(bias_at, token, bias.to_le_bytes()));
        store.gpu.upload_now(memory.address(), &block)?;
        if bytes > TABLES_AT {
            // Ordinary memory of this size is not taken aside.
            store.gpu.synchronize()?;
        }
        let filters = params.top_k != 0 || params.top_p < 1.0;
        Ok(Recipe {
            memory,
            adjusts: penalized || biased,
            filters: filters && !params.is_greedy(),
            _charge: charge,
        })
    }
}

/// `struct Sampling`.
fn head(params: &SamplingParams, random: &[u64; 4], counts: u64, bias: u64) -> [u8; RECIPE_BYTES] {
    let inverse = if params.is_greedy() { 0.0 } else { 1.0 / f64::from(params.temperature) };
    let floats = [
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    ];
    let mut bytes = Vec::with_capacity(RECIPE_BYTES);
    bytes.extend(inverse.to_le_bytes());
    bytes.extend(floats.iter().flat_map(|float| float.to_le_bytes()));
    bytes.extend(u32::try_from(params.top_k).unwrap_or(0).to_le_bytes());
    bytes.extend(random.iter().chain([&counts, &bias]).flat_map(|word| word.to_le_bytes()));
    bytes.try_into().expect("the fields have this size together")
}

/// A kernel with the launch that its module names.
struct Launch {
    kernel: Kernel,
    blocks: u32,
    threads: u32,
}

/// The kernels, and what they share.
pub struct Sampling {
    gpu: Arc<Gpu>,
    adjust: Launch,
    weigh: Launch,
    list: Launch,
    choose: Launch,
    /// Address of each row's recipe, or 0; and what was written there last.
    table: Memory,
    written: Vec<u64>,
    shared: Memory,
}

impl Sampling {
    /// The kernels of `module`, which is that of the stage `sample`.
    pub fn new(gpu: &Arc<Gpu>, module: &Module) -> Result<Sampling, CudaError> {
        let launch = |name: &str| {
            let [blocks, threads, ..] = words::<4>(module, &format!("{name}_launch"))?;
            Ok::<Launch, CudaError>(Launch { kernel: module.kernel(name)?, blocks, threads })
        };
        let [shared] = words::<1>(module, "sample_shared_bytes")?;
        Ok(Sampling {
            gpu: Arc::clone(gpu),
            adjust: launch("sample_adjust")?,
            weigh: launch("sample_weigh")?,
            list: launch("sample_list")?,
            choose: launch("sample_choose")?,
            table: gpu.allocate("a table of recipes", MAX_ROWS * size_of::<u64>())?,
            written: Vec::new(),
            shared: gpu.allocate("what sampling blocks share", MAX_ROWS * shared as usize)?,
        })
    }

    /// Settles the tokens of a pass that was just enqueued; `recipes` of its head rows. `step`, `logits` and
    /// `tokens` are the pass's buffers.
    pub fn run(
        &mut self,
        recipes: &[Option<&Recipe>],
        step: u64,
        logits: u64,
        tokens: u64,
    ) -> Result<(), CudaError> {
        let table: Vec<u64> =
            recipes.iter().map(|recipe| recipe.map_or(0, |recipe| recipe.memory.address())).collect();
        if table != self.written {
            let bytes: Vec<u8> = table.iter().flat_map(|address| address.to_le_bytes()).collect();
            self.gpu.upload_now(self.table.address(), &bytes)?;
            self.written = table;
        }
        let any = |ask: fn(&Recipe) -> bool| recipes.iter().flatten().any(|recipe| ask(recipe));
        let (table, shared) = (self.table.address(), self.shared.address());
        let rows = recipes.len() as u32;
        let launch = |launch: &Launch, mut arguments: Vec<u64>| {
            let grid = [launch.blocks, rows, 1];
            let mut pointers: Vec<*mut c_void> =
                arguments.iter_mut().map(|argument| (&raw mut *argument).cast()).collect();
            // SAFETY: the kernels take these addresses; recipes and the pass's buffers live until the stream has
            // come past the launch.
            unsafe { launch.kernel.launch(&self.gpu, grid, launch.threads, 0, true, &mut pointers) }
        };
        if any(|recipe| recipe.adjusts) {
            launch(&self.adjust, vec![step, table, shared, logits])?;
        }
        if any(|recipe| recipe.filters) {
            launch(&self.weigh, vec![step, table, shared, logits, tokens])?;
        }
        launch(&self.list, vec![step, table, shared, logits, tokens])?;
        launch(&self.choose, vec![step, table, shared, logits, tokens])
    }
}

fn words<const COUNT: usize>(module: &Module, name: &str) -> Result<[u32; COUNT], CudaError> {
    let words = module.words(name)?;
    words.ok_or_else(|| CudaError::Model(format!("its kernels lack {name}; please report this")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_is_laid_out_as_the_kernels_read_it() {
        let params = SamplingParams { temperature: 0.5, top_p: 0.9, top_k: 40, ..SamplingParams::default() };
        let bytes = head(&params, &[1, 2, 3, 4], 5, 6);
        assert_eq!(bytes[..8], 2f64.to_le_bytes());
        assert_eq!(bytes[8..12], 0.9f32.to_le_bytes());
        assert_eq!(bytes[28..32], 40u32.to_le_bytes());
        let words: Vec<u64> = bytes[32..].as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        assert_eq!(words, [1, 2, 3, 4, 5, 6]);
        let source = include_str!("../kernels/sample.cu");
        assert!(source.contains(&format!("sizeof(Sampling) == {RECIPE_BYTES}")));
    }
}
