//! A 32-bit word that threads can sleep on: Linux futex, or a mutex and condition variable under loom.

#[cfg(not(loom))]
pub(super) use linux::FutexWord;
#[cfg(loom)]
pub(super) use model::FutexWord;

#[cfg(not(loom))]
mod linux {
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    /// Longest sleep without looking at the word again: bounds the damage of a lost wake-up to one late step.
    const RECHECK: Duration = Duration::from_secs(1);

    /// An atomic word with a wait queue in the kernel.
    #[derive(Debug, Default)]
    pub(in super::super) struct FutexWord(AtomicU32);

    impl FutexWord {
        /// The word itself.
        pub(in super::super) fn word(&self) -> &AtomicU32 {
            &self.0
        }

        /// Sleeps while the word is `expected`; may return early for any reason, so callers loop.
        pub(in super::super) fn wait(&self, expected: u32) {
            let timeout = libc::timespec { tv_sec: RECHECK.as_secs().cast_signed(), tv_nsec: 0 };
            // SAFETY: the word outlives the call (borrowed), the timeout is a valid timespec, and FUTEX_WAIT reads
            // nothing else. Errors (EAGAIN, EINTR, ETIMEDOUT) all mean "look again", which callers do.
            unsafe {
                libc::syscall(
                    libc::SYS_futex,
                    self.0.as_ptr(),
                    libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                    expected,
                    &raw const timeout,
                );
            }
        }

        /// Wakes every thread that sleeps on the word.
        pub(in super::super) fn wake_all(&self) {
            // SAFETY: the word outlives the call (borrowed); FUTEX_WAKE does not touch its value.
            unsafe {
                libc::syscall(
                    libc::SYS_futex,
                    self.0.as_ptr(),
                    libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
                    i32::MAX,
                );
            }
        }
    }
}

#[cfg(loom)]
mod model {
    use loom::sync::atomic::{AtomicU32, Ordering};
    use loom::sync::{Condvar, Mutex};

    /// The futex contract in loom's vocabulary: compare and sleep are one atomic action with respect to a wake.
    #[derive(Debug)]
    pub(in super::super) struct FutexWord {
        word: AtomicU32,
        queue: Mutex<()>,
        woken: Condvar,
    }

    impl Default for FutexWord {
        fn default() -> Self {
            Self { word: AtomicU32::new(0), queue: Mutex::new(()), woken: Condvar::new() }
        }
    }

    impl FutexWord {
        pub(in super::super) fn word(&self) -> &AtomicU32 {
            &self.word
        }

        pub(in super::super) fn wait(&self, expected: u32) {
            let guard = self.queue.lock().unwrap();
            if self.word.load(Ordering::Relaxed) == expected {
                drop(self.woken.wait(guard).unwrap());
            }
        }

        pub(in super::super) fn wake_all(&self) {
            let _guard = self.queue.lock().unwrap();
            self.woken.notify_all();
        }
    }
}
