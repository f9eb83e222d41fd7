//! Proves, on a model that is a few lines long: whatever is submitted and aborted in whatever order, every request ends
//! once, answers do not depend on what runs beside them or on what a slot held before, and all memory comes back.

use super::*;
use crate::engine::answer::Answer;
use crate::engine::request::{Completion, GenerateEvent, GenerateRequest};
use crate::engine::score;
use crate::engine::slots::Reuse;
use crate::sampler::SamplingParams;
use proptest::prelude::*;
use spillway_protocol::frame::LogitRows;
use std::collections::HashMap;
use std::sync::mpsc::{Receiver, channel};

const VOCAB: usize = 50;
const BLOCKS: usize = 12;
const LIMITS: FrameLimits = FrameLimits {
    max_spans: 3,
    max_tokens: 16,
    max_seq: 128,
    kv_blocks: BLOCKS,
    d_model: 1,
    vocab: VOCAB,
    max_logit_rows: 16,
};

/// Workers whose whole model is: the next token is a hash of all tokens before it. Keys and values live in blocks by id, the
/// recurrent state in slots, so wrong tables, positions or resets give wrong answers.
#[derive(Default)]
struct Workers {
    cells: HashMap<(u32, usize), u32>,
    states: HashMap<u32, Vec<u32>>,
    /// By slot: for which of its tokens layers were lifted.
    lifted: HashMap<u32, Vec<bool>>,
    /// By sequence: the same, whatever workers there were. Whoever runs a token again must run it as before.
    known: HashMap<u64, Vec<bool>>,
}

/// New tokens of a prompt from which on layers are lifted for it.
const LIFT_FROM: usize = 6;

impl Workers {
    /// Runs a step; returns the logits of its rows.
    fn run(&mut self, frame: &StepFrame, ids: &[u32]) -> Vec<Vec<f32>> {
        let mut rows = Vec::new();
        for span in frame.spans() {
            let shape = span.shape;
            let state = self.states.entry(shape.state_slot).or_default();
            // An attending model only overwrites what lies behind `start`; the state here stands for both kinds.
            assert!(state.len() >= shape.start as usize, "a span starts behind what its slot holds");
            state.truncate(shape.start as usize);
            let lifted = self.lifted.entry(shape.state_slot).or_default();
            lifted.truncate(shape.start as usize);
            let known = self.known.entry(shape.sequence).or_insert_with(|| lifted.clone());
            let all = lifted.iter().zip(&*known).all(|(now, before)| now == before);
            assert!(all, "what it goes on from was run as before");
            known.extend(lifted.iter().skip(known.len()));
            for position in shape.start as usize..(shape.start + shape.tokens) as usize {
                lifted.push(shape.lifted);
                if position == known.len() {
                    known.push(shape.lifted);
                }
                assert_eq!(known[position], shape.lifted, "position {position} is run as it was before");
            }
            for token in 0..shape.tokens as usize {
                let (id, position) = (ids[span.first_token + token], shape.start as usize + token);
                state.push(id);
                self.cells.insert((frame.blocks(span)[position / 32], position % 32), id);
                let wanted = shape.logits == LogitRows::All
                    || shape.logits == LogitRows::Last && token + 1 == shape.tokens as usize;
                if wanted {
                    let read = |at: usize| self.cells[&(frame.blocks(span)[at / 32], at % 32)];
                    let seen: Vec<u32> = (0..=position).map(read).collect();
                    assert_eq!(&seen, state, "blocks and slot of a sequence hold the same tokens");
                    rows.push(logits(&seen));
                }
            }
        }
        rows
    }
}

fn logits(tokens: &[u32]) -> Vec<f32> {
    let mut row = vec![0.0; VOCAB];
    row[next(tokens) as usize] = 1.0;
    row
}

fn next(tokens: &[u32]) -> u32 {
    tokens.iter().fold(7, |hash, &token| (hash * 31 + token) % 1009) % 50
}

fn expected(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    (0..count).for_each(|_| tokens.push(next(&tokens)));
    tokens.split_off(prompt.len())
}

