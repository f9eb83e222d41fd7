//! Commands from any thread to the engine's thread.

use super::bench::BenchJob;
use super::request::RequestId;
use super::sequence::Waiting;
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What the engine can be asked to do.
#[derive(Debug)]
pub(super) enum Command {
    Submit(Waiting),
    Abort(RequestId),
    Bench(BenchJob),
    Shutdown,
}

/// The engine takes no more commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Closed;

/// A queue that can be closed, with a bell that wakes a poll.
#[derive(Debug)]
pub(super) struct Mailbox {
    /// None once the engine takes no more commands.
    queue: Mutex<Option<VecDeque<Command>>>,
    /// Whether the queue may hold something: spares the lock in the engine's loop.
    full: AtomicBool,
    bell: EventFd,
}

impl Mailbox {
    pub(super) fn new() -> Result<Mailbox, nix::Error> {
        let bell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Mailbox { queue: Mutex::new(Some(VecDeque::new())), full: AtomicBool::new(false), bell })
    }

    /// Delivers a command.
    pub(super) fn push(&self, command: Command) -> Result<(), Closed> {
        self.lock().as_mut().ok_or(Closed)?.push_back(command);
        self.full.store(true, Ordering::Release);
        // Fails only when the bell has been rung 2^64 times without being answered.
        let _ = self.bell.write(1);
        Ok(())
    }

    /// The next command, if there is one.
    pub(super) fn pop(&self) -> Option<Command> {
        if !self.full.load(Ordering::Acquire) {
            return None;
        }
        let mut queue = self.lock();
        let command = queue.as_mut().and_then(VecDeque::pop_front);
        if command.is_none() {
            self.full.store(false, Ordering::Release);
            // Nothing to read when the bell was answered before.
            let _ = self.bell.read();
        }
        command
    }

    /// Refuses further commands and returns those that nobody has taken.
    pub(super) fn close(&self) -> VecDeque<Command> {
        self.lock().take().unwrap_or_default()
    }

    /// Readable when a command has come.
    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// A thread that panicked while it held the lock left a queue that is whole: every change is a single call.
    fn lock(&self) -> MutexGuard<'_, Option<VecDeque<Command>>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    fn rings(mailbox: &Mailbox) -> bool {
        poll(&mut [PollFd::new(mailbox.bell(), PollFlags::POLLIN)], PollTimeout::ZERO).unwrap() == 1
    }

    #[test]
    fn the_bell_rings_until_the_mailbox_is_empty() {
        let mailbox = Mailbox::new().unwrap();
        assert!(!rings(&mailbox));
        mailbox.push(Command::Abort(RequestId(1))).unwrap();
        mailbox.push(Command::Shutdown).unwrap();
        assert!(rings(&mailbox));
        assert!(matches!(mailbox.pop(), Some(Command::Abort(RequestId(1)))));
        assert!(matches!(mailbox.pop(), Some(Command::Shutdown)));
        assert!(mailbox.pop().is_none() && !rings(&mailbox));
    }

    #[test]
    fn a_closed_mailbox_gives_everything_back() {
        let mailbox = Mailbox::new().unwrap();
        mailbox.push(Command::Shutdown).unwrap();
        assert_eq!(mailbox.close().len(), 1);
        assert_eq!(mailbox.push(Command::Abort(RequestId(1))), Err(Closed));
        assert!(mailbox.pop().is_none());
    }
}
