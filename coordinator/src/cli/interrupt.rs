//! Ctrl-C as a message instead of a handler: the signal is blocked everywhere and read by one thread, which passes it to
//! whoever waits. Worker processes are not affected (a spawned command starts with a clean signal mask).

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::fmt;
use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};

/// What a waiting command receives: an interruption or something of its own.
#[derive(Debug)]
pub enum Wake<T> {
    /// The user pressed Ctrl-C.
    Interrupt,
    /// Something the command waits for.
    Item(T),
}

type Listener = Box<dyn Fn() + Send>;

#[derive(Default)]
struct Shared {
    listener: Option<Listener>,
    /// Interruptions that nobody was there to hear.
    missed: usize,
}

/// The program's interruptions. Install it once, before any other thread exists.
#[derive(Clone)]
pub struct Interrupts(Arc<Mutex<Shared>>);

impl fmt::Debug for Interrupts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Interrupts")
    }
}

impl Interrupts {
    /// Blocks the signal for this thread and those it will start, and begins to listen.
    pub fn install() -> io::Result<Self> {
        let mut mask = SigSet::empty();
        mask.add(Signal::SIGINT);
        mask.thread_block()?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC)?;
        let interrupts = Interrupts(Arc::new(Mutex::new(Shared::default())));
        let passed_to = interrupts.clone();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            while let Ok(Some(_)) = signals.read_signal() {
                passed_to.deliver();
            }
        })?;
        Ok(interrupts)
    }

    fn deliver(&self) {
        let mut shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &shared.listener {
            Some(listener) => listener(),
            None => shared.missed += 1,
        }
    }

    /// A channel that also carries interruptions, from now on and in place of any earlier one.
    pub fn channel<T: Send + 'static>(&self) -> (Sender<Wake<T>>, Receiver<Wake<T>>) {
        let (sender, receiver) = mpsc::channel();
        self.route(sender.clone());
        (sender, receiver)
    }

    /// Sends interruptions into an existing channel, from now on and in place of any earlier one.
    pub fn route<T: Send + 'static>(&self, to: Sender<Wake<T>>) {
        let listener = move || {
            // A receiver that is gone has stopped waiting; the next one hears the next interruption.
            drop(to.send(Wake::Interrupt));
        };
        let mut shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..std::mem::take(&mut shared.missed) {
            listener();
        }
        shared.listener = Some(Box::new(listener));
    }

    /// Runs `job` on its own thread and waits for it; none when the user interrupts first. The job then runs on until
    /// the process ends.
    pub fn interruptible<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<Option<T>> {
        let (sender, receiver) = self.channel();
        std::thread::Builder::new().name("job".into()).spawn(move || {
            // Fails only when the waiting side was interrupted and is gone.
            drop(sender.send(Wake::Item(job())));
        })?;
        match receiver.recv() {
            Ok(Wake::Item(result)) => Ok(Some(result)),
            Ok(Wake::Interrupt) => Ok(None),
            Err(_) => Err(io::Error::other("the thread that did the work ended without a result")),
        }
    }
}
