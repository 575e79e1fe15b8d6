//! What a pass is stage by stage, in kernels, bytes and operations; what that takes at the least on a device, and what it may
//! take.
//!
//! # Floors and estimates
//!
//! A **floor** is what a stage cannot be faster than: its bytes at the whole bandwidth, or its operations at the whole rate. An
//! **estimate** is a guess, never a measurement: every stage takes the longer of its two floors, each stretched by the part
//! of the rate that is assumed to be reached, and every kernel of the longest dependent chain adds a time of its own, of which
//! two are published, so that there are two estimates ([`crate::chips`]).
//!
//! # What a prompt moves in steps of decode
//!
//! A plan of decode counts each row as a sequence. Rows of a prompt are one: its state is read and written once for a step, and its
//! cache counts once, as all bytes do that several blocks of a kernel read ([`crate::plan`]).

use std::ops::Range;

use lily_model::weights::Weights;

use crate::chips::{ARITHMETIC_REACHED, Chip, LONGEST_STAGE, MEMORY_REACHED, SHORTEST_STAGE};
use crate::decode::{self, MAX_ROWS, Shape};
use crate::operations::{Tokens, operations};
use crate::plan::{Plan, Role};
use crate::stage::Stage;
use crate::target::Target;

/// A long prompt is reckoned from so many of its steps, each of which stands for those around it.
const MOST_PLANS: usize = 64;

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
    fn times(self, times: u64) -> Work {
        let Work { kernels, bytes, operations } = self;
        Work { kernels: times * kernels, bytes: times * bytes, operations: times * operations }
    }

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
        Tally::of(plan, rows, |stage| rows as u64 * operations(weights, stage, tokens), |_, bytes| bytes)
    }

    /// A pass of the program for prompts.
    pub fn pass(plan: &Plan, weights: &Weights, tokens: Tokens) -> Tally {
        Tally::of(plan, tokens.count, |stage| operations(weights, stage, tokens), |_, bytes| bytes)
    }

    /// A prompt of `count` tokens after `seen` others, through steps of decode; its last token goes through the head.
    pub fn steps(weights: &Weights, target: Target, seen: usize, count: usize) -> Tally {
        let mut all = Tally::default();
        let (full, rest) = (count / MAX_ROWS, count % MAX_ROWS);
        let plans = full.min(MOST_PLANS);
        for part in 0..plans {
            let steps = part * full / plans..(part + 1) * full / plans;
            let middle = (steps.start + steps.end - 1) / 2;
            let step = Tally::step_of_prompt(weights, target, seen + middle * MAX_ROWS, MAX_ROWS);
            all = all.plus(step.times(steps.len() as u64));
        }
        if rest > 0 {
            all = all.plus(Tally::step_of_prompt(weights, target, seen + full * MAX_ROWS, rest));
        }
        // Operations need no plan, so they are those of the prompt itself; the head is asked for by the last token alone, whose step
        // reads its matrix.
        let tokens = Tokens { seen, count, heads: 1 };
        for stage in Stage::ALL {
            all.stages[stage as usize].operations = operations(weights, stage, tokens);
        }
        let head = decode::record(weights, target, Shape { rows: 1, context: 1, sampled: false });
        all.stages[Stage::Head as usize].bytes = head.traffic(Some(Stage::Head), None).total();
        all
    }

    /// A step of `rows` tokens of one sequence after `seen` others.
    fn step_of_prompt(weights: &Weights, target: Target, seen: usize, rows: usize) -> Tally {
        let plan = decode::record(weights, target, Shape { rows, context: seen + rows, sampled: false });
        // Of the cache's new positions one remains, 20 KB of each of the others are lost: nothing beside the weights.
        let of_one = |role: Role, bytes: u64| match role {
            Role::State | Role::Kv => bytes / rows as u64,
            _ => bytes,
        };
        Tally::of(&plan, rows, |_| 0, of_one)
    }

    fn of(
        plan: &Plan,
        tokens: usize,
        operations: impl Fn(Stage) -> u64,
        bytes: impl Fn(Role, u64) -> u64,
    ) -> Tally {
        let work = |stage| Work {
            kernels: plan.kernels(stage) as u64,
            bytes: Role::ALL
                .map(|role| bytes(role, plan.traffic(Some(stage), Some(role)).total()))
                .iter()
                .sum(),
            operations: operations(stage),
        };
        let chain = plan.dependencies.longest_chain().len() as u64;
        Tally { stages: Stage::ALL.map(work), chain, tokens }
    }

    fn times(mut self, times: u64) -> Tally {
        self.stages = self.stages.map(|work| work.times(times));
        Tally { chain: times * self.chain, tokens: times as usize * self.tokens, ..self }
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
    use crate::layout::KV_ELEMENT_BYTES;
    use crate::prefill;

    fn full_model() -> Weights {
        Weights::outline(&Geometry::qwen3_6_35b_a3b())
    }

    fn step(weights: &Weights, rows: usize, context: usize) -> Tally {
        let shape = Shape { rows, context, sampled: false };
        Tally::step(&decode::record(weights, Target::APPLE_MAX, shape), weights, rows, context)
    }

    #[test]
    fn a_prompt_in_steps_of_decode_moves_its_experts_anew_and_its_state_once_a_step() {
        let weights = full_model();
        let prompt = Tally::steps(&weights, Target::APPLE_MAX, 0, 100);
        let sizes = [32, 32, 32, 4];
        let plans = sizes.map(|rows| {
            decode::record(&weights, Target::APPLE_MAX, Shape { rows, context: 100, sampled: false })
        });
        let kernels: usize = plans.iter().map(|plan| plan.dispatches.len()).sum();
        assert_eq!((prompt.tokens, prompt.all().kernels), (100, kernels as u64));
        let up: u64 =
            plans.iter().map(|plan| plan.traffic(Some(Stage::MoeUp), Some(Role::Weights)).total()).sum();
        let with_activations = prompt.stage(Stage::MoeUp).bytes;
        assert!(with_activations > up && (with_activations as f64) < 1.05 * up as f64);
        // The state of one sequence once in each of the four steps, whatever else the kernels move.
        let around = [Stage::DeltaCore, Stage::DeltaOut];
        let moved: u64 = around.map(|stage| prompt.stage(stage).bytes).iter().sum();
        let of_roles = |plan: &Plan, roles: [Role; 3]| -> u64 {
            let traffic = |stage, role| plan.traffic(Some(stage), Some(role)).total();
            around.iter().flat_map(|&stage| roles.map(|role| traffic(stage, role))).sum()
        };
        let others = [Role::Weights, Role::Step, Role::Activations];
        let others: u64 = plans.iter().map(|plan| of_roles(plan, others)).sum();
        assert_eq!(moved - others, 4 * Cost::of(&weights).state_bytes);
    }

    #[test]
    fn a_long_prompt_that_is_reckoned_from_some_of_its_steps_costs_what_all_of_them_do() {
        let weights = full_model();
        let (seen, count) = (0, 2 * MOST_PLANS * MAX_ROWS);
        let whole = Tally::steps(&weights, Target::APPLE_MAX, seen, count);
        let half = count / 2;
        // Each half is short enough for a plan of every step.
        let halves = Tally::steps(&weights, Target::APPLE_MAX, seen, half).plus(Tally::steps(
            &weights,
            Target::APPLE_MAX,
            seen + half,
            half,
        ));
        let (whole_work, halves_work) = (whole.all(), halves.all());
        let head = Cost::of(&weights).head_ops;
        assert_eq!(whole_work.operations + head, halves_work.operations);
        assert_eq!((whole.chain, whole_work.kernels), (halves.chain, halves_work.kernels));
        let apart = whole_work.bytes as f64 / halves_work.bytes as f64 - 1.0;
        assert!(apart.abs() < 0.005, "{apart}");
    }

    #[test]
    fn estimates_are_above_both_floors_on_every_chip() {
        let weights = full_model();
        for tally in [step(&weights, 1, 4096), Tally::steps(&weights, Target::APPLE_MAX, 0, 64)] {
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
        let plan = prefill::record(&weights, Shape { rows: count, context: count, sampled: false });
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
        let bytes = Cost::of(&full_model()).batch_bytes(1, 4096, KV_ELEMENT_BYTES) as f64;
        let seconds = bytes / m5_max.bytes_per_second / MEMORY_REACHED + 555.0 * SHORTEST_STAGE;
        let published = 186.6;
        assert!((1.0 / seconds / published - 1.0).abs() < 0.01, "{}", 1.0 / seconds);
    }
}
