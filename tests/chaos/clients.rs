//! Clients that ask one thing after the other and know what the answers must be.

use crate::support::{Conversation, is_terminal};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Different requests; clients go through them from different starts.
pub const REQUESTS: usize = 12;

/// A request, greedy or drawn, short or with a prompt of several steps.
pub fn request(kind: usize) -> Value {
    let ids: Vec<usize> = (0..10 + kind * 13).map(|position| (position * 7 + kind * 31) % 200 + 3).collect();
    json!({"type": "generate", "id": "r", "prompt_ids": ids, "max_tokens": 20 + kind * 3, "ignore_eos": true,
        "temperature": kind % 2, "top_p": 1, "seed": kind})
}

/// What a client has seen.
#[derive(Debug, Default)]
pub struct Seen {
    /// Times from request to end.
    pub latencies: Vec<Duration>,
    /// Requests that were ended because their worker crashed twice over them alone.
    pub condemned: usize,
    /// Announcements that a request is being recovered.
    pub recovering: usize,
}

/// The text of an answer, its last event and the number of announced recoveries.
pub fn answer(client: &mut Conversation, kind: usize) -> (String, Value, usize) {
    client.send(request(kind));
    let events = client.until(|event| event["id"] == "r" && is_terminal(event));
    let of = |name| events.iter().filter(move |event| event["type"] == name);
    let text = of("token").map(|event| event["text"].as_str().unwrap()).collect();
    let recovering = of("recovering").count();
    (text, events.last().unwrap().clone(), recovering)
}

/// Asks until told to stop. Every answer is that of an undisturbed run.
pub fn run(socket: &Path, start: usize, expected: &[String], stop: &AtomicBool, done: &AtomicUsize) -> Seen {
    let mut client = Conversation::connect(socket);
    let mut seen = Seen::default();
    for turn in start.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let kind = turn % REQUESTS;
        let asked = Instant::now();
        let (text, end, recovering) = answer(&mut client, kind);
        seen.recovering += recovering;
        if end["code"] == "poison_request" {
            seen.condemned += 1;
        } else {
            assert_eq!(end["type"], "done", "{end}");
            assert_eq!(text, expected[kind], "request {kind}");
            seen.latencies.push(asked.elapsed());
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
    assert!(client.is_quiet_for(Duration::from_millis(20)), "an event after the last one");
    client.hang_up();
    seen
}
