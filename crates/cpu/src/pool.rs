//! Threads that stay: fork and join in about a microsecond, without allocating.
//!
//! A decode step forks some hundred times, each time for tens of microseconds, so the workers spin between
//! forks; when nothing comes for a while they park and cost nothing. The caller is worker 0. Where more
//! threads are asked for than the machine has cores, nobody spins, because the spinning thread would hold the
//! core that the working one needs.
//!
//! Tasks are shared out in runs: each worker begins with its own stretch of consecutive tasks, which is a stretch
//! of consecutive memory where tasks are rows of a matrix, and whoever is done takes tasks from the far end of
//! the longest stretch that is left. So reads stay in order, and no worker waits for another by more than one task.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};

/// Polls of the fork counter before a worker parks: 50 to 100 microseconds, longer than the host needs
/// between two forks of one step and far shorter than a person notices.
const SPINS: u32 = 4096;

type Job<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// The tasks of a fork that are left to one worker, `first..end` as two halves of a word; on a cache line of its
/// own, since its worker changes it before every task.
#[repr(align(64))]
struct Run(AtomicU64);

impl Run {
    fn set(&self, tasks: Range<usize>) {
        self.0.store(pack(tasks.start as u32, tasks.end as u32), Ordering::Relaxed);
    }

    fn left(&self) -> u32 {
        let (first, end) = unpack(self.0.load(Ordering::Relaxed));
        end - first
    }

    /// The first task, and the one that the same worker will find behind it if no one takes that.
    fn take_first(&self) -> Option<(usize, Option<usize>)> {
        let taken = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |run| {
            let (first, end) = unpack(run);
            (first < end).then(|| pack(first + 1, end))
        });
        let (first, end) = unpack(taken.ok()?);
        Some((first as usize, (first + 1 < end).then_some(first as usize + 1)))
    }

    /// The last task.
    fn take_last(&self) -> Option<usize> {
        let taken = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |run| {
            let (first, end) = unpack(run);
            (first < end).then(|| pack(first, end - 1))
        });
        Some(unpack(taken.ok()?).1 as usize - 1)
    }
}

fn pack(first: u32, end: u32) -> u64 {
    u64::from(first) << 32 | u64::from(end)
}

fn unpack(run: u64) -> (u32, u32) {
    ((run >> 32) as u32, run as u32)
}

/// What the caller and the workers share.
struct Shared {
    /// Counts forks; a worker runs once per change.
    fork: AtomicU32,
    /// Workers (without the caller) that have not finished the present fork.
    pending: AtomicUsize,
    /// The present fork's closure. Written only between forks, by the caller.
    job: UnsafeCell<Option<&'static Job<'static>>>,
    /// Who to wake when `pending` reaches zero.
    caller: UnsafeCell<Option<Thread>>,
    /// What each worker has to do of the present fork, where that is a list of tasks.
    runs: Vec<Run>,
    /// Set by a worker just before it parks.
    parked: Vec<AtomicBool>,
    /// The first panic of the present fork.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    workers: usize,
    spins: u32,
}

// SAFETY: `job` and `caller` are written only by the holder of `ThreadPool::entry` while no worker runs
// (`pending` is 0 and `fork` unchanged), and read by workers only between a change of `fork` (acquire) and
// their decrement of `pending` (release).
unsafe impl Sync for Shared {}
// SAFETY: as above; what is inside is itself `Send`.
unsafe impl Send for Shared {}

