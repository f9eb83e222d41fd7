//! The board: who is live, who waits, what is in flight. All scheduling, no processes: the driver carries steps between the
//! board and the workers.

use super::request::{FinishReason, RequestError, RequestId};
use super::schedule::{Budget, Ready, choose};
use super::sequence::{Output, Sequence, Waiting};
use super::slots::Slots;
use crate::workers::WorkerError;
use spillway_protocol::frame::{FrameError, FrameLimits, StepFrame};
use std::collections::VecDeque;

/// Fraction of a step that prompts may take beside decoding sequences, and its floor in tokens.
const PREFILL_BESIDE_DECODE: usize = 8;
const PREFILL_FLOOR: usize = 32;

/// A span of a step under way.
#[derive(Debug, Clone, Copy)]
struct Entry {
    slot: usize,
    start: usize,
    tokens: usize,
    first_row: usize,
    rows: usize,
}

/// A step under way.
#[derive(Debug, Default)]
struct Flight {
    step: u64,
    entries: Vec<Entry>,
}

/// All requests of an engine.
#[derive(Debug)]
pub(super) struct Board {
    limits: FrameLimits,
    slots: Slots,
    /// By slot.
    live: Vec<Option<Sequence>>,
    waiting: VecDeque<Waiting>,
    /// Steps under way, oldest first: they come back in the order they were sent.
    flights: VecDeque<Flight>,
    /// Empty flights, to be used again.
    spare: Vec<Flight>,
    /// Requests that are over and have not been told yet.
    ended: Vec<Output>,
    steps_in_flight: usize,
    /// New tokens of a prompt from which on layers are lifted for it, if any ever are.
    lift_from: Option<usize>,
    turn: usize,
    tokens_done: u64,
    ready: Vec<Ready>,
    chosen: Vec<(usize, usize)>,
}

impl Board {
    /// `rewindable`: whether a sequence can continue from any prefix (see [`Slots`]).
    pub(super) fn new(
        limits: FrameLimits,
        rewindable: bool,
        steps_in_flight: usize,
        lift_from: Option<usize>,
    ) -> Board {
        Board {
            slots: Slots::new(limits.max_spans, limits.kv_blocks, rewindable),
            live: (0..limits.max_spans).map(|_| None).collect(),
            limits,
            waiting: VecDeque::new(),
            flights: VecDeque::new(),
            spare: Vec::new(),
            ended: Vec::new(),
            steps_in_flight,
            lift_from,
            turn: 0,
            tokens_done: 0,
            ready: Vec::new(),
            chosen: Vec::new(),
        }
    }

    /// Puts a request at the end of the queue. One that wants no token is done at once.
    pub(super) fn enqueue(&mut self, mut request: Waiting) {
        if let Output::Answer(answer) = &mut request.output {
            answer.accept();
            if answer.max_tokens() == 0 {
                answer.start(0);
                answer.finish(FinishReason::Length, &request.prompt);
                self.ended.push(request.output);
                return;
            }
        }
        self.waiting.push_back(request);
    }

    /// Ends a request that was never let in.
    pub(super) fn reject(&mut self, mut request: Waiting, error: &RequestError) {
        request.output.fail(error);
        self.ended.push(request.output);
    }

    /// Gives slots to waiting requests in order. The first one that has to wait holds the others up, so that a large
    /// request is not overtaken for ever.
    pub(super) fn admit(&mut self) {
        while let Some(request) = self.waiting.front() {
            let claim = self.slots.claim(&request.prompt, request.length(), request.reuse());
            let Some(claim) = claim else { return };
            let Some(request) = self.waiting.pop_front() else { return };
            let lifts = self.slots.lifts(claim.slot).clone();
            let sequence = request.begin(claim.cached, lifts, self.lift_from, self.limits.max_tokens);
            self.live[claim.slot] = Some(sequence);
        }
    }

    /// Whether another step may go out now.
    pub(super) fn may_send(&self) -> bool {
        self.flights.len() < self.steps_in_flight
    }

    /// Whether any step is under way.
    pub(super) fn in_flight(&self) -> bool {
        !self.flights.is_empty()
    }

