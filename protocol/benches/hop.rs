//! What a hop costs: a frame goes through a ring to another thread, and one comes back through a second ring. Half of
//! the round trip is a hop. Floor: at most 3 us median while both sides spin (needs two idle CPUs). The payloads are a
//! decode step of one token with d_model 2560 and 5120, and an empty frame for the ring alone.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use spillway_protocol::frame::{FrameError, SlotRead, SlotWrite};
use spillway_protocol::ring::{Ring, RingConsumer, RingError, RingProducer, Wait};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(5);
const SLOTS: u32 = 2;

fn ends(bytes: usize) -> Result<(RingProducer, RingConsumer), RingError> {
    let ring = Ring::create(SLOTS, bytes.max(1))?;
    Ok((RingProducer::attach(ring.dup()?)?, RingConsumer::attach(ring.dup()?)?))
}

/// Sends the buffer; false when the other side is gone.
fn send(producer: &mut RingProducer, buffer: &[u8]) -> Result<bool, FrameError> {
    let Ok(Wait::Ready(mut slot)) = producer.wait(TIMEOUT) else { return Ok(false) };
    slot.put(0, buffer)?;
    slot.publish();
    Ok(true)
}

/// Receives into the buffer; false when the other side is gone.
fn receive(consumer: &mut RingConsumer, buffer: &mut [u8]) -> Result<bool, FrameError> {
    let Ok(Wait::Ready(slot)) = consumer.wait(TIMEOUT) else { return Ok(false) };
    SlotRead::get(&slot, 0, buffer)?;
    Ok(true)
}

fn hop(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("round_trip_two_hops");
    for bytes in [0, 4 * 2560, 4 * 5120] {
        let (Ok((mut there, mut there_end)), Ok((mut back, mut back_end))) = (ends(bytes), ends(bytes))
        else {
            eprintln!("no shared memory for two rings with slots of {bytes} bytes; skipped");
            continue;
        };
        let echo = std::thread::spawn(move || {
            let mut buffer = vec![0; bytes];
            while receive(&mut there_end, &mut buffer) == Ok(true) && send(&mut back, &buffer) == Ok(true) {}
        });
        let mut buffer = vec![0; bytes];
        group.bench_function(BenchmarkId::from_parameter(bytes), |bencher| {
            bencher.iter(|| {
                let done =
                    send(&mut there, &buffer) == Ok(true) && receive(&mut back_end, &mut buffer) == Ok(true);
                assert!(done, "the echo thread stopped");
            });
        });
        drop(there);
        assert!(echo.join().is_ok(), "the echo thread failed");
    }
    group.finish();
}

criterion_group!(benches, hop);
criterion_main!(benches);
