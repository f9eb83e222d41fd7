//! What the CPU really computes: with `SPILLWAY_CPU_EXEC_TRACE=1` a worker prints a line to standard error for every kind of
//! step that it sees for the first time. The line tells what was loaded, not what was asked for.

use spillway_protocol::frame::StepFrame;
use std::collections::BTreeSet;
use std::ops::Range;

/// Switches the trace on when it is `1`.
const SWITCH: &str = "SPILLWAY_CPU_EXEC_TRACE";

/// What makes steps alike: how many tokens, sequences and wanted logit rows they have.
type Shape = (usize, usize, usize);

/// The kinds of steps seen so far, if anyone wants to know.
#[derive(Debug)]
pub(crate) struct ExecTrace {
    seen: Option<BTreeSet<Shape>>,
    layers: Range<usize>,
    formats: String,
}

impl ExecTrace {
    /// A trace for a band of `layers` with matrices of `formats`, on if the environment says so.
    pub fn from_env(layers: Range<usize>, formats: &[String]) -> Self {
        Self::new(std::env::var(SWITCH).is_ok_and(|value| value == "1"), layers, formats)
    }

    fn new(on: bool, layers: Range<usize>, formats: &[String]) -> Self {
        Self { seen: on.then(BTreeSet::new), layers, formats: formats.join(" ") }
    }

    /// Prints a line if what is computed here of the step is the first of its kind: nothing is of what is lifted.
    pub fn see(&mut self, frame: &StepFrame) {
        let (spans, _, tokens) = frame.by_lift();
        let rows = spans.iter().map(|span| span.shape.logits.count(span.shape.tokens as usize)).sum();
        if tokens > 0
            && let Some(line) = self.line((tokens, spans.len(), rows))
        {
            eprintln!("{line}");
        }
    }

    fn line(&mut self, shape: Shape) -> Option<String> {
        let (tokens, sequences, rows) = shape;
        let Range { start, end } = self.layers;
        self.seen.as_mut()?.insert(shape).then(|| {
            format!(
                "cpu exec: layers {start}-{}, tokens {tokens}, sequences {sequences}, logit rows {rows}, formats {}",
                end.saturating_sub(1),
                self.formats
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::ExecTrace;

    #[test]
    fn a_line_is_printed_for_the_first_step_of_its_kind() {
        let formats = ["Q4_K".to_owned(), "Q6_K".to_owned()];
        let mut trace = ExecTrace::new(true, 3..8, &formats);
        let line = "cpu exec: layers 3-7, tokens 512, sequences 1, logit rows 0, formats Q4_K Q6_K";
        assert_eq!(trace.line((512, 1, 0)).as_deref(), Some(line));
        assert_eq!(trace.line((512, 1, 0)), None);
        assert!(trace.line((1, 1, 1)).is_some());
        assert_eq!(ExecTrace::new(false, 3..8, &formats).line((1, 1, 1)), None);
    }
}
