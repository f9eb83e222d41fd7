//! Connections: how many, how slow they may be, and how they end when the daemon does. The router's own server has none of these
//! limits, which is why connections are served with hyper here.

use super::listener::HttpServer;
use super::routes::{App, router};
use super::socket::Socket;
use crate::daemon::{Ending, Service, hangup, reached};
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use nix::poll::PollFlags;
use nix::sys::socket::{setsockopt, sockopt};
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{JoinError, JoinSet};
use tokio_io_timeout::TimeoutStream;

/// Connections at once; further ones wait to be accepted. More than requests may run and wait, so that a server with too
/// much to do says so (`queue_full`).
const MAX_CONNECTIONS: usize = 512;

/// Requests that are read and made into prompts at once. A large one takes many times its size in memory until it is a prompt
/// or refused; others wait with their bodies.
const MAX_PROMPTS: usize = 4;

/// Largest head of a request, and most of an answer that is put together for one write, in bytes.
const BUFFER_BYTES: usize = 64 << 10;

/// Most of an answer that the system keeps for a client, in bytes. By itself it would keep megabytes for one that does not read.
const SEND_BUFFER_BYTES: usize = 256 << 10;

/// How long a client may take to send the head of a request, or leave a connection unused.
const HEAD_LIMIT: Duration = Duration::from_secs(15);

/// How long a client may take nothing of what waits for it.
const STALL_LIMIT: Duration = Duration::from_secs(10);

/// The event of a client that has closed its sending half, or all. `nix` has no name for it.
const HALF_CLOSED: PollFlags = PollFlags::from_bits_retain(nix::libc::POLLRDHUP);

/// How long aborted requests may take to say so when the daemon stops.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// How long to wait when the system has no descriptors left for a new client.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Answers requests until the daemon ends; those accepted by then are still answered, or aborted when it stops.
pub async fn serve(server: HttpServer, service: Arc<Service>, mut ending: watch::Receiver<Ending>) {
    let HttpServer { listener, access, .. } = server;
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "HTTP cannot be served"),
    };
    let prompts = Arc::new(Semaphore::new(MAX_PROMPTS));
    let router = router(App { service, access, prompts, ending: ending.clone() });
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            (stream, permit) = accept(&listener, &permits) => {
                connections.spawn(connection(stream, permit, router.clone(), ending.clone()));
            }
            Some(ended) = connections.join_next() => report(ended),
            () = reached(&mut ending, Ending::Draining) => break,
        }
    }
    drop(listener);
    let stopped = async {
        reached(&mut ending, Ending::Stopping).await;
        tokio::time::sleep(STOP_LIMIT).await;
    };
    tokio::select! {
        () = all_ended(&mut connections) => {}
        () = stopped => connections.shutdown().await,
    }
}

async fn all_ended(connections: &mut JoinSet<()>) {
    while let Some(ended) = connections.join_next().await {
        report(ended);
    }
}

fn report(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "answering an HTTP request has panicked");
    }
}

/// The next client, once there is room for it.
async fn accept(listener: &TcpListener, permits: &Arc<Semaphore>) -> (TcpStream, OwnedSemaphorePermit) {
    loop {
        let accepted = match permits.clone().acquire_owned().await {
            Ok(permit) => listener.accept().await.map(|(stream, _)| (stream, permit)),
            Err(closed) => Err(io::Error::other(closed)),
        };
        match accepted {
            Ok(accepted) => return accepted,
            Err(error) => {
                tracing::warn!(%error, "an HTTP client could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Serves one client. When it goes away or does not read, the answer under way is dropped, and its request aborted.
async fn connection(
    stream: TcpStream,
    _permit: OwnedSemaphorePermit,
    router: Router,
    mut ending: watch::Receiver<Ending>,
) {
    // Tokens are small and must not wait for one another. A client that has just gone away refuses either.
    let _ = stream.set_nodelay(true);
    let _ = setsockopt(&stream, sockopt::SndBuf, &SEND_BUFFER_BYTES);
    let socket = Socket::from(stream);
    let mut stream = TimeoutStream::new(socket.clone());
    stream.set_write_timeout(Some(STALL_LIMIT));
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_LIMIT)
        .max_buf_size(BUFFER_BYTES)
        .serve_connection(TokioIo::new(Box::pin(stream)), TowerToHyperService::new(router));
    let mut served = pin!(served);
    let answered = async {
        tokio::select! {
            result = &mut served => result,
            () = reached(&mut ending, Ending::Draining) => {
                served.as_mut().graceful_shutdown();
                served.await
            }
        }
    };
    let result = tokio::select! {
        result = answered => result,
        // Hyper would look only once it has read what comes next, and a client may have sent more before it went away.
        () = hangup(socket, HALF_CLOSED) => return,
    };
    if let Err(error) = result {
        tracing::debug!(%error, "an HTTP client has gone away, does not read, or speaks something else");
    }
}
