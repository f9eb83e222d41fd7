//! What is on its way to one client. Putting an event in never blocks; a client that does not read is given up when too
//! much has piled up or a write has waited too long, so that it cannot hold back the engine or other clients.

use spillway_protocol::jsonl::Event;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

/// Bytes that may wait for one client: minutes of a fast stream.
pub const MAX_WAITING_BYTES: usize = 8 << 20;

/// How long a client may leave a write waiting. Its requests hold slots that others wait for.
const STALL_LIMIT: Duration = Duration::from_secs(10);

/// Bytes put together into one write.
const WRITE_BYTES: usize = 64 << 10;

/// How far a connection has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Open,
    /// Everything has been put in; what waits is still written.
    Finished,
    /// The client does not read, or has gone away. Nothing more is written.
    Lost,
}

/// The sending end; clones share it.
#[derive(Debug, Clone)]
pub struct Outbox {
    lines: mpsc::UnboundedSender<String>,
    waiting: Arc<AtomicUsize>,
    phase: Arc<watch::Sender<Phase>>,
}

/// The end that writes to the client.
#[derive(Debug)]
pub struct OutboxWriter {
    lines: mpsc::UnboundedReceiver<String>,
    waiting: Arc<AtomicUsize>,
    phase: Arc<watch::Sender<Phase>>,
}

/// Both ends for one client.
pub fn outbox() -> (Outbox, OutboxWriter) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let waiting = Arc::new(AtomicUsize::new(0));
    let phase = Arc::new(watch::Sender::new(Phase::Open));
    (
        Outbox { lines: sender, waiting: waiting.clone(), phase: phase.clone() },
        OutboxWriter { lines: receiver, waiting, phase },
    )
}

impl Outbox {
    /// Puts an event in. Events for a client that is lost are dropped.
    pub fn push(&self, event: &Event) {
        if *self.phase.borrow() == Phase::Lost {
            return;
        }
        let line = event.to_line();
        let waiting = self.waiting.fetch_add(line.len(), Ordering::Relaxed) + line.len();
        if waiting > MAX_WAITING_BYTES {
            tracing::warn!(waiting, "a client does not read its answers and is dropped");
            self.lose();
        } else {
            // The receiver ends first only when the client is lost or has been told everything.
            let _ = self.lines.send(line);
        }
    }

    /// Ends the connection after what has been put in.
    pub fn finish(&self) {
        reach(&self.phase, Phase::Finished);
    }

    /// Gives the client up.
    pub fn lose(&self) {
        reach(&self.phase, Phase::Lost);
    }

    /// Completes when the client is lost: it does not read, or has gone away.
    pub async fn lost(&self) {
        reached(&self.phase, Phase::Lost).await;
    }
}

/// A phase never goes back.
fn reach(phase: &watch::Sender<Phase>, to: Phase) {
    phase.send_if_modified(|now| std::mem::replace(now, to.max(*now)) < to);
}

async fn reached(phase: &watch::Sender<Phase>, wanted: Phase) {
    // Fails only without a sender, and `phase` is one.
    let _ = phase.subscribe().wait_for(|now| *now >= wanted).await;
}

impl OutboxWriter {
    /// Writes events until the connection is finished or the client is lost.
    pub async fn run(mut self, to: impl AsyncWrite + Unpin) {
        let phase = self.phase.clone();
        tokio::select! {
            () = reached(&phase, Phase::Lost) => {}
            result = self.write_all(to) => if let Err(error) = result {
                tracing::debug!(%error, "a client has gone away or does not read");
                reach(&phase, Phase::Lost);
            }
        }
    }

    async fn write_all(&mut self, mut to: impl AsyncWrite + Unpin) -> io::Result<()> {
        let phase = self.phase.clone();
        let mut finished = std::pin::pin!(reached(&phase, Phase::Finished));
        loop {
            let next = tokio::select! {
                next = self.lines.recv() => next,
                () = &mut finished, if !self.lines.is_closed() => {
                    // What was put in before is still received.
                    self.lines.close();
                    continue;
                }
            };
            let Some(mut batch) = next else { return Ok(()) };
            while batch.len() < WRITE_BYTES
                && let Ok(line) = self.lines.try_recv()
            {
                batch.push_str(&line);
            }
            let write = async {
                to.write_all(batch.as_bytes()).await?;
                to.flush().await
            };
            timeout(STALL_LIMIT, write).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
            self.waiting.fetch_sub(batch.len(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;

    fn token(text: &str) -> Event {
        Event::Token { id: "r".into(), text: text.into() }
    }

    #[tokio::test]
    async fn everything_put_in_is_written_before_the_writer_ends() {
        let (outbox, writer) = outbox();
        let (near, mut far) = tokio::io::duplex(64);
        let writer = tokio::spawn(writer.run(near));
        for n in 0..1000 {
            outbox.push(&token(&n.to_string()));
        }
        // Whoever still holds the other end does not keep the writer.
        outbox.finish();
        let mut text = String::new();
        far.read_to_string(&mut text).await.unwrap();
        writer.await.unwrap();
        assert_eq!(text.lines().count(), 1000);
        assert!(text.ends_with("\"text\":\"999\"}\n"));
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_is_lost_and_holds_nothing_back() {
        let (outbox, writer) = outbox();
        let (near, _far) = tokio::io::duplex(64);
        let writer = tokio::spawn(writer.run(near));
        let big = "x".repeat(1 << 20);
        for _ in 0..9 {
            outbox.push(&token(&big));
        }
        outbox.lost().await;
        writer.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_leaves_a_little_unread_for_long_is_lost() {
        let (outbox, writer) = outbox();
        let (near, _far) = tokio::io::duplex(64);
        let writer = tokio::spawn(writer.run(near));
        outbox.push(&token(&"x".repeat(100)));
        let waited = tokio::time::Instant::now();
        outbox.lost().await;
        writer.await.unwrap();
        assert!((STALL_LIMIT..2 * STALL_LIMIT).contains(&waited.elapsed()));
    }

    #[tokio::test]
    async fn a_client_that_has_gone_away_is_lost() {
        let (outbox, writer) = outbox();
        let (near, far) = tokio::io::duplex(64);
        drop(far);
        let writer = tokio::spawn(writer.run(near));
        outbox.push(&token("x"));
        outbox.lost().await;
        writer.await.unwrap();
    }
}
