//! What a pass is stage by stage, in kernels, bytes and operations; what that takes at the least on a device, and what it may
//! take.
//!
//! # Floors and estimates
//!
//! A **floor** is what a stage cannot be faster than: its bytes at the whole bandwidth, or its operations at the whole rate. An
//! **estimate** is a guess, never a measurement: every stage takes the longer of its two floors, each stretched by the part
//! of the rate that is assumed to be reached, and every kernel of the longest dependent chain adds a time of its own, of which
//! two are published, so that there are two estimates ([`crate::chips`]).

use std::ops::Range;

use lily_model::weights::Weights;

use crate::chips::{ARITHMETIC_REACHED, Chip, LONGEST_STAGE, MEMORY_REACHED, SHORTEST_STAGE};
use crate::decode::Shape;
use crate::operations::{Tokens, operations};
use crate::plan::Plan;
use crate::prefill::metal;
use crate::stage::Stage;
use crate::target::Target;

/// What a stage is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Launches of its kernels.
    pub kernels: u64,
    /// Bytes that move between the device and its memory, in both directions.
    pub bytes: u64,
    /// Operations.
    pub operations: u64,
}

impl Work {
    fn plus(self, other: Work) -> Work {
        Work {
            kernels: self.kernels + other.kernels,
            bytes: self.bytes + other.bytes,
            operations: self.operations + other.operations,
        }
    }
}

/// Seconds at the least.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Floors {
    /// For the bytes.
    pub memory: f64,
    /// For the operations.
    pub arithmetic: f64,
}

/// A pass, or several one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    stages: [Work; Stage::ALL.len()],
    /// Kernels that wait for each other.
    pub chain: u64,
    /// Tokens that are computed.
    pub tokens: usize,
}

impl Tally {
    /// A step of decode of `rows` sequences, each at `context` positions once the token is in its cache.
    pub fn step(plan: &Plan, weights: &Weights, rows: usize, context: usize) -> Tally {
        let tokens = Tokens { seen: context - 1, count: 1, heads: 1 };
        Tally::of(plan, rows, |stage| rows as u64 * operations(weights, stage, tokens))
    }

    /// A pass of the program for prompts.
    pub fn pass(plan: &Plan, weights: &Weights, tokens: Tokens) -> Tally {
        Tally::of(plan, tokens.count, |stage| operations(weights, stage, tokens))
    }

    /// A prompt of `count` tokens after `seen` others through Metal's program for prompts, `most` tokens a pass; its last token goes
    /// through the head.
    pub fn prompt(weights: &Weights, target: Target, seen: usize, count: usize, most: usize) -> Tally {
        let mut all = Tally::default();
        let mut done = 0;
        while done < count {
            let rows = most.min(count - done);
            let (seen, is_last) = (seen + done, done + rows == count);
            let plan = metal::record(weights, target, Shape { rows, context: seen + rows, sampled: false });
            let mut pass =
                Tally::pass(&plan, weights, Tokens { seen, count: rows, heads: usize::from(is_last) });
            if !is_last {
                // Its kernels find no row.
                for stage in [Stage::Head, Stage::Sample] {
                    pass.stages[stage as usize].bytes = 0;
                }
            }
            all = all.plus(pass);
            done += rows;
        }
        all
    }

    fn of(plan: &Plan, tokens: usize, operations: impl Fn(Stage) -> u64) -> Tally {
        let work = |stage| Work {
            kernels: plan.kernels(stage) as u64,
            bytes: plan.traffic(Some(stage), None).total(),
            operations: operations(stage),
        };
        let chain = plan.dependencies.longest_chain().len() as u64;
        Tally { stages: Stage::ALL.map(work), chain, tokens }
    }

    fn plus(mut self, other: Tally) -> Tally {
        for (own, more) in self.stages.iter_mut().zip(other.stages) {
            *own = own.plus(more);
        }
        Tally { chain: self.chain + other.chain, tokens: self.tokens + other.tokens, ..self }
    }

    /// A stage.
    pub fn stage(&self, stage: Stage) -> Work {
        self.stages[stage as usize]
    }

    /// All stages together.
    pub fn all(&self) -> Work {
        self.stages.into_iter().fold(Work::default(), Work::plus)
    }

    /// What a stage takes at the least.
    pub fn floors(&self, stage: Stage, chip: &Chip) -> Floors {
        let Work { bytes, operations, .. } = self.stage(stage);
        Floors {
            memory: bytes as f64 / chip.bytes_per_second,
            arithmetic: operations as f64 / chip.operations_per_second,
        }
    }

    /// The floors of all stages, each added up.
    pub fn all_floors(&self, chip: &Chip) -> Floors {
        Stage::ALL.into_iter().fold(Floors::default(), |all, stage| {
            let Floors { memory, arithmetic } = self.floors(stage, chip);
            Floors { memory: all.memory + memory, arithmetic: all.arithmetic + arithmetic }
        })
    }

