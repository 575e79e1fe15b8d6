//! What a model takes of a card, known before anything is loaded.

use std::fmt;
use std::sync::Arc;

use lily_gpu::decode::Shape;
use lily_gpu::layout::{KvFormat, PAGE_TOKENS};
use lily_gpu::memory::Context;
use lily_gpu::packing;
use lily_gpu::plan::Plan;
use lily_model::weights::Weights;

use crate::driver::{Card, Gpu};
use crate::error::CudaError;
use crate::pages::Sizes;
use crate::{program, sources, weights};

/// Bytes that are left to the driver: kernels, graphs, tables of pages, staging.
const LEFT: u64 = 512 << 20;
const GB: f64 = 1e9;

/// Bytes of the card's memory, by what they are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Tokens of context.
    pub context: usize,
    /// The weights.
    pub weights: u64,
    /// What stages hand to each other.
    pub workspace: u64,
    /// One sequence of the whole context: recurrent state, keys and values.
    pub sequence: u64,
    /// The most that all sequences and snapshots may take together.
    pub state: u64,
    /// What it may take: what was free before, or the limit that was set where that is less.
    pub free: u64,
}

/// A model on a card, before anything is loaded.
#[derive(Debug)]
pub struct Planned {
    /// What it takes.
    pub memory: MemoryPlan,
    /// The plans of decode, and of what prompts need besides.
    pub plans: Vec<(Shape, Plan)>,
    /// The plans of prompts.
    pub prompt_plans: Vec<(Shape, Plan)>,
}

impl MemoryPlan {
    /// The plan for the model of `weights`, whose shapes alone are looked at, with keys and values as `kv`, on the card as it is now, of which it may
    /// take `most` bytes.
    ///
    /// # Errors
    /// Those of [`MemoryPlan::within`].
    pub fn of_model(
        gpu: &Arc<Gpu>,
        weights: &Weights,
        kv: KvFormat,
        context: Context,
        most: u64,
    ) -> Result<Planned, CudaError> {
        MemoryPlan::within(&gpu.card, weights, kv, context, gpu.free_memory()?.min(most))
    }

    /// The plan for the model of `weights` in `free` bytes of a card, with keys and values as `kv`. How many tokens of a prompt a pass takes depends
    /// on what is free, too.
    ///
    /// # Errors
    /// A model that the kernels are not written for, and those of [`MemoryPlan::new`].
    pub fn within(
        card: &Card,
        weights: &Weights,
        kv: KvFormat,
        context: Context,
        free: u64,
    ) -> Result<Planned, CudaError> {
        let geometry = &weights.geometry;
        sources::check(geometry)?;
        packing::check_formats(weights).map_err(CudaError::Model)?;
        let target = program::target(card, kv);
        let plans = program::plans(weights, target);
        let context = context.within(geometry.max_context);
        let room = MemoryPlan::prompt_room(&plans[0].1, free);
        let prompt_plans = |context| program::prompt_plans(weights, target, context, room);
        let sizes = Sizes::new(geometry, kv);
        let memory = MemoryPlan::new(card, &plans, &prompt_plans(0), sizes, context, free)?;
        let prompt_plans = prompt_plans(memory.context);
        Ok(Planned { memory, plans, prompt_plans })
    }

    /// The plan for `context` tokens, or for as many as there is room for where less will do, in `free` bytes. The prompts'
    /// plans are those of an empty context.
    ///
    /// # Errors
    /// [`CudaError::CardTooSmall`] where one sequence of that length does not fit beside the weights.
    pub fn new(
        card: &Card,
        plans: &[(Shape, Plan)],
        prompt_plans: &[(Shape, Plan)],
        sizes: Sizes,
        context: Context,
        free: u64,
    ) -> Result<MemoryPlan, CudaError> {
        let weights = plans.first().map_or(0, |(_, plan)| weights::bytes(plan));
        let workspace = program::workspace_bytes(plans.iter().chain(prompt_plans).map(|(_, plan)| plan));
        let expanded_page = if prompt_plans.is_empty() { 0 } else { sizes.expanded_page as u64 };
        let expanded = |tokens| sizes.kv.pages(tokens) as u64 * expanded_page;
        let room = free.saturating_sub(weights + workspace + LEFT);
        let (context, fits) = match context {
            Context::Exactly(tokens) => (tokens, sizes.sequence(tokens) as u64 + expanded(tokens) <= room),
            Context::AtMost(tokens) => {
                let page = sizes.kv.page_bytes() as u64 + expanded_page;
                let pages = room.saturating_sub(sizes.sequence(0) as u64) / page;
                let room = usize::try_from(pages).unwrap_or(usize::MAX).saturating_mul(PAGE_TOKENS);
                (tokens.min(room.max(1)), room > 0)
            }
        };
        let (sequence, workspace) = (sizes.sequence(context) as u64, workspace + expanded(context));
        let beside = weights + workspace + LEFT;
        let state = free.saturating_sub(beside);
        let plan = MemoryPlan { context, weights, workspace, sequence, state, free };
        if !fits {
            let (needed, parts) = (gb(beside + sequence), plan.parts());
            return Err(CudaError::CardTooSmall { card: card.name.clone(), free: gb(free), needed, parts });
        }
        Ok(plan)
    }