thread_local! {
    /// Whether this thread is inside a fork; a fork inside a fork runs on the thread that asked.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// A fixed set of threads that run one closure together.
pub struct ThreadPool {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    /// Serialises callers.
    entry: Mutex<()>,
}

impl ThreadPool {
    /// A pool of `threads` workers, the caller among them; at least 1. Fewer where the system refuses threads.
    pub fn new(threads: usize) -> ThreadPool {
        let wanted = threads.max(1);
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            fork: AtomicU32::new(0),
            pending: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            caller: UnsafeCell::new(None),
            runs: (0..wanted).map(|_| Run(AtomicU64::new(0))).collect(),
            parked: (1..wanted).map(|_| AtomicBool::new(false)).collect(),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            workers: wanted,
            spins: if wanted <= cores { SPINS } else { 0 },
        });
        let mut handles = Vec::with_capacity(wanted - 1);
        for worker in 1..wanted {
            let theirs = shared.clone();
            let spawned = thread::Builder::new()
                .name(format!("lily-cpu-{worker}"))
                .spawn(move || work(&theirs, worker));
            match spawned {
                Ok(handle) => handles.push(handle),
                Err(_) => {
                    // A pool of the threads that do exist: stop these and build it anew.
                    let got = handles.len() + 1;
                    drop(ThreadPool { shared, handles, entry: Mutex::new(()) });
                    return ThreadPool::new(got);
                }
            }
        }
        ThreadPool { shared, handles, entry: Mutex::new(()) }
    }

    /// Workers, the caller counted.
    pub fn threads(&self) -> usize {
        self.shared.workers
    }

    /// Runs `job(worker, workers)` once on every worker and returns when all are done.
    ///
    /// A panic in any of them comes out here, after all have finished. From inside a job it runs `job(0, 1)`
    /// on the calling thread, so a kernel may be called from either side.
    pub fn run<F: Fn(usize, usize) + Sync>(&self, job: F) {
        if self.shared.workers == 1 || INSIDE.get() {
            return job(0, 1);
        }
        let turn = self.entry.lock().unwrap_or_else(PoisonError::into_inner);
        self.fork(turn, &job);
    }

    /// The fork itself, for the holder of `entry`.
    fn fork(&self, turn: MutexGuard<'_, ()>, job: &Job<'_>) {
        let shared = &*self.shared;
        let erased: &Job<'_> = job;
        // SAFETY: the lifetime is erased, but no worker touches the closure after its decrement of `pending`,
        // and this function does not return (or unwind) before `pending` is 0.
        let erased: &'static Job<'static> =
            unsafe { std::mem::transmute::<&Job<'_>, &'static Job<'static>>(erased) };
        // SAFETY: `entry` is held and no worker runs, see `Shared`.
        unsafe {
            *shared.job.get() = Some(erased);
            *shared.caller.get() = Some(thread::current());
        }
        shared.pending.store(self.handles.len(), Ordering::Relaxed);
        // Sequentially consistent against `parked`: either the worker sees the new fork before it parks, or
        // this thread sees that it has parked and wakes it.
        shared.fork.fetch_add(1, Ordering::SeqCst);
        for (handle, parked) in self.handles.iter().zip(&shared.parked) {
            if parked.swap(false, Ordering::SeqCst) {
                handle.thread().unpark();
            }
        }
        INSIDE.set(true);
        let mine = catch_unwind(AssertUnwindSafe(|| job(0, shared.workers)));
        INSIDE.set(false);
        let mut polls = 0;
        while shared.pending.load(Ordering::Acquire) != 0 {
            if polls < shared.spins {
                polls += 1;
                std::hint::spin_loop();
            } else {
                thread::park();
            }
        }
        let theirs = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(turn);
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        if let Some(panic) = theirs {
            resume_unwind(panic);
        }
    }

    /// Runs `task(index)` for every `index < count`, each once: see [`ThreadPool::for_each_in_runs`].
    pub fn for_each<F: Fn(usize) + Sync>(&self, count: usize, task: F) {
        self.for_each_in_runs(count, |index, _| task(index));
    }

    /// Runs `task(index, next)` for every `index < count`, each once. `next` is the task that this thread most
    /// likely runs afterwards, so that `task` can ask the memory for what that one begins with.
    ///
    /// Each worker walks a stretch of its own; one that is done helps the worker with most tasks left, from
    /// the end of that one's stretch. Panics where `count` does not fit a u32.
    pub fn for_each_in_runs<F: Fn(usize, Option<usize>) + Sync>(&self, count: usize, task: F) {
        assert!(u32::try_from(count).is_ok(), "{count} tasks in one fork");
        let shared = &*self.shared;
        if shared.workers == 1 || INSIDE.get() {
            return (0..count).for_each(|index| task(index, (index + 1 < count).then_some(index + 1)));
        }
        let turn = self.entry.lock().unwrap_or_else(PoisonError::into_inner);
        for (worker, run) in shared.runs.iter().enumerate() {
            run.set(partition(count, 1, worker, shared.workers));
        }
        self.fork(turn, &|worker, _| {
            while let Some((index, next)) = shared.runs[worker].take_first() {
                task(index, next);
            }
            while let Some(run) = shared.runs.iter().max_by_key(|run| run.left()).filter(|run| run.left() > 0)
            {
                if let Some(index) = run.take_last() {
                    task(index, None);
                }
            }
        });
    }

    /// Runs `task(index, item)` for every item, each once, as [`ThreadPool::for_each`] does.
    pub fn for_each_mut<T: Send, F: Fn(usize, &mut T) + Sync>(&self, items: &mut [T], task: F) {
        struct Items<T>(*mut T);
        // SAFETY: items are `Send`, and each is reached by one task only, below.
        unsafe impl<T: Send> Sync for Items<T> {}
        let count = items.len();
        let items = Items(items.as_mut_ptr());
        let items = &items;
        // SAFETY: `index` is below the length and comes up once, so no two references are to one item.
        self.for_each(count, |index| task(index, unsafe { &mut *items.0.add(index) }));
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.fork.fetch_add(1, Ordering::SeqCst);
        for handle in self.handles.drain(..) {
            handle.thread().unpark();
            // A worker's panic was already handed to the caller of `run`.
            let _ = handle.join();
        }
    }
}

