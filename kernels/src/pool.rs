//! A fixed team of threads that runs one closure at a time: fork, work, join.
//!
//! A forward pass forks and joins several hundred times per token, so a fork must cost about a microsecond: no
//! allocation, no lock, no channel. Helpers spin for a short, adaptive while after each job (at most [`SPIN_MAX`], not
//! at all when the team is larger than the processors it may use) and then sleep in the kernel, so an idle pool uses
//! no processor time. A caller that has no next job yet says so with [`ThreadPool::rest`]: then they spin politely.

mod fork_join;
mod futex;
mod split;

pub use split::{ChunkQueue, partition};

use crate::topology;
use fork_join::{ForkJoin, Spin};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Longest time a thread spins before it sleeps.
pub const SPIN_MAX: Duration = Duration::from_micros(50);
/// Most threads a pool may have.
pub const MAX_THREADS: usize = 1024;
/// A spin that failed halves the next one, down to this.
const SPIN_MIN: Duration = Duration::from_micros(2);
/// Looks at the word between two looks at the clock.
const LOOKS_PER_CLOCK: u32 = 32;

/// Why a pool could not be made.
#[derive(Debug, Error)]
pub enum PoolError {
    /// The thread count is 0 or absurd.
    #[error("cannot make a pool of {threads} threads: use 1 to {MAX_THREADS}")]
    ThreadCount {
        /// What was asked for.
        threads: usize,
    },
    /// The system refused a thread.
    #[error(
        "cannot start pool thread {thread}: {source}; raise the process limit (ulimit -u) or use fewer threads"
    )]
    Spawn {
        /// Index of the thread in the team.
        thread: usize,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The CPU list could not be applied.
    #[error("cannot bind threads to CPUs {cpus:?}: {source}; name CPUs this process may use")]
    Affinity {
        /// The CPUs asked for.
        cpus: Vec<usize>,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl PoolError {
    /// Stable name of the error for programs.
    pub fn code(&self) -> &'static str {
        match self {
            PoolError::ThreadCount { .. } => "pool_thread_count",
            PoolError::Spawn { .. } => "pool_spawn_failed",
            PoolError::Affinity { .. } => "pool_affinity_failed",
        }
    }
}

/// What caller and helpers share.
#[derive(Debug)]
struct Shared {
    fork_join: ForkJoin,
    spin_max: Duration,
    /// Set while the caller has no next job: spinners offer their processors to others.
    resting: AtomicBool,
    /// Set while a job runs; a second `run` at that time does its work alone.
    busy: AtomicBool,
    /// The first panic of a helper in the current job. Locked only on that path.
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// A static team of threads. The thread that calls [`ThreadPool::run`] is thread 0 of the team.
#[derive(Debug)]
pub struct ThreadPool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

impl ThreadPool {
    /// A pool of `threads` threads, the caller included.
    ///
    /// # Errors
    /// [`PoolError::ThreadCount`] for 0 or more than [`MAX_THREADS`], [`PoolError::Spawn`] when the system refuses.
    pub fn new(threads: usize) -> Result<Self, PoolError> {
        let helpers = match threads {
            1..=MAX_THREADS => threads - 1,
            _ => return Err(PoolError::ThreadCount { threads }),
        };
        // A spinner that keeps the thread it waits for off the processor can only lose.
        let spin_max = if threads > topology::allowed_cpus().len() { Duration::ZERO } else { SPIN_MAX };
        let mut pool = Self {
            shared: Arc::new(Shared {
                fork_join: ForkJoin::new(),
                spin_max,
                resting: AtomicBool::new(false),
                busy: AtomicBool::new(false),
                panicked: AtomicBool::new(false),
                panic: Mutex::new(None),
            }),
            helpers: Vec::with_capacity(helpers),
        };
        for thread in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let handle = std::thread::Builder::new()
                .name(format!("spillway-{thread}"))
                .spawn(move || help(&shared, thread))
                .map_err(|source| PoolError::Spawn { thread, source })?;
            pool.helpers.push(handle);
        }
        Ok(pool)
    }

    /// A pool whose threads, the calling thread included, may only run on `cpus` (a NUMA node's, say).
    ///
    /// # Errors
    /// As [`ThreadPool::new`]; [`PoolError::Affinity`] when the list is empty or names CPUs the process may not use.
    pub fn with_cpus(threads: usize, cpus: &[usize]) -> Result<Self, PoolError> {
        // New threads inherit the set of the thread that starts them.
        topology::bind_current_thread(cpus)
            .map_err(|source| PoolError::Affinity { cpus: cpus.to_vec(), source })?;
        Self::new(threads)
    }

    /// Threads in the team, the caller included.
    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs `f(t)` for every `t` in `0..threads()`, `t = 0` on the calling thread, and returns when all are done.
    ///
    /// The calls may run at the same time or one after another: when the pool is already running a job (a nested
    /// `run`, or one from another thread), the caller makes all calls itself. So `f` must not wait for another `t`.
    ///
    /// # Panics
    /// When `f` panics on any thread, after all threads are done; with the payload of the first panic seen.
    pub fn run(&self, f: &(dyn Fn(usize) + Sync)) {
        if self.helpers.is_empty() || self.shared.busy.swap(true, Ordering::Acquire) {
            (0..self.threads()).for_each(f);
            return;
        }
        if self.shared.resting.load(Ordering::Relaxed) {
            self.shared.resting.store(false, Ordering::Relaxed);
        }
        let helpers = u32::try_from(self.helpers.len()).unwrap_or(u32::MAX);
        let guard = Join { shared: &self.shared };
        // SAFETY: `busy` was ours to set, so no other job is unfinished; `guard` waits for the helpers before `f` can
        // go out of scope, also when `f(0)` unwinds; `helpers` threads loop in `help`.
        unsafe { self.shared.fork_join.publish(Some(f), helpers) };
        f(0);
        drop(guard);
        if self.shared.panicked.load(Ordering::Relaxed) && self.shared.panicked.swap(false, Ordering::Relaxed)
        {
            let payload = self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
            resume_unwind(payload.unwrap_or_else(|| Box::new("a pool thread panicked")));
        }
    }
}

impl ThreadPool {
    /// Says that the next job has to come from elsewhere first, perhaps from a process that needs these processors: helpers
    /// that spin for it give way to any other thread. They go on spinning for their time, since a processor that falls
    /// asleep takes longer to wake than a short step takes.
    pub fn rest(&self) {
        self.shared.resting.store(true, Ordering::Relaxed);
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        // SAFETY: `&mut self` proves that no `run` is in progress; with no job nobody calls `finish`.
        unsafe { self.shared.fork_join.publish(None, 0) };
        for helper in self.helpers.drain(..) {
            // A helper catches the panics of jobs, so it ends normally.
            let _ = helper.join();
        }
    }
}

/// Waits for the helpers when dropped, then lets the next job in.
struct Join<'a> {
    shared: &'a Shared,
}

