//! The lock-free part of the ring: who owns which slot, and how the two sides wait for each other.
//!
//! Each side writes one word, `count << 1 | closed`, and reads the other's. `count` is the number of slots published
//! (producer) or released (consumer) since the start, modulo 2^31; slot `i` of the count is `i & (slots - 1)`, which
//! survives the wrap because the number of slots is a power of two. A side that finds nothing to do announces itself in
//! its `waiting` word, looks once more, and sleeps on the other side's word. The other side stores its word first and
//! looks for a waiter second; a sequentially consistent fence on either side makes sure that at least one of the two
//! sees the other, and the futex compares the word again before it sleeps.
//!
//! A side keeps its own count privately: the shared words are written by another process and trusted only within
//! bounds. An end can be taken over by another process after its holder is gone: it goes on from the shared word.

use crate::sync::{FutexWord, Word, fence};
use std::ops::Deref;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::time::Duration;

const CLOSED: u32 = 1;
/// Two cache lines: adjacent lines are prefetched in pairs.
const LINE: usize = 128;

/// What one side shows the other, alone on its cache lines.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Side {
    /// `count << 1 | closed`.
    progress: FutexWord,
    /// Not zero while this side sleeps, or is about to, on the other side's progress.
    waiting: Word,
}

/// The shared words of a ring.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Words {
    producer: Side,
    consumer: Side,
}

const _: () = assert!(cfg!(loom) || size_of::<Words>() == 2 * LINE);

#[cfg(loom)]
impl Words {
    pub(super) fn new() -> Self {
        let side = || Side { progress: FutexWord::new(), waiting: Word::new(0) };
        Self { producer: side(), consumer: side() }
    }
}

/// Which end of the ring a [`Cursor`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Producer,
    Consumer,
}

/// What a side finds when it looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    /// This slot is ours until [`Cursor::advance`].
    Slot(usize),
    /// Nothing yet; the value is what to sleep on.
    Nothing(u32),
    /// The other side closed, and (for a consumer) nothing is left.
    Closed,
    /// The other side's count is impossible.
    Corrupt,
}

/// One end of a ring. `W` gives access to the shared words: a mapping, or an `Arc` under loom.
#[derive(Debug)]
pub(super) struct Cursor<W: Deref<Target = Words>> {
    words: W,
    role: Role,
    /// Slots in the ring, a power of two.
    slots: u32,
    /// Our count, modulo 2^32; the shared word keeps the low 31 bits.
    count: u32,
}

impl<W: Deref<Target = Words>> Cursor<W> {
    /// Takes an end over where its last holder left it, which may have closed it or died at any point; in a new ring that is
    /// the beginning. `slots` must be a power of two below 2^30.
    pub(super) fn attach(words: W, role: Role, slots: u32) -> Self {
        debug_assert!(slots.is_power_of_two() && slots < 1 << 30);
        let mut cursor = Self { words, role, slots, count: 0 };
        cursor.count = cursor.own().progress.word().load(Relaxed) >> 1;
        // A holder that died asleep has left its mark, which would cost the other side a system call for every slot.
        cursor.own().waiting.store(0, Relaxed);
        cursor.show(cursor.count << 1);
        cursor
    }

    pub(super) fn words(&self) -> &W {
        &self.words
    }

    fn own(&self) -> &Side {
        match self.role {
            Role::Producer => &self.words.producer,
            Role::Consumer => &self.words.consumer,
        }
    }

    fn other(&self) -> &Side {
        match self.role {
            Role::Producer => &self.words.consumer,
            Role::Consumer => &self.words.producer,
        }
    }

    /// Looks for a slot without waiting.
    pub(super) fn look(&self) -> Look {
        let seen = self.other().progress.word().load(Acquire);
        // Published minus released, in the 31 bits that both counts have.
        let ahead = match self.role {
            Role::Producer => (self.count << 1).wrapping_sub(seen & !CLOSED) >> 1,
            Role::Consumer => (seen & !CLOSED).wrapping_sub(self.count << 1) >> 1,
        };
        if ahead > self.slots {
            return Look::Corrupt;
        }
        let closed = seen & CLOSED != 0;
        let free = match self.role {
            // What a producer writes after the consumer left would never be read.
            Role::Producer if closed => return Look::Closed,
            Role::Producer => self.slots - ahead,
            Role::Consumer => ahead,
        };
        match free {
            0 if closed => Look::Closed,
            0 => Look::Nothing(seen),
            _ => Look::Slot((self.count & (self.slots - 1)) as usize),
        }
    }

    /// Gives the slot found by [`Cursor::look`] to the other side.
    pub(super) fn advance(&mut self) {
        self.count = self.count.wrapping_add(1);
        self.show(self.count << 1);
    }

    /// Tells the other side that this one is gone. Slots already published stay readable.
    pub(super) fn close(&self) {
        self.show(self.count << 1 | CLOSED);
    }

    fn show(&self, progress: u32) {
        self.own().progress.word().store(progress, Release);
        fence(SeqCst);
        if self.other().waiting.load(Relaxed) != 0 {
            self.own().progress.wake();
        }
    }

