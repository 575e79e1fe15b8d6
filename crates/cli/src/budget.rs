//! Whether a model and its context fit into the machine's memory, said before the model is started.
//!
//! Two kinds of memory count. The **weights** are mapped files: the system may drop their pages and read them
//! again, but every token needs some of them, so for full speed all must stay resident. What the backend
//! allocates for itself, state and scratch buffers, cannot be dropped at all.

use std::fmt;

use anyhow::bail;

/// Bytes that are left to the system and to the rest of this program: tokenizer, threads, connections.
const LEFT: u64 = 1_000_000_000;
/// A context that is proposed is a multiple of this.
const STEP: usize = 1024;
const GB: f64 = 1e9;

/// What a model takes at a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Tokens of context.
    pub context: usize,
    /// Bytes of weights, mapped.
    pub weights: u64,
    /// Bytes that the backend allocates for one sequence of that context.
    pub own: u64,
    /// Bytes that the process can have, where the system tells.
    pub machine: Option<u64>,
}

impl Budget {
    /// The budget for the context `asked` for, else for `usual` or what of it fits. `own` gives what the backend
    /// allocates for one sequence of so many tokens.
    ///
    /// Weights that do not fit themselves are no reason to refuse: the model runs, from the disk, and
    /// [`Budget`] says so when it is printed.
    ///
    /// # Errors
    /// A context that was asked for and does not fit: the sentence says what would.
    pub fn new(
        asked: Option<usize>,
        usual: usize,
        weights: u64,
        machine: Option<u64>,
        own: impl Fn(usize) -> u64,
    ) -> anyhow::Result<Budget> {
        let context = asked.unwrap_or(usual);
        let budget = |context| Budget { context, weights, own: own(context), machine };
        let Some(bytes) = machine else { return Ok(budget(context)) };
        let beside = LEFT + if fits(weights, own(STEP.min(context)), bytes) { weights } else { 0 };
        let room = bytes.saturating_sub(beside);
        if own(context) <= room {
            return Ok(budget(context));
        }
        // The largest number of whole steps below the context that fits.
        let (mut fitting, mut steps) = (0, context.div_ceil(STEP));
        while steps - fitting > 1 {
            let middle = fitting + (steps - fitting) / 2;
            if own(middle * STEP) <= room { fitting = middle } else { steps = middle }
        }
        match (asked, fitting * STEP) {
            (_, 0) => bail!(
                "there is no memory for this model: even a short context needs {} of its own, and {} can be had",
                gb(own(STEP.min(context))),
                gb(room)
            ),
            (Some(asked), most) => bail!(
                "--ctx-len {asked} does not fit: it needs {} beside {} of weights, and this machine has {}; \
                 --ctx-len {most} is the most that does",
                gb(own(asked)),
                gb(weights),
                gb(bytes)
            ),
            (None, most) => Ok(budget(most)),
        }
    }

    /// Bytes that are left beside all that, for more sequences and for the prefix cache; `None` where the system
    /// does not tell.
    pub fn left(&self) -> Option<u64> {
        let weights = if self.is_resident() { self.weights } else { 0 };
        Some(self.machine?.saturating_sub(weights).saturating_sub(self.own).saturating_sub(LEFT))
    }

    /// Whether weights and all can stay resident; true where the system does not tell.
    pub fn is_resident(&self) -> bool {
        self.machine.is_none_or(|machine| fits(self.weights, self.own, machine))
    }
}

fn fits(weights: u64, own: u64, machine: u64) -> bool {
    weights.saturating_add(own).saturating_add(LEFT) <= machine
}

fn gb(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / GB)
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Budget { context, weights, own, machine } = *self;
        write!(
            f,
            "{:.2} GB of weights mapped, {:.2} GB of its own for {context} tokens",
            weights as f64 / GB,
            own as f64 / GB
        )?;
        if let Some(machine) = machine {
            write!(f, ", machine {}", gb(machine))?;
        }
        if !self.is_resident() {
            write!(
                f,
                "; the weights do not fit, so parts are read from disk again and again, which is slow"
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use lily_cpu::footprint::Footprint;
    use lily_cpu::kv_cache::KvFormat;
    use lily_model::geometry::Geometry;

    use super::*;

    const WEIGHTS: u64 = 19_508_789_376;

    fn full_model(asked: Option<usize>, usual: usize, machine: u64) -> Result<Budget, String> {
        let geometry = Geometry::qwen3_6_35b_a3b();
        let own = |tokens| Footprint::new(&geometry, KvFormat::F16, 2, tokens).total() as u64;
        Budget::new(asked, usual, WEIGHTS, Some(machine), own).map_err(|error| error.to_string())
    }

    #[test]
    fn the_full_model_with_32k_fits_a_24_gb_machine() {
        // What the system calls 24 GB is somewhat less.
        let budget = full_model(Some(32_768), 1, 23_400_000_000).unwrap();
        assert!(budget.is_resident());
        let line = budget.to_string();
        assert!(line.starts_with("19.51 GB of weights mapped, 0."), "{line}");
        assert!(line.ends_with("for 32768 tokens, machine 23.4 GB"), "{line}");
    }

    #[test]
    fn a_context_that_does_not_fit_is_refused_with_one_that_does() {
        let machine = 23_400_000_000;
        let sentence = full_model(Some(262_144), 1, machine).unwrap_err();
        assert!(sentence.starts_with("--ctx-len 262144 does not fit"), "{sentence}");
        let most = sentence.split_once("; --ctx-len ").unwrap().1.split(' ').next().unwrap();
        let most: usize = most.parse().unwrap();
        assert!(most.is_multiple_of(STEP));
        assert!(full_model(Some(most), 1, machine).is_ok());
        assert!(full_model(Some(most + STEP), 1, machine).is_err());
        // Nobody asked: what fits is taken.
        assert_eq!(full_model(None, 262_144, machine).unwrap().context, most);
    }

    #[test]
    fn weights_that_do_not_fit_are_said_and_not_refused() {
        let budget = full_model(None, 32_768, 16_000_000_000).unwrap();
        assert_eq!(budget.context, 32_768);
        assert!(budget.to_string().contains("read from disk"), "{budget}");
        assert!(full_model(None, 32_768, 1_000_000_000).unwrap_err().contains("no memory for this model"));
    }

    #[test]
    fn where_the_system_does_not_tell_nothing_is_refused() {
        let budget = Budget::new(Some(1 << 40), 1, WEIGHTS, None, |tokens| tokens as u64).unwrap();
        assert_eq!((budget.context, budget.is_resident()), (1 << 40, true));
    }
}
