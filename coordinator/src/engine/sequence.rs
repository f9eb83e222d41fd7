//! One request: what there is of it while it waits for a slot, and while it has one.

use super::answer::Answer;
use super::lifts::Lifts;
use super::request::{FinishReason, RequestError, RequestId};
use super::schedule::Ready;
use super::score::ScoreSender;
use super::slots::Reuse;
use crate::workers::WorkerError;
use spillway_protocol::frame::{FrameError, LogitRows, SpanShape};

/// Where the logits of a sequence go.
#[derive(Debug)]
pub(super) enum Output {
    /// Into an answer.
    Answer(Box<Answer>),
    /// To a thread that reads every row.
    Score(ScoreSender),
}

/// An accepted request that has no slot yet.
#[derive(Debug)]
pub(super) struct Waiting {
    pub id: RequestId,
    pub prompt: Vec<u32>,
    /// Most prompt tokens in one step.
    pub chunk: usize,
    pub output: Output,
    /// It had a slot before.
    pub resumed: Option<Resumed>,
}

/// What a sequence keeps that has lost its slot.
#[derive(Debug, Clone)]
pub(super) struct Resumed {
    prompt_len: usize,
    lifts: Lifts,
    suspicion: Option<Suspicion>,
    was_done: usize,
}

impl Waiting {
    pub(super) fn new(id: RequestId, prompt: Vec<u32>, chunk: usize, output: Output) -> Waiting {
        Waiting { id, prompt, chunk, output, resumed: None }
    }

    /// Tokens that the user gave.
    pub(super) fn prompt_len(&self) -> usize {
        self.resumed.as_ref().map_or(self.prompt.len(), |resumed| resumed.prompt_len)
    }

    /// What it may continue from: scores are of every position.
    pub(super) fn reuse(&self) -> Reuse<'_> {
        match (&self.output, &self.resumed) {
            (Output::Score(_), _) => Reuse::Nothing,
            (Output::Answer(_), Some(resumed)) => Reuse::AsRun(&resumed.lifts),
            (Output::Answer(_), None) => Reuse::Any,
        }
    }

    /// Tokens to reserve room for.
    pub(super) fn length(&self) -> usize {
        match &self.output {
            Output::Answer(answer) => self.prompt_len() + answer.max_tokens(),
            Output::Score(_) => self.prompt.len(),
        }
    }

    /// With a slot that holds its first `cached` tokens, run with layers lifted for `lifts`. They are lifted for its prompt, too, if
    /// so many of its tokens are new as `lift_from` says.
    pub(super) fn begin(
        self,
        cached: usize,
        mut lifts: Lifts,
        lift_from: Option<usize>,
        largest_chunk: usize,
    ) -> Sequence {
        let prompt_len = self.prompt_len();
        let Waiting { id, prompt, chunk, mut output, resumed } = self;
        match &resumed {
            Some(resumed) => lifts.extend(&resumed.lifts, cached),
            None if lift_from.is_some_and(|from| prompt_len - cached >= from) => {
                lifts.push(cached..prompt_len)
            }
            None => {}
        }
        if let Output::Answer(answer) = &mut output
            && resumed.is_none()
        {
            answer.start(cached);
        }
        Sequence {
            id,
            prompt_len,
            tokens: prompt,
            sent: cached,
            done: cached,
            in_flight: 0,
            chunk: chunk.min(largest_chunk),
            output,
            closed: false,
            lifts,
            suspicion: resumed.as_ref().and_then(|resumed| resumed.suspicion),
            was_done: resumed.map_or(0, |resumed| resumed.was_done),
        }
    }
}

impl From<Sequence> for Waiting {
    /// A sequence that waits for a slot again; its tokens so far are computed anew.
    fn from(sequence: Sequence) -> Waiting {
        let Sequence { id, tokens, prompt_len, chunk, output, lifts, suspicion, was_done, .. } = sequence;
        let resumed = Some(Resumed { prompt_len, lifts, suspicion, was_done });
        Waiting { id, prompt: tokens, chunk, output, resumed }
    }
}

