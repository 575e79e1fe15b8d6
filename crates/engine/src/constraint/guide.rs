//! A grammar at work: which tokens may come next, computed while the device is busy.
//!
//! The matcher travels. After a token it takes that token in, which is quick, and goes to a helper thread, which
//! walks the vocabulary, which is not; with the next logits it comes back with the set. One thread for each
//! constrained answer, so that answers of one batch do not wait for one another.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;

/// What a helper thread hands back: the matcher, the set, and what the set took.
type Masked = (Box<Matcher>, Result<SimpleVob, String>, Duration);

/// The grammar of one answer.
pub(crate) struct Guide {
    /// `None` while the helper thread has it.
    matcher: Option<Box<Matcher>>,
    helper: Option<Helper>,
    cost: Cost,
}

/// What the sets of one answer took, for the log.
#[derive(Default)]
struct Cost {
    sets: u32,
    computing: Duration,
    slowest: Duration,
    /// The part of `computing` that the device was done before, so that the engine's thread waited.
    waiting: Duration,
}

struct Helper {
    work: Sender<Box<Matcher>>,
    done: Receiver<Masked>,
}

/// The tokens that may be chosen.
#[derive(Clone, Debug)]
pub(crate) enum Allowed {
    /// All but these.
    AllBut(Vec<u32>),
    /// These alone.
    Only(SimpleVob),
}

impl Allowed {
    /// Takes every other token out of a row of logits.
    pub(crate) fn apply(&self, logits: &mut [f32]) {
        match self {
            Allowed::AllBut(tokens) => {
                for &token in tokens {
                    if let Some(logit) = logits.get_mut(token as usize) {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
            Allowed::Only(set) => {
                let mut words = set.as_slice().iter().copied();
                for chunk in logits.chunks_mut(u32::BITS as usize) {
                    let word = words.next().unwrap_or(0);
                    if word == u32::MAX {
                        continue;
                    }
                    for (bit, logit) in chunk.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }
}

impl Guide {
    pub(super) fn new(matcher: Box<Matcher>) -> Guide {
        Guide { matcher: Some(matcher), helper: None, cost: Cost::default() }
    }

    /// Begins to compute the set of tokens that may come next.
    pub(crate) fn prepare(&mut self) {
        if self.helper.is_none() {
            self.helper = Helper::start();
        }
        let Some(helper) = &self.helper else { return };
        if let Some(matcher) = self.matcher.take()
            && let Err(unsent) = helper.work.send(matcher)
        {
            self.matcher = Some(unsent.0);
        }
    }

    /// The tokens that may come next. It waits for what [`Guide::prepare`] began, or does it itself.
    pub(crate) fn allowed(&mut self) -> Result<Allowed, String> {
        let start = Instant::now();
        let masked = match self.matcher.take() {
            Some(matcher) => mask(matcher),
            None => match self.helper.as_ref().map(|helper| helper.done.recv()) {
                Some(Ok(masked)) => masked,
                _ => return Err("the grammar's thread ended; please report this".to_owned()),
            },
        };
        let (matcher, set, computing) = masked;
        self.matcher = Some(matcher);
        self.cost.sets += 1;
        self.cost.computing += computing;
        self.cost.slowest = self.cost.slowest.max(computing);
        self.cost.waiting += start.elapsed();
        set.map(Allowed::Only)
    }

    /// Takes in the token that was chosen; true where nothing can follow it.
    pub(crate) fn accept(&mut self, token: u32) -> Result<bool, String> {
        let Some(matcher) = &mut self.matcher else {
            return Err("the grammar was asked out of turn; please report this".to_owned());
        };
        matcher.consume_token(token).map_err(|error| explain(&error.to_string()))?;
        Ok(matcher.is_stopped())
    }
}

impl Drop for Guide {
    fn drop(&mut self) {
        let Cost { sets, computing, slowest, waiting } = self.cost;
        if sets > 0 {
            let mean_us = |time: Duration| time.as_micros() / u128::from(sets);
            let (mean_us, waited_us, slowest_us) =
                (mean_us(computing), mean_us(waiting), slowest.as_micros());
            tracing::debug!(sets, mean_us, slowest_us, waited_us, "the answer's grammar is done");
        }
    }
}

impl Helper {
    /// `None` where the system refuses a thread; the set is then computed where it is needed.
    fn start() -> Option<Helper> {
        let (work, tasks) = channel::<Box<Matcher>>();
        let (results, done) = channel();
        let run = move || {
            // It ends with the answer, which drops the other ends.
            while let Ok(matcher) = tasks.recv() {
                if results.send(mask(matcher)).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("lily-mask".to_owned()).spawn(run).ok()?;
        Some(Helper { work, done })
    }
}

fn mask(mut matcher: Box<Matcher>) -> Masked {
    let start = Instant::now();
    let set = matcher.compute_mask().map_err(|error| explain(&error.to_string()));
    (matcher, set, start.elapsed())
}

fn explain(error: &str) -> String {
    let first = error.lines().next().unwrap_or_default();
    format!("the answer's grammar cannot be followed any further: {first}")
}
