//! The data path: step frames in, band, results out, until asked to stop.

use super::ProcessError;
use super::open::{Ends, Served};
use super::requests::Requests;
use super::stop::Stop;
use crate::band::{Band, Logits};
use crate::fault::Fault;
use crate::residual::{Incoming, Outgoing};
use spillway_protocol::frame::{
    FrameKind, FrameLimits, StepFrame, read_step, read_tokens, write_logits, write_logits_head,
};
use spillway_protocol::ring::{RingConsumer, RingProducer, SlotReader, SlotWriter, Wait};
use spillway_protocol::status::{Counters, StatusWriter, WorkerState};
use std::time::{Duration, Instant};

/// Longest sleep in a ring: how soon a request to stop is seen by an idle worker.
const TICK: Duration = Duration::from_millis(100);

/// Serves one band.
#[derive(Debug)]
pub(super) struct Server<'a, B> {
    stage: Stage<'a, B>,
    /// Closed after the band has been dropped, which may take a while: whoever sees it closed hears at once why.
    ring_in: RingConsumer,
}

/// The band and what its steps need.
#[derive(Debug)]
struct Stage<'a, B> {
    band: B,
    ends: Ends,
    limits: FrameLimits,
    epoch: u64,
    out: Out<'a>,
    /// The step in hand and its token ids, reused.
    frame: StepFrame,
    ids: Vec<u32>,
    fault: Fault,
}

/// The outgoing ring and what waiting for it needs.
#[derive(Debug)]
struct Out<'a> {
    ring: RingProducer,
    status: &'a StatusWriter,
    stop: &'a Stop,
}

impl<'a, B: Band> Server<'a, B> {
    pub(super) fn new(
        served: Served<B>,
        ring_in: RingConsumer,
        ring_out: RingProducer,
        status: &'a StatusWriter,
        stop: &'a Stop,
    ) -> Self {
        let Served { band, ends, limits } = served;
        let out = Out { ring: ring_out, status, stop };
        let frame = StepFrame::with_limits(&limits);
        let ids = Vec::with_capacity(limits.max_tokens);
        let fault = Fault::from_env();
        Self { stage: Stage { band, ends, limits, epoch: 0, out, frame, ids, fault }, ring_in }
    }

    /// Until asked to stop, or an error.
    pub(super) fn serve(mut self, requests: &mut Requests<'_>) -> Result<(), ProcessError> {
        let Out { status, stop, .. } = self.stage.out;
        loop {
            requests.answer_pending(&mut self.stage.band)?;
            self.stage.epoch = self.stage.epoch.max(requests.epoch());
            status.set_state(WorkerState::Idle);
            let start = Instant::now();
            let found = self.ring_in.wait(TICK)?;
            status.add(&Counters { wait_ns: nanoseconds(start), ..Counters::default() });
            if stop.requested() {
                return Ok(());
            }
            match found {
                Wait::TimedOut => {}
                // The stage before this one has left. The coordinator replaces it, or asks this one to stop.
                Wait::Closed => stop.wait_for(TICK),
                Wait::Ready(slot) => self.stage.step(slot)?,
            }
        }
    }
}

impl<B: Band> Stage<'_, B> {
    /// Runs the step in `slot` and sends its result on. A frame of an earlier epoch is dropped; a later one begins with it.
    fn step(&mut self, slot: SlotReader<'_>) -> Result<(), ProcessError> {
        let Self { band, ends, limits, epoch, out, frame, ids, fault } = self;
        let start = Instant::now();
        let kind = if ends.embed { FrameKind::Tokens } else { FrameKind::Residual };
        read_step(&slot, kind, limits, frame)?;
        if frame.epoch() < *epoch {
            return Ok(());
        }
        *epoch = frame.epoch();
        out.status.set_epoch(*epoch);
        let frame = &*frame;
        let pending = if ends.embed {
            ids.resize(frame.tokens(), 0);
            read_tokens(&slot, frame, limits, ids)?;
            drop(slot);
            fault.tokens(ids);
            band.embed(ids)?;
            None
        } else {
            band.receive(Incoming::new(slot, frame, limits))?
        };
        out.status.add(&Counters { copy_ns: nanoseconds(start), ..Counters::default() });
        out.status.set_step(frame.step());
        out.status.set_state(WorkerState::Stepping);
        let start = Instant::now();
        band.run(frame, pending, &mut || out.status.layer_done())?;
        out.status.add(&Counters { busy_ns: nanoseconds(start), ..Counters::default() });
        if ends.head {
            out.send_logits(band, frame, limits)?;
        } else {
            out.send(|slot| band.send(Outgoing::new(slot, frame, limits)))?;
        }
        band.rest();
        out.status.add(&Counters { steps: 1, tokens: frame.tokens() as u64, ..Counters::default() });
        Ok(())
    }
}

impl Out<'_> {
    /// Sends the logits of the step in hand, group by group.
    fn send_logits(
        &mut self,
        band: &mut impl Band,
        frame: &StepFrame,
        limits: &FrameLimits,
    ) -> Result<(), ProcessError> {
        let mut start = Instant::now();
        band.logits(frame, &mut |about, logits| {
            self.status.add(&Counters { busy_ns: nanoseconds(start), ..Counters::default() });
            self.send(|slot| match logits {
                Logits::Values(values) => Ok(write_logits(slot, about, limits.vocab, values)?),
                Logits::OnDevice(write) => {
                    let offset = write_logits_head(slot, about, limits.vocab)?;
                    write(slot.locate(offset, about.rows * limits.vocab * size_of::<f32>())?)
                }
            })?;
            start = Instant::now();
            Ok(())
        })
    }

    /// Waits for room and sends what `write` puts into the slot.
    fn send(
        &mut self,
        write: impl FnOnce(&mut SlotWriter<'_>) -> Result<(), ProcessError>,
    ) -> Result<(), ProcessError> {
        loop {
            self.status.set_state(WorkerState::Sending);
            let start = Instant::now();
            let found = self.ring.wait(TICK)?;
            self.status.add(&Counters { wait_ns: nanoseconds(start), ..Counters::default() });
            match found {
                Wait::Ready(mut slot) => {
                    // What follows is its own work: it does not wait for the next stage any more.
                    self.status.set_state(WorkerState::Stepping);
                    let start = Instant::now();
                    write(&mut slot)?;
                    slot.publish();
                    self.status.add(&Counters { copy_ns: nanoseconds(start), ..Counters::default() });
                    return Ok(());
                }
                _ if self.stop.requested() => return Err(ProcessError::Stopped),
                Wait::TimedOut => {}
                // The next stage has left. Its successor will drop what belongs to an earlier epoch.
                Wait::Closed => self.stop.wait_for(TICK),
            }
        }
    }
}

/// Nanoseconds since `start`.
fn nanoseconds(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