struct Harness {
    board: Board,
    workers: Workers,
    /// Rows of steps under way, and the sequences that layers are lifted for in them.
    under_way: VecDeque<(Vec<Vec<f32>>, Vec<u64>)>,
    frame: StepFrame,
    ids: Vec<u32>,
    step: u64,
}

impl Harness {
    fn new(rewindable: bool, steps_in_flight: usize) -> Harness {
        Harness {
            board: Board::new(LIMITS, rewindable, steps_in_flight, Some(LIFT_FROM)),
            workers: Workers::default(),
            under_way: VecDeque::new(),
            frame: StepFrame::with_limits(&LIMITS),
            ids: Vec::new(),
            step: 0,
        }
    }

    fn submit(&mut self, id: u64, prompt: &[u32], max_tokens: usize) -> Receiver<GenerateEvent> {
        let (sender, events) = channel();
        let request = GenerateRequest {
            prompt: prompt.to_vec(),
            max_tokens,
            sampling: SamplingParams::default(),
            stop: Vec::new(),
            ignore_eos: false,
        };
        let sink = Box::new(move |event| sender.send(event).unwrap());
        let answer = Answer::new(&request, max_tokens, None, sink);
        let output = Output::Answer(Box::new(answer));
        self.board.enqueue(Waiting::new(RequestId(id), prompt.to_vec(), 16, output));
        events
    }

    fn turn(&mut self) {
        self.board.admit();
        while self.board.may_send() {
            self.step += 1;
            if !self.board.next_step(1, self.step, &mut self.frame, &mut self.ids).unwrap() {
                break;
            }
            let of = |lifted: bool| {
                let spans = self.frame.spans().iter().filter(move |span| span.shape.lifted == lifted);
                spans.map(|span| span.shape.sequence)
            };
            let is_lifted = |id: &u64| self.under_way.iter().any(|(_, lifted)| lifted.contains(id));
            assert!(!of(false).any(|id| is_lifted(&id)), "the state is still with the GPU");
            let lifted = of(true).collect();
            self.under_way.push_back((self.workers.run(&self.frame, &self.ids), lifted));
        }
        self.board.deliver();
        if let Some((rows, _)) = self.under_way.pop_front() {
            assert_eq!(rows.len(), self.board.expected_rows());
            for (row, mut logits) in rows.into_iter().enumerate() {
                self.board.row(row, &mut logits);
            }
            self.board.step_done();
        }
    }

    /// The workers are gone, and others take their place that hold nothing and have other limits.
    fn relocate(&mut self, max_spans: usize, kv_blocks: usize) {
        self.board.rewind(&WorkerError::GivenUp);
        self.board.tell_recovering("device_replanned", "elsewhere");
        self.under_way.clear();
        self.workers = Workers { known: std::mem::take(&mut self.workers.known), ..Workers::default() };
        let (limits, steps) = (FrameLimits { max_spans, kv_blocks, ..LIMITS }, self.board.steps_in_flight);
        self.board.resettle(limits, steps, Some(LIFT_FROM));
    }

    fn run_out(&mut self) {
        for _ in 0..10_000 {
            self.turn();
            if self.board.live() + self.board.waiting() == 0 && !self.board.in_flight() {
                self.board.deliver();
                return;
            }
        }
        panic!("requests are stuck");
    }
}

/// The only terminal event.
fn terminal(events: &Receiver<GenerateEvent>) -> GenerateEvent {
    let ends = |event: &GenerateEvent| {
        matches!(event, GenerateEvent::Done(_) | GenerateEvent::Failed(_) | GenerateEvent::Aborted(_))
    };
    let all: Vec<GenerateEvent> = events.try_iter().collect();
    assert_eq!(all.iter().filter(|event| ends(event)).count(), 1, "{all:?}");
    assert!(ends(all.last().unwrap()), "the terminal event is the last one");
    let started = all.iter().filter(|event| matches!(event, GenerateEvent::Started { .. })).count();
    assert!(started <= 1, "{all:?}");
    all.into_iter().next_back().unwrap()
}