impl Drop for Join<'_> {
    fn drop(&mut self) {
        self.shared.fork_join.wait(&mut Budget::new(self.shared.spin_max));
        self.shared.busy.store(false, Ordering::Release);
    }
}

/// A helper's life: wait for a job, run it, report.
fn help(shared: &Shared, thread: usize) {
    let mut seen = 0;
    let mut budget = Budget::new(shared.spin_max);
    while let Some(job) = shared.fork_join.next(&mut seen, &mut Helper { budget: &mut budget, shared }) {
        budget.renew();
        // SAFETY: the caller keeps the job alive until every helper has called `finish`.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*job)(thread) }));
        if let Err(payload) = result {
            shared.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.fork_join.finish();
    }
}

/// How long to spin: the full time while spinning pays, half as long after every time it did not.
#[derive(Debug)]
struct Budget {
    max: Duration,
    current: Duration,
    since: Option<Instant>,
    looks: u32,
    spent: bool,
}

impl Budget {
    fn new(max: Duration) -> Self {
        Self { max, current: max, since: None, looks: 0, spent: false }
    }

    /// The wait is over; prepares for the next one.
    fn renew(&mut self) {
        self.current = if self.spent { (self.current / 2).max(SPIN_MIN).min(self.max) } else { self.max };
        self.since = None;
        self.looks = 0;
        self.spent = false;
    }
}

/// A helper between two jobs: spins within its budget, politely while the team rests.
struct Helper<'a> {
    budget: &'a mut Budget,
    shared: &'a Shared,
}