    /// Fills `frame` and `ids` with the next step; false when nobody has tokens to run.
    pub(super) fn next_step(
        &mut self,
        epoch: u64,
        step: u64,
        frame: &mut StepFrame,
        ids: &mut Vec<u32>,
    ) -> Result<bool, FrameError> {
        self.select();
        frame.begin(epoch, step);
        ids.clear();
        if self.chosen.is_empty() {
            return Ok(false);
        }
        let mut flight = self.spare.pop().unwrap_or_default();
        flight.step = step;
        for &(slot, tokens) in &self.chosen {
            let Some(sequence) = &mut self.live[slot] else { continue };
            let end = sequence.sent + tokens;
            let logits = sequence.wanted(end);
            // Another placement, since then, may lift nothing.
            let lifted = self.lift_from.is_some() && sequence.lifts.at(sequence.sent).0;
            let entry = Entry {
                slot,
                start: sequence.sent,
                tokens,
                first_row: frame.logit_rows(),
                rows: logits.count(tokens),
            };
            frame.push(
                sequence.span(slot, tokens, logits, lifted)?,
                self.slots.blocks(slot, end),
                &self.limits,
            )?;
            ids.extend_from_slice(&sequence.tokens[sequence.sent..end]);
            sequence.sent = end;
            sequence.in_flight += 1;
            flight.entries.push(entry);
        }
        self.flights.push_back(flight);
        Ok(true)
    }

    /// Decides who takes part in the next step.
    fn select(&mut self) {
        self.ready.clear();
        let open = |live: &'_ Option<Sequence>| live.as_ref().is_some_and(|sequence| !sequence.closed);
        let suspected = |live: &Option<Sequence>| live.as_ref().is_some_and(|it| it.suspicion.is_some());
        // Under suspicion a sequence runs alone, so that the next failure tells who is to blame.
        let alone = self.live.iter().position(|live| open(live) && suspected(live));
        for (slot, live) in self.live.iter().enumerate() {
            if let Some(sequence) = live
                && open(live)
                && alone.is_none_or(|alone| alone == slot)
            {
                self.ready.push(sequence.ready(slot));
            }
        }
        let decoding = self.ready.iter().filter(|ready| ready.decoding).count();
        let budget = Budget {
            step: self.limits.max_tokens,
            prefill_beside_decode: (self.limits.max_tokens / PREFILL_BESIDE_DECODE).max(PREFILL_FLOOR),
            decode: decoding.div_ceil(self.steps_in_flight),
        };
        choose(&self.ready, &budget, self.turn, &mut self.chosen);
        self.turn = self.turn.wrapping_add(1);
    }

    /// Number of the step whose logits come next.
    pub(super) fn expected_step(&self) -> Option<u64> {
        self.flights.front().map(|flight| flight.step)
    }

    /// Logit rows that the step whose logits come next asked for.
    pub(super) fn expected_rows(&self) -> usize {
        self.flights
            .front()
            .and_then(|flight| flight.entries.last())
            .map_or(0, |entry| entry.first_row + entry.rows)
    }

    /// A logits row of the oldest step. `logits` is scratch afterwards.
    pub(super) fn row(&mut self, row: usize, logits: &mut [f32]) {
        let entries = self.flights.front().map(|flight| flight.entries.as_slice()).unwrap_or_default();
        let entry =
            entries.iter().find(|entry| (entry.first_row..entry.first_row + entry.rows).contains(&row));
        if let Some(entry) = entry
            && let Some(sequence) = &mut self.live[entry.slot]
            && !sequence.closed
        {
            sequence.closed = sequence.take_row(entry.start + (row - entry.first_row), logits);
        }
    }

    /// The oldest step is complete.
    pub(super) fn step_done(&mut self) {
        let Some(mut flight) = self.flights.pop_front() else { return };
        for entry in flight.entries.drain(..) {
            let Some(sequence) = &mut self.live[entry.slot] else { continue };
            sequence.in_flight -= 1;
            sequence.done += entry.tokens;
            sequence.suspicion = sequence.suspicion.filter(|suspicion| sequence.done < suspicion.until);
            self.tokens_done += entry.tokens as u64;
            self.release_if_over(entry.slot);
        }
        self.spare.push(flight);
    }

    /// Ends a request wherever it is.
    pub(super) fn abort(&mut self, id: RequestId) {
        if let Some(at) = self.waiting.iter().position(|request| request.id == id) {
            if let Some(mut request) = self.waiting.remove(at) {
                request.output.abort(&request.prompt);
                self.ended.push(request.output);
            }
            return;
        }
        let slot = self.live.iter().position(|live| live.as_ref().is_some_and(|sequence| sequence.id == id));
        if let Some(slot) = slot
            && let Some(sequence) = &mut self.live[slot]
            && !sequence.closed
        {
            sequence.output.abort(&sequence.tokens);
            sequence.closed = true;
            self.release_if_over(slot);
        }
    }

    /// Every request that has no terminal event yet is aborted.
    pub(super) fn abort_all(&mut self) {
        let live = self.live.iter().flatten().map(|sequence| sequence.id);
        let ids: Vec<RequestId> = self.waiting.iter().map(|request| request.id).chain(live).collect();
        ids.into_iter().for_each(|id| self.abort(id));
    }

