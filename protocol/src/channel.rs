//! Control messages on a socket: length-prefixed `postcard` frames with typed, directional ends.
//!
//! A frame is its length as a little-endian u32 (1 to [`MAX_FRAME`]) and that many bytes. A [`CoordinatorEnd`] sends
//! [`ToWorker`] and receives [`FromWorker`]; a [`WorkerEnd`] the reverse. Both halves of an end can be separated, so that
//! one thread sends while another waits. Sockets are never switched to non-blocking mode (the mode would be shared with
//! every holder of the socket); each call asks for it instead and waits in `poll`.

use crate::control::{FromWorker, ToWorker};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, send};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Largest frame body in bytes. Control messages are small; a larger length means that the stream is garbled.
pub const MAX_FRAME: usize = 1 << 20;
const PREFIX: usize = size_of::<u32>();
/// How long a send may wait for the other side to read.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a message could not be sent or received. Every error but `System` on set-up is final for the channel.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// A system call failed.
    #[error("control channel: {action} failed: {source}")]
    System {
        /// What was attempted.
        action: &'static str,
        /// The system's reason.
        source: Errno,
    },
    /// The other side closed its end.
    #[error("control channel: the other process is gone")]
    Closed,
    /// The other side does not read.
    #[error("control channel: the other process has not read for {} s; it hangs or is stopped", SEND_TIMEOUT.as_secs())]
    SendTimeout,
    /// The stream ended inside a frame.
    #[error("control channel: the stream ended inside a frame, {have} bytes after its beginning")]
    Torn {
        /// Bytes of the frame that arrived.
        have: usize,
    },
    /// A frame began and did not go on.
    #[error("control channel: {have} bytes of a frame came, and then nothing for {seconds} s")]
    Unfinished {
        /// Bytes of the frame that arrived.
        have: usize,
        /// How long nothing came.
        seconds: u64,
    },
    /// A length that no frame has.
    #[error("control channel: a frame of {found} bytes, allowed are 1 to {MAX_FRAME}")]
    Length {
        /// Length found or needed.
        found: usize,
    },
    /// Bytes that are no message, or more than a message.
    #[error("control channel: a frame does not decode ({reason}); both processes must be the same build")]
    Decode {
        /// What the decoder said.
        reason: String,
    },
}

impl ChannelError {
    /// Stable name of the error.
    pub fn code(&self) -> &'static str {
        match self {
            ChannelError::System { .. } => "channel_system",
            ChannelError::Closed => "channel_closed",
            ChannelError::SendTimeout => "channel_send_timeout",
            ChannelError::Torn { .. } => "channel_torn",
            ChannelError::Unfinished { .. } => "channel_unfinished",
            ChannelError::Length { .. } => "channel_length",
            ChannelError::Decode { .. } => "channel_decode",
        }
    }
}

/// How a receive ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Received<T> {
    /// A message.
    Message(T),
    /// Nothing within the time given.
    TimedOut,
    /// The other side closed its end, after a whole number of frames.
    Closed,
}

/// The coordinator's end of a worker's control channel.
pub type CoordinatorEnd = Channel<ToWorker, FromWorker>;
/// The worker's end of its control channel.
pub type WorkerEnd = Channel<FromWorker, ToWorker>;

/// A new pair of connected ends.
pub fn pair() -> Result<(CoordinatorEnd, WorkerEnd), ChannelError> {
    let (coordinator, worker) = UnixStream::pair().map_err(|error| system("socketpair", &error))?;
    Ok((Channel::new(coordinator)?, Channel::new(worker)?))
}

/// One end of a control channel: sends `S`, receives `R`.
#[derive(Debug)]
pub struct Channel<S, R> {
    sender: Sender<S>,
    receiver: Receiver<R>,
}