/// A worker's life.
fn work(shared: &Shared, worker: usize) {
    INSIDE.set(true);
    let parked = &shared.parked[worker - 1];
    let mut seen = 0;
    loop {
        let mut polls = 0;
        while shared.fork.load(Ordering::Acquire) == seen {
            if polls < shared.spins {
                polls += 1;
                std::hint::spin_loop();
                continue;
            }
            parked.store(true, Ordering::SeqCst);
            if shared.fork.load(Ordering::SeqCst) == seen {
                thread::park();
            }
            parked.store(false, Ordering::SeqCst);
        }
        seen = seen.wrapping_add(1);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: `fork` has changed, so the caller has written both and leaves them until `pending` is 0.
        let (job, caller) = unsafe {
            ((*shared.job.get()).expect("written before the fork"), (*shared.caller.get()).clone())
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(worker, shared.workers))) {
            shared.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
        if shared.pending.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(caller) = caller
        {
            caller.unpark();
        }
    }
}

/// Worker `worker`'s share of `0..count`, cut at multiples of `block`; shares differ by at most one block.
pub fn partition(count: usize, block: usize, worker: usize, workers: usize) -> Range<usize> {
    let blocks = count.div_ceil(block);
    let start = blocks * worker / workers * block;
    let end = blocks * (worker + 1) / workers * block;
    start.min(count)..end.min(count)
}

/// Cores that do arithmetic on their own: sibling threads of one core count once. What the process may use
/// where the system does not tell.
pub fn physical_cores() -> usize {
    let allowed = thread::available_parallelism().map_or(1, usize::from);
    let mut cores = std::collections::BTreeSet::new();
    if let Ok(cpus) = std::fs::read_dir("/sys/devices/system/cpu") {
        for cpu in cpus.flatten() {
            if let Ok(siblings) = std::fs::read_to_string(cpu.path().join("topology/thread_siblings_list")) {
                cores.insert(siblings);
            }
        }
    }
    if cores.is_empty() { allowed } else { cores.len().min(allowed) }
}
