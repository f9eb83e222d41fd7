//! A band on one GPU: contiguous layers with their weights and state, run one step at a time.
//!
//! Everything is prepared at load: steps are fused, weights repacked and uploaded, buffers and state allocated for the
//! largest step. A step then allocates nothing: its facts go to the device in one copy, its operations are queued (or a
//! captured graph of them replayed), and its result is copied back.

mod attention;
mod edges;
mod error;
mod exec;
mod facts;
mod head;
mod kernels;
mod lift;
mod load;
mod mapped;
mod needs;
mod plan;
mod replay;
mod spec;
mod staging;
mod streaming;

pub use error::BandError;
pub use mapped::mapped_bytes;
pub use needs::{LayerNeeds, ModelWidths, Needs};
pub use spec::{BandSpec, MAX_SEQUENCES};
pub use streaming::largest_group;

use crate::compile::KernelCompiler;
use crate::hip::{Arena, Device, DeviceSlice, Event, HipError, Stream};
use crate::launch::{Kernels, KvElement};
use edges::Edges;
use exec::{Scratch, Step, Streamed};
use facts::Facts;
use head::Head;
use lift::Lift;
use load::{Loader, Need};
use mapped::MappedBlock;
use needs::ScratchBytes;
use plan::{Builder, Op, StateSizes};
use replay::{Replay, Shape, captured_context};
use spillway_model::file::ModelFile;
use spillway_model::program::{Layer, WeightRef};
use spillway_protocol::control::{DeviceShare, LayerBytes};
use spillway_protocol::frame::{Span, StepFrame};
use spillway_protocol::plan::{KvType, Limits, Residency};
use spillway_worker::band::{Logits, LogitsSink, logit_groups};
use spillway_worker::embedding::Embedding;
use spillway_worker::residual::{Incoming, Outgoing};
use spillway_worker::states::SharedStates;
use spillway_worker::{LoadProgress, ProcessError, Rings};
use std::sync::Arc;
use streaming::{Streaming, is_streamed};

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
    // Graphs and kernels go before the memory they name, and everything before the device.
    replay: Replay,
    kernels: Kernels,
    /// Lifted ones first.
    layers: Vec<BandLayer>,
    layer_bytes: Vec<LayerBytes>,
    embedding: Option<Embedding>,
    head: Option<Head>,
    facts: Facts,
    edges: Edges,
    scratch: Scratch,
    stream: Stream,
    /// One for each layer: passed when the layer is done.
    marks: Vec<Event>,
    lift: Option<Lift>,
    // Its copies read blocks.
    streaming: Option<Streaming>,
    /// Weights of the first layers, as far as they are in host memory.
    blocks: Vec<MappedBlock>,
    _memory: Arena,
    device: Device,
}

