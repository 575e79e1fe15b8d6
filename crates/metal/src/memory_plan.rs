//! What a model takes of a Mac's memory, known before anything is loaded.

use std::fmt;

use lily_gpu::decode::Shape;
use lily_gpu::layout::{KvFormat, PAGE_TOKENS};
use lily_gpu::memory::Context;
use lily_gpu::packing;
use lily_gpu::plan::Plan;
use lily_model::weights::Weights;

use crate::backend::SLOTS;
use crate::device::{Device, DeviceInfo};
use crate::error::MetalError;
use crate::slot::Slot;
use crate::store::Sizes;
use crate::{program, sources, weights};

/// Bytes that are left to others who use the GPU: the window server above all.
const LEFT: u64 = 512 << 20;
/// Bytes of the machine that the sentence about the limit leaves to everything else.
const SYSTEM: u64 = 4 << 30;
const GB: f64 = 1e9;

/// Bytes of the memory that the GPU may keep, by what they are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Tokens of context.
    pub context: usize,
    /// The weights, mapped or copied.
    pub weights: u64,
    /// What stages hand to each other, and what a step reads and writes.
    pub workspace: u64,
    /// The most tokens of a prompt that a pass takes.
    pub prompt_rows: usize,
    /// One sequence of the whole context: recurrent state, keys and values.
    pub sequence: u64,
    /// The most that all sequences and snapshots may take together.
    pub state: u64,
    /// What the system lets the process keep for the GPU (`recommendedMaxWorkingSetSize`) beside what it keeps already.
    pub free: u64,
}

/// What a model's memory and passes are.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The memory.
    pub memory: MemoryPlan,
    /// The plans of decode.
    pub plans: Vec<(Shape, Plan)>,
    /// The plans of prompts.
    pub prompt_plans: Vec<(Shape, Plan)>,
}

impl MemoryPlan {
    /// The plan for the model of `weights`, whose shapes alone are looked at, on the device as it is now, and the plans
    /// of its passes. Keys and values are stored as `kv` says; contexts of up to `short` tokens have the short layout of
    /// attention.
    ///
    /// # Errors
    /// A model that the kernels are not written for, and those of [`MemoryPlan::new`].
    pub fn of_model<D: Device>(
        device: &D,
        weights: &Weights,
        kv: KvFormat,
        context: Context,
        short: usize,
        state_limit: u64,
    ) -> Result<Planned, MetalError> {
        let geometry = &weights.geometry;
        sources::check(geometry)?;
        packing::check_formats(weights).map_err(MetalError::Model)?;
        let plans = program::plans(weights, device.info(), short, kv);
        let context = context.within(geometry.max_context);
        let most = match context {
            Context::Exactly(tokens) | Context::AtMost(tokens) => tokens,
        };
        let (_, widest) = plans.last().expect("there is a plan for every bucket");
        let (info, sizes, allocated) = (device.info(), Sizes::new(geometry, kv), device.allocated());
        let weight_bytes = weights::bytes(widest);
        let room = MemoryPlan::prompt_room(info, allocated, weight_bytes);
        let prompt_plans = program::prompt_plans(weights, info, room, kv);
        let prompt_rows = prompt_plans.iter().map(|(shape, _)| shape.rows).max().unwrap_or(0);
        let workspace = program::workspace_bytes(plans.iter().chain(&prompt_plans).map(|(_, plan)| plan))
            + (SLOTS * Slot::<D>::bytes(most, prompt_rows)) as u64;
        let parts = [weight_bytes, workspace];
        let memory = MemoryPlan::new(info, allocated, parts, prompt_rows, sizes, context, state_limit)?;
        Ok(Planned { memory, plans, prompt_plans })
    }

    /// The plan for `context` tokens, or for as many as there is room for where less will do, on a device that holds
    /// `allocated` bytes already. Sequences and snapshots may take `state_limit`; a pass takes `prompt_rows` tokens of a prompt.
    ///
    /// # Errors
    /// [`MetalError::TooSmall`] where one sequence of that length does not fit beside the weights.
    pub fn new(
        info: &DeviceInfo,
        allocated: u64,
        [weights, workspace]: [u64; 2],
        prompt_rows: usize,
        sizes: Sizes,
        context: Context,
        state_limit: u64,
    ) -> Result<MemoryPlan, MetalError> {
        let free = info.working_set.saturating_sub(allocated);
        let beside = weights + workspace + LEFT;
        let state = free.saturating_sub(beside).min(state_limit);
        let pages = state.saturating_sub(sizes.sequence(0) as u64) / sizes.page() as u64;
        let room = usize::try_from(pages).unwrap_or(usize::MAX).saturating_mul(PAGE_TOKENS);
        let (context, fits) = match context {
            Context::Exactly(tokens) => (tokens, sizes.sequence(tokens) as u64 <= state),
            Context::AtMost(tokens) => (tokens.min(room.max(1)), room > 0),
        };
        let sequence = sizes.sequence(context) as u64;
        let plan = MemoryPlan { context, weights, workspace, prompt_rows, sequence, state, free };
        if fits {
            return Ok(plan);
        }
        let needed = allocated + beside + plan.sequence;
        Err(MetalError::TooSmall {
            device: info.name.clone(),
            free: gb(free),
            needed: gb(needed - allocated),
            parts: plan.parts(),
            advice: advice(info.memory, needed, room),
        })
    }

