//! The process at one end of a tested link: opens a device and does what it is told, one line of JSON in, one out.

use super::test::{fill_pattern, first_difference};
use crate::hip::{
    Device, DeviceBuffer, Driver, HipError, IpcHandle, PeerBuffer, PinnedBuffer, Provider, Stream,
};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::time::Instant;

/// What a byte is before a copy: what was not delivered is seen.
const BLANK: u8 = 0xa5;

/// What a probe is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Order {
    /// Open a device; everything else needs it.
    Open {
        /// Source of devices.
        provider: String,
        /// Number of the device there.
        ordinal: u32,
        /// Bytes of the largest copy.
        bytes: usize,
    },
    /// Let the other process write into this one's memory.
    Share,
    /// Write into the other process's memory from now on.
    Attach {
        /// Its handle.
        handle: Vec<u8>,
        /// Bytes of the memory.
        bytes: u64,
    },
    /// Blank the shared memory.
    Blank {
        /// Bytes from the beginning on.
        bytes: usize,
    },
    /// Copy a pattern into the other process's memory.
    Send {
        /// Bytes.
        bytes: usize,
        /// Which pattern.
        seed: u64,
    },
    /// Compare the shared memory with a pattern.
    Check {
        /// Bytes.
        bytes: usize,
        /// Which pattern.
        seed: u64,
    },
    /// Time copies into the other process's memory, one queued after the other.
    Rate {
        /// Bytes of a copy.
        bytes: usize,
        /// Copies.
        count: u32,
    },
    /// Time copies one by one, from queueing each to knowing that it is there.
    Time {
        /// Bytes of a copy.
        bytes: usize,
        /// Copies.
        count: u32,
        /// From where to where.
        leg: Leg,
    },
}

/// What rows take from one device to the next, or a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Leg {
    /// Into the other process's memory.
    Peer,
    /// From the device to page-locked memory.
    ToHost,
    /// From page-locked memory to the device.
    FromHost,
}

/// What a probe answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    /// Done.
    Done,
    /// The handle of the shared memory.
    Shared {
        /// The bytes of the handle.
        handle: Vec<u8>,
        /// Bytes of the memory.
        bytes: u64,
    },
    /// The memory holds something else.
    Differs {
        /// The first byte that does.
        at: usize,
    },
    /// Time of one copy, on average.
    Took {
        /// Microseconds.
        microseconds: f64,
    },
    /// Times of copies.
    Times {
        /// Microseconds, in the order of the copies.
        microseconds: Vec<f64>,
    },
    /// The driver failed.
    Failed {
        /// Stable name of the error.
        code: String,
        /// What it said.
        reason: String,
    },
}

/// Serves orders until the input ends.
///
/// # Errors
/// Input or output failed, or an order makes no sense.
pub fn serve(input: impl BufRead, mut output: impl Write) -> std::io::Result<()> {
    let mut probe: Option<Probe> = None;
    for line in input.lines() {
        let order: Order = serde_json::from_str(&line?)?;
        let answer = obey(&mut probe, &order).unwrap_or_else(|error| Answer::Failed {
            code: error.code().to_owned(),
            reason: error.to_string(),
        });
        writeln!(output, "{}", serde_json::to_string(&answer)?)?;
        output.flush()?;
    }
    Ok(())
}

fn obey(probe: &mut Option<Probe>, order: &Order) -> Result<Answer, HipError> {
    match (probe, order) {
        (probe, Order::Open { provider, ordinal, bytes }) => {
            *probe = Some(Probe::open(provider.parse()?, *ordinal, *bytes)?);
            Ok(Answer::Done)
        }
        (Some(probe), order) => probe.obey(order),
        (None, _) => Err(out_of_order()),
    }
}

fn out_of_order() -> HipError {
    HipError::OutOfRange { what: "obeying a probe's order out of order", offset: 0, bytes: 0, len: 0 }
}