impl Band {
    /// Loads a band onto a device. Lifted layers need `states`, where the CPU worker that they are lifted from has theirs.
    ///
    /// # Errors
    /// The file does not have the band, kernels cannot be had, the device's memory is too small, or `progress` says stop.
    pub fn load(
        model: &Arc<ModelFile>,
        spec: BandSpec,
        states: Option<&SharedStates>,
        device: &Device,
        compiler: &KernelCompiler,
        progress: &mut LoadProgress<'_>,
    ) -> Result<Self, BandError> {
        let program = model.program();
        spec.check(program.layers.len())?;
        let (layers, residency) = (&program.layers[spec.all_layers()], spec.all_residency());
        let kernels = kernels::kernels(model, &spec, device, compiler, progress)?;
        let layer_needs: Vec<LayerNeeds> = layers.iter().map(LayerNeeds::of).collect();
        let groups = mapped_groups(model, layers, &residency)?.into_iter();
        let needs = Needs::new(ModelWidths::of(program), &layer_needs, spec.head, spec.limits);
        let needs =
            if spec.lifted.is_empty() { needs.with_mapped(groups) } else { needs.with_lifted(groups) };
        let scratch_bytes = needs.scratch();
        let (mut memory, stream) = (Arena::new(device), Stream::new(device)?);
        let sizes = state_sizes(&spec.limits);
        let bytes = device_bytes(model, &spec, &sizes, &scratch_bytes)?;
        memory.reserve("the band", usize::try_from(bytes).unwrap_or(usize::MAX))?;

        let head_needs = [Need::Matrix(&program.head.output), Need::Values(&program.head.norm)];
        let head_needs = head_needs.into_iter().filter(|_| spec.head);
        let order: Vec<Need<'_>> = head_needs.chain(layers.iter().flat_map(Need::of_layer)).collect();
        let mut loader = Loader::new(model, device, &stream, &order, progress)?;
        let mut builder = Builder { loader: &mut loader, arena: &mut memory, block: None, sizes };
        let group = spec.limits.max_logit_rows;
        let head = spec
            .head
            .then(|| Head::load(&mut builder, device, &program.head, &scratch_bytes, group))
            .transpose()?;
        let mut band_layers = Vec::with_capacity(layers.len());
        let mut layer_bytes = Vec::with_capacity(layers.len());
        let mut blocks = Vec::new();
        for (layer, residency) in layers.iter().zip(&residency) {
            let before = builder.loader.done();
            if *residency == Residency::HostMapped {
                let bytes = Need::mapped_bytes(layer, model)?;
                builder.block = Some(MappedBlock::new(device, "weights in host memory", bytes)?);
            }
            band_layers.push(BandLayer { ops: builder.layer(layer)?, widths: layer.buffers.clone() });
            layer_bytes.push(match builder.block.take() {
                Some(block) => {
                    let pinned = block.len() as u64;
                    blocks.push(block);
                    LayerBytes { pinned, ..LayerBytes::default() }
                }
                None => LayerBytes { device: builder.loader.done() - before, ..LayerBytes::default() },
            });
        }
        let scratch = Scratch::allocate(&mut memory, &scratch_bytes)?;
        let facts_memory = memory.allocate("step facts", scratch_bytes.facts)?;
        let mapped_ops = band_layers.iter().take(blocks.len()).map(|layer| layer.ops.as_slice());
        let streaming = (scratch_bytes.streamed > 0)
            .then(|| Streaming::new(device, &mut memory, scratch_bytes.streamed, mapped_ops))
            .transpose()?;
        let lift = match states {
            _ if spec.lifted.is_empty() => None,
            None => return Err(BandError::NotHere("memory for the states of lifted layers")),
            Some(states) => {
                let lifted = spec.lifted.clone().zip(layers).zip(&band_layers);
                let lifted = lifted.map(|((index, layer), loaded)| (index, layer, loaded.ops.as_slice()));
                let (slots, capacity) = (spec.limits.max_sequences, needs.handed_over_bytes());
                Some(Lift::new(device, states, lifted, slots, capacity)?)
            }
        };
        // Weights are there before the memory that they came through is given back.
        stream.synchronize()?;
        Ok(Self {
            d_model: program.d_model,
            replay: Replay::from_env(),
            kernels,
            layers: band_layers,
            layer_bytes,
            embedding: spec.embed.then(|| Embedding::new(model)).transpose()?,
            head,
            facts: Facts::new(device, facts_memory, &program.ropes, spec.limits.max_sequences)?,
            edges: Edges::new(device, needs.residual_bytes())?,
            scratch,
            stream,
            marks: layers.iter().map(|_| Event::new(device)).collect::<Result<_, _>>()?,
            lift,
            streaming,
            blocks,
            _memory: memory,
            device: device.clone(),
            spec,
        })
    }

    /// Weights of each layer of the band, as stored.
    pub fn layer_bytes(&self) -> &[LayerBytes] {
        &self.layer_bytes[self.spec.lifted.len()..]
    }

    /// Bytes of the weights of lifted layers, page-locked.
    pub fn lifted_bytes(&self) -> u64 {
        self.layer_bytes[..self.spec.lifted.len()].iter().map(|layer| layer.pinned).sum()
    }

    /// The device it runs on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Lets the device copy residual rows and logits from and to the rings itself. A driver that refuses is noted.
    pub fn use_rings(&mut self, rings: &Rings) {
        let incoming = (!self.spec.embed).then_some(&rings.incoming);
        self.edges.register(&self.device, incoming, &rings.outgoing);
    }

    /// What does not work as well as it might, one sentence each.
    pub fn notes(&self) -> &[String] {
        self.edges.notes()
    }

    /// Turns token ids into the input of the next step.
    ///
    /// # Errors
    /// The band does not embed, or an id is not in the vocabulary.
    pub fn embed(&mut self, ids: &[u32]) -> Result<(), BandError> {
        self.check_size(ids.len(), 0)?;
        let residual = self.residual(ids.len())?;
        let embedding = self.embedding.as_ref().ok_or(BandError::NotHere("embedding"))?;
        let rows = &mut self.edges.staging.values_mut()?[..ids.len() * self.d_model];
        embedding.rows(ids, rows)?;
        Ok(self.edges.staging.upload(&self.stream, 0, residual)?)
    }

