//! The control codec against pieces, garbage, silence and sudden ends.

use super::*;
use crate::control::PROTOCOL_VERSION;
use proptest::prelude::*;
use std::io::{Read, Write};

fn hello() -> FromWorker {
    FromWorker::Hello { protocol: PROTOCOL_VERSION, pid: 77 }
}

fn failed(length: usize) -> FromWorker {
    FromWorker::Failed { code: "test".into(), message: "x".repeat(length) }
}

/// A coordinator's end whose other side is a bare socket.
fn bare() -> (CoordinatorEnd, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (CoordinatorEnd::new(ours).unwrap(), theirs)
}

#[test]
fn messages_arrive_in_order_and_then_the_close() {
    let (mut coordinator, mut worker) = pair().unwrap();
    assert_eq!(coordinator.try_receive().unwrap(), Received::TimedOut);
    worker.send(&hello()).unwrap();
    worker.send(&failed(100_000)).unwrap();
    coordinator.send(&ToWorker::Shutdown).unwrap();
    assert_eq!(worker.receive(None).unwrap(), Received::Message(ToWorker::Shutdown));
    drop(worker);
    assert_eq!(coordinator.receive(None).unwrap(), Received::Message(hello()));
    assert_eq!(coordinator.receive(None).unwrap(), Received::Message(failed(100_000)));
    assert_eq!(coordinator.receive(None).unwrap(), Received::Closed);
    assert_eq!(coordinator.send(&ToWorker::Shutdown).unwrap_err().code(), "channel_closed");
}

/// Garbage that looks like the beginning of a frame must not swallow what comes after it for ever.
#[test]
fn a_frame_that_does_not_go_on_is_an_error_after_a_while() {
    let (mut coordinator, mut other) = bare();
    coordinator.receiver.patience = Duration::from_millis(60);
    other.write_all(&[9, 0, 0, 0, 1]).unwrap();
    assert_eq!(coordinator.try_receive().unwrap(), Received::TimedOut);
    assert_eq!(coordinator.receive(Some(Duration::from_millis(5))).unwrap(), Received::TimedOut);
    // Too short to be the rest; the time begins again.
    other.write_all(&[0, 0]).unwrap();
    assert_eq!(coordinator.receive(None).unwrap_err().code(), "channel_unfinished");
    // Without a frame under way, silence is nothing.
    let (mut coordinator, _other) = bare();
    coordinator.receiver.patience = Duration::ZERO;
    assert_eq!(coordinator.receive(Some(Duration::from_millis(20))).unwrap(), Received::TimedOut);
}

#[test]
fn a_receive_ends_after_its_timeout() {
    let (mut coordinator, _worker) = pair().unwrap();
    let start = Instant::now();
    let timeout = Duration::from_millis(30);
    assert_eq!(coordinator.receive(Some(timeout)).unwrap(), Received::TimedOut);
    assert!(start.elapsed() >= timeout);
}

#[test]
fn a_frame_larger_than_the_socket_buffer_gets_through() {
    let (mut coordinator, mut worker) = pair().unwrap();
    let reader = std::thread::spawn(move || coordinator.receive(None));
    worker.send(&failed(MAX_FRAME - 64)).unwrap();
    assert_eq!(reader.join().unwrap().unwrap(), Received::Message(failed(MAX_FRAME - 64)));
}

#[test]
fn a_message_above_the_bound_is_not_sent() {
    let (_coordinator, mut worker) = pair().unwrap();
    assert_eq!(worker.send(&failed(MAX_FRAME)).unwrap_err().code(), "channel_length");
}

#[test]
fn halves_work_in_two_threads() {
    let (mut coordinator, worker) = pair().unwrap();
    let (mut sender, mut receiver) = worker.split();
    let waiting = std::thread::spawn(move || receiver.receive(None));
    sender.send(&hello()).unwrap();
    coordinator.send(&ToWorker::Shutdown).unwrap();
    assert_eq!(waiting.join().unwrap().unwrap(), Received::Message(ToWorker::Shutdown));
    assert_eq!(coordinator.receive(None).unwrap(), Received::Message(hello()));
}

#[test]
fn garbled_streams_are_errors_with_codes() {
    let cases: [(&[u8], &str); 5] = [
        (&[0, 0, 0, 0], "channel_length"),
        (&[0xff, 0xff, 0xff, 0xff, 1], "channel_length"),
        (&[1, 0, 0, 0, 0x7f], "channel_decode"),
        (&[5, 0, 0, 0, 1], "channel_torn"),
        (&[5, 0], "channel_torn"),
    ];
    for (bytes, code) in cases {
        let (mut coordinator, mut peer) = bare();
        peer.write_all(bytes).unwrap();
        drop(peer);
        assert_eq!(coordinator.receive(None).unwrap_err().code(), code, "{bytes:?}");
    }
}

#[test]
fn bytes_after_a_message_inside_its_frame_are_an_error() {
    let mut frame = Vec::new();
    encode(&hello(), &mut frame).unwrap();
    frame.push(0);
    frame[0] += 1;
    let (mut coordinator, mut peer) = bare();
    peer.write_all(&frame).unwrap();
    assert_eq!(coordinator.receive(None).unwrap_err().code(), "channel_decode");
}

#[test]
fn an_end_speaks_the_same_bytes_on_an_inherited_socket() {
    let (ours, mut peer) = UnixStream::pair().unwrap();
    let mut worker = WorkerEnd::from_fd(ours.into()).unwrap();
    worker.send(&hello()).unwrap();
    drop(worker);
    let mut bytes = Vec::new();
    peer.read_to_end(&mut bytes).unwrap();
    let mut expected = Vec::new();
    encode(&hello(), &mut expected).unwrap();
    assert_eq!(bytes, expected);
}

proptest! {
    /// Messages come out whole however the stream is cut.
    #[test]
    fn any_cut_of_the_stream_gives_the_same_messages(
        lengths in prop::collection::vec(0usize..300, 1..6),
        cuts in prop::collection::vec(1usize..64, 1..40),
    ) {
        let mut stream = Vec::new();
        for length in &lengths {
            let mut frame = Vec::new();
            encode(&failed(*length), &mut frame).unwrap();
            stream.extend(frame);
        }
        let mut decoder = Decoder::default();
        let (mut rest, mut got, mut cut) = (stream.as_slice(), Vec::new(), cuts.iter().cycle());
        while !rest.is_empty() {
            let (piece, more) = rest.split_at(rest.len().min(*cut.next().unwrap()));
            decoder.push(piece);
            rest = more;
            while let Some(message) = decoder.next::<FromWorker>().unwrap() {
                got.push(message);
            }
        }
        prop_assert_eq!(got, lengths.iter().map(|length| failed(*length)).collect::<Vec<_>>());
        prop_assert_eq!(decoder.have(), 0);
    }

    /// Any bytes at all: messages or an error, never a panic, and never more memory than was received.
    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let mut decoder = Decoder::default();
        decoder.push(&bytes);
        while let Ok(Some(_)) = decoder.next::<FromWorker>() {}
        let mut decoder = Decoder::default();
        decoder.push(&bytes);
        while let Ok(Some(_)) = decoder.next::<ToWorker>() {}
    }
}