    /// Bytes that the passes of prompts may hand to each other beside `weights` bytes of weights, on a device that holds `allocated`
    /// bytes already: a part of what sequences and snapshots would have otherwise.
    pub fn prompt_room(info: &DeviceInfo, allocated: u64, weights: u64) -> u64 {
        const PART: u64 = 8;
        info.working_set.saturating_sub(allocated + weights + LEFT) / PART
    }

    fn parts(&self) -> String {
        format!(
            "{} of weights, {} for {} tokens of context, {} of workspace, {} for others",
            gb(self.weights),
            gb(self.sequence),
            self.context,
            gb(self.workspace),
            gb(LEFT)
        )
    }
}

/// What to do where `needed` bytes are more than macOS lets the GPU keep of `memory`, and there is room for `room` tokens.
fn advice(memory: u64, needed: u64, room: usize) -> String {
    let megabytes = needed.div_ceil(1 << 20);
    let shorter = if room > 0 {
        format!("--ctx-len {room} is the most that fits")
    } else {
        "no context fits; use --backend cpu".to_owned()
    };
    if needed + SYSTEM <= memory {
        format!(
            "let the GPU keep more with `sudo sysctl iogpu.wired_limit_mb={megabytes}` (until the next start of the \
             machine); as it is, {shorter}"
        )
    } else {
        shorter
    }
}

fn gb(bytes: u64) -> String {
    format!("{:.2} GB", bytes as f64 / GB)
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}; {} for all sequences and snapshots together; macOS lets the GPU keep {}; prompts are read {} tokens at a time",
            self.parts(),
            gb(self.state),
            gb(self.free),
            self.prompt_rows
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lily_model::geometry::Geometry;

    const GIB: u64 = 1 << 30;
    const F16: KvFormat = KvFormat::F16;

    fn plan(memory: u64, working_set: u64, context: Context, kv: KvFormat) -> Result<MemoryPlan, MetalError> {
        let info = DeviceInfo {
            name: "Apple M4 Max".into(),
            family: 9,
            has_metal4: true,
            cores: 40,
            memory,
            working_set,
            max_buffer: working_set,
            has_unified_memory: true,
            threadgroup_memory: 32 << 10,
            simd_width: 32,
            page_bytes: 16 << 10,
        };
        let sizes = Sizes::new(&Geometry::qwen3_6_35b_a3b(), kv);
        MemoryPlan::new(&info, 0, [19_510_000_000, 200 << 20], 2048, sizes, context, u64::MAX)
    }

    #[test]
    fn the_full_model_with_32k_fits_the_working_set_of_36_gb() {
        let plan = plan(36 * GIB, 27 * GIB, Context::AtMost(32 << 10), F16).unwrap();
        assert_eq!(plan.context, 32 << 10);
        assert!(plan.sequence < 800_000_000 && plan.state > 8_000_000_000, "{plan}");
    }

    #[test]
    fn where_it_does_not_fit_one_sentence_says_what_to_do() {
        // 24 GB, of which macOS lets the GPU keep 16.
        let refused =
            |memory, working_set, context| plan(memory, working_set, context, F16).unwrap_err().to_string();
        let sentence = refused(24 * GIB, 16 * GIB, Context::Exactly(4096));
        assert!(sentence.contains("sudo sysctl iogpu.wired_limit_mb=19"), "{sentence}");
        assert!(
            sentence.contains("19.51 GB of weights") && sentence.contains("no context fits"),
            "{sentence}"
        );
        // 16 GB: no setting helps.
        let sentence = refused(16 * GIB, 11 * GIB, Context::AtMost(4096));
        assert!(!sentence.contains("sysctl") && sentence.contains("--backend cpu"), "{sentence}");
    }

    /// In 23 GiB of working set a context of 262,144 tokens fits in 8 bits alone.
    #[test]
    fn a_context_that_does_not_fit_is_refused_with_the_one_that_does() {
        let all = Context::Exactly(262_144);
        let plan = |context, kv| plan(28 * GIB, 23 * GIB, context, kv);
        let sentence = plan(all, F16).unwrap_err().to_string();
        let (_, rest) = sentence.split_once("--ctx-len ").unwrap();
        let most: usize = rest.split(' ').next().unwrap().parse().unwrap();
        assert_eq!(plan(Context::Exactly(most), F16).unwrap().context, most);
        assert!(plan(Context::Exactly(most + 1), F16).is_err(), "{sentence}");
        assert_eq!(plan(Context::AtMost(262_144), F16).unwrap().context, most);
        let (halves, bytes) = (plan(Context::Exactly(most), F16).unwrap(), plan(all, KvFormat::Q8).unwrap());
        assert!(bytes.sequence < halves.sequence * 262_144 / most as u64 * 52 / 100, "{bytes}");
    }
}
