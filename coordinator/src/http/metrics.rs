//! The state of the daemon as Prometheus reads it.

use spillway_protocol::jsonl::{Diagnosis, StageReport};
use std::fmt::Write;

/// A figure of the whole daemon: name, type, help, value.
type Figure = (&'static str, &'static str, &'static str, fn(&Diagnosis) -> u64);

const FIGURES: &[Figure] = &[
    ("spillway_ready", "gauge", "Whether a request would be answered now.", |d| u64::from(d.ready)),
    ("spillway_requests_in_flight", "gauge", "Requests accepted and not ended, of all clients.", |d| {
        d.requests as u64
    }),
    ("spillway_requests_generating", "gauge", "Requests that have left the queue.", |d| d.live as u64),
    ("spillway_requests_queued", "gauge", "Requests that wait for a slot.", |d| d.queued as u64),
    ("spillway_tokens_total", "counter", "Tokens run by the loaded model, prompt and answer.", |d| {
        d.tokens_done
    }),
    ("spillway_worker_restarts_total", "counter", "Workers of the loaded model that were replaced.", |d| {
        d.restarts
    }),
];

/// A figure of each stage: name, type, help, value.
type StageFigure = (&'static str, &'static str, &'static str, fn(&StageReport) -> f64);

const STAGE_FIGURES: &[StageFigure] = &[
    ("spillway_stage_busy_seconds_total", "counter", "Time in which the worker computed.", |s| {
        seconds(s.busy_ns)
    }),
    (
        "spillway_stage_wait_seconds_total",
        "counter",
        "Time in which the worker waited for input or room.",
        |s| seconds(s.wait_ns),
    ),
    ("spillway_stage_copy_seconds_total", "counter", "Time in which the worker copied frames.", |s| {
        seconds(s.copy_ns)
    }),
    ("spillway_stage_steps_total", "counter", "Steps of the worker since it was started.", |s| {
        s.steps as f64
    }),
    ("spillway_stage_memory_bytes", "gauge", "Private memory that the stage is charged for.", |s| {
        s.stage.bytes as f64
    }),
];

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Everything, in the text format of Prometheus.
pub fn render(diagnosis: &Diagnosis) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    for (name, kind, help, value) in FIGURES {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {}", value(diagnosis));
    }
    for (name, kind, help, value) in STAGE_FIGURES {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (index, stage) in diagnosis.stages.iter().enumerate() {
            let target = stage.stage.target;
            let _ = writeln!(text, "{name}{{stage=\"{index}\",target=\"{target}\"}} {}", value(stage));
        }
    }
    text
}
