//! The lock-free heart of the pool: one caller hands the same job to a fixed team and waits for all of it.
//!
//! Two futex words carry everything. `epoch` holds `2 * number of jobs published`, plus 1 while a helper sleeps on it;
//! `pending` holds `2 * helpers still working`, plus 1 while the caller sleeps on it. The sleep bit lives in the word
//! it guards, so a publisher sees it in the very exchange that publishes: no wake-up is lost and no system call is
//! made when nobody sleeps. The model test under `cfg(loom)` checks this.

use super::futex::FutexWord;
#[cfg(loom)]
use loom::cell::UnsafeCell;
#[cfg(loom)]
use loom::sync::atomic::Ordering;
#[cfg(not(loom))]
use std::sync::atomic::Ordering;

const SLEEPING: u32 = 1;
const ONE: u32 = 2;

/// What the helpers run: the job's data with its lifetime erased.
type JobPtr = *const (dyn Fn(usize) + Sync);

/// Gives up the processor for a moment between two looks at a word; returns false when the budget is spent.
pub(super) trait Spin {
    /// Called between two looks.
    fn spin(&mut self) -> bool;
}

/// The cell that holds the current job; loom tracks accesses to its own version.
#[cfg(not(loom))]
#[derive(Debug)]
struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }
    fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }
    fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// State shared by the caller and its helpers.
#[derive(Debug)]
pub(super) struct ForkJoin {
    epoch: FutexWord,
    pending: FutexWord,
    job: UnsafeCell<Option<JobPtr>>,
}

// SAFETY: `job` is written only by `publish`, which requires that no helper works (its contract), and read by helpers
// only between observing the new epoch (acquire) and their `finish` (release): accesses never overlap. The pointee is
// `Sync`, so calling it from other threads is fine.
unsafe impl Sync for ForkJoin {}
// SAFETY: as above; the pointer is only followed while the publisher keeps the job alive.
unsafe impl Send for ForkJoin {}

impl ForkJoin {
    pub(super) fn new() -> Self {
        Self { epoch: FutexWord::default(), pending: FutexWord::default(), job: UnsafeCell::new(None) }
    }

    /// Hands `job` to `helpers` helpers; `None` tells them to end.
    ///
    /// # Safety
    /// No other `publish` is unfinished: [`ForkJoin::wait`] has returned for every earlier one. Exactly `helpers`
    /// threads loop on [`ForkJoin::next`]. The job stays alive until `wait` returns.
    pub(super) unsafe fn publish(&self, job: Option<&(dyn Fn(usize) + Sync)>, helpers: u32) {
        let job = job.map(|job| {
            let job: *const (dyn Fn(usize) + Sync + '_) = job;
            // SAFETY: only the lifetime changes; the caller keeps the job alive until `wait` returns, and helpers do
            // not follow the pointer after `finish`.
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), JobPtr>(job) }
        });
        // SAFETY: no helper reads the cell now, by this function's contract.
        self.job.with_mut(|cell| unsafe { *cell = job });
        self.pending.word().store(helpers * ONE, Ordering::Relaxed);
        let epoch = self.epoch.word().load(Ordering::Relaxed);
        let next = (epoch & !SLEEPING).wrapping_add(ONE);
        // Release: the job and the count are visible to whoever sees the new epoch.
        if self.epoch.word().swap(next, Ordering::AcqRel) & SLEEPING != 0 {
            self.epoch.wake_all();
        }
    }

    /// Waits for the job after the one `seen` stands for and updates `seen`. `None`: the team ends.
    pub(super) fn next(&self, seen: &mut u32, spin: &mut impl Spin) -> Option<JobPtr> {
        let mut may_spin = true;
        loop {
            let epoch = self.epoch.word().load(Ordering::Acquire);
            if epoch & !SLEEPING != *seen {
                *seen = epoch & !SLEEPING;
                // SAFETY: between the new epoch and this helper's `finish` nobody writes the cell.
                return self.job.with(|cell| unsafe { *cell });
            }
            if may_spin {
                may_spin = spin.spin();
                continue;
            }
            let asleep = epoch | SLEEPING;
            let claimed = epoch == asleep
                || self
                    .epoch
                    .word()
                    .compare_exchange(epoch, asleep, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok();
            if claimed {
                self.epoch.wait(asleep);
            }
        }
    }

    /// A helper reports that it is done with the current job and will not touch it again.
    pub(super) fn finish(&self) {
        // Release: everything the helper did is visible to the caller after its `wait`.
        if self.pending.word().fetch_sub(ONE, Ordering::AcqRel) == ONE | SLEEPING {
            self.pending.wake_all();
        }
    }

    /// Waits until every helper has finished the published job.
    pub(super) fn wait(&self, spin: &mut impl Spin) {
        let mut may_spin = true;
        loop {
            let pending = self.pending.word().load(Ordering::Acquire);
            if pending < ONE {
                return;
            }
            if may_spin {
                may_spin = spin.spin();
                continue;
            }
            let asleep = pending | SLEEPING;
            let claimed = pending == asleep
                || self
                    .pending
                    .word()
                    .compare_exchange(pending, asleep, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok();
            if claimed {
                self.pending.wait(asleep);
            }
        }
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;

    /// Sleeps at once: every interleaving of sleeping and waking is then explored.
    struct NoSpin;
    impl Spin for NoSpin {
        fn spin(&mut self) -> bool {
            false
        }
    }

    /// Every helper runs every job exactly once, the caller sees their effects, and the team ends: over all schedules
    /// with at most `preemptions` forced switches (the search grows about twentyfold with each).
    fn check(helpers: usize, jobs: usize, preemptions: usize) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(preemptions);
        model.check(move || {
            let shared = Arc::new(ForkJoin::new());
            let total = Arc::new(AtomicUsize::new(0));
            let team: Vec<_> = (1..=helpers)
                .map(|thread| {
                    let shared = shared.clone();
                    loom::thread::spawn(move || {
                        let mut seen = 0;
                        while let Some(job) = shared.next(&mut seen, &mut NoSpin) {
                            // SAFETY: the job lives until the caller's `wait` returns, which needs our `finish`.
                            unsafe { (*job)(thread) };
                            shared.finish();
                        }
                    })
                })
                .collect();
            let count = total.clone();
            let job = move |thread: usize| {
                count.fetch_add(thread, Ordering::Relaxed);
            };
            for done in 1..=jobs {
                // SAFETY: as many helpers as threads, the job outlives `wait`, and no earlier job is unfinished.
                unsafe { shared.publish(Some(&job), u32::try_from(helpers).unwrap()) };
                shared.wait(&mut NoSpin);
                assert_eq!(total.load(Ordering::Relaxed), done * helpers * (helpers + 1) / 2);
            }
            // SAFETY: as above; the team ends.
            unsafe { shared.publish(None, 0) };
            for helper in team {
                helper.join().unwrap();
            }
        });
    }

    #[test]
    fn loom_two_helpers_one_job() {
        check(2, 1, 2);
    }

    #[test]
    fn loom_one_helper_two_jobs() {
        check(1, 2, 3);
    }
}