    /// Takes the input of the next step. Rows that the device still reads are given back, for [`Band::run`].
    ///
    /// # Errors
    /// There are more tokens than the band was made for, or the copy cannot be queued.
    pub fn receive<'a>(&mut self, rows: Incoming<'a>) -> Result<Option<Incoming<'a>>, ProcessError> {
        self.check_size(rows.tokens(), 0)?;
        let residual = self.residual(rows.tokens())?;
        self.edges.receive(&self.stream, residual, rows)
    }

    /// Runs the layers on the spans of `frame` and waits for them, lifted ones first for spans for which they are lifted. What these
    /// change of states is where the CPU worker finds it when this returns. `pending` rows are dropped as soon as the device has
    /// read them. `layer_done` is called for each of its own layers: as the device comes past it in a step that is not captured as
    /// a graph, which would take long, else for all of them in the end.
    ///
    /// # Errors
    /// An operation cannot be queued, or the device failed.
    pub fn run(
        &mut self,
        frame: &StepFrame,
        pending: Option<Incoming<'_>>,
        layer_done: &mut dyn FnMut(),
    ) -> Result<(), BandError> {
        let (tokens, spans) = (frame.tokens(), frame.spans().len());
        self.check_size(tokens, spans)?;
        self.queue_lifted(frame, layer_done)?;
        self.facts.upload(&self.stream, frame)?;
        let context = context(frame.spans());
        let Self { replay, kernels, layers, facts, scratch, stream, streaming, blocks, marks, .. } = self;
        let placed = &facts.placed(tokens)?;
        let (lifted, own) = layers.split_at(self.spec.lifted.len());
        let (lifted_marks, marks) = marks.split_at(lifted.len());
        // Marks within a graph would be those of its capture.
        let marks = if replay.may_capture(tokens) { &[] } else { marks };
        let mapped = blocks.len() - lifted.len();
        let mut streaming = streaming.as_mut().filter(|_| is_streamed(tokens) && mapped > 0);
        replay.queue(stream, Shape { tokens, spans, context }, || {
            let streamed = streaming.as_deref_mut().map(|streaming| Streamed { streaming, blocks });
            let step = Step { kernels, stream, scratch, facts, placed, tokens, spans, context, streamed };
            queue_layers(step, own, mapped, marks)
        })?;
        if let Some(rows) = pending {
            self.edges.wait_taken()?;
            drop(rows);
        }
        if let (Some(lift), (_, lifted @ [_, ..], _)) = (&mut self.lift, frame.by_lift()) {
            follow(lifted_marks, layer_done)?;
            lift.give_back(frame, lifted, layer_done)?;
        }
        follow(marks, layer_done)?;
        let unmarked = own.len() - marks.len();
        self.stream.synchronize()?;
        (0..unmarked).for_each(|_| layer_done());
        Ok(())
    }

    /// Queues the lifted layers for the spans for which they are lifted, with the states that they need.
    fn queue_lifted(&mut self, frame: &StepFrame, gets_on: &mut dyn FnMut()) -> Result<(), BandError> {
        let Self {
            lift: Some(lift), kernels, layers, facts, scratch, stream, streaming, blocks, marks, ..
        } = self
        else {
            return Ok(());
        };
        let (passed, lifted, first) = frame.by_lift();
        lift.passed(passed);
        if lifted.is_empty() {
            return Ok(());
        }
        lift.bring(stream, frame, lifted, gets_on)?;
        facts.upload_of(stream, frame, lifted)?;
        let (tokens, spans, context) = (frame.tokens() - first, lifted.len(), context(lifted));
        let placed = &facts.placed(tokens)?;
        let scratch = &scratch.starting_at(first, self.d_model)?;
        let streaming = streaming.as_mut().filter(|_| is_streamed(tokens));
        let streamed = streaming.map(|streaming| Streamed { streaming, blocks });
        let step = Step { kernels, stream, scratch, facts, placed, tokens, spans, context, streamed };
        queue_layers(step, &layers[..blocks.len()], blocks.len(), &marks[..blocks.len()])?;
        Ok(lift.mark(stream)?)
    }

    /// Puts the output of the last step into `rows`.
    ///
    /// # Errors
    /// The copy failed.
    pub fn send(&mut self, rows: Outgoing<'_, '_>) -> Result<(), ProcessError> {
        let residual = self.residual(rows.tokens())?;
        self.edges.send(&self.stream, residual, rows)
    }

    /// Shares device memory that the stage before may write residual rows into; allocated when it is asked for first.
    ///
    /// # Errors
    /// There is not enough, or the driver does not share memory between processes.
    pub fn offer(&mut self) -> Result<DeviceShare, HipError> {
        self.edges.offer(&self.device)
    }

    /// Writes residual rows into the next stage's device from now on, or into the ring.
    ///
    /// # Errors
    /// The reason why the device cannot be written to; then rows go into the ring.
    pub fn connect(&mut self, share: Option<&DeviceShare>) -> Result<(), String> {
        self.edges.connect(&self.device, share)
    }

    /// The residual of a step on the device: the first buffer.
    fn residual(&self, tokens: usize) -> Result<DeviceSlice, HipError> {
        self.scratch.buffers[0].part(0, tokens * self.d_model * size_of::<f32>())
    }

    /// Computes the logit rows that the step's spans ask for and hands them to `sink` in groups.
    ///
    /// # Errors
    /// The band has no head, the device failed, or `sink` did.
    pub fn logits(&mut self, frame: &StepFrame, sink: &mut LogitsSink<'_>) -> Result<(), ProcessError> {
        let Self { kernels, head, facts, edges, scratch, stream, .. } = self;
        let head = head.as_mut().ok_or(BandError::NotHere("head"))?;
        let placed = facts.placed(frame.tokens()).map_err(BandError::from)?;
        for about in logit_groups(frame, head.group()) {
            let rows = head.queue(kernels, stream, scratch, &placed, &about)?;
            // So that what the copy takes is told apart from what the products take.
            stream.synchronize()?;
            match (rows, edges.ring_out()) {
                (Some(rows), Some(ring)) => sink(
                    &about,
                    Logits::OnDevice(&mut |offset| {
                        stream.download(ring, offset, rows)?;
                        Ok(stream.synchronize()?)
                    }),
                )?,
                (Some(rows), None) => sink(&about, Logits::Values(head.fetch(stream, rows)?))?,
                (None, _) => sink(&about, Logits::Values(&[]))?,
            }
        }
        Ok(())
    }

    fn check_size(&self, tokens: usize, spans: usize) -> Result<(), BandError> {
        let (max_tokens, max_spans) = (self.spec.limits.max_step_tokens, self.spec.limits.max_sequences);
        if tokens <= max_tokens && spans <= max_spans {
            return Ok(());
        }
        Err(BandError::StepSize { tokens, spans, max_tokens, max_spans })
    }
}

