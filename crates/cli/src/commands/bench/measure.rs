//! The runs themselves, timed.

use std::time::Instant;

use indicatif::ProgressBar;
use lily_engine::backend::{
    Backend, BackendError, DecodeStep, Input, Limits, SequenceId, SnapshotId, StageTime, StepOutput, Ticket,
    Want,
};

use super::plan::{Pace, Plan};
use super::report::{Decode, Prefill, Timing};
use crate::machine::{self, Resident};

/// Tokens of the prompt with which the time from the start to the first token is taken: a short question.
const FIRST_PROMPT: usize = 32;
/// Positions over which the bytes of one are counted: whole pages of every backend.
const PAGES: usize = 1024;
/// Seed of the random tokens.
const SEED: u64 = 0x5eed_0f11_1e00_0001;

/// A backend being measured.
pub struct Bench {
    backend: Box<dyn Backend>,
    plan: Plan,
    progress: ProgressBar,
    random: u64,
    resident: Option<Resident>,
    pace: Pace,
    /// What was left out, and how to have it.
    notes: Vec<String>,
}

impl Bench {
    /// Measures `backend` according to `plan`; `progress` says what is going on.
    pub fn new(backend: Box<dyn Backend>, plan: Plan, progress: ProgressBar) -> Bench {
        Bench {
            backend,
            plan,
            progress,
            random: SEED,
            resident: None,
            pace: Pace::default(),
            notes: Vec::new(),
        }
    }

    /// Bytes of the backend's KV cache for each position.
    pub fn kv_bytes(&self) -> u64 {
        (self.backend.sequence_bytes(PAGES) - self.backend.sequence_bytes(0)) / PAGES as u64
    }

    /// Answers a first short prompt, of so many tokens.
    pub fn first_token(&mut self) -> Result<usize, BackendError> {
        self.progress.set_message("reading a first prompt");
        let tokens = FIRST_PROMPT.min(self.plan.context);
        self.prefill_once(tokens)?;
        Ok(tokens)
    }

    /// Times prefill at each length.
    pub fn prefill(&mut self) -> Result<Vec<Prefill>, BackendError> {
        let begin = Instant::now();
        let mut results = Vec::new();
        for length in self.plan.prompts.lengths.clone() {
            let expected = self.plan.runs() as f64 * self.pace.foresees(length);
            let spent = if results.is_empty() { 0.0 } else { begin.elapsed().as_secs_f64() };
            if !self.plan.prompts.goes_on(spent, expected) {
                self.leave_out("prompt", length, expected);
                break;
            }
            let mut seconds = Vec::with_capacity(self.plan.repeat);
            for run in 0..self.plan.runs() {
                self.say("prefill of", length, run);
                seconds.push(self.prefill_once(length)?);
            }
            let timing = self.counted(seconds);
            self.pace.saw(length, timing.median_seconds());
            results.push(Prefill::new(length, timing));
            self.look_at_memory();
        }
        Ok(results)
    }

    /// Times decode at each depth. The depths lie on one sequence, each frozen when it is reached.
    pub fn decode(&mut self) -> Result<Vec<Decode>, BackendError> {
        let begin = Instant::now();
        let mut results: Vec<Decode> = Vec::new();
        let mut filled = None;
        let mut held = 0;
        for depth in self.plan.depths.lengths.clone() {
            let fill = self.pace.foresees(depth) - self.pace.foresees(held);
            let run = results.last().map_or(0.0, |decode| decode.timing.median_seconds());
            let expected = fill + self.plan.runs() as f64 * run;
            let spent = if results.is_empty() { 0.0 } else { begin.elapsed().as_secs_f64() };
            if !self.plan.depths.goes_on(spent, expected) {
                self.leave_out("depth", depth, expected);
                break;
            }
            self.progress.set_message(format!("filling the context to {depth} tokens"));
            let sequence = match filled {
                Some(sequence) => sequence,
                None => *filled.insert(self.backend.open(None)?),
            };
            self.extend(sequence, depth - held, Want::Nothing)?;
            held = depth;
            let snapshot = self.backend.snapshot(sequence)?;
            let mut seconds = Vec::with_capacity(self.plan.repeat);
            for run in 0..self.plan.runs() {
                self.say("decode at", depth, run);
                seconds.push(self.decode_once(snapshot)?);
            }
            let stages = if self.plan.profile { self.stages(snapshot, depth)? } else { None };
            self.backend.discard(snapshot);
            let timing = self.counted(seconds);
            results.push(Decode::new(depth, self.plan.generated, timing, stages));
            self.look_at_memory();
        }
        if let Some(sequence) = filled {
            self.backend.close(sequence);
        }
        Ok(results)
    }

    /// What was resident at the worst: the highest peak, and the most of each kind after a measurement.
    pub fn resident(&self) -> Option<Resident> {
        self.resident
    }

    /// What the device can do at the most.
    pub fn limits(&mut self) -> Option<Limits> {
        self.progress.set_message("measuring what the machine can do at the most");
        self.backend.limits()
    }

