//! The daemon: JSON lines on standard input and output, on a local socket, and HTTP, as asked. The protocol is described in
//! `docs/protocol.md`; tokio lives here and in [`http`](crate::http) alone.
//!
//! One task per connection and one per message that takes time. The engine's thread never waits for a client: events go
//! into a bounded outbox, and a client that does not read is given up.

mod answer;
mod ask;
mod client;
mod conversation;
mod line;
mod order;
mod outbox;
mod service;
mod signals;
mod socket;
mod start;

use crate::config::ConfigFile;
use crate::http::{self, HttpServer};
use crate::workers::LoadProgress;
pub(crate) use ask::{Asked, Running, ask, stateless};
use client::serve;
pub(crate) use client::{Ending, reached};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use service::First;
pub(crate) use service::{Held, RequestCount, Resident, Service};
use signals::{Heard, Signals};
pub use socket::SocketError;
use socket::SocketFile;
pub use start::{LoadError, Wanted};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener as StdListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};

/// How often a connection is checked for a client that has gone away without a word. Requests that wait or compute write
/// nothing, so a failing write cannot tell.
const HANGUP_CHECK: Duration = Duration::from_millis(200);

/// How long to wait when the system has no descriptors left for a new client.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Where the daemon serves, and what it loads by itself.
#[derive(Debug)]
pub struct DaemonOptions {
    /// JSON lines on standard input and output.
    pub stdio: bool,
    /// JSON lines on a local socket.
    pub listen: Option<PathBuf>,
    /// OpenAI's protocol.
    pub http: Option<HttpServer>,
    /// A model to load at the start; the daemon ends when that fails.
    pub load: Option<FirstLoad>,
    /// How long requests may run on after a termination signal.
    pub drain_limit: Duration,
    /// Settings, read again at every load.
    pub config: ConfigFile,
}

/// A model that is loaded without a message.
pub struct FirstLoad {
    /// The model.
    pub wanted: Wanted,
    /// Hears how the load goes on.
    pub progress: Box<dyn FnMut(LoadProgress) + Send>,
    /// Hears the name of the model when it can be asked.
    pub loaded: Box<dyn FnOnce(&str) + Send>,
}

impl fmt::Debug for FirstLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FirstLoad").field("wanted", &self.wanted).finish_non_exhaustive()
    }
}

/// Why the daemon could not serve.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The socket cannot be had.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The model to begin with was not loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The system refused something basic.
    #[error("the daemon cannot start: {0}; check the limits of this user")]
    Io(#[from] io::Error),
}

impl DaemonError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        match self {
            DaemonError::Socket(error) => error.code(),
            DaemonError::Load(error) => error.code(),
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

/// Serves until standard input ends (without anything else to serve) or a signal comes, then ends the workers.
pub fn run(options: DaemonOptions) -> Result<DaemonEnd, DaemonError> {
    let socket = options.listen.as_deref().map(socket::listen).transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let end = runtime.block_on(async { Daemon::start(options).await?.serve(socket).await });
    // A read of standard input may be stuck in the system; it must not keep the process.
    runtime.shutdown_background();
    end
}

/// What runs.
struct Daemon {
    service: Arc<Service>,
    signals: Signals,
    ending: watch::Sender<Ending>,
    /// Connections, and the server of HTTP.
    clients: JoinSet<()>,
    /// The model to begin with, while it is loaded. Given up with the daemon, as the loads of clients are.
    first: JoinSet<Result<(), LoadError>>,
    /// Loads that a signal has asked for.
    reloads: JoinSet<()>,
    interrupted: bool,
    /// Why the first load failed.
    failed: Option<LoadError>,
}

impl Daemon {
    /// Starts everything but the local socket.
    async fn start(options: DaemonOptions) -> Result<Daemon, DaemonError> {
        let mut daemon = Daemon {
            service: Arc::new(Service::new(options.config)),
            signals: Signals::new(options.drain_limit)?,
            ending: watch::Sender::new(Ending::Serving),
            clients: JoinSet::new(),
            first: JoinSet::new(),
            reloads: JoinSet::new(),
            interrupted: false,
            failed: None,
        };
        if let Some(load) = options.load {
            // Before anybody can ask, so that all requests wait for it.
            let first = daemon.service.begin_first().await;
            daemon.first.spawn(load_first(daemon.service.clone(), first, load));
        }
        if options.stdio {
            let stdout = io::stdout().as_fd().try_clone_to_owned()?;
            daemon.serve_client(tokio::io::stdin(), tokio::io::stdout(), stdout);
        }
        if let Some(server) = options.http {
            let serving = http::serve(server, daemon.service.clone(), daemon.ending.subscribe());
            daemon.clients.spawn(serving);
        }
        Ok(daemon)
    }

