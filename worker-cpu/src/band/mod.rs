//! A band: contiguous layers with their weights and state, run one step at a time.
//!
//! Everything is prepared at load: steps are fused (`fuse.rs`), weights packed, buffers and state allocated for the
//! largest step. A step then takes no lock and allocates nothing per token. The same band runs inside a worker process
//! and in-process (tests, tools): fill the input with [`Band::embed`] or [`Band::input`], call [`Band::run`], read
//! [`Band::residual`] or [`Band::logits`].

mod buffers;
mod exec;
mod head;
mod plan;

use crate::load::{LoadError, Loader, Need, Progress};
use arrayvec::ArrayVec;
use buffers::Buffers;
use exec::{Engine, Rows};
use head::Head;
use plan::{Op, Settings};
use spillway_kernels::activations::{ActivationError, Activations, Codes, Forms};
use spillway_kernels::isa::{IsaError, KernelSet};
use spillway_kernels::matmul::{Kernels, MatmulError};
use spillway_kernels::ops::attention::{AttentionScratch, KvElement, KvSpan};
use spillway_kernels::ops::deltanet::{DeltaNetScratch, StateSpan};
use spillway_kernels::ops::{Ops, OpsError, RopePairing, RopeTable, SharedPart};
use spillway_kernels::pool::ThreadPool;
use spillway_model::file::ModelFile;
use spillway_model::program::{self, RESIDUAL, RopeSpec};
use spillway_protocol::frame::{LogitsFrame, StepFrame};
use spillway_protocol::plan::{ActivationType, KvType, Limits, StageBytes};
use spillway_worker::band::logit_groups;
use spillway_worker::embedding::{Embedding, EmbeddingError};
use spillway_worker::states::{Area, SharedStates};
use std::ops::Range;
use std::sync::Arc;

/// Most sequences of one step; the span tables of a step live on the stack.
pub const MAX_SEQUENCES: usize = 256;

/// Which part of a model a band is, and for which sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BandSpec {
    /// Contiguous layers, 0-based, end exclusive.
    pub layers: Range<usize>,
    /// Whether it turns token ids into residual rows.
    pub embed: bool,
    /// Whether it applies the final norm and the output projection.
    pub head: bool,
    /// Sizes to allocate for.
    pub limits: Limits,
}

/// Why a band cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum BandLoadError {
    /// A weight or a state.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The kernel set that was asked for.
    #[error(transparent)]
    Isa(#[from] IsaError),
    /// A band that the model does not have, or sizes that no band has.
    #[error("band of layers {layers:?} of {available}: {reason}; make a new plan for this file")]
    Spec {
        /// Layers asked for.
        layers: Range<usize>,
        /// Layers of the model.
        available: usize,
        /// What is wrong.
        reason: &'static str,
    },
}

impl BandLoadError {
    /// Stable name of the error.
    pub fn code(&self) -> &'static str {
        match self {
            BandLoadError::Load(error) => error.code(),
            BandLoadError::Isa(error) => error.code(),
            BandLoadError::Spec { .. } => "band_spec",
        }
    }
}