    /// The backend's name.
    pub fn description(&self) -> String {
        self.backend.description()
    }

    /// Takes the progress off the screen and says what was left out.
    pub fn finish(&self) {
        self.progress.finish_and_clear();
        for note in &self.notes {
            eprintln!("lily: {note}");
        }
    }

    fn leave_out(&mut self, flag: &str, length: usize, seconds: f64) {
        let minutes = (seconds / 60.0).ceil();
        self.notes.push(format!(
            "--{flag} {length} was left out, as it would take some {minutes} minutes; name it to have it measured"
        ));
    }

    /// Seconds from an empty sequence to the token after `length` random ones.
    fn prefill_once(&mut self, length: usize) -> Result<f64, BackendError> {
        let sequence = self.backend.open(None)?;
        let seconds = self.extend(sequence, length, Want::Token)?;
        self.backend.close(sequence);
        Ok(seconds)
    }

    /// Seconds of one run from `snapshot` on, each step enqueued before the last one is collected where the backend
    /// runs ahead, as in the engine.
    fn decode_once(&mut self, snapshot: SnapshotId) -> Result<f64, BackendError> {
        let sequence = self.backend.open(Some(snapshot))?;
        let mut input = Input::Token(self.token());
        let ahead = self.backend.runs_ahead();
        let mut waiting = None;
        let begin = Instant::now();
        for _ in 0..self.plan.generated {
            let ticket = self.backend.decode(&[DecodeStep { sequence, input, want: Want::Token }])?;
            input = Input::LastSampled;
            let due = if ahead { waiting.replace(ticket) } else { Some(ticket) };
            if let Some(due) = due {
                self.collect(due)?;
            }
        }
        if let Some(last) = waiting {
            self.collect(last)?;
        }
        let seconds = begin.elapsed().as_secs_f64();
        self.backend.close(sequence);
        Ok(seconds)
    }

    /// What each stage of a token from `snapshot` on takes: of as many runs as everything else, the one that took least
    /// in all.
    fn stages(&mut self, snapshot: SnapshotId, depth: usize) -> Result<Option<Vec<StageTime>>, BackendError> {
        let mut least: Option<Vec<StageTime>> = None;
        let total = |times: &Vec<StageTime>| times.iter().map(|time| time.seconds).sum::<f64>();
        for run in 0..self.plan.runs() {
            self.say("stages at", depth, run);
            let sequence = self.backend.open(Some(snapshot))?;
            let input = Input::Token(self.token());
            let times = self.backend.decode_timed(sequence, input)?;
            self.backend.close(sequence);
            let Some(times) = times else {
                let note =
                    format!("{} does not time its stages, so --profile added nothing", self.description());
                if !self.notes.contains(&note) {
                    self.notes.push(note);
                }
                return Ok(None);
            };
            if least.as_ref().is_none_or(|least| total(&times) < total(least)) {
                least = Some(times);
            }
        }
        Ok(least)
    }

    /// Seconds that `count` random tokens at the end of `sequence` take, in the engine's chunks.
    fn extend(&mut self, sequence: SequenceId, count: usize, want: Want) -> Result<f64, BackendError> {
        let tokens: Vec<u32> = (0..count).map(|_| self.token()).collect();
        let begin = Instant::now();
        let mut chunks = tokens.chunks(self.backend.prefill_chunks().alone).peekable();
        while let Some(chunk) = chunks.next() {
            let want = if chunks.peek().is_some() { Want::Nothing } else { want };
            let ticket = self.backend.extend(sequence, chunk, want)?;
            self.collect(ticket)?;
        }
        Ok(begin.elapsed().as_secs_f64())
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Vec<StepOutput>, BackendError> {
        self.backend.collect(ticket)
    }

    /// A random token (splitmix64).
    fn token(&mut self) -> u32 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.random;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let word = word ^ (word >> 31);
        (word % self.backend.geometry().vocab as u64) as u32
    }

    /// The runs that count.
    fn counted(&self, mut seconds: Vec<f64>) -> Timing {
        seconds.drain(..usize::from(self.plan.warmup));
        Timing::new(seconds)
    }

    fn say(&self, what: &str, length: usize, run: usize) {
        let run = match (self.plan.warmup, run) {
            (true, 0) => "warming up".to_string(),
            (true, run) => format!("run {run} of {}", self.plan.repeat),
            (false, run) => format!("run {} of {}", run + 1, self.plan.repeat),
        };
        self.progress.set_message(format!("{what} {length} tokens, {run}"));
    }

    fn look_at_memory(&mut self) {
        let Some(now) = machine::resident() else { return };
        let before = self.resident.unwrap_or_default();
        self.resident = Some(Resident {
            peak: now.peak.max(before.peak),
            anonymous: now.anonymous.max(before.anonymous),
            mapped: now.mapped.max(before.mapped),
        });
    }
}
