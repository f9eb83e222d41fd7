//! Notices a worker that does not get on with the step in hand, from the pulse on its status page.
//!
//! How long a worker may be silent is measured, not configured: a multiple of the longest silences of steps of about the same
//! number of tokens. A worker that has become twenty times slower still shows a pulse in time; one that is stuck does not. A
//! process that is known to be stopped has less time.

use spillway_protocol::status::{Status, WorkerState};
use std::time::{Duration, Instant};

/// Silence is a failure from this multiple of what is normal on.
const PATIENCE: u32 = 30;
/// Silence is no failure before that, however short steps are: the machine may be busy.
pub(super) const SHORTEST: Duration = Duration::from_secs(1);
/// Highest limit for steps of a kind that has not been seen yet.
const UNKNOWN: Duration = Duration::from_secs(60);
/// A gap between two looks after which this process itself, or the machine, must have been stopped.
const ASLEEP: Duration = Duration::from_secs(1);
/// Kinds of steps: by the logarithm of their tokens.
const KINDS: usize = 20;

/// The stage that should get on, and has been silent for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Silent {
    pub stage: usize,
    /// The first of the stages before it that wait for it; itself when none does.
    pub first: usize,
    pub silence: Duration,
    /// Longer than a worker that computes would be.
    pub hung: bool,
}

/// The step that comes back next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Awaited {
    pub step: u64,
    pub tokens: usize,
}

#[derive(Debug, Default)]
pub(super) struct Watchdog {
    /// Usual longest silence by kind of step.
    normal: [Option<Duration>; KINDS],
    pulse: Option<Pulse>,
    looked: Option<Instant>,
}

/// The last sign of life, and of whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pulse {
    stage: usize,
    step: u64,
    layers: u64,
    state: Option<WorkerState>,
    since: Instant,
}

impl Watchdog {
    /// Looks at the workers, in pipeline order, while `awaited` is under way.
    pub(super) fn look(
        &mut self,
        now: Instant,
        awaited: Awaited,
        workers: impl Iterator<Item = Status>,
    ) -> Option<Silent> {
        let asleep = self.looked.replace(now).is_some_and(|last| now.duration_since(last) > ASLEEP);
        // The stage that has the step in hand, or should have taken it. One that waits for room waits for the next one, which may
        // still be at an older step.
        let mut late = workers.enumerate().skip_while(|(_, status)| has_done(status, awaited.step));
        let (first, mut status) = late.next()?;
        let mut stage = first;
        while status.state == Some(WorkerState::Sending)
            && let Some(next) = late.next()
        {
            (stage, status) = next;
        }
        let seen = Pulse {
            stage,
            step: status.step,
            layers: status.counters.layers,
            state: status.state,
            since: now,
        };
        let Some(last) = self.pulse.filter(|last| Pulse { since: now, ..*last } == seen && !asleep) else {
            if let Some(last) = self.pulse.replace(seen)
                && !asleep
                && last.stage == stage
            {
                self.learn(awaited.tokens, now.duration_since(last.since));
            }
            return None;
        };
        let silence = now.duration_since(last.since);
        let hung = silence > self.limit(awaited.tokens);
        (silence > SHORTEST).then_some(Silent { stage, first, silence, hung })
    }

    /// A step came back at `now`; `look` is the longest silence that nobody looked into.
    pub(super) fn done(&mut self, now: Instant, awaited: Awaited, look: Duration) {
        let asleep = self.looked.is_none_or(|last| now.duration_since(last) > ASLEEP);
        match self.pulse.filter(|_| !asleep) {
            // A device may say nothing until a step is over, which may take seconds.
            Some(last) => self.learn(awaited.tokens, now.duration_since(last.since).max(look)),
            None => {
                self.normal[kind(awaited.tokens)].get_or_insert(look);
            }
        }
        self.rest();
    }

    /// Nothing is under way.
    pub(super) fn rest(&mut self) {
        self.pulse = None;
        self.looked = None;
    }

