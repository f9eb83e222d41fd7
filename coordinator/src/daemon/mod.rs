//! The daemon: JSON lines on standard input and output and, if asked, on a local socket. The protocol is described in
//! `docs/protocol.md`; tokio lives here alone.
//!
//! One task per connection and one per message that takes time. The engine's thread never waits for a client: events go
//! into a bounded outbox, and a client that does not read is given up.

mod answer;
mod client;
mod conversation;
mod line;
mod order;
mod outbox;
mod service;
mod socket;

use crate::config::ConfigFile;
use client::{Ending, serve};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use service::Service;
pub use socket::SocketError;
use socket::SocketFile;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener as StdListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// How long requests may run on after a termination signal.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);

/// How often a connection is checked for a client that has gone away without a word. Requests that wait or compute write
/// nothing, so a failing write cannot tell.
const HANGUP_CHECK: Duration = Duration::from_millis(200);

/// How long to wait when the system has no descriptors left for a new client.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Where the daemon serves.
#[derive(Debug, Clone, Default)]
pub struct DaemonOptions {
    /// Local socket, next to standard input and output.
    pub listen: Option<PathBuf>,
    /// Settings, read again at every load.
    pub config: ConfigFile,
}

/// Why the daemon could not serve.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The socket cannot be had.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The system refused something basic.
    #[error("the daemon cannot start: {0}; check the limits of this user")]
    Io(#[from] io::Error),
}

impl DaemonError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        match self {
            DaemonError::Socket(error) => error.code(),
            DaemonError::Io(_) => "daemon_failed",
        }
    }
}

/// How the daemon ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DaemonEnd {
    /// Everything accepted was answered (or aborted after the drain limit).
    Drained,
    /// The user pressed Ctrl-C; what ran was aborted.
    Interrupted,
}

/// Serves until standard input ends (without a socket) or a signal comes, then ends the workers.
pub fn run(options: &DaemonOptions) -> Result<DaemonEnd, DaemonError> {
    let socket = options.listen.as_deref().map(socket::listen).transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let end = runtime.block_on(serve_all(socket, options.config.clone()));
    // A read of standard input may be stuck in the system; it must not keep the process.
    runtime.shutdown_background();
    end
}

async fn serve_all(
    socket: Option<(StdListener, SocketFile)>,
    config: ConfigFile,
) -> Result<DaemonEnd, DaemonError> {
    let mut signals = Signals::new()?;
    let service = Arc::new(Service::new(config));
    let ending = watch::Sender::new(Ending::Serving);
    let mut clients = JoinSet::new();
    let stdout = io::stdout().as_fd().try_clone_to_owned()?;
    let (tokio_in, tokio_out) = (tokio::io::stdin(), tokio::io::stdout());
    clients.spawn(serve(service.clone(), tokio_in, tokio_out, hangup(stdout), ending.subscribe()));
    let (listener, socket_file) = match socket {
        Some((listener, file)) => (Some(UnixListener::from_std(listener)?), Some(file)),
        None => (None, None),
    };
    let mut interrupted = false;
    loop {
        let draining = *ending.borrow() >= Ending::Draining;
        tokio::select! {
            client = clients.join_next(), if !clients.is_empty() => {
                if let Some(Err(error)) = client {
                    tracing::error!(%error, "a connection has panicked");
                }
            }
            stream = accept(listener.as_ref()), if !draining => {
                serve_socket(stream, &service, &ending, &mut clients);
            }
            end = signals.next(draining) => {
                interrupted |= end.interrupted;
                ending.send_replace(end.reached);
            }
        }
        if clients.is_empty() && (listener.is_none() || *ending.borrow() >= Ending::Draining) {
            break;
        }
    }
    drop(socket_file);
    service.unload(std::future::ready(())).await;
    Ok(if interrupted { DaemonEnd::Interrupted } else { DaemonEnd::Drained })
}

/// The next client; never without a listener.
async fn accept(listener: Option<&UnixListener>) -> UnixStream {
    let Some(listener) = listener else { return std::future::pending().await };
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                tracing::warn!(%error, "a client could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn serve_socket(
    stream: UnixStream,
    service: &Arc<Service>,
    ending: &watch::Sender<Ending>,
    clients: &mut JoinSet<()>,
) {
    match stream.as_fd().try_clone_to_owned() {
        Ok(fd) => {
            let (from, to) = stream.into_split();
            clients.spawn(serve(service.clone(), from, to, hangup(fd), ending.subscribe()));
        }
        Err(error) => tracing::warn!(%error, "a client could not be served"),
    }
}

/// Completes when nobody can read what is written to `fd` any more. A client that only closes its sending half still
/// reads.
async fn hangup(fd: OwnedFd) {
    loop {
        let mut fds = [PollFd::new(fd.as_fd(), PollFlags::empty())];
        let gone = PollFlags::POLLHUP | PollFlags::POLLERR;
        if poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
            && fds[0].revents().is_some_and(|events| events.intersects(gone))
        {
            return;
        }
        tokio::time::sleep(HANGUP_CHECK).await;
    }
}

/// Signals that end the daemon.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    drain_until: Option<tokio::time::Instant>,
}

/// What a signal, or the end of patience, leads to.
struct EndStep {
    reached: Ending,
    interrupted: bool,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            drain_until: None,
        })
    }

    /// The next step towards the end: a first SIGTERM drains; a second, the drain limit, or SIGINT stops.
    async fn next(&mut self, draining: bool) -> EndStep {
        let limit = self.drain_until;
        tokio::select! {
            _ = self.terminate.recv() => {
                if draining {
                    return EndStep { reached: Ending::Stopping, interrupted: false };
                }
                self.drain_until = Some(tokio::time::Instant::now() + DRAIN_LIMIT);
                EndStep { reached: Ending::Draining, interrupted: false }
            }
            _ = self.interrupt.recv() => EndStep { reached: Ending::Stopping, interrupted: true },
            () = sleep_until(limit) => {
                tracing::warn!("requests did not end in time and are aborted");
                self.drain_until = None;
                EndStep { reached: Ending::Stopping, interrupted: false }
            }
        }
    }
}

async fn sleep_until(limit: Option<tokio::time::Instant>) {
    match limit {
        Some(limit) => tokio::time::sleep_until(limit).await,
        None => std::future::pending().await,
    }
}