/// Why a step did not run. The state of its sequences is undefined afterwards.
#[derive(Debug, thiserror::Error)]
pub enum BandError {
    /// An operation refused its operands.
    #[error(transparent)]
    Ops(#[from] OpsError),
    /// A matrix product refused its operands.
    #[error(transparent)]
    Matmul(#[from] MatmulError),
    /// The input of a matrix product was refused.
    #[error(transparent)]
    Activation(#[from] ActivationError),
    /// Token ids have no rows.
    #[error(transparent)]
    Embedding(#[from] EmbeddingError),
    /// More tokens or sequences than the band was made for.
    #[error(
        "a step of {tokens} tokens in {spans} spans exceeds the band's {max_tokens} tokens in {max_spans}"
    )]
    StepSize {
        /// Tokens of the step.
        tokens: usize,
        /// Spans of the step.
        spans: usize,
        /// Tokens allowed.
        max_tokens: usize,
        /// Spans allowed.
        max_spans: usize,
    },
    /// Something was asked of a band that is not at that end of the pipeline.
    #[error("this band has no {0}; the pipeline is wired wrongly")]
    NotHere(&'static str),
}

impl BandError {
    /// Stable name of the error.
    pub fn code(&self) -> &'static str {
        match self {
            BandError::Ops(error) => error.code(),
            BandError::Matmul(error) => error.code(),
            BandError::Activation(error) => error.code(),
            BandError::Embedding(error) => error.code(),
            BandError::StepSize { .. } => "step_size",
            BandError::NotHere(_) => "band_has_no_such_end",
        }
    }
}

/// Sees a step from inside. `()` sees nothing and costs nothing.
pub trait Observer {
    /// Layer `layer` of the model is done; `residual` is its output for tokens for which it was not lifted, `[tokens, d_model]`.
    fn layer_done(&mut self, layer: usize, residual: &[f32]);
}

impl Observer for () {
    fn layer_done(&mut self, _layer: usize, _residual: &[f32]) {}
}

/// A layer, ready to run.
#[derive(Debug)]
struct BandLayer {
    ops: Vec<Op>,
    widths: Vec<usize>,
}

/// A loaded band.
#[derive(Debug)]
pub struct Band {
    spec: BandSpec,
    d_model: usize,
    embedding: Option<Embedding>,
    head: Option<Head>,
    layers: Vec<BandLayer>,
    engine: Engine,
    positions: Vec<u32>,
    layer_bytes: Vec<u64>,
    bytes: StageBytes,
    /// Whether its layers may be lifted.
    lifts: bool,
}

impl Band {
    /// Loads a band with every thread of `pool`. With `states`, that is where the states of its layers are.
    ///
    /// # Errors
    /// When the file does not have the band, a weight has no kernels, memory is refused, or `progress` says stop.
    pub fn load(
        model: &Arc<ModelFile>,
        spec: BandSpec,
        states: Option<&SharedStates>,
        pool: ThreadPool,
        progress: &mut Progress<'_>,
    ) -> Result<Self, BandLoadError> {
        let program = model.program();
        check_spec(&spec, program.layers.len())?;
        let kernels = Kernels::from_env()?;
        let set = kernels.set();
        let ops = Ops::new(set).ok_or(IsaError::Unsupported { set, available: KernelSet::available() })?;
        let layers = &program.layers[spec.layers.clone()];
        let limits = spec.limits;

        // The output projection is the largest matrix: first, while little else is held.
        let head_needs = Head::needs(program).into_iter().filter(|_| spec.head);
        let order: Vec<Need<'_>> = head_needs.chain(layers.iter().flat_map(plan::needs)).collect();
        let mut loader = Loader::new(model, &pool, order, progress)?;
        let settings = settings(&limits);
        let head = spec
            .head
            .then(|| Head::load(&program.head, &mut loader, limits.max_logit_rows, settings.codes))
            .transpose()?;
        let mut band_layers = Vec::with_capacity(layers.len());
        let mut layer_bytes = Vec::with_capacity(layers.len());
        for (index, layer) in spec.layers.clone().zip(layers) {
            let before = loader.done();
            let shared = states.map(|states| shared_parts(states, index)).unwrap_or_default();
            let ops = plan::layer_ops(layer, &mut loader, &settings, shared)?;
            layer_bytes.push(loader.done() - before);
            band_layers.push(BandLayer { ops, widths: layer.buffers.clone() });
        }
        let weights = loader.done();
        let embedding = spec.embed.then(|| Embedding::new(model)).transpose().map_err(LoadError::from)?;
        let engine = engine(pool, kernels, ops, program, layers, &band_layers, limits.max_step_tokens);
        let mut band = Self {
            d_model: program.d_model,
            embedding,
            head,
            layers: band_layers,
            engine,
            positions: Vec::with_capacity(limits.max_step_tokens),
            layer_bytes,
            bytes: StageBytes::default(),
            lifts: states.is_some(),
            spec,
        };
        band.bytes = band.count_bytes(weights, &settings);
        Ok(band)
    }

    fn count_bytes(&self, weights: u64, settings: &Settings) -> StageBytes {
        let ops = self.layers.iter().flat_map(|layer| &layer.ops);
        let (kv, state) =
            ops.map(|op| op.state_bytes(settings)).fold((0, 0), |sum, op| (sum.0 + op.0, sum.1 + op.1));
        let head = self.head.as_ref().map_or(0, Head::scratch_bytes);
        let hidden: usize = self.engine.hidden.iter().map(|hidden| size_of_val(hidden.as_slice())).sum();
        let scratch = self.engine.buffers.bytes() + self.engine.inputs.bytes() + hidden + head;
        let embedding = self.embedding.as_ref().map_or(0, Embedding::file_bytes);
        let [embedding, kv, state, scratch] = [embedding, kv, state, scratch].map(|bytes| bytes as u64);
        StageBytes { weights, embedding, kv, state, scratch, ..StageBytes::default() }
    }

    /// What the band was made for.
    pub fn spec(&self) -> &BandSpec {
        &self.spec
    }

    /// Bytes the band holds, by purpose (rings are not the band's).
    pub fn bytes(&self) -> &StageBytes {
        &self.bytes
    }

    /// Weight bytes of each layer, as stored.
    pub fn layer_bytes(&self) -> &[u64] {
        &self.layer_bytes
    }

    /// Name of the kernel set that computes.
    pub fn kernels(&self) -> &'static str {
        self.engine.kernels.set().name()
    }

    /// Turns token ids into the input of the next [`Band::run`].
    pub fn embed(&mut self, ids: &[u32]) -> Result<(), BandError> {
        self.check_size(ids.len(), 0)?;
        let embedding = self.embedding.as_ref().ok_or(BandError::NotHere("embedding"))?;
        Ok(embedding.rows(ids, self.engine.buffers.get_mut(RESIDUAL, ids.len() * self.d_model))?)
    }

    /// The input of the next [`Band::run`], `[tokens, d_model]`, to be filled.
    pub fn input(&mut self, tokens: usize) -> Result<&mut [f32], BandError> {
        self.check_size(tokens, 0)?;
        Ok(self.engine.buffers.get_mut(RESIDUAL, tokens * self.d_model))
    }

    /// Runs the layers on the spans of `frame`, in place on the input. Rows of spans for which they are lifted stay as they are.
    ///
    /// # Errors
    /// The step is too large, or layers are lifted whose states nobody else reaches.
    pub fn run(&mut self, frame: &StepFrame, observer: &mut impl Observer) -> Result<(), BandError> {
        self.check_size(frame.tokens(), frame.spans().len())?;
        let (spans, lifted, tokens) = frame.by_lift();
        if !lifted.is_empty() && !self.lifts {
            return Err(BandError::NotHere("memory that it shares with a GPU's"));
        }
        let kv: ArrayVec<KvSpan<'_>, MAX_SEQUENCES> = spans
            .iter()
            .map(|span| KvSpan {
                first_row: span.first_token,
                tokens: span.shape.tokens as usize,
                start: span.shape.start as usize,
                blocks: frame.blocks(span),
            })
            .collect();
        let states: ArrayVec<StateSpan, MAX_SEQUENCES> = spans
            .iter()
            .map(|span| StateSpan {
                first_row: span.first_token,
                tokens: span.shape.tokens as usize,
                slot: span.shape.state_slot as usize,
                reset: span.shape.start == 0,
            })
            .collect();
        self.positions.clear();
        for span in spans {
            self.positions.extend(span.shape.start..span.shape.start + span.shape.tokens);
        }
        for table in &mut self.engine.ropes {
            table.prepare(&self.positions);
        }
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let rows = Rows { tokens, kv: &kv, states: &states, widths: &layer.widths };
            for op in layer.ops.iter_mut().filter(|_| tokens > 0) {
                self.engine.run(op, &rows)?;
            }
            let residual = self.engine.buffers.get(RESIDUAL, tokens * self.d_model);
            observer.layer_done(self.spec.layers.start + index, residual);
        }
        Ok(())
    }

