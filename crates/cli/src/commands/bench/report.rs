//! The figures, as `--json` prints them: sizes in bytes, times in seconds, speeds in tokens per second.

use lily_engine::backend::{Limits, StageTime};
use lily_model::cost::Cost;
use serde::Serialize;

use crate::machine::Resident;

/// Everything that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of the program.
    pub lily: &'static str,
    /// When, local time.
    pub date: String,
    /// The checkpoint's name.
    pub model: String,
    /// The backend's description of itself: device, instructions, threads.
    pub backend: String,
    /// Where.
    pub machine: Machine,
    /// How it began.
    pub start: Start,
    /// What was resident.
    pub memory: Option<Memory>,
    /// What the machine can do at the most; none where the backend cannot tell or was not asked.
    pub limits: Option<Ceiling>,
    /// One entry a prompt length.
    pub prefill: Vec<Prefill>,
    /// One entry a context depth.
    pub decode: Vec<Decode>,
}

impl Report {
    /// Works out how near each speed comes to its floor, with `kv_bytes` for each position of the KV cache.
    pub fn compare(&mut self, cost: &Cost, kv_bytes: u64) {
        let limits = self.limits;
        for prefill in &mut self.prefill {
            prefill.matrix_ops = cost.prefill_ops(prefill.tokens);
            prefill.floor = limits.and_then(|limits| {
                let seconds = prefill.matrix_ops as f64 / limits.matrix_ops_per_second?;
                Some(Floor::new(prefill.tokens, seconds, &prefill.timing))
            });
        }
        for decode in &mut self.decode {
            let middle = decode.depth + decode.tokens / 2;
            decode.bytes_per_token = cost.decode_bytes(middle, kv_bytes);
            decode.floor = limits.map(|limits| {
                let seconds =
                    (decode.tokens as u64 * decode.bytes_per_token) as f64 / limits.read_bytes_per_second;
                Floor::new(decode.tokens, seconds, &decode.timing)
            });
        }
    }
}

/// The machine.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Processor.
    pub cpu: String,
    /// Memory that the process could have.
    pub memory_bytes: Option<u64>,
}

/// How it began.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Start {
    /// From opening the checkpoint until the backend was ready.
    pub load_seconds: f64,
    /// From the start of the program to the first token.
    pub first_token_seconds: f64,
    /// Length of the prompt before that token.
    pub prompt_tokens: usize,
}

/// What was resident, before the limits were measured.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Memory {
    /// The peak of everything, pages of mapped files included.
    pub peak_resident_bytes: u64,
    /// The process's own: state, scratch buffers, the program's data. The most there was after a measurement.
    pub resident_anonymous_bytes: Option<u64>,
    /// Pages of mapped files, the weights above all. The most there was after a measurement.
    pub resident_mapped_bytes: Option<u64>,
    /// Size of the weights in the files: all of it must be resident for full speed.
    pub weight_bytes: u64,
}

impl Memory {
    /// From what the system said.
    pub fn new(resident: Option<Resident>, weight_bytes: u64) -> Option<Memory> {
        resident.map(|resident| Memory {
            peak_resident_bytes: resident.peak,
            resident_anonymous_bytes: resident.anonymous,
            resident_mapped_bytes: resident.mapped,
            weight_bytes,
        })
    }
}

/// See [`Limits`].
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Ceiling {
    /// Of a plain read.
    pub read_bytes_per_second: f64,
    /// Of the instruction that multiplies weights and activations, on registers.
    pub matrix_ops_per_second: Option<f64>,
}

impl From<Limits> for Ceiling {
    fn from(limits: Limits) -> Ceiling {
        let Limits { read_bytes_per_second, matrix_ops_per_second } = limits;
        Ceiling { read_bytes_per_second, matrix_ops_per_second }
    }
}

/// All runs of one measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Timing {
    /// Each run, in the order of measuring.
    seconds: Vec<f64>,
    #[serde(skip)]
    sorted: Vec<f64>,
}

impl Timing {
    /// Of at least one run.
    pub fn new(seconds: Vec<f64>) -> Timing {
        assert!(!seconds.is_empty(), "something was measured");
        let mut sorted = seconds.clone();
        sorted.sort_by(f64::total_cmp);
        Timing { seconds, sorted }
    }