/// One end. Fields are dropped in this order: memory of others first, the device last.
#[derive(Debug)]
struct Probe {
    attached: Option<PeerBuffer>,
    shared: DeviceBuffer,
    source: DeviceBuffer,
    host: PinnedBuffer,
    stream: Stream,
    device: Device,
}

impl Probe {
    fn open(provider: Provider, ordinal: u32, bytes: usize) -> Result<Self, HipError> {
        let device = Device::open(&Driver::open(&provider)?, ordinal)?;
        Ok(Self {
            attached: None,
            shared: device.allocate("shared memory of a link test", bytes)?,
            source: device.allocate("source of a link test", bytes)?,
            host: device.allocate_pinned("patterns of a link test", bytes)?,
            stream: Stream::new(&device)?,
            device,
        })
    }

    fn obey(&mut self, order: &Order) -> Result<Answer, HipError> {
        match *order {
            Order::Open { .. } => return Err(out_of_order()),
            Order::Share => {
                let (handle, bytes) = self.shared.share()?.to_parts();
                return Ok(Answer::Shared { handle: handle.to_vec(), bytes });
            }
            Order::Attach { ref handle, bytes } => {
                let handle = handle.as_slice().try_into().map_err(|_| out_of_order())?;
                self.attached = Some(PeerBuffer::open(&self.device, IpcHandle::from_parts(handle, bytes))?);
            }
            Order::Blank { bytes } => {
                self.stream.fill(self.shared.slice().part(0, bytes)?, BLANK)?;
                self.stream.synchronize()?;
            }
            Order::Send { bytes, seed } => {
                let mut pattern = vec![0; bytes];
                fill_pattern(&mut pattern, seed);
                self.host.write(0, &pattern)?;
                self.stream.upload(self.source.slice().part(0, bytes)?, &self.host, 0)?;
                self.copy(bytes)?;
                self.stream.synchronize()?;
            }
            Order::Check { bytes, seed } => {
                let mut found = vec![0; bytes];
                // As a stage takes rows over: by a copy inside the device, which may see other caches than one to the host.
                let taken = self.source.slice().part(0, bytes)?;
                self.stream.copy_within(taken, self.shared.slice().part(0, bytes)?)?;
                self.stream.download(&self.host, 0, taken)?;
                self.stream.synchronize()?;
                self.host.read(0, &mut found)?;
                let differs = |at| Answer::Differs { at };
                return Ok(first_difference(&found, seed).map_or(Answer::Done, differs));
            }
            Order::Rate { bytes, count } => return self.rate(bytes, count),
            Order::Time { bytes, count, leg } => return self.time(bytes, count, leg),
        }
        Ok(Answer::Done)
    }

    /// Queues a copy as a stage does that hands rows to the next one.
    fn copy(&self, bytes: usize) -> Result<(), HipError> {
        let attached = self.attached.as_ref().ok_or_else(out_of_order)?;
        self.stream.copy_within(attached.slice().part(0, bytes)?, self.source.slice().part(0, bytes)?)
    }

    fn rate(&self, bytes: usize, count: u32) -> Result<Answer, HipError> {
        self.copy(bytes)?;
        self.stream.synchronize()?;
        let start = Instant::now();
        (0..count).try_for_each(|_| self.copy(bytes))?;
        self.stream.synchronize()?;
        Ok(Answer::Took { microseconds: microseconds(start) / f64::from(count.max(1)) })
    }

    fn time(&self, bytes: usize, count: u32, leg: Leg) -> Result<Answer, HipError> {
        let here = self.source.slice().part(0, bytes)?;
        let once = || {
            let start = Instant::now();
            match leg {
                Leg::Peer => self.copy(bytes)?,
                Leg::ToHost => self.stream.download(&self.host, 0, here)?,
                Leg::FromHost => self.stream.upload(here, &self.host, 0)?,
            }
            self.stream.synchronize()?;
            Ok(microseconds(start))
        };
        // The first one takes longer than any other.
        once()?;
        Ok(Answer::Times { microseconds: (0..count).map(|_| once()).collect::<Result<_, HipError>>()? })
    }
}

fn microseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e6
}