    /// The output of the last [`Band::run`], `[tokens, d_model]`.
    pub fn residual(&self, tokens: usize) -> &[f32] {
        self.engine.buffers.get(RESIDUAL, tokens * self.d_model)
    }

    /// Computes the logit rows that the step's spans ask for and hands them to `sink` in groups, in row order, the last
    /// group marked. A step that asks for none gets one empty group.
    pub fn logits<E: From<BandError>>(
        &mut self,
        frame: &StepFrame,
        mut sink: impl FnMut(&LogitsFrame, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let head = self.head.as_mut().ok_or(BandError::NotHere("head"))?;
        let Engine { pool, kernels, ops, buffers, .. } = &self.engine;
        let residual = buffers.get(RESIDUAL, frame.tokens() * self.d_model);
        for about in logit_groups(frame, head.group()) {
            let rows = frame.logit_token_rows().skip(about.first_row).take(about.rows);
            sink(&about, head.run(pool, kernels, ops, residual, rows)?)?;
        }
        Ok(())
    }

    /// Says that the step is over, so that waiting threads of the team let others have their processors.
    pub fn rest(&self) {
        self.engine.pool.rest();
    }

    /// The recurrent state of a layer of the model in a state slot: past convolution inputs `[channel][past]`, oldest
    /// first, and matrices `[head][value][key]`. `None` when the layer is not here or keeps none.
    pub fn recurrent_state(&self, layer: usize, slot: usize) -> Option<(Vec<f32>, Vec<f32>)> {
        let layer = self.layers.get(layer.checked_sub(self.spec.layers.start)?)?;
        layer.ops.iter().find_map(|op| match op {
            Op::DeltaNet { state, .. } => {
                Some((state.conv_state(slot).ok()?, state.matrix_state(slot).ok()?))
            }
            _ => None,
        })
    }

    fn check_size(&self, tokens: usize, spans: usize) -> Result<(), BandError> {
        let (max_tokens, max_spans) = (self.spec.limits.max_step_tokens, self.spec.limits.max_sequences);
        if tokens <= max_tokens && spans <= max_spans {
            return Ok(());
        }
        Err(BandError::StepSize { tokens, spans, max_tokens, max_spans })
    }
}

/// The memory of a layer's states.
fn shared_parts(states: &SharedStates, layer: usize) -> Vec<SharedPart> {
    let part = |area: &Area| {
        // SAFETY: `SharedStates` has seen that its areas are inside the memory, which the clone keeps mapped; they do not overlap,
        // and each is taken once, by the load of its layer. The workers take turns as the memory's module describes.
        unsafe {
            let start = states.memory.base().add(area.at);
            SharedPart::new(start, area.bytes, Arc::new(states.memory.clone()))
        }
    };
    states.of(layer).iter().map(part).collect()
}

fn check_spec(spec: &BandSpec, available: usize) -> Result<(), BandLoadError> {
    let Limits { max_sequences, max_step_tokens, max_logit_rows, .. } = spec.limits;
    let rules = [
        (spec.layers.is_empty() || spec.layers.end > available, "the file does not have these layers"),
        (spec.embed && spec.layers.start != 0, "only the first band embeds"),
        (spec.head && spec.layers.end != available, "only the last band has the head"),
        (max_sequences == 0 || max_sequences > MAX_SEQUENCES, "a CPU worker serves 1 to 256 sequences"),
        (max_step_tokens == 0, "a step has at least one token"),
        (spec.head && max_logit_rows == 0, "a logits frame has at least one row"),
    ];
    match rules.into_iter().find(|(broken, _)| *broken) {
        Some((_, reason)) => Err(BandLoadError::Spec { layers: spec.layers.clone(), available, reason }),
        None => Ok(()),
    }
}

fn settings(limits: &Limits) -> Settings {
    let kv_element = match limits.kv_type {
        KvType::F32 => KvElement::F32,
        KvType::F16 => KvElement::F16,
    };
    let codes = codes(limits.activations);
    Settings { kv_blocks: limits.kv_blocks, kv_element, slots: limits.max_sequences, codes }
}

/// What the kernels call the inputs of quantised matrices.
pub fn codes(activations: ActivationType) -> Codes {
    match activations {
        ActivationType::Int8 => Codes::Int8,
        ActivationType::Int16 => Codes::Int16,
    }
}

/// Working memory for the largest step through any of the layers.
fn engine(
    pool: ThreadPool,
    kernels: Kernels,
    ops: Ops,
    program: &program::Program,
    layers: &[program::Layer],
    band_layers: &[BandLayer],
    tokens: usize,
) -> Engine {
    let ops_of = || band_layers.iter().flat_map(|layer| &layer.ops);
    let hidden = ops_of().map(Op::hidden_width).max().unwrap_or(0) * tokens;
    let inputs = || ops_of().flat_map(Op::inputs);
    let cols = inputs().map(|inputs| inputs.cols).max().unwrap_or(0);
    let forms = inputs().fold(Forms::default(), |forms, inputs| forms.and(inputs.forms));
    Engine {
        buffers: Buffers::new(layers, program.d_model, tokens),
        inputs: Activations::with_capacity(tokens, cols, forms),
        hidden: [vec![0.0; hidden], vec![0.0; hidden]],
        ropes: program.ropes.iter().map(rope_table).collect(),
        attention: AttentionScratch::new(),
        delta_net: DeltaNetScratch::new(),
        pool,
        kernels,
        ops,
    }
}

fn rope_table(spec: &RopeSpec) -> RopeTable {
    let pairing = match spec.pairing {
        program::RopePairing::Halves => RopePairing::Halves,
        program::RopePairing::Adjacent => RopePairing::Adjacent,
    };
    RopeTable::new(pairing, &spec.inv_freq, spec.magnitude)
}