    /// Longer silences count at once, shorter ones slowly.
    fn learn(&mut self, tokens: usize, silence: Duration) {
        let normal = self.normal[kind(tokens)].get_or_insert(silence);
        *normal = if silence > *normal { silence } else { *normal - (*normal - silence) / 16 };
    }

    fn limit(&self, tokens: usize) -> Duration {
        let patience = |normal: Duration| (normal * PATIENCE).max(SHORTEST);
        match self.normal[kind(tokens)] {
            Some(measured) => patience(measured),
            None => self.normal(kind(tokens)).map_or(UNKNOWN, |guessed| patience(guessed).min(UNKNOWN)),
        }
    }

    /// What is usual for a kind of step; from the next smaller kind in proportion, else as for a larger one.
    fn normal(&self, kind: usize) -> Option<Duration> {
        let smaller = (0..=kind).rev().find_map(|known| Some((known, self.normal[known]?)));
        match smaller {
            Some((known, normal)) => Some(normal * (1 << (kind - known))),
            None => self.normal[kind..].iter().find_map(|normal| *normal),
        }
    }
}

fn kind(tokens: usize) -> usize {
    (tokens.max(1).ilog2() as usize).min(KINDS - 1)
}

fn has_done(status: &Status, step: u64) -> bool {
    let busy = matches!(status.state, Some(WorkerState::Stepping | WorkerState::Sending));
    status.step > step || (status.step == step && !busy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_protocol::status::Counters;

    const DECODE: Awaited = Awaited { step: 5, tokens: 1 };
    const LOOK: Duration = Duration::from_millis(20);

    fn worker(step: u64, layers: u64, state: WorkerState) -> Status {
        let counters = Counters { layers, ..Counters::default() };
        Status { pid: 1, epoch: 1, state: Some(state), step, bytes_allocated: 0, counters }
    }

    fn done(step: u64) -> Status {
        worker(step, 100, WorkerState::Idle)
    }

    /// Looks every 20 ms for `seconds` at workers that do not move; when it barks, and at whom.
    fn still(
        dog: &mut Watchdog,
        awaited: Awaited,
        workers: [Status; 2],
        seconds: u64,
    ) -> Option<(Silent, Duration)> {
        let start = Instant::now();
        let mut looks = (0..seconds * 50).map(|look| LOOK * u32::try_from(look).unwrap());
        let mut silent = |at| dog.look(start + at, awaited, workers.into_iter()).filter(|silent| silent.hung);
        looks.find_map(|at| Some((silent(at)?, at)))
    }

    fn trained() -> Watchdog {
        let mut dog = Watchdog::default();
        dog.done(Instant::now(), DECODE, LOOK);
        dog
    }

    #[test]
    fn a_worker_that_stops_within_short_steps_is_noticed_after_a_second() {
        let (hung, at) =
            still(&mut trained(), DECODE, [done(5), worker(5, 7, WorkerState::Stepping)], 5).unwrap();
        assert_eq!(hung.stage, 1);
        assert!(at <= SHORTEST + 2 * LOOK, "{at:?}");
    }

    #[test]
    fn a_worker_that_does_not_take_its_step_is_the_one_that_hangs() {
        let (hung, _) = still(&mut trained(), DECODE, [worker(4, 7, WorkerState::Idle), done(4)], 5).unwrap();
        assert_eq!(hung.stage, 0);
    }

    /// With more steps under way than there is room for, one that hangs holds others up before their part of the step that is due.
    #[test]
    fn a_worker_that_takes_nothing_is_the_one_that_hangs_and_not_who_waits_for_room() {
        let (waits, next) = (worker(5, 7, WorkerState::Sending), worker(3, 2, WorkerState::Stepping));
        let (hung, _) = still(&mut trained(), DECODE, [waits, next], 5).unwrap();
        assert_eq!((hung.first, hung.stage), (0, 1));
        // Nobody waits for the last one's logits but this process.
        let (hung, _) = still(&mut trained(), DECODE, [done(5), waits], 5).unwrap();
        assert_eq!((hung.first, hung.stage), (1, 1));
    }

    #[test]
    fn nothing_is_wrong_while_logits_are_on_their_way() {
        assert_eq!(still(&mut trained(), DECODE, [done(5), done(5)], 100), None);
    }

    #[test]
    fn a_first_step_has_a_minute() {
        let workers = [worker(5, 0, WorkerState::Stepping), done(4)];
        let (_, at) = still(&mut Watchdog::default(), DECODE, workers, 100).unwrap();
        assert!(at > UNKNOWN && at < UNKNOWN * 2);
    }

    /// A device that shows no pulse within its steps has as long for the next one as its last one makes usual, and no longer.
    #[test]
    fn a_step_without_any_pulse_is_usual_when_it_comes_back() {
        let prompt = Awaited { step: 5, tokens: 1024 };
        let stepping = || [worker(5, 0, WorkerState::Stepping), done(4)];
        let mut dog = trained();
        let mut run = |seconds: u32| {
            let start = Instant::now();
            let mut looks = (0..seconds * 50).map(|look| start + LOOK * look);
            let hung = looks.any(|at| dog.look(at, prompt, stepping().into_iter()).is_some_and(|it| it.hung));
            dog.done(start + Duration::from_secs(seconds.into()), prompt, LOOK);
            hung
        };
        assert!(!run(5), "the first one has a minute");
        assert!(!run(5) && !run(100));
        // Longer ones become usual at once, shorter ones slowly.
        assert!(!run(5) && !run(5));
        let mut dog = trained();
        dog.done(Instant::now(), prompt, LOOK);
        assert!(still(&mut dog, prompt, stepping(), 5).is_some(), "a short one before");
    }

    /// Layers that usually take `usual` take `slower` times as long.
    fn slowed(usual: Duration, slower: u32) -> Option<Silent> {
        let mut dog = Watchdog::default();
        let mut now = Instant::now();
        let mut barked = None;
        for layer in 0..60 {
            let lasts = if layer < 30 { usual } else { usual * slower };
            let until = now + lasts;
            while now < until {
                let workers = [worker(5, layer, WorkerState::Stepping), done(4)];
                barked = barked.or(dog.look(now, DECODE, workers.into_iter()).filter(|silent| silent.hung));
                now += LOOK;
            }
        }
        barked
    }

    #[test]
    fn a_worker_that_is_twenty_times_slower_is_left_alone() {
        for usual in [25, 100, 900] {
            assert_eq!(slowed(Duration::from_millis(usual), 20), None, "{usual} ms");
        }
        assert!(slowed(Duration::from_millis(100), 40).is_some(), "the test can fail");
    }

    #[test]
    fn larger_steps_may_take_longer_in_proportion() {
        let mut dog = trained();
        let prompt = Awaited { step: 5, tokens: 512 };
        let (_, at) = still(&mut dog, prompt, [worker(5, 0, WorkerState::Stepping), done(4)], 600).unwrap();
        assert!(at > UNKNOWN && at < UNKNOWN * 2, "but not for ever: {at:?}");
        let (_, at) = still(
            &mut trained(),
            Awaited { step: 5, tokens: 64 },
            [worker(5, 0, WorkerState::Stepping), done(4)],
            600,
        )
        .unwrap();
        assert!(at > LOOK * PATIENCE * 63 && at < LOOK * PATIENCE * 66, "{at:?}");
    }

    #[test]
    fn time_in_which_this_process_slept_does_not_count() {
        let mut dog = trained();
        let start = Instant::now();
        let workers = || [worker(5, 1, WorkerState::Stepping), done(4)].into_iter();
        assert_eq!(dog.look(start, DECODE, workers()), None);
        assert_eq!(dog.look(start + Duration::from_secs(3600), DECODE, workers()), None);
        assert_eq!(dog.look(start + Duration::from_secs(3600) + LOOK, DECODE, workers()), None);
    }
}
