//! What is measured: the lengths asked for, or a series that grows as long as time allows.

use anyhow::bail;

use crate::args::BenchArgs;

/// The first length of a series that was not asked for.
const FIRST: usize = 256;
/// From one length of such a series to the next.
const FACTOR: usize = 4;
/// Seconds that such a series may take, all runs together.
const PATIENCE: f64 = 90.0;

/// All that will be done.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Prompt lengths.
    pub prompts: Series,
    /// Context depths.
    pub depths: Series,
    /// Tokens decoded in a run.
    pub generated: usize,
    /// Runs that count.
    pub repeat: usize,
    /// Whether a run that does not count comes first.
    pub warmup: bool,
    /// Whether the stages of a decoded token are timed too.
    pub profile: bool,
    /// Tokens that a sequence must have room for.
    pub context: usize,
}

impl Plan {
    /// What `args` ask of a backend with room for `most` tokens.
    ///
    /// # Errors
    /// Where something asked for does not fit the context, or nothing is asked for.
    pub fn new(args: &BenchArgs, most: usize) -> anyhow::Result<Plan> {
        let generated = args.generated;
        if let Some(&prompt) = args.prompt.iter().flatten().find(|&&prompt| prompt > most) {
            bail!("--prompt {prompt} does not fit the context of {most} tokens; ask for less");
        }
        let room = most.saturating_sub(generated);
        if let Some(&depth) = args.depth.iter().flatten().find(|&&depth| depth > room) {
            bail!(
                "--depth {depth} and --gen {generated} do not fit the context of {most} tokens; ask for less"
            );
        }
        let prompts = Series::new(args.prompt.as_deref(), most);
        let depths = if generated == 0 { Series::none() } else { Series::new(args.depth.as_deref(), room) };
        if prompts.lengths.is_empty() && depths.lengths.is_empty() {
            bail!(
                "there is nothing to measure in a context of {most} tokens; ask for it with --prompt or --depth"
            );
        }
        let (repeat, warmup, profile) = (args.repeat, !args.no_warmup, args.profile);
        Ok(Plan { prompts, depths, generated, repeat, warmup, profile, context: most })
    }

    /// Runs of each measurement, the one that does not count among them.
    pub fn runs(&self) -> usize {
        self.repeat + usize::from(self.warmup)
    }
}

/// Lengths, the shortest first.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// The lengths.
    pub lengths: Vec<usize>,
    /// Whether every one must be measured, however long it takes.
    asked: bool,
}

impl Series {
    fn none() -> Series {
        Series { lengths: Vec::new(), asked: true }
    }

    fn new(asked: Option<&[usize]>, most: usize) -> Series {
        match asked {
            Some(lengths) => {
                let mut lengths: Vec<usize> = lengths.iter().copied().filter(|&length| length > 0).collect();
                lengths.sort_unstable();
                lengths.dedup();
                Series { lengths, asked: true }
            }
            None => {
                let grow = |length: &usize| length.checked_mul(FACTOR);
                let lengths = std::iter::successors(Some(FIRST), grow);
                Series { lengths: lengths.take_while(|&length| length <= most).collect(), asked: false }
            }
        }
    }

    /// Whether a length that will take about `seconds` is worth waiting for, `spent` seconds into the series.
    pub fn goes_on(&self, spent: f64, seconds: f64) -> bool {
        self.asked || spent == 0.0 || spent + seconds <= PATIENCE
    }
}

/// What a prompt's token takes, seen so far, to foresee what longer prompts will.
///
/// Every token costs the same in the projections and, in attention, more with each token before it; so the mean
/// cost is a straight line over the length, through the last two lengths that were measured.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    before: Option<(f64, f64)>,
    last: Option<(f64, f64)>,
}

impl Pace {
    /// `length` tokens took `seconds`.
    pub fn saw(&mut self, length: usize, seconds: f64) {
        self.before = self.last.replace((length as f64, seconds / length as f64));
    }

    /// Seconds that a prompt of `length` tokens will take; 0 where nothing was seen.
    pub fn foresees(&self, length: usize) -> f64 {
        let length = length as f64;
        let (seen, per_token) = self.last.unwrap_or_default();
        let slope = match self.before {
            Some((before, cost)) if before < seen => ((per_token - cost) / (seen - before)).max(0.0),
            _ => 0.0,
        };
        length * (per_token + slope * (length - seen))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Command, Lily};

    fn plan(flags: &str, most: usize) -> Result<Plan, String> {
        let words = ["lily", "bench"].into_iter().chain(flags.split_whitespace());
        let Command::Bench(args) = Lily::parse_from(words).command else { unreachable!("it was asked for") };
        Plan::new(&args, most).map_err(|error| error.to_string())
    }

    #[test]
    fn without_flags_the_series_grow_to_the_context() {
        let plan = plan("", 5000).unwrap();
        assert_eq!(plan.prompts.lengths, [256, 1024, 4096]);
        assert_eq!(plan.depths.lengths, [256, 1024, 4096]);
        assert_eq!(plan.context, 5000);
    }

    #[test]
    fn what_is_asked_for_is_measured_shortest_first_and_once() {
        let plan = plan("-p 512,64,512 -d 128 -n 8 -r 2 --no-warmup", 1000).unwrap();
        assert_eq!(plan.prompts.lengths, [64, 512]);
        assert_eq!((plan.depths.lengths.as_slice(), plan.runs()), ([128].as_slice(), 2));
        assert!(plan.prompts.goes_on(1e9, 1e9));
    }

    #[test]
    fn zero_leaves_a_part_out() {
        assert!(plan("-p 0", 1000).unwrap().prompts.lengths.is_empty());
        assert!(plan("-n 0", 1000).unwrap().depths.lengths.is_empty());
        assert!(plan("-p 0 -n 0", 1000).unwrap_err().contains("nothing to measure"));
    }

    #[test]
    fn what_does_not_fit_the_context_is_refused_by_its_flag() {
        assert!(plan("-p 2000", 1000).unwrap_err().starts_with("--prompt 2000"));
        assert!(plan("-d 990", 1000).unwrap_err().starts_with("--depth 990"));
    }

    #[test]
    fn longer_prompts_are_foreseen_from_the_last_two() {
        let cost = |length: usize| length as f64 * (1.0 + 0.5 * length as f64);
        let mut pace = Pace::default();
        assert_eq!(pace.foresees(100), 0.0);
        pace.saw(4, cost(4));
        assert_eq!(pace.foresees(8), 2.0 * cost(4));
        pace.saw(16, cost(16));
        assert_eq!(pace.foresees(64), cost(64));
    }

    #[test]
    fn a_series_that_was_not_asked_for_ends_before_patience_does() {
        let series = plan("", 5000).unwrap().prompts;
        assert!(series.goes_on(0.0, 1e9), "the first length is always measured");
        assert!(series.goes_on(PATIENCE / 2.0, PATIENCE / 4.0));
        assert!(!series.goes_on(PATIENCE / 2.0, PATIENCE));
    }
}