    /// Serves until the end.
    async fn serve(mut self, socket: Option<(StdListener, SocketFile)>) -> Result<DaemonEnd, DaemonError> {
        let (listener, socket_file) = match socket {
            Some((listener, file)) => (Some(UnixListener::from_std(listener)?), Some(file)),
            None => (None, None),
        };
        loop {
            let draining = *self.ending.borrow() >= Ending::Draining;
            tokio::select! {
                client = self.clients.join_next(), if !self.clients.is_empty() => {
                    if let Some(client) = client {
                        tell_panic(client, "a connection");
                    }
                }
                stream = accept(listener.as_ref()), if !draining => self.serve_socket(stream),
                Some(loaded) = self.first.join_next() => {
                    if let Err(error) = loaded.unwrap_or(Err(LoadError::Panicked)) {
                        self.failed = Some(error);
                        self.end(Ending::Stopping);
                    }
                }
                Some(reloaded) = self.reloads.join_next() => tell_panic(reloaded, "loading the model again"),
                heard = self.signals.next(draining) => self.hear(heard, draining),
            }
            let listens = listener.is_some() && *self.ending.borrow() < Ending::Draining;
            if self.clients.is_empty() && !listens {
                break;
            }
        }
        drop(socket_file);
        drop((self.first, self.reloads));
        self.service.unload(std::future::ready(())).await;
        match self.failed {
            Some(error) => Err(error.into()),
            None if self.interrupted => Ok(DaemonEnd::Interrupted),
            None => Ok(DaemonEnd::Drained),
        }
    }

    fn hear(&mut self, heard: Heard, draining: bool) {
        match heard {
            Heard::Reload if draining => {
                tracing::warn!("the daemon is ending; the model is not loaded again");
            }
            // One that waits will find whatever has changed by then.
            Heard::Reload if self.first.len() + self.reloads.len() > 1 => {}
            Heard::Reload => {
                self.reloads.spawn(reload(self.service.clone()));
            }
            Heard::End { reached, interrupted } => {
                self.interrupted |= interrupted;
                self.end(reached);
            }
        }
    }

    fn end(&self, reached: Ending) {
        self.service.drain();
        self.ending.send_replace(reached);
    }

    fn serve_socket(&mut self, stream: UnixStream) {
        match stream.as_fd().try_clone_to_owned() {
            Ok(fd) => {
                let (from, to) = stream.into_split();
                self.serve_client(from, to, fd);
            }
            Err(error) => tracing::warn!(%error, "a client could not be served"),
        }
    }

    /// Serves a client of JSON lines; `fd` is where it hears.
    fn serve_client(
        &mut self,
        from: impl AsyncRead + Unpin + Send + 'static,
        to: impl AsyncWrite + Unpin + Send + 'static,
        fd: OwnedFd,
    ) {
        let serving =
            serve(self.service.clone(), from, to, hangup(fd, PollFlags::empty()), self.ending.subscribe());
        self.clients.spawn(serving);
    }
}

/// Loads the model that the daemon begins with.
async fn load_first(service: Arc<Service>, first: First, load: FirstLoad) -> Result<(), LoadError> {
    let FirstLoad { wanted, progress, loaded } = load;
    let resident = service.load_first(first, wanted, progress).await?;
    loaded(&resident.name());
    Ok(())
}

/// Loads the model again, as the `reload` message does, and tells the log. That it fails is no reason to end.
async fn reload(service: Arc<Service>) {
    match service.reload(std::future::ready(()), |_| {}).await {
        Ok(resident) => {
            let model = &resident.engine.plan().model.path;
            tracing::info!(model = %model.display(), "the model has been loaded again");
        }
        Err(error) => tracing::error!(code = error.code(), "the model was not loaded again: {error}"),
    }
}

/// A task has ended: says so if it did in a way that it should not. The daemon goes on.
fn tell_panic(ended: Result<(), JoinError>, what: &str) {
    if let Err(error) = ended {
        tracing::error!(%error, "{what} has panicked");
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

/// Completes when nobody can read what is written to `fd` any more, or after one of the events `also`: a client that only closes
/// its sending half still reads, but may count as gone all the same (`POLLRDHUP`).
pub(crate) async fn hangup(fd: impl AsFd, also: PollFlags) {
    loop {
        // First, so that what is answered at once still is for a client that has said its last word.
        tokio::time::sleep(HANGUP_CHECK).await;
        // Nothing else is asked for, so that whatever comes is an end.
        if poll(&mut [PollFd::new(fd.as_fd(), also)], PollTimeout::ZERO).is_ok_and(|ready| ready > 0) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

    /// A defect in a load that a signal has asked for is told to the log; clients do not notice.
    #[tokio::test]
    async fn a_reload_that_panics_does_not_end_the_daemon() {
        let options = DaemonOptions {
            stdio: false,
            listen: None,
            http: None,
            load: None,
            drain_limit: Duration::ZERO,
            config: ConfigFile::default(),
        };
        let mut daemon = Daemon::start(options).await.unwrap();
        daemon.reloads.spawn(async { panic!("a defect") });
        let (mut client, end) = tokio::io::duplex(1 << 12);
        let (from, to) = tokio::io::split(end);
        let (fd, _hears) = std::os::unix::net::UnixStream::pair().unwrap();
        daemon.serve_client(from, to, fd.into());
        let serving = tokio::spawn(daemon.serve(None));
        let (hears, mut says) = tokio::io::split(&mut client);
        let mut lines = BufReader::new(hears).lines();
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            says.write_all(b"{\"type\":\"ping\"}\n").await.unwrap();
            assert!(lines.next_line().await.unwrap().unwrap().contains("pong"));
        }
        drop(client);
        assert_eq!(serving.await.unwrap().unwrap(), DaemonEnd::Drained);
    }
}