    /// Seconds that it takes at the least: every stage the longer of its two floors.
    pub fn floor(&self, chip: &Chip) -> f64 {
        self.stretched(chip, 1.0, 1.0)
    }

    /// Seconds that it may take on one of Apple's chips, from the shortest to the longest that is assumed.
    pub fn estimate(&self, chip: &Chip) -> Range<f64> {
        let stages = self.stretched(chip, MEMORY_REACHED, ARITHMETIC_REACHED);
        let chain = self.chain as f64;
        stages + chain * SHORTEST_STAGE..stages + chain * LONGEST_STAGE
    }

    /// The sum of each stage's longer floor, where so much of both rates is reached.
    fn stretched(&self, chip: &Chip, of_memory: f64, of_arithmetic: f64) -> f64 {
        let stages = Stage::ALL.into_iter().map(|stage| self.floors(stage, chip));
        stages.map(|floors| (floors.memory / of_memory).max(floors.arithmetic / of_arithmetic)).sum()
    }
}

#[cfg(test)]
mod tests {
    use lily_model::cost::Cost;
    use lily_model::geometry::Geometry;

    use super::*;
    use crate::chips::{APPLE, H200};
    use crate::decode;
    use crate::layout::{KvFormat, KvLayout};
    use crate::prefill::cuda;

    /// Bytes of a position's keys and values, in halves.
    fn kv_bytes(weights: &Weights) -> u64 {
        KvLayout::new(&weights.geometry, KvFormat::F16).token_bytes() as u64
    }

    fn full_model() -> Weights {
        Weights::outline(&Geometry::qwen3_6_35b_a3b())
    }

    fn step(weights: &Weights, rows: usize, context: usize) -> Tally {
        let shape = Shape { rows, context, sampled: false };
        Tally::step(&decode::record(weights, Target::APPLE_MAX, shape), weights, rows, context)
    }

    #[test]
    fn a_prompt_in_several_passes_does_the_work_of_one_and_moves_its_weights_anew() {
        let weights = full_model();
        let prompt = |most| Tally::prompt(&weights, Target::APPLE_MAX, 0, 4096, most);
        let (one, two) = (prompt(4096), prompt(2048));
        assert_eq!(one.all().operations, two.all().operations);
        assert_eq!((2 * one.chain, 2 * one.all().kernels), (two.chain, two.all().kernels));
        let moved = |tally: &Tally, stage| tally.stage(stage).bytes as f64;
        // The head once, but for the tokens of the prompt block; the projections' weights twice, beside activations that are the same.
        let heads = moved(&two, Stage::Head) / moved(&one, Stage::Head);
        assert!((heads - 1.0).abs() < 0.001, "{heads}");
        assert!(moved(&two, Stage::MoeUp) > moved(&one, Stage::MoeUp));
        let all_weights = Cost::of(&weights).batch_bytes(4096, 1, kv_bytes(&weights));
        assert!(two.all().bytes - one.all().bytes < all_weights);
    }

    #[test]
    fn estimates_are_above_both_floors_on_every_chip() {
        let weights = full_model();
        for tally in [step(&weights, 1, 4096), Tally::prompt(&weights, Target::APPLE_MAX, 0, 64, 64)] {
            for chip in &APPLE {
                let (floors, estimate) = (tally.all_floors(chip), tally.estimate(chip));
                assert!(estimate.start > floors.memory.max(floors.arithmetic), "{}", chip.name);
                assert!(estimate.end > estimate.start);
            }
        }
    }

    #[test]
    fn a_token_is_bound_by_memory_and_a_long_pass_on_an_h200_by_arithmetic_where_weights_are() {
        let weights = full_model();
        for chip in &APPLE {
            let Floors { memory, arithmetic } = step(&weights, 1, 256).all_floors(chip);
            assert!(memory > arithmetic, "{}", chip.name);
        }
        let count = 4096;
        let plan =
            cuda::record(&weights, Target::HOPPER, Shape { rows: count, context: count, sampled: false });
        let pass = Tally::pass(&plan, &weights, Tokens { seen: 0, count, heads: 0 });
        let Floors { memory, arithmetic } = pass.floors(Stage::DeltaIn, &H200);
        assert!(arithmetic > memory, "{arithmetic} and {memory}");
        assert_eq!(pass.stage(Stage::Head), Work::default());
    }

    /// `docs/performance.md`: with the reference engine's 555 dependent stages and the bytes of a token, the assumptions give its
    /// published decode on an M5 Max, 186.6 tokens/s at 4K.
    #[test]
    fn the_assumptions_give_the_reference_engines_published_decode() {
        let m5_max = APPLE[4];
        let weights = full_model();
        let bytes = Cost::of(&weights).batch_bytes(1, 4096, kv_bytes(&weights)) as f64;
        let seconds = bytes / m5_max.bytes_per_second / MEMORY_REACHED + 555.0 * SHORTEST_STAGE;
        let published = 186.6;
        assert!((1.0 / seconds / published - 1.0).abs() < 0.01, "{}", 1.0 / seconds);
    }
}
