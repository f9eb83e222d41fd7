//! What the process needs of a band and of the processor that runs it.

use crate::process::ProcessError;
use crate::residual::{Incoming, Outgoing};
use spillway_model::file::ModelFile;
use spillway_protocol::control::{DeviceShare, LoadBand, LoadStats};
use spillway_protocol::frame::{LogitsFrame, StepFrame};
use spillway_protocol::ring::RingMemory;
use spillway_protocol::states::StateMemory;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

/// Told how far a load is: bytes stored so far, bytes in all. `Break` gives the load up.
pub type LoadProgress<'a> = dyn FnMut(u64, u64) -> ControlFlow<()> + 'a;

/// Logit rows `[rows, vocab]` on their way to the coordinator.
#[expect(missing_debug_implementations, reason = "it lends a closure")]
pub enum Logits<'a> {
    /// In the memory of this process.
    Values(&'a [f32]),
    /// On a device that writes them into the memory of the outgoing ring, at the offset that this is called with.
    OnDevice(&'a mut dyn FnMut(usize) -> Result<(), ProcessError>),
}

/// Takes the logits of a step group by group.
pub type LogitsSink<'a> = dyn FnMut(&LogitsFrame, Logits<'_>) -> Result<(), ProcessError> + 'a;

/// What a band shares with other processes.
#[derive(Debug, Clone)]
pub struct Rings {
    /// Brings the input of steps.
    pub incoming: RingMemory,
    /// Takes their results.
    pub outgoing: RingMemory,
    /// Holds the states of lifted layers, where the worker runs or passes any.
    pub states: Option<StateMemory>,
}

/// A kind of worker.
pub trait Worker {
    /// Name of the hidden subcommand and prefix of messages.
    const NAME: &'static str;
    /// How long the process spins for the next step while steps keep coming, before it sleeps.
    const PATIENCE: Duration;
    /// What it loads.
    type Band: Band;

    /// Loads the band that `load` describes. A load that `progress` gives up may end with any error.
    ///
    /// # Errors
    /// The file does not have the band, or the processor cannot hold it.
    fn load(
        model: &Arc<ModelFile>,
        load: &LoadBand,
        rings: &Rings,
        progress: &mut LoadProgress<'_>,
    ) -> Result<Loaded<Self::Band>, ProcessError>;
}

/// A band and what it took.
#[derive(Debug)]
pub struct Loaded<B> {
    /// The band.
    pub band: B,
    /// What was allocated; the process fills in the time.
    pub stats: LoadStats,
}

/// Contiguous layers with their weights and state, run one step at a time: input, [`Band::run`], output.
pub trait Band {
    /// Turns token ids into the input of the next step.
    ///
    /// # Errors
    /// The band does not embed, or an id is not in the vocabulary.
    fn embed(&mut self, ids: &[u32]) -> Result<(), ProcessError>;

    /// Takes the input of the next step. Rows that are still being copied when it returns are given back, for
    /// [`Band::run`] to drop as soon as they are not needed any more.
    ///
    /// # Errors
    /// There are more tokens than the band was made for, or they cannot be copied.
    fn receive<'a>(&mut self, rows: Incoming<'a>) -> Result<Option<Incoming<'a>>, ProcessError>;

    /// Runs the layers on the spans of `frame`. `pending` is what [`Band::receive`] gave back. `layer_done` is called
    /// for each layer as it is known to be done, and whenever else it is known that the step gets on: nobody counts the calls.
    ///
    /// # Errors
    /// An operation failed; the state of the step's sequences is undefined.
    fn run(
        &mut self,
        frame: &StepFrame,
        pending: Option<Incoming<'_>>,
        layer_done: &mut dyn FnMut(),
    ) -> Result<(), ProcessError>;

    /// Puts the output of the last step into `rows`, whole when it returns.
    ///
    /// # Errors
    /// The output cannot be had from the processor.
    fn send(&mut self, rows: Outgoing<'_, '_>) -> Result<(), ProcessError>;

    /// Computes the logit rows that the step's spans ask for and hands them to `sink` in groups, in row order, the last
    /// group marked. A step that asks for none gets one empty group.
    ///
    /// # Errors
    /// The band has no head, an operation failed, or `sink` did.
    fn logits(&mut self, frame: &StepFrame, sink: &mut LogitsSink<'_>) -> Result<(), ProcessError>;

    /// The step is over: threads that wait for the next one must let other processes have their processors.
    fn rest(&mut self);

    /// Gives the stage before memory of this band's device to write residual rows into; the same when it is asked again.
    ///
    /// # Errors
    /// The reason why it cannot.
    fn offer(&mut self) -> Result<DeviceShare, String>;

    /// Writes residual rows into `share` of the next stage from now on; none: into the ring.
    ///
    /// # Errors
    /// The reason why it cannot; rows go through the ring.
    fn connect(&mut self, share: Option<&DeviceShare>) -> Result<(), String>;
}

/// The groups in which `frame`'s logit rows are computed, at most `most` rows each, in order.
pub fn logit_groups(frame: &StepFrame, most: usize) -> impl Iterator<Item = LogitsFrame> {
    let (epoch, step, total) = (frame.epoch(), frame.step(), frame.logit_rows());
    let groups = total.div_ceil(most.max(1)).max(1);
    (0..groups).map(move |group| {
        let first_row = group * most;
        let rows = most.min(total - first_row);
        LogitsFrame { epoch, step, first_row, rows, last: group + 1 == groups }
    })
}
