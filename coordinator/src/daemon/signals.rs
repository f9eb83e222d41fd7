//! Signals that the daemon acts on.

use super::client::Ending;
use std::io;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep_until};

/// The signals, and the end of patience once one of them has come.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    drain_limit: Duration,
    drain_until: Option<Instant>,
}

/// What a signal, or the end of patience, asks for.
#[derive(Debug)]
pub enum Heard {
    /// The model is to be loaded again.
    Reload,
    /// The next step towards the end.
    End {
        /// How far.
        reached: Ending,
        /// Whether the user has pressed Ctrl-C.
        interrupted: bool,
    },
}

impl Signals {
    /// Listens to signals from now on; requests may run for `drain_limit` after the first SIGTERM.
    pub fn new(drain_limit: Duration) -> io::Result<Self> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            drain_limit,
            drain_until: None,
        })
    }

    /// SIGHUP reloads; a first SIGTERM drains; a second, the drain limit, or SIGINT stops.
    pub async fn next(&mut self, draining: bool) -> Heard {
        let limit = self.drain_until;
        tokio::select! {
            _ = self.hangup.recv() => Heard::Reload,
            _ = self.terminate.recv() => {
                if draining {
                    return Heard::End { reached: Ending::Stopping, interrupted: false };
                }
                self.drain_until = Instant::now().checked_add(self.drain_limit);
                Heard::End { reached: Ending::Draining, interrupted: false }
            }
            _ = self.interrupt.recv() => Heard::End { reached: Ending::Stopping, interrupted: true },
            () = patience(limit) => {
                tracing::warn!("requests did not end in time and are aborted");
                self.drain_until = None;
                Heard::End { reached: Ending::Stopping, interrupted: false }
            }
        }
    }
}

async fn patience(limit: Option<Instant>) {
    match limit {
        Some(limit) => sleep_until(limit).await,
        None => std::future::pending().await,
    }
}