/// A request with a slot.
#[derive(Debug)]
pub(super) struct Sequence {
    pub id: RequestId,
    /// Prompt and answer so far.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// Tokens handed to the workers.
    pub sent: usize,
    /// Tokens that every stage has run.
    pub done: usize,
    /// Steps under way that hold tokens of this sequence.
    pub in_flight: usize,
    pub chunk: usize,
    pub output: Output,
    /// Its terminal event is decided; it only waits for its steps to come back.
    pub closed: bool,
    /// Positions that layers are lifted for, as far as its tokens are known.
    pub lifts: Lifts,
    pub suspicion: Option<Suspicion>,
    /// Tokens that had been run when a worker failed: until they are again, the sequence is behind.
    pub was_done: usize,
}

/// A worker failed with a step of this sequence in hand.
#[derive(Debug, Clone, Copy)]
pub(super) struct Suspicion {
    /// Tokens of the sequence with which the step ended: when they are done, it was not to blame.
    pub until: usize,
    /// Failures in a row.
    failures: u32,
}

/// Failures of one step after which its request is to blame: the step runs alone from the first on.
pub(super) const POISONOUS: u32 = 2;

impl Sequence {
    /// A worker failed with a step of this sequence in hand; whether that ends the request.
    pub(super) fn suspect(&mut self, error: &WorkerError) -> bool {
        let failures = self.suspicion.map_or(0, |suspicion| suspicion.failures) + 1;
        self.suspicion = Some(Suspicion { until: self.sent, failures });
        let condemned = failures >= POISONOUS && !self.closed;
        if condemned {
            self.output.fail(&RequestError::poison(error));
            self.closed = true;
        }
        condemned
    }

    /// The tokens that may come next in one span: layers are lifted for all of them, or for none. After lifted ones the CPU finds
    /// the state when they have come back, no sooner.
    pub(super) fn ready(&self, slot: usize) -> Ready {
        let decoding = self.sent >= self.prompt_len;
        let (lifted, until) = self.lifts.at(self.sent);
        let was_lifted = self.sent.checked_sub(1).is_some_and(|last| self.lifts.at(last).0);
        let waits = was_lifted && !lifted && self.in_flight > 0;
        let pending = if waits { 0 } else { self.tokens.len().min(until) - self.sent };
        Ready { slot, pending, decoding, lifted, chunk: self.chunk }
    }

    /// The rows wanted of a span that ends at `end`.
    pub(super) fn wanted(&self, end: usize) -> LogitRows {
        match &self.output {
            Output::Score(_) => LogitRows::All,
            Output::Answer(_) if end == self.tokens.len() => LogitRows::Last,
            Output::Answer(_) => LogitRows::None,
        }
    }

    pub(super) fn span(
        &self,
        slot: usize,
        tokens: usize,
        logits: LogitRows,
        lifted: bool,
    ) -> Result<SpanShape, FrameError> {
        let number = |value: usize| {
            u32::try_from(value)
                .map_err(|_| FrameError::Inconsistent("a position is beyond what a frame can say"))
        };
        Ok(SpanShape {
            sequence: self.id.0,
            state_slot: number(slot)?,
            start: number(self.sent)?,
            tokens: number(tokens)?,
            logits,
            lifted,
        })
    }

    /// The logits of `position`; true when the sequence needs no more.
    pub(super) fn take_row(&mut self, position: usize, logits: &mut [f32]) -> bool {
        match &mut self.output {
            Output::Answer(answer) => answer.choose(&mut self.tokens, logits),
            Output::Score(score) => {
                let read = score.row(position, logits);
                let last = position + 1 == self.tokens.len();
                if last {
                    score.end(Ok(()));
                }
                last || !read
            }
        }
    }
}

impl Output {
    pub(super) fn abort(&mut self, tokens: &[u32]) {
        match self {
            Output::Answer(answer) => answer.finish(FinishReason::Aborted, tokens),
            Output::Score(score) => score.end(Err(RequestError::stopped())),
        }
    }

    pub(super) fn fail(&mut self, error: &RequestError) {
        match self {
            Output::Answer(answer) => answer.fail(error),
            Output::Score(score) => score.end(Err(error.clone())),
        }
    }
}
