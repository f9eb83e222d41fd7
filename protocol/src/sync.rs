//! The concurrency seam: what the ring needs from the machine, in two editions.
//!
//! The real edition is atomics in shared memory and the `futex` system call without the private flag, so that it works
//! between processes. Under `cfg(loom)` the same names are loom's model of them, and the model checker explores every
//! interleaving of `ring::core`.

#[cfg(not(loom))]
pub(crate) use real::{FutexWord, Word, fence};

#[cfg(loom)]
pub(crate) use model::{FutexWord, Word, fence};

#[cfg(not(loom))]
mod real {
    use std::sync::atomic::AtomicU32;
    pub(crate) use std::sync::atomic::{AtomicU32 as Word, fence};
    use std::time::Duration;

    /// A 32-bit word on which the other process can wait.
    #[derive(Debug)]
    #[repr(transparent)]
    pub(crate) struct FutexWord(AtomicU32);

    impl FutexWord {
        pub(crate) fn word(&self) -> &Word {
            &self.0
        }

        /// Sleeps while the word still holds `seen`, at most for `timeout`. May return early; callers look again.
        pub(crate) fn wait(&self, seen: u32, timeout: Duration) {
            let limit = libc::timespec {
                tv_sec: timeout.as_secs().min(i32::MAX as u64).cast_signed(),
                tv_nsec: timeout.subsec_nanos().into(),
            };
            // SAFETY: the word lives as long as `&self`; the kernel reads it and `limit` and writes neither. Every
            // result (woken, value changed, timed out, interrupted) means the same to the caller: look again.
            unsafe {
                libc::syscall(libc::SYS_futex, self.0.as_ptr(), libc::FUTEX_WAIT, seen, &raw const limit)
            };
        }

        /// Wakes every waiter.
        pub(crate) fn wake(&self) {
            // SAFETY: the word lives as long as `&self`; FUTEX_WAKE only uses its address.
            unsafe { libc::syscall(libc::SYS_futex, self.0.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
        }
    }
}

#[cfg(loom)]
mod model {
    use loom::sync::atomic::Ordering;
    pub(crate) use loom::sync::atomic::{AtomicU32 as Word, fence};
    use loom::sync::{Condvar, Mutex};
    use std::time::Duration;

    /// A futex as the kernel defines it: comparing and going to sleep is one step with respect to wake-ups, but not with
    /// respect to the stores to the word. The model never times out, so that loom reports a lost wake-up as a deadlock.
    #[derive(Debug)]
    pub(crate) struct FutexWord {
        word: Word,
        queue: Mutex<()>,
        woken: Condvar,
    }

    impl FutexWord {
        pub(crate) fn new() -> Self {
            Self { word: Word::new(0), queue: Mutex::new(()), woken: Condvar::new() }
        }

        pub(crate) fn word(&self) -> &Word {
            &self.word
        }

        pub(crate) fn wait(&self, seen: u32, _timeout: Duration) {
            let queue = self.queue.lock().unwrap();
            if self.word.load(Ordering::SeqCst) == seen {
                drop(self.woken.wait(queue).unwrap());
            }
        }

        pub(crate) fn wake(&self) {
            let _queue = self.queue.lock().unwrap();
            self.woken.notify_all();
        }
    }
}