impl Spin for Helper<'_> {
    fn spin(&mut self) -> bool {
        if self.shared.resting.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        self.budget.spin()
    }
}

impl Spin for Budget {
    fn spin(&mut self) -> bool {
        std::hint::spin_loop();
        self.looks = self.looks.wrapping_add(1);
        if !self.looks.is_multiple_of(LOOKS_PER_CLOCK) && !self.max.is_zero() {
            return true;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        self.spent = since.elapsed() >= self.current;
        !self.spent
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::thread::JoinHandleExt;
    use std::sync::atomic::AtomicUsize;

    /// Every thread index runs exactly once per job, for many jobs and team sizes.
    #[test]
    fn runs_each_index_once() {
        for threads in 1..=5 {
            let pool = ThreadPool::new(threads).unwrap();
            assert_eq!(pool.threads(), threads);
            for _ in 0..500 {
                let hits: Vec<_> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
                pool.run(&|t| {
                    hits[t].fetch_add(1, Ordering::Relaxed);
                });
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
            }
        }
    }

    /// The caller is thread 0 and sees what the helpers wrote.
    #[test]
    fn caller_is_thread_zero() {
        let pool = ThreadPool::new(3).unwrap();
        let caller = std::thread::current().id();
        let on_caller = AtomicUsize::new(usize::MAX);
        pool.run(&|t| {
            if std::thread::current().id() == caller {
                on_caller.store(t, Ordering::Relaxed);
            }
        });
        assert_eq!(on_caller.into_inner(), 0);
    }

    /// A panic on a helper or on the caller reaches the caller, and the pool works afterwards.
    #[test]
    fn panics_reach_the_caller() {
        let pool = ThreadPool::new(3).unwrap();
        for bad in 0..3 {
            let done = AtomicUsize::new(0);
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|t| {
                    assert!(t != bad, "boom {t}");
                    done.fetch_add(1, Ordering::Relaxed);
                });
            }));
            let payload = result.unwrap_err();
            assert_eq!(*payload.downcast::<String>().unwrap(), format!("boom {bad}"));
            assert_eq!(done.into_inner(), 2);
        }
        pool.run(&|_| ());
    }

    /// A job may use the pool it runs on: the inner job is done by the thread that asks.
    #[test]
    fn nested_run_is_serial() {
        let pool = ThreadPool::new(2).unwrap();
        let calls = AtomicUsize::new(0);
        pool.run(&|_| {
            pool.run(&|_| {
                calls.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(calls.into_inner(), 4);
    }

    /// After the spin budget a helper sleeps and uses next to no processor time.
    #[test]
    fn idle_pool_sleeps() {
        let pool = ThreadPool::new(2).unwrap();
        pool.run(&|_| ());
        let before = cpu_time(&pool.helpers[0]);
        let idle = Duration::from_millis(200);
        std::thread::park_timeout(idle);
        let used = cpu_time(&pool.helpers[0]) - before;
        assert!(used < idle / 20, "an idle helper used {used:?} in {idle:?}");
    }

    /// Processor time a thread has used so far.
    fn cpu_time(thread: &JoinHandle<()>) -> Duration {
        let mut clock = 0;
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the thread has not been joined, and both results have valid places to go.
        unsafe {
            assert_eq!(libc::pthread_getcpuclockid(thread.as_pthread_t(), &raw mut clock), 0);
            assert_eq!(libc::clock_gettime(clock, &raw mut time), 0);
        }
        Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).unwrap())
    }

    /// Bad requests are errors with stable codes.
    #[test]
    fn refuses_bad_requests() {
        assert_eq!(ThreadPool::new(0).unwrap_err().code(), "pool_thread_count");
        assert_eq!(ThreadPool::new(MAX_THREADS + 1).unwrap_err().code(), "pool_thread_count");
        assert_eq!(ThreadPool::with_cpus(1, &[]).unwrap_err().code(), "pool_affinity_failed");
    }

    /// A bound pool runs on the CPUs it was given.
    #[test]
    fn binds_to_cpus() {
        std::thread::spawn(|| {
            let cpu = topology::allowed_cpus()[0];
            let pool = ThreadPool::with_cpus(2, &[cpu]).unwrap();
            pool.run(&|_| assert_eq!(topology::allowed_cpus(), [cpu]));
        })
        .join()
        .unwrap();
    }
}
