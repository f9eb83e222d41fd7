//! Loading, as a bar per stage on a terminal, as JSON lines, or silently.

use super::args::Progress;
use super::output;
use crate::workers::{Link, LoadProgress};
use indicatif::{MultiProgress, ProgressBar, ProgressFinish, ProgressStyle};
use serde_json::json;
use std::io::{IsTerminal, stderr};

const BAR: &str = "{prefix} [{bar:32}] {bytes}/{total_bytes} {bytes_per_sec}";

/// Shows progress on standard error.
#[derive(Debug)]
pub enum ProgressView {
    /// A bar per stage.
    Bars(MultiProgress, Vec<ProgressBar>),
    /// One JSON object per event.
    Json,
    /// Nothing.
    Silent,
}

impl ProgressView {
    /// The view for what was asked and where standard error goes.
    pub fn new(asked: Progress) -> Self {
        match asked {
            Progress::Auto if stderr().is_terminal() => ProgressView::Bars(MultiProgress::new(), Vec::new()),
            Progress::Auto | Progress::None => ProgressView::Silent,
            Progress::Json => ProgressView::Json,
        }
    }

    /// Shows that a stage has come further, or how two of them are linked.
    pub fn show(&mut self, progress: &LoadProgress) {
        match (self, progress) {
            (ProgressView::Silent, _) => {}
            (ProgressView::Json, LoadProgress::Weights { stage, stages, done, total }) => {
                let event = json!({"type": "loading", "stage": stage, "stages": stages, "done": done, "total": total});
                output::note(&event.to_string());
            }
            (ProgressView::Json, LoadProgress::Link(Link { from, path, reason })) => {
                let event =
                    json!({"type": "link", "from": from, "to": from + 1, "path": path, "reason": reason});
                output::note(&event.to_string());
            }
            (ProgressView::Bars(all, _), LoadProgress::Link(Link { from, path, reason })) => {
                if let Some(reason) = reason {
                    // Fails when standard error does not work; then nothing can be told.
                    let _ = all.println(format!("stages {from} and {}: {}, {reason}", from + 1, path.name()));
                }
            }
            (ProgressView::Bars(all, bars), &LoadProgress::Weights { stage, stages, done, total }) => {
                while bars.len() < stages {
                    bars.push(all.add(new_bar(bars.len(), stages)));
                }
                if let Some(bar) = bars.get(stage) {
                    bar.set_length(total);
                    bar.set_position(done);
                }
            }
        }
    }

    /// Clears what is on the screen.
    pub fn finish(self) {
        if let ProgressView::Bars(_, bars) = self {
            for bar in bars {
                bar.finish_and_clear();
            }
        }
    }
}

fn new_bar(stage: usize, stages: usize) -> ProgressBar {
    // A view that is dropped before its end is cleared, too.
    let bar = ProgressBar::new(0)
        .with_prefix(format!("loading stage {} of {stages}", stage + 1))
        .with_finish(ProgressFinish::AndClear);
    match ProgressStyle::with_template(BAR) {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        // The template is a constant that the tests draw; without it the default bar serves.
        Err(_) => bar,
    }
}