    /// What the workers held is gone, and the steps under way with it: every sequence starts again from its tokens. When
    /// `error` blames a step, its sequences are suspected, and a sequence whose step has failed alone before is ended: whether
    /// that happened.
    pub(super) fn rewind(&mut self, error: &WorkerError) -> bool {
        let blamed: Vec<usize> = match error.blames_the_step() {
            true => {
                self.flights.iter().flat_map(|flight| flight.entries.iter().map(|entry| entry.slot)).collect()
            }
            false => Vec::new(),
        };
        self.flights.clear();
        let mut condemned = false;
        for slot in 0..self.live.len() {
            let Some(sequence) = &mut self.live[slot] else { continue };
            if blamed.contains(&slot) {
                condemned |= sequence.suspect(error);
            }
            sequence.was_done = sequence.was_done.max(sequence.done);
            (sequence.sent, sequence.done, sequence.in_flight) = (0, 0, 0);
            self.release_if_over(slot);
        }
        self.slots.forget();
        condemned
    }

    /// Tells everyone who is being answered about a pause.
    pub(super) fn tell_recovering(&mut self, code: &'static str, message: &str) {
        for sequence in self.live.iter_mut().flatten().filter(|sequence| !sequence.closed) {
            if let Output::Answer(answer) = &mut sequence.output {
                answer.recovering(code, message);
            }
        }
    }

    /// Goes on with workers of other limits that hold nothing; to be called after [`Self::rewind`]. Sequences that have no room
    /// any more wait for it, before those that never had any.
    pub(super) fn resettle(&mut self, limits: FrameLimits, steps_in_flight: usize, lift_from: Option<usize>) {
        let mut live: Vec<Sequence> = std::mem::take(&mut self.live).into_iter().flatten().collect();
        live.sort_by_key(|sequence| std::cmp::Reverse(sequence.id));
        live.into_iter().for_each(|sequence| self.waiting.push_front(sequence.into()));
        self.slots = Slots::new(limits.max_spans, limits.kv_blocks, self.slots.rewindable());
        self.live = (0..limits.max_spans).map(|_| None).collect();
        (self.limits, self.steps_in_flight, self.lift_from) = (limits, steps_in_flight, lift_from);
        self.admit();
    }

    /// Whether a sequence is not yet where it was before a worker failed.
    pub(super) fn replaying(&self) -> bool {
        let behind = |sequence: &Sequence| !sequence.closed && sequence.done < sequence.was_done;
        let displaced = |request: &Waiting| request.resumed.is_some();
        self.live.iter().flatten().any(behind) || self.waiting.iter().any(displaced)
    }

    /// Every request that has no terminal event yet fails; what the workers held is gone.
    pub(super) fn fail_all(&mut self, error: &RequestError) {
        self.flights.clear();
        for request in std::mem::take(&mut self.waiting) {
            self.reject(request, error);
        }
        for slot in 0..self.live.len() {
            let Some(mut sequence) = self.live[slot].take() else { continue };
            if !sequence.closed {
                sequence.output.fail(error);
            }
            self.slots.release(slot, &[], &sequence.lifts);
            self.ended.push(sequence.output);
        }
        self.slots.forget();
    }

    fn release_if_over(&mut self, slot: usize) {
        let over = |sequence: &mut Sequence| sequence.closed && sequence.in_flight == 0;
        if let Some(sequence) = self.live[slot].take_if(over) {
            self.slots.release(slot, &sequence.tokens[..sequence.done], &sequence.lifts);
            self.ended.push(sequence.output);
        }
    }

    /// Hands collected events to the users.
    pub(super) fn deliver(&mut self) {
        for output in &mut self.ended {
            match output {
                Output::Answer(answer) => answer.deliver(),
                Output::Score(score) => score.deliver(),
            }
        }
        self.ended.clear();
        for sequence in self.live.iter_mut().flatten() {
            if let Output::Answer(answer) = &mut sequence.output {
                answer.deliver();
            }
        }
    }

    /// Forgets what finished sequences left behind.
    pub(super) fn forget(&mut self) {
        self.slots.forget();
    }

    /// Requests that generate.
    pub(super) fn live(&self) -> usize {
        self.live.iter().flatten().filter(|sequence| !sequence.closed).count()
    }

    /// Requests without a slot.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Blocks of live requests.
    pub(super) fn blocks_used(&self) -> usize {
        self.slots.blocks_used()
    }

    /// Tokens run since the start.
    pub(super) fn tokens_done(&self) -> u64 {
        self.tokens_done
    }
}

#[cfg(test)]
mod tests;