    /// Bytes that the passes of prompts may hand to each other on a card with `free` bytes free, beside the weights of
    /// `plan`: a part of what sequences and snapshots would have otherwise.
    pub fn prompt_room(plan: &Plan, free: u64) -> u64 {
        const PART: u64 = 8;
        free.saturating_sub(weights::bytes(plan) + LEFT) / PART
    }

    fn parts(&self) -> String {
        format!(
            "{} of weights, {} for {} tokens of context, {} of workspace, {} for the driver",
            gb(self.weights),
            gb(self.sequence),
            self.context,
            gb(self.workspace),
            gb(LEFT)
        )
    }
}

fn gb(bytes: u64) -> String {
    format!("{:.2} GB", bytes as f64 / GB)
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}; {} for all sequences and snapshots together; the card has {} to give",
            self.parts(),
            gb(self.state),
            gb(self.free)
        )
    }
}

#[cfg(test)]
mod tests {
    use lily_model::geometry::Geometry;

    use super::*;

    /// The full model where `memory` bytes may be taken, with as much context as fits.
    fn planned(context: Context, kv: KvFormat, memory: u64) -> Result<Planned, CudaError> {
        let card = Card {
            name: "a card".to_owned(),
            capability: (9, 0),
            multiprocessors: 132,
            shared_bytes: 227 << 10,
            memory: 141_000_000_000,
            driver: 13_000,
        };
        MemoryPlan::within(&card, &Weights::outline(&Geometry::qwen3_6_35b_a3b()), kv, context, memory)
    }

    #[test]
    fn the_whole_context_fits_32_gb_or_24_in_8_bits_and_what_fits_less_is_exact() {
        const MEMORY: [(KvFormat, u64); 2] =
            [(KvFormat::F16, 24_000_000_000), (KvFormat::Q8, 22_000_000_000)];
        let whole = |kv, memory| planned(Context::AtMost(usize::MAX), kv, memory).unwrap().memory.context;
        assert_eq!(whole(KvFormat::F16, 32_000_000_000), 262_144);
        assert_eq!(whole(KvFormat::Q8, 24_000_000_000), 262_144);
        for (kv, most) in MEMORY {
            let part = planned(Context::AtMost(usize::MAX), kv, most).unwrap();
            let MemoryPlan { context, weights, workspace, sequence, .. } = part.memory;
            assert!(context < 262_144 && weights + workspace + sequence + LEFT <= most, "{}", part.memory);
            // What the kernels are given is what was counted.
            let plans = part.plans.iter().chain(&part.prompt_plans).map(|(_, plan)| plan);
            assert_eq!(program::workspace_bytes(plans), workspace);
            assert_eq!(planned(Context::Exactly(context), kv, most).unwrap().memory.context, context);
            let refused = planned(Context::Exactly(context + 1), kv, most).unwrap_err().to_string();
            let (gb, tenths) = (gb(most), most as f64 / GB);
            let says = format!("a card has {gb} to give and the model needs {tenths:.1}");
            assert!(refused.starts_with(&says), "{refused}");
        }
    }

    #[test]
    fn less_memory_makes_passes_over_prompts_shorter() {
        let rows = |kv, memory| {
            let planned = planned(Context::Exactly(1024), kv, memory).unwrap();
            planned.prompt_plans.iter().map(|(shape, _)| shape.rows).max().unwrap_or(0)
        };
        const MEMORY: [u64; 3] = [20_300_000_000, 22_000_000_000, 141_000_000_000];
        let [little, some, plenty] = MEMORY.map(|memory| rows(KvFormat::F16, memory));
        assert!(little < some && some < plenty, "{little}, {some}, {plenty}");
        assert_eq!(plenty, lily_gpu::prefill::cuda::MOST_ROWS);
        // Pages that are unpacked are not counted there.
        assert_eq!(MEMORY.map(|memory| rows(KvFormat::Q8, memory)), [little, some, plenty]);
    }
}