/// The context to queue a step of `spans` with.
fn context(spans: &[Span]) -> usize {
    let longest = spans.iter().map(|span| span.shape.start + span.shape.tokens).max();
    captured_context(longest.unwrap_or(0) as usize)
}

/// Waits for one mark after the other, and tells.
fn follow(marks: &[Event], layer_done: &mut dyn FnMut()) -> Result<(), HipError> {
    for mark in marks {
        mark.synchronize()?;
        layer_done();
    }
    Ok(())
}

/// Queues layers one after the other, each with its mark behind it; the first `mapped` of them are streamed, if the step says so.
fn queue_layers(
    mut step: Step<'_>,
    layers: &[BandLayer],
    mapped: usize,
    marks: &[Event],
) -> Result<(), BandError> {
    for (index, layer) in layers.iter().enumerate() {
        if index == mapped {
            step.streamed = None;
        }
        layer.ops.iter().try_for_each(|op| step.queue(op, &layer.widths))?;
        marks.get(index).map_or(Ok(()), |mark| step.stream.record(mark))?;
    }
    Ok(())
}

/// Bytes of the largest group of matrices of each layer in host memory.
fn mapped_groups(
    model: &ModelFile,
    layers: &[Layer],
    residency: &[Residency],
) -> Result<Vec<u64>, BandError> {
    let mapped = layers.iter().zip(residency).filter(|(_, home)| **home == Residency::HostMapped);
    let bytes = |weight: &WeightRef| Need::Matrix(weight).stored_bytes(model);
    mapped.map(|(layer, _)| largest_group(layer, bytes)).collect()
}

/// All that a band takes of a device's memory, as memory is reserved for it.
fn device_bytes(
    model: &ModelFile,
    spec: &BandSpec,
    sizes: &StateSizes,
    scratch: &ScratchBytes,
) -> Result<u64, BandError> {
    let program = model.program();
    let mut sum = scratch.of_steps() as u64;
    if spec.head {
        sum += Head::bytes(model, &program.head, scratch)?;
    }
    for (layer, residency) in program.layers[spec.all_layers()].iter().zip(spec.all_residency()) {
        sum += sizes.of_layer(layer) as u64;
        if residency == Residency::Device {
            sum += Need::mapped_bytes(layer, model)?;
        }
    }
    Ok(sum)
}

fn state_sizes(limits: &Limits) -> StateSizes {
    let kv_element = match limits.kv_type {
        KvType::F32 => KvElement::F32,
        KvType::F16 => KvElement::F16,
    };
    StateSizes { kv_blocks: limits.kv_blocks, kv_element, slots: limits.max_sequences }
}
