//! The data path: step frames in, band, results out, until asked to stop.

use super::ProcessError;
use super::open::{Ends, Served};
use super::stop::Stop;
use crate::band::Band;
use crate::fault::Fault;
use spillway_protocol::frame::{
    FrameError, FrameKind, FrameLimits, StepFrame, read_residual, read_step, read_tokens, write_logits,
    write_residual,
};
use spillway_protocol::ring::{RingConsumer, RingProducer, SlotReader, SlotWriter, Wait};
use spillway_protocol::status::{Counters, StatusWriter, WorkerState};
use std::time::{Duration, Instant};

/// Longest sleep in a ring: how soon a request to stop is seen by an idle worker.
const TICK: Duration = Duration::from_millis(100);

/// Serves one band.
#[derive(Debug)]
pub(super) struct Server<'a, B> {
    band: B,
    ends: Ends,
    limits: FrameLimits,
    epoch: u64,
    ring_in: RingConsumer,
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
        epoch: u64,
        ring_in: RingConsumer,
        ring_out: RingProducer,
        status: &'a StatusWriter,
        stop: &'a Stop,
    ) -> Self {
        let Served { band, ends, limits } = served;
        let frame = StepFrame::with_limits(&limits);
        let ids = Vec::with_capacity(limits.max_tokens);
        let (out, fault) = (Out { ring: ring_out, status, stop }, Fault::from_env());
        Self { band, ends, limits, epoch, ring_in, out, frame, ids, fault }
    }

    /// Until asked to stop, or an error.
    pub(super) fn serve(mut self) -> Result<(), ProcessError> {
        while self.receive()? {
            self.fault.tokens(&self.ids);
            let tokens = self.frame.tokens() as u64;
            self.out.status.set_step(self.frame.step());
            self.out.status.set_state(WorkerState::Stepping);
            let start = Instant::now();
            self.band.run(&self.frame, &mut || self.out.status.layer_done())?;
            self.out.status.add(&Counters { busy_ns: nanoseconds(start), ..Counters::default() });
            self.answer()?;
            self.band.rest();
            self.out.status.add(&Counters { steps: 1, tokens, ..Counters::default() });
        }
        Ok(())
    }

    /// Waits for a frame of this epoch, or of a later one, which begins with it, and takes it in. False when asked to stop.
    fn receive(&mut self) -> Result<bool, ProcessError> {
        let Self { band, ends, limits, epoch, ring_in, out, frame, ids, .. } = self;
        let kind = if ends.embed { FrameKind::Tokens } else { FrameKind::Residual };
        out.status.set_state(WorkerState::Idle);
        loop {
            let start = Instant::now();
            let found = ring_in.wait(TICK)?;
            out.status.add(&Counters { wait_ns: nanoseconds(start), ..Counters::default() });
            if out.stop.requested() {
                return Ok(false);
            }
            match found {
                Wait::TimedOut => {}
                // The stage before this one has left. The coordinator replaces it, or asks this one to stop.
                Wait::Closed => out.stop.wait_for(TICK),
                Wait::Ready(slot) => {
                    let start = Instant::now();
                    let taken = take_in(&slot, kind, band, limits, *epoch, frame, ids)?;
                    drop(slot);
                    out.status.add(&Counters { copy_ns: nanoseconds(start), ..Counters::default() });
                    if taken {
                        *epoch = frame.epoch();
                        out.status.set_epoch(*epoch);
                        return Ok(true);
                    }
                }
            }
        }
    }

    /// Sends the step's result on.
    fn answer(&mut self) -> Result<(), ProcessError> {
        let Self { band, ends, limits, out, frame, .. } = self;
        let frame = &*frame;
        let mut start = Instant::now();
        if !ends.head {
            let residual = band.residual(frame.tokens())?;
            out.status.add(&Counters { busy_ns: nanoseconds(start), ..Counters::default() });
            return out.send(|slot| write_residual(slot, frame, limits.d_model, residual));
        }
        band.logits(frame, &mut |about, logits| {
            out.status.add(&Counters { busy_ns: nanoseconds(start), ..Counters::default() });
            out.send(|slot| write_logits(slot, about, limits.vocab, logits))?;
            start = Instant::now();
            Ok(())
        })
    }
}

/// Reads the frame in `slot` into the band. False when it belongs to an earlier epoch: then it is dropped.
fn take_in(
    slot: &SlotReader<'_>,
    kind: FrameKind,
    band: &mut impl Band,
    limits: &FrameLimits,
    epoch: u64,
    frame: &mut StepFrame,
    ids: &mut Vec<u32>,
) -> Result<bool, ProcessError> {
    read_step(slot, kind, limits, frame)?;
    if frame.epoch() < epoch {
        return Ok(false);
    }
    match kind {
        FrameKind::Tokens => {
            ids.resize(frame.tokens(), 0);
            read_tokens(slot, frame, limits, ids)?;
            band.embed(ids)?;
        }
        _ => read_residual(slot, frame, limits, band.input(frame.tokens())?)?,
    }
    Ok(true)
}

impl Out<'_> {
    /// Waits for room and sends what `write` puts into the slot.
    fn send(
        &mut self,
        write: impl FnOnce(&mut SlotWriter<'_>) -> Result<(), FrameError>,
    ) -> Result<(), ProcessError> {
        self.status.set_state(WorkerState::Sending);
        loop {
            let start = Instant::now();
            let found = self.ring.wait(TICK)?;
            self.status.add(&Counters { wait_ns: nanoseconds(start), ..Counters::default() });
            match found {
                Wait::Ready(mut slot) => {
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