fn done(events: &Receiver<GenerateEvent>) -> Completion {
    match terminal(events) {
        GenerateEvent::Done(completion) => completion,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_answer_is_the_model_applied_again_and_again() {
    let mut harness = Harness::new(true, 1);
    let prompt: Vec<u32> = (0..40).map(|i| i % 50).collect();
    let events = harness.submit(1, &prompt, 20);
    harness.run_out();
    let completion = done(&events);
    assert_eq!(completion.token_ids, expected(&prompt, 20));
    assert_eq!((completion.finish_reason, completion.prompt_ids), (FinishReason::Length, prompt));
    assert_eq!(completion.timings.generated_tokens, 20);
}

#[test]
fn no_token_wanted_is_done_at_once() {
    let mut harness = Harness::new(true, 1);
    let events = harness.submit(1, &[1, 2], 0);
    harness.board.deliver();
    assert!(done(&events).token_ids.is_empty());
    assert_eq!(harness.step, 0);
}

#[test]
fn a_conversation_continues_where_its_slot_ended() {
    for rewindable in [true, false] {
        let mut harness = Harness::new(rewindable, 1);
        let first = harness.submit(1, &[5; 20], 10);
        harness.run_out();
        let mut longer = vec![5; 20];
        longer.extend(done(&first).token_ids);
        longer.extend([8, 9]);
        let second = harness.submit(2, &longer, 10);
        harness.run_out();
        let completion = done(&second);
        assert_eq!(completion.token_ids, expected(&longer, 10));
        // The last token of an answer was chosen but never run.
        assert_eq!(completion.timings.cached_tokens, 29);
        let fork = harness.submit(3, &[5; 25], 5);
        harness.run_out();
        let completion = done(&fork);
        assert_eq!(completion.token_ids, expected(&[5; 25], 5));
        assert_eq!(completion.timings.cached_tokens, if rewindable { 20 } else { 0 });
    }
}

#[test]
fn a_request_can_be_aborted_in_every_state() {
    let mut harness = Harness::new(true, 1);
    let states = [(1, 0), (2, 1), (3, 6)].map(|(id, turns)| (id, turns, harness.submit(id, &[3; 40], 20)));
    let queued = harness.submit(4, &[3; 40], 20);
    let gone = |events: &Receiver<GenerateEvent>| matches!(terminal(events), GenerateEvent::Aborted(_));
    harness.board.abort(RequestId(4));
    harness.board.deliver();
    assert!(gone(&queued), "queued");
    for (id, turns, events) in states {
        (0..turns).for_each(|_| harness.turn());
        harness.board.abort(RequestId(id));
        harness.board.abort(RequestId(id));
        harness.board.deliver();
        assert!(gone(&events), "after {turns} turns");
    }
    harness.run_out();
    assert_eq!(harness.board.blocks_used(), 0);
}

#[test]
fn failing_ends_everything_once_and_forgets_the_slots() {
    let mut harness = Harness::new(true, 1);
    let all: Vec<_> = (0..6).map(|id| harness.submit(id, &[3; 40], 20)).collect();
    (0..4).for_each(|_| harness.turn());
    harness.board.fail_all(&RequestError::busy());
    harness.board.deliver();
    for events in &all {
        assert!(matches!(terminal(events), GenerateEvent::Failed(_)));
    }
    assert_eq!((harness.board.live(), harness.board.waiting(), harness.board.in_flight()), (0, 0, false));
    assert_eq!(harness.board.slots.claim(&[3; 40], 40, Reuse::Any).unwrap().cached, 0);
}

#[test]
fn sequences_without_room_on_other_workers_wait_for_it_before_those_that_never_had_any() {
    let mut harness = Harness::new(false, 2);
    let all: Vec<_> = (0..4).map(|id| harness.submit(id, &[3; 40], 20)).collect();
    (0..8).for_each(|_| harness.turn());
    assert_eq!((harness.board.live(), harness.board.waiting()), (3, 1));
    harness.relocate(3, 4);
    assert!(harness.board.replaying());
    assert_eq!((harness.board.live(), harness.board.waiting()), (2, 2), "two blocks for each");
    assert_eq!(harness.board.waiting.iter().map(|request| request.id.0).collect::<Vec<_>>(), [2, 3]);
    harness.run_out();
    for (id, events) in all.iter().enumerate() {
        let seen: Vec<GenerateEvent> = events.try_iter().collect();
        let told = |event: &&GenerateEvent| {
            matches!(event, GenerateEvent::Recovering { code: "device_replanned", .. })
        };
        assert_eq!(seen.iter().filter(told).count(), usize::from(id < 3), "{seen:?}");
        let Some(GenerateEvent::Done(completion)) = seen.last() else { panic!("{seen:?}") };
        assert_eq!(completion.token_ids, expected(&[3; 40], 20));
    }
    assert!(!harness.board.replaying());
}

#[test]
fn scoring_gives_every_row_in_order() {
    let mut harness = Harness::new(true, 1);
    let prompt: Vec<u32> = (0..60).map(|i| i * 7 % 50).collect();
    let (sender, reader) = score::pair();
    let output = Output::Score(sender);
    harness.board.enqueue(Waiting::new(RequestId(1), prompt.clone(), 7, output));
    let thread = std::thread::spawn(move || {
        let mut rows = Vec::new();
        let result = reader.read(&mut |position, row| {
            rows.push((position, row.to_vec()));
            std::ops::ControlFlow::Continue(())
        });
        (rows, result)
    });
    harness.run_out();
    let (rows, result) = thread.join().unwrap();
    assert_eq!(result, Some(Ok(())));
    let wanted: Vec<_> = (0..60).map(|at| (at, logits(&prompt[..=at]))).collect();
    assert_eq!(rows, wanted);
}

/// Something a user does.
#[derive(Debug, Clone)]
enum Act {
    Submit { prompt: Vec<u32>, max_tokens: usize },
    Abort { which: usize },
    Turns(usize),
    Relocate { slots: usize, blocks: usize },
}

fn act() -> impl Strategy<Value = Act> {
    let tokens = prop_oneof![(1usize..90).prop_map(|n| vec![4; n]), prop::collection::vec(0u32..50, 1..90)];
    prop_oneof![
        3 => (tokens, 0usize..30).prop_map(|(prompt, max_tokens)| Act::Submit { prompt, max_tokens }),
        1 => (0usize..20).prop_map(|which| Act::Abort { which }),
        3 => (0usize..12).prop_map(Act::Turns),
        1 => (1usize..=3, 4..=BLOCKS).prop_map(|(slots, blocks)| Act::Relocate { slots, blocks }),
    ]
}

proptest! {
    #[test]
    fn whatever_happens_answers_are_right_and_memory_comes_back(
        acts in prop::collection::vec(act(), 1..40), rewindable: bool, steps_in_flight in 1usize..4,
    ) {
        let mut harness = Harness::new(rewindable, steps_in_flight);
        let mut requests = Vec::new();
        for act in acts {
            match act {
                Act::Submit { prompt, max_tokens } => {
                    let events = harness.submit(requests.len() as u64, &prompt, max_tokens);
                    requests.push((prompt, max_tokens, events));
                }
                Act::Abort { which } => harness.board.abort(RequestId(which as u64)),
                Act::Relocate { slots, blocks } => harness.relocate(slots, blocks),
                Act::Turns(turns) => (0..turns).for_each(|_| harness.turn()),
            }
        }
        harness.run_out();
        for (prompt, max_tokens, events) in &requests {
            match terminal(events) {
                GenerateEvent::Done(completion) => {
                    prop_assert_eq!(completion.token_ids, expected(prompt, *max_tokens));
                }
                GenerateEvent::Aborted(completion) => {
                    let wanted = expected(prompt, completion.token_ids.len());
                    prop_assert_eq!(completion.token_ids, wanted);
                }
                other => prop_assert!(false, "{:?}", other),
            }
        }
        prop_assert_eq!(harness.board.blocks_used(), 0);
    }
}
