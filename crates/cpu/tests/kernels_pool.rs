//! The thread pool: every share runs once, and nothing that a task does breaks it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use lily_cpu::pool::{ThreadPool, partition, physical_cores};

#[test]
fn every_worker_runs_once_per_fork_whether_it_spun_or_slept() {
    for threads in [1, 2, 5] {
        let pool = ThreadPool::new(threads);
        assert_eq!(pool.threads(), threads);
        for round in 0..500 {
            let ran: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            pool.run(|worker, workers| {
                assert_eq!(workers, threads);
                ran[worker].fetch_add(1, Ordering::Relaxed);
            });
            assert!(ran.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            if round % 100 == 0 {
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

#[test]
fn uneven_tasks_run_once_each() {
    let pool = ThreadPool::new(3);
    let ran: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
    pool.for_each(ran.len(), |task| {
        ran[task].fetch_add(1, Ordering::Relaxed);
    });
    assert!(ran.iter().all(|count| count.load(Ordering::Relaxed) == 1));
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
    let pool = ThreadPool::new(3);
    for guilty in 0..3 {
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(|worker, _| assert_ne!(worker, guilty, "as planned"));
        }));
        assert!(result.is_err());
        let ran = AtomicUsize::new(0);
        pool.run(|_, _| {
            ran.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ran.into_inner(), 3);
    }
}

#[test]
fn a_fork_inside_a_fork_runs_on_the_thread_that_asked() {
    let pool = ThreadPool::new(2);
    let ran = AtomicUsize::new(0);
    pool.run(|_, _| {
        pool.run(|worker, workers| {
            assert_eq!((worker, workers), (0, 1));
            ran.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert_eq!(ran.into_inner(), 2);
}

#[test]
fn several_callers_take_turns() {
    let pool = ThreadPool::new(2);
    let ran = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..100 {
                    pool.run(|_, _| {
                        ran.fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
        }
    });
    assert_eq!(ran.into_inner(), 800);
}

#[test]
fn shares_cover_everything_once_and_are_cut_at_blocks() {
    for count in [0, 1, 31, 32, 33, 1000] {
        for workers in [1, 2, 3, 8, 50] {
            let mut next = 0;
            for worker in 0..workers {
                let share = partition(count, 32, worker, workers);
                assert_eq!(share.start, next);
                assert!(share.end == count || share.end.is_multiple_of(32));
                next = share.end;
            }
            assert_eq!(next, count);
        }
    }
}

#[test]
fn the_machine_has_a_core() {
    let cores = physical_cores();
    assert!(cores >= 1 && cores <= thread::available_parallelism().map_or(1, usize::from));
}
