//! Timed runs on an otherwise idle pipeline: the numbers contain what serving contains (rings, workers, copying logits),
//! and nothing of sampling or text.

use super::board::Board;
use super::pipeline::{Collected, Expected, Pipeline};
use super::request::RequestError;
use crate::workers::WorkerError;
use serde::Serialize;
use spillway_protocol::frame::{FrameLimits, LogitRows, SpanShape};
use spillway_protocol::plan::KV_BLOCK_TOKENS;
use std::collections::VecDeque;
use std::sync::mpsc::SyncSender;
use std::time::Instant;

/// One timed run. Prompt and answer are timed separately, each starting at `depth`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BenchRequest {
    /// Tokens already in the context before a clock starts.
    pub depth: usize,
    /// Prompt tokens to time (0 = skip).
    pub prompt: usize,
    /// Tokens to decode one by one (0 = skip).
    pub generate: usize,
}

/// Times of one run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct BenchResult {
    /// Seconds for the prompt.
    pub prefill_s: f64,
    /// Seconds for the decoded tokens.
    pub decode_s: f64,
}

impl BenchRequest {
    /// Positions the run needs.
    pub(super) fn length(&self) -> usize {
        self.depth + self.prompt.max(self.generate)
    }
}

/// A run and where its result goes.
#[derive(Debug)]
pub(super) struct BenchJob {
    pub request: BenchRequest,
    pub reply: SyncSender<Result<BenchResult, RequestError>>,
}

/// How steps are composed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Way<'a> {
    pub limits: &'a FrameLimits,
    /// Steps that may be under way at once.
    pub steps: usize,
    /// New tokens of a prompt from which on layers are lifted for it.
    pub lift_from: Option<usize>,
}

/// Runs `request`. The board must be idle; what it remembered is forgotten, since the run uses slot 0 and its blocks.
pub(super) fn run(
    request: &BenchRequest,
    board: &mut Board,
    pipeline: &mut Pipeline,
    way: Way<'_>,
) -> Result<BenchResult, WorkerError> {
    board.forget();
    let mut runner = Runner { pipeline, way, blocks: Vec::new(), under_way: VecDeque::new(), seed: 1 };
    let blocks = request.length().div_ceil(KV_BLOCK_TOKENS);
    runner.blocks.extend((0u32..).take(blocks));
    let mut result = BenchResult::default();
    if request.prompt > 0 {
        runner.prompt(0, request.depth)?;
        let start = Instant::now();
        runner.prompt(request.depth, request.prompt)?;
        result.prefill_s = start.elapsed().as_secs_f64();
    }
    if request.generate > 0 {
        runner.prompt(0, request.depth)?;
        let start = Instant::now();
        for token in 0..request.generate {
            runner.feed(request.depth + token, 1, false)?;
        }
        result.decode_s = start.elapsed().as_secs_f64();
    }
    Ok(result)
}

/// Drives one sequence in slot 0.
struct Runner<'a> {
    pipeline: &'a mut Pipeline,
    way: Way<'a>,
    blocks: Vec<u32>,
    under_way: VecDeque<Expected>,
    seed: u32,
}

impl Runner<'_> {
    /// Runs `count` tokens as a prompt from position `start` on.
    fn prompt(&mut self, start: usize, count: usize) -> Result<(), WorkerError> {
        self.feed(start, count, self.way.lift_from.is_some_and(|from| count >= from))
    }

    /// Runs `count` pseudo-random tokens from position `start` in the largest steps and waits until all are done. The last
    /// step wants the logits of its last token, as serving does at the end of a prompt and at every decoded token.
    fn feed(&mut self, start: usize, count: usize, lifted: bool) -> Result<(), WorkerError> {
        let mut at = start;
        while at < start + count {
            let tokens = self.way.limits.max_tokens.min(start + count - at);
            let last = at + tokens == start + count;
            let logits = if last { LogitRows::Last } else { LogitRows::None };
            let count = u32::try_from(tokens).unwrap_or(u32::MAX);
            let position = u32::try_from(at).unwrap_or(u32::MAX);
            let (sequence, state_slot) = (0, 0);
            self.send(SpanShape { sequence, state_slot, start: position, tokens: count, logits, lifted })?;
            at += tokens;
            while self.under_way.len() >= self.way.steps {
                self.collect()?;
            }
        }
        while !self.under_way.is_empty() {
            self.collect()?;
        }
        Ok(())
    }

    fn send(&mut self, shape: SpanShape) -> Result<(), WorkerError> {
        let (limits, seed) = (self.way.limits, &mut self.seed);
        let (start, tokens) = (shape.start as usize, shape.tokens as usize);
        let blocks = &self.blocks[..(start + tokens).div_ceil(KV_BLOCK_TOKENS)];
        let mut step_number = 0;
        self.pipeline.send(|epoch, step, frame, ids| {
            frame.begin(epoch, step);
            frame.push(shape, blocks, limits)?;
            ids.clear();
            ids.extend((0..tokens).map(|_| random_id(seed, limits.vocab)));
            step_number = step;
            Ok(true)
        })?;
        self.under_way.push_back(Expected { step: step_number, rows: shape.logits.count(tokens) });
        Ok(())
    }

    fn collect(&mut self) -> Result<(), WorkerError> {
        let Some(&expected) = self.under_way.front() else { return Ok(()) };
        while self.pipeline.collect(expected, &mut |_, _| {})? != Collected::Step {}
        self.under_way.pop_front();
        Ok(())
    }
}

/// A token id from a linear congruential generator: any spread over the vocabulary will do.
fn random_id(seed: &mut u32, vocab: usize) -> u32 {
    *seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    let vocab = u64::try_from(vocab).unwrap_or(u64::MAX);
    u32::try_from(u64::from(*seed).wrapping_mul(vocab) >> 32).unwrap_or(0)
}
