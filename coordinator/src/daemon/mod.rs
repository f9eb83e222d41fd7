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

/// How often a connection is checked for a client that has gone away without a word. Requests that wait or compute write
/// nothing, so a failing write cannot tell.
const HANGUP_CHECK: Duration = Duration::from_millis(200);

/// How long to wait when the system has no descriptors left for a new client.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Where the daemon serves.
#[derive(Debug, Clone)]
pub struct DaemonOptions {
    /// Local socket, next to standard input and output.
    pub listen: Option<PathBuf>,
    /// How long requests may run on after a termination signal.
    pub drain_limit: Duration,
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
    let end = runtime.block_on(serve_all(socket, options));
    // A read of standard input may be stuck in the system; it must not keep the process.
    runtime.shutdown_background();
    end
}

async fn serve_all(
    socket: Option<(StdListener, SocketFile)>,
    options: &DaemonOptions,
) -> Result<DaemonEnd, DaemonError> {
    let mut signals = Signals::new(options.drain_limit)?;
    let service = Arc::new(Service::new(options.config.clone()));
    let ending = watch::Sender::new(Ending::Serving);
    let mut clients = JoinSet::new();
    let stdout = io::stdout().as_fd().try_clone_to_owned()?;
    let (tokio_in, tokio_out) = (tokio::io::stdin(), tokio::io::stdout());
    clients.spawn(serve(service.clone(), tokio_in, tokio_out, hangup(stdout), ending.subscribe()));
    let (listener, socket_file) = match socket {
        Some((listener, file)) => (Some(UnixListener::from_std(listener)?), Some(file)),
        None => (None, None),
    };
    // Dropped with this function, which gives up what is still under way, as the end of the daemon does with loads of clients.
    let mut reloads = JoinSet::new();
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
            Some(_) = reloads.join_next() => {}
            heard = signals.next(draining) => match heard {
                Heard::Reload if draining => tracing::warn!("the daemon is ending; the model is not loaded again"),
                // One that waits will find whatever has changed by then.
                Heard::Reload if reloads.len() > 1 => {}
                Heard::Reload => {
                    reloads.spawn(reload(service.clone()));
                }
                Heard::End { reached, interrupted: now } => {
                    interrupted |= now;
                    service.drain();
                    ending.send_replace(reached);
                }
            },
        }
        if clients.is_empty() && (listener.is_none() || *ending.borrow() >= Ending::Draining) {
            break;
        }
    }
    drop(socket_file);
    drop(reloads);
    service.unload(std::future::ready(())).await;
    Ok(if interrupted { DaemonEnd::Interrupted } else { DaemonEnd::Drained })
}

/// Loads the model again, as the `reload` message does, and tells the log.
async fn reload(service: Arc<Service>) {
    match service.reload(std::future::ready(()), |_| {}).await {
        Ok(resident) => {
            let model = &resident.engine.plan().model.path;
            tracing::info!(model = %model.display(), "the model has been loaded again");
        }
        Err(error) => tracing::error!(code = error.code(), "the model was not loaded again: {error}"),
    }
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

/// Signals that the daemon acts on.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    drain_limit: Duration,
    drain_until: Option<tokio::time::Instant>,
}

/// What a signal, or the end of patience, asks for.
enum Heard {
    /// The model is to be loaded again.
    Reload,
    /// The next step towards the end.
    End { reached: Ending, interrupted: bool },
}

impl Signals {
    fn new(drain_limit: Duration) -> io::Result<Self> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            drain_limit,
            drain_until: None,
        })
    }

    /// SIGHUP reloads; a first SIGTERM drains; a second, the drain limit, or SIGINT stops.
    async fn next(&mut self, draining: bool) -> Heard {
        let limit = self.drain_until;
        tokio::select! {
            _ = self.hangup.recv() => Heard::Reload,
            _ = self.terminate.recv() => {
                if draining {
                    return Heard::End { reached: Ending::Stopping, interrupted: false };
                }
                self.drain_until = tokio::time::Instant::now().checked_add(self.drain_limit);
                Heard::End { reached: Ending::Draining, interrupted: false }
            }
            _ = self.interrupt.recv() => Heard::End { reached: Ending::Stopping, interrupted: true },
            () = sleep_until(limit) => {
                tracing::warn!("requests did not end in time and are aborted");
                self.drain_until = None;
                Heard::End { reached: Ending::Stopping, interrupted: false }
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