impl<S: Serialize, R: DeserializeOwned> Channel<S, R> {
    /// The end on an inherited socket.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, ChannelError> {
        Self::new(UnixStream::from(fd))
    }

    fn new(stream: UnixStream) -> Result<Self, ChannelError> {
        let second = stream.try_clone().map_err(|error| system("dup", &error))?;
        Ok(Self { sender: Sender::new(second), receiver: Receiver::new(stream) })
    }

    /// Sends a message; waits while the other side's buffer is full, at most 10 s.
    pub fn send(&mut self, message: &S) -> Result<(), ChannelError> {
        self.sender.send(message)
    }

    /// Waits for a message; `None` waits without limit.
    pub fn receive(&mut self, timeout: Option<Duration>) -> Result<Received<R>, ChannelError> {
        self.receiver.receive(timeout)
    }

    /// Takes a message if a whole one has arrived.
    pub fn try_receive(&mut self) -> Result<Received<R>, ChannelError> {
        self.receiver.receive(Some(Duration::ZERO))
    }

    /// The two halves, for two threads.
    pub fn split(self) -> (Sender<S>, Receiver<R>) {
        (self.sender, self.receiver)
    }
}

impl<S, R> AsFd for Channel<S, R> {
    /// For `poll` (readable when something arrived or the other side is gone) and for inheritance.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.stream.as_fd()
    }
}

/// The sending half.
#[derive(Debug)]
pub struct Sender<S> {
    stream: UnixStream,
    frame: Vec<u8>,
    types: PhantomData<fn(&S)>,
}

impl<S: Serialize> Sender<S> {
    fn new(stream: UnixStream) -> Self {
        Self { stream, frame: Vec::new(), types: PhantomData }
    }

    /// Sends a message; waits while the other side's buffer is full, at most 10 s.
    pub fn send(&mut self, message: &S) -> Result<(), ChannelError> {
        encode(message, &mut self.frame)?;
        let deadline = Instant::now() + SEND_TIMEOUT;
        let mut sent = 0;
        while sent < self.frame.len() {
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match send(self.stream.as_raw_fd(), &self.frame[sent..], flags) {
                Ok(count) => sent += count,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if !ready(self.stream.as_fd(), PollFlags::POLLOUT, Some(left))? {
                        return Err(ChannelError::SendTimeout);
                    }
                }
                Err(Errno::EPIPE | Errno::ECONNRESET) => return Err(ChannelError::Closed),
                Err(source) => return Err(ChannelError::System { action: "send", source }),
            }
        }
        Ok(())
    }
}

/// The receiving half.
#[derive(Debug)]
pub struct Receiver<R> {
    stream: UnixStream,
    decoder: Decoder,
    /// Since when nothing has come of a frame that is not whole.
    partial: Option<Instant>,
    /// How long that may last.
    patience: Duration,
    types: PhantomData<fn() -> R>,
}

impl<R: DeserializeOwned> Receiver<R> {
    fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            decoder: Decoder::default(),
            partial: None,
            patience: SEND_TIMEOUT,
            types: PhantomData,
        }
    }

    /// Waits for a message; `None` waits without limit.
    pub fn receive(&mut self, timeout: Option<Duration>) -> Result<Received<R>, ChannelError> {
        let start = Instant::now();
        loop {
            if let Some(message) = self.decoder.next()? {
                return Ok(Received::Message(message));
            }
            let have = self.decoder.have();
            match self.fill()? {
                Fill::Some => self.partial = None,
                Fill::End if have > 0 => return Err(ChannelError::Torn { have }),
                Fill::End => return Ok(Received::Closed),
                Fill::Nothing => {
                    let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
                    // A sender gives a frame up after as long; what comes then would be read as its rest.
                    let of_frame = (have > 0).then(|| {
                        let since = self.partial.get_or_insert_with(Instant::now);
                        self.patience.saturating_sub(since.elapsed())
                    });
                    if of_frame == Some(Duration::ZERO) {
                        return Err(ChannelError::Unfinished { have, seconds: self.patience.as_secs() });
                    }
                    let wait = left.into_iter().chain(of_frame).min();
                    if !ready(self.stream.as_fd(), PollFlags::POLLIN, wait)? && left == wait {
                        return Ok(Received::TimedOut);
                    }
                }
            }
        }
    }

    /// Reads what has arrived, without waiting.
    fn fill(&mut self) -> Result<Fill, ChannelError> {
        let mut chunk = [0; 4096];
        match recv(self.stream.as_raw_fd(), &mut chunk, MsgFlags::MSG_DONTWAIT) {
            Ok(0) | Err(Errno::ECONNRESET) => Ok(Fill::End),
            Ok(count) => {
                self.decoder.push(&chunk[..count]);
                Ok(Fill::Some)
            }
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(Fill::Nothing),
            Err(source) => Err(ChannelError::System { action: "recv", source }),
        }
    }
}

