//! What is on its way to one client. Putting an event in never blocks; a client that does not read is given up when too
//! much has piled up, so that it cannot hold back the engine or other clients.

use spillway_protocol::jsonl::Event;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, watch};

/// Bytes that may wait for one client: minutes of a fast stream.
pub const MAX_WAITING_BYTES: usize = 8 << 20;

/// Bytes put together into one write.
const WRITE_BYTES: usize = 64 << 10;

/// The sending end; clones share it. When all are dropped, the writer ends after the last event.
#[derive(Debug, Clone)]
pub struct Outbox {
    lines: mpsc::UnboundedSender<String>,
    waiting: Arc<AtomicUsize>,
    lost: Arc<watch::Sender<bool>>,
}

/// The end that writes to the client.
#[derive(Debug)]
pub struct OutboxWriter {
    lines: mpsc::UnboundedReceiver<String>,
    waiting: Arc<AtomicUsize>,
    lost: Arc<watch::Sender<bool>>,
}

/// Both ends for one client.
pub fn outbox() -> (Outbox, OutboxWriter) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let waiting = Arc::new(AtomicUsize::new(0));
    let lost = Arc::new(watch::Sender::new(false));
    (
        Outbox { lines: sender, waiting: waiting.clone(), lost: lost.clone() },
        OutboxWriter { lines: receiver, waiting, lost },
    )
}

impl Outbox {
    /// Puts an event in. Events for a client that is lost are dropped.
    pub fn push(&self, event: &Event) {
        if *self.lost.borrow() {
            return;
        }
        let line = event.to_line();
        let waiting = self.waiting.fetch_add(line.len(), Ordering::Relaxed) + line.len();
        if waiting > MAX_WAITING_BYTES {
            tracing::warn!(waiting, "a client does not read its answers and is dropped");
            self.lost.send_replace(true);
        } else {
            // The receiver ends before the senders only when the client is lost.
            let _ = self.lines.send(line);
        }
    }

    /// Gives the client up.
    pub fn lose(&self) {
        self.lost.send_replace(true);
    }

    /// Becomes true when the client is lost: it does not read, or has gone away.
    pub fn lost(&self) -> watch::Receiver<bool> {
        self.lost.subscribe()
    }
}

impl OutboxWriter {
    /// Writes events until all [`Outbox`]es are gone or the client is lost.
    pub async fn run(mut self, to: impl AsyncWrite + Unpin) {
        let mut lost = self.lost.subscribe();
        tokio::select! {
            // Fails only when the sender is gone, and `self` holds one.
            _ = lost.wait_for(|lost| *lost) => {}
            result = self.write_all(to) => if let Err(error) = result {
                tracing::debug!(%error, "a client has gone away");
                self.lost.send_replace(true);
            }
        }
    }

    async fn write_all(&mut self, mut to: impl AsyncWrite + Unpin) -> io::Result<()> {
        while let Some(mut batch) = self.lines.recv().await {
            while batch.len() < WRITE_BYTES
                && let Ok(line) = self.lines.try_recv()
            {
                batch.push_str(&line);
            }
            to.write_all(batch.as_bytes()).await?;
            to.flush().await?;
            self.waiting.fetch_sub(batch.len(), Ordering::Relaxed);
        }
        Ok(())
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
        drop(outbox);
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
        outbox.lost().wait_for(|lost| *lost).await.unwrap();
        writer.await.unwrap();
    }

    #[tokio::test]
    async fn a_client_that_has_gone_away_is_lost() {
        let (outbox, writer) = outbox();
        let (near, far) = tokio::io::duplex(64);
        drop(far);
        let writer = tokio::spawn(writer.run(near));
        outbox.push(&token("x"));
        outbox.lost().wait_for(|lost| *lost).await.unwrap();
        writer.await.unwrap();
    }
}
