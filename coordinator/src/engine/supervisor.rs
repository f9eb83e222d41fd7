//! What is done about a worker that has failed: start another one, later if that happens often, or give up.

use super::sequence::POISONOUS;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Failures within [`WINDOW`] after which a pipeline is given up, unless the options say otherwise.
pub(crate) const DEFAULT_LIMIT: usize = 5;
/// How long a failure counts.
pub(super) const WINDOW: Duration = Duration::from_secs(60);
/// Wait before a start after which no step was completed; doubled with each further one.
const FIRST_DELAY: Duration = Duration::from_millis(100);
const LONGEST_DELAY: Duration = Duration::from_secs(5);

/// What to do about a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Replace the worker after this wait.
    Restart(Duration),
    /// It has failed too often.
    GiveUp,
}

/// Remembers failures.
#[derive(Debug)]
pub(super) struct Supervisor {
    limit: usize,
    failures: VecDeque<Instant>,
    /// Failures since a step was completed, or workers have been there for long.
    fruitless: u32,
    /// Since when all workers have been there again.
    complete: Option<Instant>,
}

impl Supervisor {
    /// Gives up at more than `limit` failures within [`WINDOW`], or without a step in between; 0 restarts nothing.
    pub(super) fn new(limit: usize) -> Supervisor {
        Supervisor { limit, failures: VecDeque::new(), fruitless: 0, complete: None }
    }

    /// A step was completed.
    pub(super) fn progressed(&mut self) {
        self.fruitless = 0;
    }

    /// All workers are there again.
    pub(super) fn recovered(&mut self, now: Instant) {
        self.complete = Some(now);
    }

    /// A failure, and those before it, were the doing of a request that has ended for it: they say nothing about workers.
    pub(super) fn explained(&mut self) {
        for _ in 1..POISONOUS {
            self.failures.pop_back();
        }
        self.fruitless = self.fruitless.saturating_sub(POISONOUS - 1);
    }

    /// A worker has failed.
    pub(super) fn judge(&mut self, now: Instant) -> Verdict {
        while self.failures.front().is_some_and(|at| now.duration_since(*at) > WINDOW) {
            self.failures.pop_front();
        }
        self.failures.push_back(now);
        if self.complete.take().is_some_and(|since| now.duration_since(since) > WINDOW) {
            self.fruitless = 0;
        }
        self.fruitless = self.fruitless.saturating_add(1);
        // Failures that take long, such as loads that hang, are never many within the window.
        if self.failures.len() > self.limit || self.fruitless as usize > self.limit {
            return Verdict::GiveUp;
        }
        Verdict::Restart(match self.fruitless {
            1 => Duration::ZERO,
            more => {
                FIRST_DELAY.saturating_mul(1u32.checked_shl(more - 2).unwrap_or(u32::MAX)).min(LONGEST_DELAY)
            }
        })
    }

    /// Failures within the window, the last one included.
    pub(super) fn recent(&self) -> usize {
        self.failures.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_worker_that_fails_before_it_has_done_anything_waits_longer_and_longer() {
        let mut supervisor = Supervisor::new(4);
        let now = Instant::now();
        let delays: Vec<Verdict> = (0..5).map(|_| supervisor.judge(now)).collect();
        let after = |ms| Verdict::Restart(Duration::from_millis(ms));
        assert_eq!(delays, [after(0), after(100), after(200), after(400), Verdict::GiveUp]);
        let mut supervisor = Supervisor::new(4);
        let delays: Vec<Verdict> = (0..3)
            .map(|_| {
                supervisor.progressed();
                supervisor.judge(now)
            })
            .collect();
        assert_eq!(delays, [after(0); 3], "what has worked in between may start at once");
    }

    /// One client whose requests crash workers must not end the model for the others.
    #[test]
    fn failures_that_a_request_is_blamed_for_do_not_count() {
        let mut supervisor = Supervisor::new(3);
        let now = Instant::now();
        for _ in 0..20 {
            assert_eq!(supervisor.judge(now), Verdict::Restart(Duration::ZERO));
            supervisor.explained();
        }
        assert_eq!(supervisor.recent(), 0);
    }

    #[test]
    fn old_failures_are_forgotten() {
        let mut supervisor = Supervisor::new(1);
        let now = Instant::now();
        assert_eq!(supervisor.judge(now), Verdict::Restart(Duration::ZERO));
        supervisor.progressed();
        assert_eq!(supervisor.judge(now + WINDOW * 2), Verdict::Restart(Duration::ZERO));
        assert_eq!(supervisor.judge(now + WINDOW * 2), Verdict::GiveUp);
    }

    #[test]
    fn failures_that_are_far_apart_count_when_nothing_came_of_the_starts_between_them() {
        let far = |nth: u32| Instant::now() + WINDOW * 2 * nth;
        let (mut hanging, mut idle) = (Supervisor::new(3), Supervisor::new(3));
        for nth in 0..9 {
            assert_eq!(hanging.judge(far(nth)) == Verdict::GiveUp, nth >= 3, "loads that hang, {nth}");
            assert_eq!(idle.judge(far(nth)), Verdict::Restart(Duration::ZERO), "workers without work, {nth}");
            idle.recovered(far(nth));
        }
    }

    #[test]
    fn a_limit_of_zero_restarts_nothing() {
        assert_eq!(Supervisor::new(0).judge(Instant::now()), Verdict::GiveUp);
    }

    proptest! {
        /// Whatever the times: never more than the limit within a window or in a row, and never given up below it.
        #[test]
        fn gives_up_exactly_when_a_window_or_a_row_holds_more_than_the_limit(
            limit in 0usize..20, gaps in prop::collection::vec((0u64..40_000, any::<bool>()), 1..60),
        ) {
            let mut supervisor = Supervisor::new(limit);
            let (mut now, mut times, mut row) = (Instant::now(), Vec::new(), 0);
            for (gap, progressed) in gaps {
                now += Duration::from_millis(gap);
                if progressed {
                    supervisor.progressed();
                    row = 0;
                }
                times.push(now);
                row += 1;
                let within = times.iter().filter(|at| now.duration_since(**at) <= WINDOW).count();
                match supervisor.judge(now) {
                    Verdict::GiveUp => prop_assert!(within > limit || row > limit),
                    Verdict::Restart(delay) => {
                        prop_assert!(within <= limit && row <= limit && delay <= LONGEST_DELAY);
                    }
                }
            }
        }
    }
}