/// What a read brought.
enum Fill {
    Some,
    Nothing,
    End,
}

/// Cuts a byte stream into frames, whatever pieces it arrives in.
#[derive(Debug, Default)]
struct Decoder {
    bytes: Vec<u8>,
}

impl Decoder {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Bytes of an unfinished frame.
    fn have(&self) -> usize {
        self.bytes.len()
    }

    /// The next whole message, if there is one.
    fn next<R: DeserializeOwned>(&mut self) -> Result<Option<R>, ChannelError> {
        let Some(prefix) = self.bytes.first_chunk::<PREFIX>() else { return Ok(None) };
        let found = u32::from_le_bytes(*prefix) as usize;
        check_length(found)?;
        let Some(body) = self.bytes.get(PREFIX..PREFIX + found) else { return Ok(None) };
        let decode_error = |reason: String| ChannelError::Decode { reason };
        let (message, rest) =
            postcard::take_from_bytes(body).map_err(|error| decode_error(error.to_string()))?;
        if !rest.is_empty() {
            return Err(decode_error(format!("{} bytes follow the message", rest.len())));
        }
        self.bytes.drain(..PREFIX + found);
        Ok(Some(message))
    }
}

/// Replaces `frame` by the frame of `message`.
fn encode(message: &impl Serialize, frame: &mut Vec<u8>) -> Result<(), ChannelError> {
    let mut buffer = std::mem::take(frame);
    buffer.clear();
    buffer.extend_from_slice(&[0; PREFIX]);
    let encoded = postcard::to_extend(message, buffer);
    *frame = encoded.map_err(|error| ChannelError::Decode { reason: error.to_string() })?;
    let found = frame.len() - PREFIX;
    check_length(found)?;
    let length = u32::try_from(found).map_err(|_| ChannelError::Length { found })?;
    frame[..PREFIX].copy_from_slice(&length.to_le_bytes());
    Ok(())
}

fn check_length(found: usize) -> Result<(), ChannelError> {
    if (1..=MAX_FRAME).contains(&found) { Ok(()) } else { Err(ChannelError::Length { found }) }
}

/// Waits until the socket is ready or broken; false when the time is over.
fn ready(fd: BorrowedFd<'_>, events: PollFlags, timeout: Option<Duration>) -> Result<bool, ChannelError> {
    let limit = match timeout {
        None => PollTimeout::NONE,
        // Round up: a wait must not become a busy loop in its last millisecond.
        Some(left) => PollTimeout::try_from(left.as_micros().div_ceil(1000)).unwrap_or(PollTimeout::MAX),
    };
    match poll(&mut [PollFd::new(fd, events)], limit) {
        Ok(count) => Ok(count > 0),
        Err(Errno::EINTR) => Ok(true),
        Err(source) => Err(ChannelError::System { action: "poll", source }),
    }
}

fn system(action: &'static str, error: &std::io::Error) -> ChannelError {
    ChannelError::System { action, source: Errno::from_raw(error.raw_os_error().unwrap_or_default()) }
}

#[cfg(test)]
mod tests;
