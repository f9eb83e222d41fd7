//! A whole pipeline of bands in one process, driven the way a coordinator drives workers.

#![allow(dead_code, reason = "every test binary uses its own part of this module")]

use spillway_kernels::pool::ThreadPool;
use spillway_model::file::ModelFile;
use spillway_protocol::frame::{FrameLimits, LogitRows, LogitsFrame, SpanShape, StepFrame};
use spillway_protocol::plan::{ActivationType, KV_BLOCK_TOKENS, KvType, Limits};
use spillway_worker_cpu::band::{Band, BandError, BandSpec, Observer};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

/// Sequences that a test pipeline holds at once.
pub const SLOTS: usize = 4;
/// Longest sequence of a test.
pub const MAX_SEQ: usize = 384;

/// How a test pipeline rounds.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    pub kv: KvType,
    pub activations: ActivationType,
}

impl Rounding {
    /// As little as possible: for files without quantised matrices.
    pub const LEAST: Self = Self { kv: KvType::F32, activations: ActivationType::Int16 };
    /// What a small quantised model gets.
    pub const FINE: Self = Self { kv: KvType::F16, activations: ActivationType::Int16 };
    /// What a large quantised model gets.
    pub const COARSE: Self = Self { kv: KvType::F16, activations: ActivationType::Int8 };
}

/// Room for [`SLOTS`] sequences of [`MAX_SEQ`] tokens, all prefilled in one step.
pub fn limits(rounding: Rounding) -> Limits {
    Limits {
        max_seq: MAX_SEQ,
        max_sequences: SLOTS,
        kv_blocks: SLOTS * MAX_SEQ.div_ceil(KV_BLOCK_TOKENS),
        kv_type: rounding.kv,
        activations: rounding.activations,
        max_step_tokens: SLOTS * MAX_SEQ,
        max_logit_rows: 50,
    }
}

/// Tokens of one sequence to run in a step.
pub struct Piece<'a> {
    pub slot: u32,
    pub start: u32,
    pub ids: &'a [u32],
    pub logits: LogitRows,
}

pub struct Pipeline {
    pub bands: Vec<Band>,
    limits: FrameLimits,
    frame: StepFrame,
    steps: u64,
}

pub fn open(path: &Path) -> Arc<ModelFile> {
    Arc::new(ModelFile::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
}

impl Pipeline {
    /// Cuts the model into bands of `cuts` layers each; every band has its own pool.
    pub fn new(model: &Arc<ModelFile>, cuts: &[usize], threads: usize, rounding: Rounding) -> Self {
        let program = model.program();
        let limits = limits(rounding);
        let mut start = 0;
        let mut bands = Vec::new();
        for count in cuts {
            let layers = start..start + count;
            start += count;
            let (embed, head) = (layers.start == 0, layers.end == program.layers.len());
            let spec = BandSpec { layers, embed, head, limits };
            let pool = ThreadPool::new(threads).unwrap();
            bands.push(Band::load(model, spec, None, pool, &mut |_, _| ControlFlow::Continue(())).unwrap());
        }
        let limits = FrameLimits::new(&limits, program.d_model, program.vocab);
        Self { bands, frame: StepFrame::with_limits(&limits), limits, steps: 0 }
    }

    /// One band with everything.
    pub fn whole(model: &Arc<ModelFile>, rounding: Rounding) -> Self {
        Self::new(model, &[model.program().layers.len()], 2, rounding)
    }

    /// Runs one step; the logit rows asked for, in order.
    pub fn step(&mut self, pieces: &[Piece<'_>], observer: &mut impl Observer) -> Vec<Vec<f32>> {
        self.steps += 1;
        self.frame.begin(1, self.steps);
        for piece in pieces {
            let tokens = u32::try_from(piece.ids.len()).unwrap();
            let Piece { slot, start, logits, .. } = *piece;
            let shape =
                SpanShape { sequence: slot.into(), state_slot: slot, start, tokens, logits, lifted: false };
            // Blocks of the sequences interleave, as they do after a while of serving.
            let blocks = (start + tokens).div_ceil(u32::try_from(KV_BLOCK_TOKENS).unwrap());
            let table: Vec<u32> = (0..blocks).map(|i| i * u32::try_from(SLOTS).unwrap() + slot).collect();
            self.frame.push(shape, &table, &self.limits).unwrap();
        }
        let ids: Vec<u32> = pieces.iter().flat_map(|piece| piece.ids).copied().collect();
        let mut residual = Vec::new();
        for (index, band) in self.bands.iter_mut().enumerate() {
            match index {
                0 => band.embed(&ids).unwrap(),
                _ => band.input(ids.len()).unwrap().copy_from_slice(&residual),
            }
            band.run(&self.frame, observer).unwrap();
            residual = band.residual(ids.len()).to_vec();
        }
        let mut rows: Vec<Vec<f32>> = Vec::new();
        let vocab = self.limits.vocab;
        let last = self.bands.last_mut().unwrap();
        let sink = |about: &LogitsFrame, logits: &[f32]| {
            assert_eq!((about.first_row, about.rows), (rows.len(), logits.len() / vocab));
            rows.extend(logits.chunks_exact(vocab).map(<[f32]>::to_vec));
            Ok::<(), BandError>(())
        };
        last.logits(&self.frame, sink).unwrap();
        assert_eq!(rows.len(), self.frame.logit_rows());
        rows
    }

    /// Logits of every position of a sequence, prefilled in chunks of `chunk` tokens in slot 0.
    pub fn score(&mut self, ids: &[u32], chunk: usize) -> Vec<Vec<f32>> {
        let mut start = 0;
        let mut rows = Vec::new();
        for ids in ids.chunks(chunk) {
            rows.extend(self.step(&[Piece { slot: 0, start, ids, logits: LogitRows::All }], &mut ()));
            start += u32::try_from(ids.len()).unwrap();
        }
        rows
    }

    /// The prompt's greedy continuation.
    pub fn greedy(&mut self, prompt: &[u32], count: usize) -> Vec<u32> {
        let first = Piece { slot: 0, start: 0, ids: prompt, logits: LogitRows::Last };
        let mut logits = self.step(&[first], &mut ());
        let mut start = u32::try_from(prompt.len()).unwrap();
        let mut out = vec![argmax(&logits[0])];
        while out.len() < count {
            let id = [out[out.len() - 1]];
            logits = self.step(&[Piece { slot: 0, start, ids: &id, logits: LogitRows::Last }], &mut ());
            out.push(argmax(&logits[0]));
            start += 1;
        }
        out
    }
}

/// Index of the largest value, the first of equals.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (index, value) in logits.iter().enumerate() {
        if *value > logits[best] {
            best = index;
        }
    }
    u32::try_from(best).unwrap()
}

/// Whether two sets of rows are the same bit for bit.
pub fn same_bits(a: &[Vec<f32>], b: &[Vec<f32>]) -> bool {
    let bits = |rows: &[Vec<f32>]| rows.iter().flatten().map(|value| value.to_bits()).collect::<Vec<_>>();
    bits(a) == bits(b)
}
