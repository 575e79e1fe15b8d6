//! What the handles and the engine's thread share: the waiting requests and whether more may come.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::generation::{Event, EventSender};
use super::request::SubmitError;
use super::stats::Stats;
use super::steering::Steering;
use crate::sampler::SamplingParams;
use crate::stop::StopMatcher;

/// Over how many requests the time that they held their places is averaged.
const MEMORY: u32 = 8;

/// A request that passed every check.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) prompt: Vec<u32>,
    pub(super) sampling: SamplingParams,
    /// Already bounded by the context.
    pub(super) max_tokens: usize,
    pub(super) chunk: usize,
    pub(super) stops: StopMatcher,
    pub(super) ignore_eos: bool,
    /// `None` where everything is left to the model.
    pub(super) steering: Option<Steering>,
    pub(super) events: EventSender,
    pub(super) submitted: Instant,
}

/// How much there is to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that have a place: their sequences hold state in the backend, or will as soon as it fits.
    pub running: usize,
    /// Requests that wait for a place.
    pub waiting: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Requests are taken.
    Open,
    /// No more are taken; those taken are finished.
    Closing,
    /// Those taken are failed.
    Aborting,
    /// The thread has ended.
    Stopped,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// Why the phase is no longer `Open`.
    reason: String,
    waiting: VecDeque<Job>,
    running: usize,
    /// How long requests held their places lately; `None` until one gave its place back.
    held: Option<Duration>,
    stats: Stats,
    /// What the device failed at last, unless it has worked since.
    trouble: Option<String>,
}

/// What [`Queue::wait_for_work`] waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Awaited {
    /// A request waits.
    Request,
    /// None came in time.
    Nothing,
    /// None will come.
    End,
}

impl State {
    /// When the next place is free, should requests go on to take as long as they did lately; zero where none has
    /// ended yet.
    fn free_in(&self) -> Duration {
        let running = u32::try_from(self.running).unwrap_or(u32::MAX).max(1);
        self.held.unwrap_or_default() / running
    }
}

/// The shared queue. See the module's page.
#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    max_running: usize,
    max_waiting: usize,
}

impl Queue {
    pub(super) fn new(max_running: usize, max_waiting: usize) -> Queue {
        let state = State {
            phase: Phase::Open,
            reason: String::new(),
            waiting: VecDeque::new(),
            running: 0,
            held: None,
            stats: Stats::default(),
            trouble: None,
        };
        Queue { state: Mutex::new(state), changed: Condvar::new(), max_running, max_waiting }
    }

    /// No code panics while it holds the lock, and the state is whole between any two lines if it did.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn submit(&self, job: Job) -> Result<(), SubmitError> {
        let mut state = self.lock();
        if state.phase != Phase::Open {
            return Err(SubmitError::Stopped(state.reason.clone()));
        }
        state.waiting.retain(|job| !job.events.is_cancelled());
        // A request passes through `waiting` even when a place is free, so both are counted together.
        let (running, waiting) = (state.running, state.waiting.len());
        if running + waiting >= self.max_running + self.max_waiting {
            return Err(SubmitError::Busy { running, waiting, free_in: state.free_in() });
        }
        state.waiting.push_back(job);
        self.changed.notify_all();
        Ok(())
    }

    /// The next request that is still wanted, in order of arrival.
    pub(super) fn take(&self) -> Option<Job> {
        let mut state = self.lock();
        state.waiting.retain(|job| !job.events.is_cancelled());
        let job = state.waiting.pop_front();
        state.running += usize::from(job.is_some());
        job
    }

    /// A place that [`Queue::take`] took is free again, after it was `held` so long.
    pub(super) fn release(&self, held: Duration) {
        let mut state = self.lock();
        state.running -= 1;
        let mean = state.held.unwrap_or(held);
        state.held = Some((mean * (MEMORY - 1) + held) / MEMORY);
    }

    /// Every place is free again.
    pub(super) fn release_all(&self) {
        self.lock().running = 0;
    }

    /// Sleeps until a request waits, the queue is closed and empty, or, where there is one, `limit` is over.
    pub(super) fn wait_for_work(&self, limit: Option<Duration>) -> Awaited {
        let idle = |state: &mut State| state.waiting.is_empty() && state.phase == Phase::Open;
        let state = match limit {
            None => self.changed.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner),
            Some(limit) => {
                let waited = self.changed.wait_timeout_while(self.lock(), limit, idle);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        match (state.waiting.is_empty(), state.phase) {
            (true, Phase::Open) => Awaited::Nothing,
            (false, phase) if phase != Phase::Aborting => Awaited::Request,
            _ => Awaited::End,
        }
    }

    /// Makes the thread's figures visible, and what the device fails at.
    pub(super) fn publish(&self, stats: Stats, trouble: Option<&str>) {
        let mut state = self.lock();
        state.stats = stats;
        if state.trouble.as_deref() != trouble {
            state.trouble = trouble.map(str::to_owned);
        }
    }

    /// What the device failed at last, unless it has worked since.
    pub(super) fn trouble(&self) -> Option<String> {
        self.lock().trouble.clone()
    }

    /// What was published last.
    pub(super) fn stats(&self) -> Stats {
        self.lock().stats
    }

    pub(super) fn is_aborting(&self) -> bool {
        self.lock().phase == Phase::Aborting
    }

    pub(super) fn load(&self) -> Load {
        let state = self.lock();
        let waiting = state.waiting.iter().filter(|job| !job.events.is_cancelled()).count();
        Load { running: state.running, waiting }
    }

    pub(super) fn stopped(&self) -> Option<String> {
        let state = self.lock();
        (state.phase != Phase::Open).then(|| state.reason.clone())
    }

    /// Takes no more requests.
    pub(super) fn close(&self, reason: &str) {
        let mut state = self.lock();
        if state.phase == Phase::Open {
            state.phase = Phase::Closing;
            state.reason = reason.to_owned();
            self.changed.notify_all();
        }
    }

    /// Asks the thread to fail what is left.
    pub(super) fn abort(&self) {
        let mut state = self.lock();
        if state.phase != Phase::Stopped {
            state.phase = Phase::Aborting;
            self.changed.notify_all();
        }
    }

    /// Whether the thread ended within `grace`.
    pub(super) fn wait_until_stopped(&self, grace: Duration) -> bool {
        let running = |state: &mut State| state.phase != Phase::Stopped;
        let waited = self.changed.wait_timeout_while(self.lock(), grace, running);
        waited.unwrap_or_else(PoisonError::into_inner).0.phase == Phase::Stopped
    }

    /// The thread has ended: fails what still waits. `reason` stands unless an earlier one does.
    pub(super) fn stop(&self, reason: &str) {
        let mut state = self.lock();
        if state.phase == Phase::Open {
            state.reason = reason.to_owned();
        }
        state.phase = Phase::Stopped;
        state.running = 0;
        for job in state.waiting.drain(..) {
            job.events.send(Event::Failed(format!("the engine has stopped: {reason}")));
        }
        self.changed.notify_all();
    }
}