    /// Sleeps until the other side's progress differs from `seen`, or `timeout` is over. May return early.
    pub(super) fn sleep(&self, seen: u32, timeout: Duration) {
        self.own().waiting.store(1, Relaxed);
        fence(SeqCst);
        if self.other().progress.word().load(Relaxed) == seen {
            self.other().progress.wait(seen, timeout);
        }
        self.own().waiting.store(0, Relaxed);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    const SLOTS: usize = 2;
    const FOREVER: Duration = Duration::MAX;

    /// Explores every interleaving with up to three preemptions: known bugs of such queues need two, and without a bound
    /// three messages would take hours.
    fn explore(test: impl Fn() + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(test);
    }

    struct Shared {
        words: Arc<Words>,
        /// loom reports any access to a slot that does not happen after the other side's.
        slots: Arc<[UnsafeCell<u32>; SLOTS]>,
    }

    fn shared() -> Shared {
        Shared { words: Arc::new(Words::new()), slots: Arc::new([UnsafeCell::new(0), UnsafeCell::new(0)]) }
    }

    fn cursor(shared: &Shared, role: Role, start: u32) -> Cursor<Arc<Words>> {
        let cursor = Cursor::attach(shared.words.clone(), role, SLOTS as u32);
        assert_eq!(cursor.count, start);
        cursor
    }

    /// Waits for a slot; `None` when the other side closed.
    fn acquire(cursor: &Cursor<Arc<Words>>) -> Option<usize> {
        loop {
            match cursor.look() {
                Look::Slot(slot) => return Some(slot),
                Look::Nothing(seen) => cursor.sleep(seen, FOREVER),
                Look::Closed => return None,
                Look::Corrupt => panic!("both sides are honest"),
            }
        }
    }

    fn send_all(shared: Shared, start: u32, messages: u32) {
        let mut producer = cursor(&shared, Role::Producer, start);
        for message in 1..=messages {
            let Some(slot) = acquire(&producer) else { return };
            // SAFETY: the slot is the producer's; loom checks it.
            shared.slots[slot].with_mut(|value| unsafe { *value = message });
            producer.advance();
        }
        producer.close();
    }

    fn receive(shared: &Shared, consumer: &mut Cursor<Arc<Words>>) -> Option<u32> {
        let slot = acquire(consumer)?;
        // SAFETY: the slot is the consumer's; loom checks it.
        let message = shared.slots[slot].with(|value| unsafe { *value });
        consumer.advance();
        Some(message)
    }

    /// Every message arrives once, in order, then the close; slots are reused and the count wraps at 2^31.
    fn transfer(start: u32, messages: u32) {
        explore(move || {
            let shared = shared();
            for side in [&shared.words.producer, &shared.words.consumer] {
                side.progress.word().store(start << 1, Relaxed);
            }
            let producer_side = Shared { words: shared.words.clone(), slots: shared.slots.clone() };
            let producer = thread::spawn(move || send_all(producer_side, start, messages));
            let mut consumer = cursor(&shared, Role::Consumer, start);
            for expected in 1..=messages {
                assert_eq!(receive(&shared, &mut consumer), Some(expected));
            }
            assert_eq!(receive(&shared, &mut consumer), None);
            producer.join().unwrap();
        });
    }

    #[test]
    fn loom_transfer_with_reused_slots() {
        transfer(0, 3);
    }

    #[test]
    fn loom_transfer_across_the_wrap_of_the_count() {
        transfer((1 << 31) - 1, 3);
    }

    /// A consumer that leaves wakes a producer that waits for a free slot.
    #[test]
    fn loom_consumer_closes_on_a_full_ring() {
        explore(|| {
            let shared = shared();
            let producer_side = Shared { words: shared.words.clone(), slots: shared.slots.clone() };
            let producer = thread::spawn(move || send_all(producer_side, 0, SLOTS as u32 + 2));
            let mut consumer = cursor(&shared, Role::Consumer, 0);
            assert_eq!(receive(&shared, &mut consumer), Some(1));
            consumer.close();
            producer.join().unwrap();
        });
    }

    /// A producer that another process takes over from: nothing is lost or doubled, and a consumer that has seen the close
    /// goes on.
    #[test]
    fn loom_producer_is_taken_over() {
        explore(|| {
            let shared = shared();
            let producer_side = Shared { words: shared.words.clone(), slots: shared.slots.clone() };
            let producer = thread::spawn(move || {
                for message in 1..=2 {
                    // The first holder's end is dropped and closed with each round.
                    let mut producer =
                        Cursor::attach(producer_side.words.clone(), Role::Producer, SLOTS as u32);
                    let slot = acquire(&producer).unwrap();
                    // SAFETY: the slot is the producer's; loom checks it.
                    producer_side.slots[slot].with_mut(|value| unsafe { *value = message });
                    producer.advance();
                    producer.close();
                }
            });
            let mut consumer = cursor(&shared, Role::Consumer, 0);
            let mut expected = 1;
            while expected <= 2 {
                match receive(&shared, &mut consumer) {
                    Some(message) => {
                        assert_eq!(message, expected);
                        expected += 1;
                    }
                    None => thread::yield_now(),
                }
            }
            producer.join().unwrap();
        });
    }

    /// A producer that leaves wakes a consumer that waits on an empty ring.
    #[test]
    fn loom_producer_closes_on_an_empty_ring() {
        explore(|| {
            let shared = shared();
            let producer = cursor(&shared, Role::Producer, 0);
            let closer = thread::spawn(move || producer.close());
            let mut consumer = cursor(&shared, Role::Consumer, 0);
            assert_eq!(receive(&shared, &mut consumer), None);
            closer.join().unwrap();
        });
    }
}
