//! Where a worker is between its start and its end. Every way it may go is a row of one table, and whatever leads from a state
//! with a process to one without ends that process: there is no third possibility, so nothing is left behind.

use serde::Serialize;

/// Where the worker of a stage is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Lifecycle {
    /// Its process has been started and has not said anything yet.
    Spawning,
    /// It has been told what to load.
    Loading,
    /// It holds its band and waits until the others do.
    Loaded,
    /// It serves steps.
    Ready,
    /// It has been asked to end.
    Draining,
    /// Its process is gone.
    Dead,
    /// Its process is gone, and the next one waits for its time.
    BackingOff,
    /// Its process is gone, and there will be no other.
    Failed,
}

/// What happens to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// Its process said hello and got its band.
    Greeted,
    /// It reported that its band is loaded.
    Loaded,
    /// It was told to serve.
    Served,
    /// It was asked to end.
    Asked,
    /// It ended, broke the protocol, reported an error or hangs.
    Ended,
    /// Another start has to wait.
    Delayed,
    /// Another process takes its place.
    Replaced,
    /// There will be no other start.
    GivenUp,
}

/// Every way from one state to another. What is not here does not happen.
const WAYS: &[(Lifecycle, Change, Lifecycle)] = {
    use Lifecycle::{BackingOff, Dead, Draining, Failed, Loaded, Loading, Ready, Spawning};
    &[
        (Spawning, Change::Greeted, Loading),
        (Loading, Change::Loaded, Loaded),
        (Loaded, Change::Served, Ready),
        (Spawning, Change::Asked, Draining),
        (Loading, Change::Asked, Draining),
        (Loaded, Change::Asked, Draining),
        (Ready, Change::Asked, Draining),
        (Spawning, Change::Ended, Dead),
        (Loading, Change::Ended, Dead),
        (Loaded, Change::Ended, Dead),
        (Ready, Change::Ended, Dead),
        (Draining, Change::Ended, Dead),
        (Dead, Change::Delayed, BackingOff),
        (Dead, Change::Replaced, Spawning),
        (BackingOff, Change::Replaced, Spawning),
        (Dead, Change::GivenUp, Failed),
        (BackingOff, Change::GivenUp, Failed),
    ]
};

impl Lifecycle {
    /// The word for people and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Lifecycle::Spawning => "spawning",
            Lifecycle::Loading => "loading",
            Lifecycle::Loaded => "loaded",
            Lifecycle::Ready => "ready",
            Lifecycle::Draining => "draining",
            Lifecycle::Dead => "dead",
            Lifecycle::BackingOff => "backing_off",
            Lifecycle::Failed => "failed",
        }
    }

    /// Whether there is a process.
    pub fn has_process(self) -> bool {
        !matches!(self, Lifecycle::Dead | Lifecycle::BackingOff | Lifecycle::Failed)
    }

    /// Whether it holds its band.
    pub(super) fn holds_band(self) -> bool {
        matches!(self, Lifecycle::Loaded | Lifecycle::Ready)
    }

    fn after(self, change: Change) -> Option<Lifecycle> {
        WAYS.iter().find(|(from, by, _)| (*from, *by) == (self, change)).map(|(_, _, to)| *to)
    }
}

/// Something that can be ended for good: nothing is left of it afterwards.
pub(super) trait End {
    fn end(&mut self);
}

/// A process and where it is; only [`Life::enter`] and [`Life::replace`] change that.
#[derive(Debug)]
pub(super) struct Life<P> {
    state: Lifecycle,
    process: P,
}

impl<P: End> Life<P> {
    /// A process that has just been started.
    pub(super) fn new(process: P) -> Life<P> {
        Life { state: Lifecycle::Spawning, process }
    }

    pub(super) fn state(&self) -> Lifecycle {
        self.state
    }

    pub(super) fn process(&self) -> &P {
        &self.process
    }

    pub(super) fn process_mut(&mut self) -> &mut P {
        &mut self.process
    }

    /// Follows a change, and ends the process where the new state has none. The new state; none when the change does not
    /// apply, and then nothing has happened.
    pub(super) fn enter(&mut self, change: Change) -> Option<Lifecycle> {
        // A successor comes with a process of its own.
        let to = self.state.after(change).filter(|_| change != Change::Replaced)?;
        if self.state.has_process() && !to.has_process() {
            self.process.end();
        }
        self.state = to;
        Some(to)
    }

    /// Lets another process take the place of one that is gone; false when this one is not, and then the other is ended.
    pub(super) fn replace(&mut self, mut successor: P) -> bool {
        let Some(state) = self.state.after(Change::Replaced) else {
            successor.end();
            return false;
        };
        *self = Life { state, process: successor };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;
    use std::rc::Rc;

    /// A process that counts how many of its kind there are.
    struct Fake(Rc<Cell<i32>>);

    impl Fake {
        fn start(running: &Rc<Cell<i32>>) -> Fake {
            running.set(running.get() + 1);
            Fake(running.clone())
        }
    }

    impl End for Fake {
        fn end(&mut self) {
            self.0.set(self.0.get() - 1);
        }
    }

    const CHANGES: [Change; 8] = [
        Change::Greeted,
        Change::Loaded,
        Change::Served,
        Change::Asked,
        Change::Ended,
        Change::Delayed,
        Change::Replaced,
        Change::GivenUp,
    ];

    proptest! {
        /// Whatever happens in whatever order: there is a process exactly where the state says so, it is the only one, another
        /// is started only when it is gone, and who was given up stays so.
        #[test]
        fn no_order_of_events_leaves_a_process_behind(events in prop::collection::vec(0..CHANGES.len(), 0..60)) {
            let running = Rc::new(Cell::new(0));
            let mut life = Life::new(Fake::start(&running));
            let mut steps_since_start = 0;
            for change in events.into_iter().map(|event| CHANGES[event]) {
                let before = life.state();
                let applied = match change {
                    Change::Replaced => life.replace(Fake::start(&running)),
                    change => life.enter(change).is_some(),
                };
                let now = life.state();
                prop_assert_eq!(running.get(), i32::from(now.has_process()), "{:?} by {:?}", before, change);
                prop_assert!(applied || now == before, "what does not apply changes nothing");
                if applied && change == Change::Replaced {
                    prop_assert!(matches!(before, Lifecycle::Dead | Lifecycle::BackingOff));
                    steps_since_start = 0;
                }
                if applied && matches!(change, Change::Greeted | Change::Loaded | Change::Served) {
                    steps_since_start += 1;
                }
                prop_assert!(now != Lifecycle::Ready || steps_since_start == 3, "no shortcut to serving");
                prop_assert!(before != Lifecycle::Failed || now == Lifecycle::Failed);
            }
            // Every state is left when its worker ends, and the end of the pipeline leaves nothing.
            life.enter(Change::Ended);
            prop_assert_eq!(running.get(), 0);
        }
    }

    #[test]
    fn the_table_has_one_way_for_each_state_and_change() {
        for (index, (from, by, _)) in WAYS.iter().enumerate() {
            let same = WAYS[..index].iter().any(|(other, change, _)| (other, change) == (from, by));
            assert!(!same, "{from:?} by {by:?}");
        }
    }
}
