//! The ring in real shared memory, between threads. Interleavings are explored by loom in `core`.

use super::*;
use std::thread;

const LONG: Duration = Duration::from_secs(20);

fn ends(slots: u32, bytes: usize) -> (RingProducer, RingConsumer) {
    let ring = Ring::create(slots, bytes).unwrap();
    (RingProducer::attach(ring.dup().unwrap()).unwrap(), RingConsumer::attach(ring.dup().unwrap()).unwrap())
}

fn send(producer: &mut RingProducer, value: u64) -> bool {
    match producer.wait(LONG).unwrap() {
        Wait::Ready(mut slot) => {
            slot.put(8, &value.to_ne_bytes()).unwrap();
            slot.publish();
            true
        }
        Wait::TimedOut => panic!("no room for {value}"),
        Wait::Closed => false,
    }
}

fn receive(consumer: &mut RingConsumer) -> Option<u64> {
    match consumer.wait(LONG).unwrap() {
        Wait::Ready(slot) => {
            let mut value = [0; 8];
            slot.get(8, &mut value).unwrap();
            Some(u64::from_ne_bytes(value))
        }
        Wait::TimedOut => panic!("no message"),
        Wait::Closed => None,
    }
}

#[test]
fn messages_arrive_once_and_in_order_through_rings_of_any_size() {
    for slots in [1, 2, 8] {
        let (mut producer, mut consumer) = ends(slots, 16);
        let sender = thread::spawn(move || (0..2000).all(|value| send(&mut producer, value)));
        for expected in 0..2000 {
            assert_eq!(receive(&mut consumer), Some(expected));
            if expected % 500 == 0 {
                // Long enough for the producer to fill the ring and fall asleep.
                thread::park_timeout(Duration::from_millis(2));
            }
        }
        assert_eq!(receive(&mut consumer), None);
        assert!(sender.join().unwrap());
    }
}

/// What a device writes at the place that a slot names is what the other side reads in the slot, and no place is outside.
#[test]
fn a_slot_says_where_it_lies_in_the_memory_of_its_ring() {
    let (mut producer, mut consumer) = ends(2, 16);
    let (out, back) = (producer.memory(), consumer.memory());
    assert_eq!((out.slots(), out.len()), (2, back.len()));
    for (index, value) in [(0, 7u64), (1, 8), (0, 9)] {
        let Wait::Ready(slot) = producer.try_next().unwrap() else { panic!("no room") };
        assert_eq!(slot.index(), index);
        let at = slot.locate(8, 8).unwrap();
        assert!(slot.locate(slot.slot.len - 7, 8).is_err() && slot.locate(usize::MAX, 8).is_err());
        // SAFETY: the place is in the ring, in a slot that is this side's.
        unsafe { out.base().add(at).cast::<u64>().write(value) };
        slot.publish();
        let Wait::Ready(slot) = consumer.try_next().unwrap() else { panic!("no message") };
        assert_eq!((slot.index(), slot.locate(8, 8).unwrap()), (index, at));
        let mut read = [0; 8];
        slot.get(8, &mut read).unwrap();
        assert_eq!(u64::from_ne_bytes(read), value);
    }
    drop((producer, consumer));
    // SAFETY: the memory stays mapped as long as this value lives.
    assert_eq!(unsafe { back.base().add(back.len() - 1).read() }, 0);
}

#[test]
fn a_full_ring_and_an_empty_ring_time_out() {
    let (mut producer, mut consumer) = ends(2, 16);
    assert!(matches!(consumer.try_next().unwrap(), Wait::TimedOut));
    assert!(matches!(consumer.wait(Duration::from_millis(2)).unwrap(), Wait::TimedOut));
    assert!(send(&mut producer, 1) && send(&mut producer, 2));
    assert!(matches!(producer.try_next().unwrap(), Wait::TimedOut));
    assert!(matches!(producer.wait(Duration::from_millis(2)).unwrap(), Wait::TimedOut));
    assert!(matches!(consumer.try_next().unwrap(), Wait::Ready(_)));
    assert!(matches!(producer.try_next().unwrap(), Wait::Ready(_)));
}

#[test]
fn a_slot_that_was_not_published_is_not_sent() {
    let (mut producer, mut consumer) = ends(1, 16);
    if let Wait::Ready(mut slot) = producer.wait(LONG).unwrap() {
        slot.put(8, &99u64.to_ne_bytes()).unwrap();
    }
    assert!(matches!(consumer.try_next().unwrap(), Wait::TimedOut));
    assert!(send(&mut producer, 5));
    assert_eq!(receive(&mut consumer), Some(5));
}

#[test]
fn closing_wakes_a_sleeper_and_leaves_published_slots_readable() {
    let (mut producer, mut consumer) = ends(2, 16);
    assert!(send(&mut producer, 1));
    let closer = thread::spawn(move || {
        thread::park_timeout(Duration::from_millis(20));
        drop(producer);
    });
    assert_eq!(receive(&mut consumer), Some(1));
    assert_eq!(receive(&mut consumer), None);
    closer.join().unwrap();
    let (mut producer, consumer) = ends(1, 16);
    drop(consumer);
    assert!(!send(&mut producer, 1));
}

#[test]
fn access_beyond_a_slot_is_an_error() {
    let (mut producer, mut consumer) = ends(1, 200);
    assert_eq!(producer.slot_bytes(), 256);
    if let Wait::Ready(mut slot) = producer.wait(LONG).unwrap() {
        for (offset, len) in [(256, 1), (250, 7), (usize::MAX, 1), (0, 257)] {
            assert_eq!(slot.put(offset, &vec![0; len]).unwrap_err().code(), "frame_slot_too_small");
        }
        slot.put(255, &[7]).unwrap();
        slot.publish();
    }
    let Wait::Ready(slot) = consumer.wait(LONG).unwrap() else { panic!("published") };
    let mut byte = [0];
    slot.get(255, &mut byte).unwrap();
    assert_eq!(byte, [7]);
    assert_eq!(slot.get(256, &mut byte).unwrap_err().code(), "frame_slot_too_small");
}

#[test]
fn impossible_shapes_are_refused() {
    for (slots, bytes) in [(0, 16), (3, 16), (1 << 17, 16), (1, 0), (2, usize::MAX)] {
        assert_eq!(Ring::create(slots, bytes).unwrap_err().code(), "ring_shape", "{slots} x {bytes}");
    }
    assert_eq!(Ring::bytes(2, 200), 4096 + 2 * 256);
}

#[test]
fn foreign_segments_are_refused() {
    let ring = Ring::create(2, 128).unwrap();
    let header = Mapping::header(&ring.segment);
    let refusal = || RingConsumer::attach(ring.dup().unwrap()).unwrap_err().code();
    header.slots.store(4, Ordering::Relaxed);
    assert_eq!(refusal(), "ring_foreign");
    header.slots.store(2, Ordering::Relaxed);
    header.version.store(VERSION + 1, Ordering::Relaxed);
    assert_eq!(refusal(), "ring_foreign");
    header.magic.store(0, Ordering::Relaxed);
    assert_eq!(refusal(), "ring_foreign");
}

#[test]
fn a_counter_beyond_the_slots_is_corruption() {
    let (producer, mut consumer) = ends(2, 16);
    // What a broken peer could write: three slots published into a ring of two.
    let mut broken = producer;
    for _ in 0..3 {
        broken.end.cursor.advance();
    }
    assert!(matches!(consumer.try_next(), Err(RingError::Corrupt)));
    assert!(matches!(consumer.wait(LONG), Err(RingError::Corrupt)));
}
