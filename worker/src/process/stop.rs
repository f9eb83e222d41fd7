//! The control thread: passes on what the coordinator asks about links, turns `Shutdown` or end-of-file into a request
//! to stop, and sees to it that it is followed.

use super::ProcessError;
use spillway_protocol::channel::{ChannelError, Received, Receiver};
use spillway_protocol::control::ToWorker;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::time::Duration;

/// How long the main thread may take to finish the step in hand.
const GRACE: Duration = Duration::from_secs(1);

/// A request to stop, seen by the main thread.
#[derive(Debug, Clone, Default)]
pub(super) struct Stop {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    requested: AtomicBool,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Stop {
    /// Starts the control thread on the receiving half of the control channel. Requests about links come
    /// out of the second value, which ends when the process should.
    pub(super) fn on_request(
        receiver: Receiver<ToWorker>,
    ) -> Result<(Self, mpsc::Receiver<ToWorker>), ProcessError> {
        let stop = Self::default();
        let watched = stop.clone();
        let (asked, requests) = mpsc::channel();
        std::thread::Builder::new()
            .name("spillway-control".into())
            .spawn(move || watch(receiver, &watched, asked))
            .map_err(|source| ProcessError::System { action: "starting the control thread", source })?;
        Ok((stop, requests))
    }

    /// Whether the process should end.
    pub(super) fn requested(&self) -> bool {
        self.shared.requested.load(Ordering::Acquire)
    }

    /// Sleeps until the process should end, at most `limit`.
    pub(super) fn wait_for(&self, limit: Duration) {
        let guard = self.shared.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.shared.changed.wait_timeout_while(guard, limit, |()| !self.requested());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn request(&self) {
        let _guard = self.shared.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.requested.store(true, Ordering::Release);
        self.shared.changed.notify_all();
    }
}

fn watch(mut receiver: Receiver<ToWorker>, stop: &Stop, asked: mpsc::Sender<ToWorker>) {
    // Any end of the conversation counts: `Shutdown`, end-of-file, a second `Load`, garbage.
    let ending = pass_on(&mut receiver, &asked);
    drop(asked);
    if !matches!(ending, Ok(Received::Message(ToWorker::Shutdown) | Received::Closed)) {
        eprintln!("error: worker: unexpected on the control channel: {ending:?}");
    }
    stop.request();
    // The process ends under this thread. If it does not, the main thread is in a long step or stuck.
    std::thread::park_timeout(GRACE);
    // SAFETY: `_exit` runs nothing in this process; the system takes back memory and descriptors. Destructors must not
    // run while the main thread still computes.
    unsafe { libc::_exit(0) };
}

/// Passes requests about links on; the result is what arrived that is none.
fn pass_on(
    receiver: &mut Receiver<ToWorker>,
    asked: &mpsc::Sender<ToWorker>,
) -> Result<Received<ToWorker>, ChannelError> {
    loop {
        match receiver.receive(None)? {
            // Fails when the main thread is on its way out.
            Received::Message(message) if message.arranges() => drop(asked.send(message)),
            ending => return Ok(ending),
        }
    }
}
