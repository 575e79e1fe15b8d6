//! What one step reads and writes of the memory that the host looks at: two of these alternate.

use lily_gpu::decode::MAX_ROWS;
use lily_gpu::layout::PAGE_TOKENS;
use lily_gpu::prompt::PromptLayout;
use lily_gpu::step::StepLayout;

use crate::device::{Buffer, Device, Transfer};
use crate::error::DeviceError;

/// Where parts of a slot begin is a multiple of it.
const ALIGNMENT: usize = 256;
/// Where the sampled tokens are, a u32 each.
const TOKENS_AT: usize = StepLayout::BYTES.next_multiple_of(ALIGNMENT);
/// Where the numbers of the head rows' recipes are, a u32 each.
const RECIPES_AT: usize = TOKENS_AT + (MAX_ROWS * size_of::<u32>()).next_multiple_of(ALIGNMENT);
/// Where the table of pages is, a u32 each.
const TABLE_AT: usize = RECIPES_AT + (MAX_ROWS * size_of::<u32>()).next_multiple_of(ALIGNMENT);

/// The step block, the sampled tokens, the numbers of recipes and pages, a prompt block, and logits where they are wanted.
#[derive(Debug)]
pub struct Slot<D: Device> {
    shared: D::Buffer,
    /// Where the prompt block is.
    prompt_at: usize,
    logits: Option<D::Buffer>,
}

impl<D: Device> Slot<D> {
    /// A slot for sequences of at most `context` tokens, and passes over `prompt_rows` tokens of a prompt.
    pub fn new(device: &D, context: usize, prompt_rows: usize) -> Result<Slot<D>, DeviceError> {
        let shared = device.allocate("step", Self::bytes(context, prompt_rows))?;
        Ok(Slot { shared, prompt_at: prompt_at(context), logits: None })
    }

    /// Bytes of a slot without logits.
    pub fn bytes(context: usize, prompt_rows: usize) -> usize {
        prompt_at(context) + PromptLayout::bytes(prompt_rows)
    }

    /// Where the plan's buffer `name` lies.
    pub fn place(&self, name: &str) -> Option<(&D::Buffer, usize)> {
        let offset = match name {
            "step" => 0,
            "tokens" => TOKENS_AT,
            "row_recipes" => RECIPES_AT,
            "page_table" => TABLE_AT,
            "prompt" => self.prompt_at,
            _ => return None,
        };
        Some((&self.shared, offset))
    }

    /// Writes a step down: its block, the numbers of the pages of its sequences, table after table, and those of the
    /// recipes of its head rows.
    pub fn write(&self, block: &[u8], tables: &[u32], recipes: &[u32]) {
        self.shared.write(0, block);
        for (at, numbers) in [(TABLE_AT, tables), (RECIPES_AT, recipes)] {
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            self.shared.write(at, &bytes);
        }
    }

    /// Writes a prompt block down.
    pub fn write_prompt(&self, block: &[u8]) {
        self.shared.write(self.prompt_at, block);
    }

    /// Makes room for `bytes` of logits.
    pub fn make_room(&mut self, device: &D, bytes: usize) -> Result<(), DeviceError> {
        if self.logits.as_ref().map_or(0, Buffer::bytes) < bytes {
            self.logits = Some(device.allocate("logits for the host", bytes)?);
        }
        Ok(())
    }

    /// What copies `bytes` of the logits at `from` here.
    pub fn keep_logits(&self, from: &(D::Buffer, usize), bytes: usize) -> Option<Transfer<D::Buffer>> {
        let (from, from_offset) = from.clone();
        let to = self.logits.clone()?;
        Some(Transfer::Copy { from, from_offset, to, to_offset: 0, bytes })
    }

    /// The first `count` sampled tokens.
    pub fn tokens(&self, count: usize) -> Vec<u32> {
        let bytes = read(&self.shared, TOKENS_AT, count * size_of::<u32>());
        bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
    }

    /// The first `count` numbers of the logits.
    pub fn logits(&self, count: usize) -> Vec<f32> {
        let Some(logits) = &self.logits else { return Vec::new() };
        let bytes = read(logits, 0, count * size_of::<f32>());
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }
}

/// Where the prompt block is, behind the table of pages.
fn prompt_at(context: usize) -> usize {
    let table = MAX_ROWS * context.div_ceil(PAGE_TOKENS).max(1) * size_of::<u32>();
    (TABLE_AT + table).next_multiple_of(ALIGNMENT)
}

fn read<B: Buffer>(buffer: &B, offset: usize, bytes: usize) -> Vec<u8> {
    let mut copy = vec![0; bytes];
    if bytes > 0 {
        buffer.read(offset, &mut copy);
    }
    copy
}