    /// The middle run; the mean of the middle two where their number is even.
    pub fn median_seconds(&self) -> f64 {
        let runs = self.sorted.len();
        (self.sorted[(runs - 1) / 2] + self.sorted[runs / 2]) / 2.0
    }

    fn speed(&self, tokens: usize) -> Speed {
        let tokens = tokens as f64;
        Speed {
            median: tokens / self.median_seconds(),
            lowest: tokens / self.sorted[self.sorted.len() - 1],
            highest: tokens / self.sorted[0],
        }
    }
}

/// Tokens per second.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Speed {
    /// Of the median run.
    pub median: f64,
    /// Of the slowest run.
    pub lowest: f64,
    /// Of the fastest run.
    pub highest: f64,
}

/// The least time that the machine's limits leave, and how near the median run came.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Floor {
    /// Tokens per second at the limit.
    pub tokens_per_second: f64,
    /// The median speed as a part of it.
    pub fraction: f64,
}

impl Floor {
    fn new(tokens: usize, seconds: f64, timing: &Timing) -> Floor {
        Floor { tokens_per_second: tokens as f64 / seconds, fraction: seconds / timing.median_seconds() }
    }
}

/// Prefill of one length.
#[derive(Clone, Debug, Serialize)]
pub struct Prefill {
    /// The prompt's length.
    pub tokens: usize,
    /// The runs.
    #[serde(flatten)]
    pub timing: Timing,
    /// Their speed.
    pub tokens_per_second: Speed,
    /// From an empty sequence to the first token, median.
    pub time_to_first_token_seconds: f64,
    /// Operations of all matrix products; attention's own and the recurrence are not among them.
    pub matrix_ops: u64,
    /// What these take at the machine's peak.
    pub floor: Option<Floor>,
}

impl Prefill {
    /// Of `tokens`.
    pub fn new(tokens: usize, timing: Timing) -> Prefill {
        Prefill {
            tokens,
            tokens_per_second: timing.speed(tokens),
            time_to_first_token_seconds: timing.median_seconds(),
            timing,
            matrix_ops: 0,
            floor: None,
        }
    }
}

/// Decode at one depth.
#[derive(Clone, Debug, Serialize)]
pub struct Decode {
    /// Tokens that stand before the first one decoded.
    pub depth: usize,
    /// Tokens decoded in a run.
    pub tokens: usize,
    /// The runs.
    #[serde(flatten)]
    pub timing: Timing,
    /// Their speed.
    pub tokens_per_second: Speed,
    /// Weights, recurrent state and KV cache that a token in the middle of the run must move.
    pub bytes_per_token: u64,
    /// What these take at the machine's read bandwidth.
    pub floor: Option<Floor>,
    /// What each stage takes for a token when all its kernels run one after the other; none where that was not asked
    /// for or the backend cannot tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stages: Option<Vec<StageSeconds>>,
}

impl Decode {
    /// `tokens` at `depth`.
    pub fn new(depth: usize, tokens: usize, timing: Timing, stages: Option<Vec<StageTime>>) -> Decode {
        let tokens_per_second = timing.speed(tokens);
        let stages = stages.map(|stages| stages.into_iter().map(Into::into).collect());
        Decode { depth, tokens, tokens_per_second, timing, bytes_per_token: 0, floor: None, stages }
    }
}

/// See [`StageTime`].
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StageSeconds {
    /// The stage.
    pub stage: &'static str,
    /// Its kernels, in all layers.
    pub kernels: usize,
    /// All of them.
    pub seconds: f64,
}

impl From<StageTime> for StageSeconds {
    fn from(time: StageTime) -> StageSeconds {
        let StageTime { stage, kernels, seconds } = time;
        StageSeconds { stage, kernels, seconds }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_of_the_runs_and_the_spread_is_all_of_them() {
        let odd = Timing::new(vec![4.0, 1.0, 2.0]);
        let Speed { median, lowest, highest } = odd.speed(8);
        assert_eq!((median, lowest, highest), (4.0, 2.0, 8.0));
        assert_eq!(Timing::new(vec![3.0, 1.0]).median_seconds(), 2.0);
    }

    #[test]
    fn a_run_at_the_limit_has_the_fraction_one() {
        let floor = Floor::new(10, 2.0, &Timing::new(vec![2.0]));
        assert_eq!((floor.tokens_per_second, floor.fraction), (5.0, 1.0));
    }
}
