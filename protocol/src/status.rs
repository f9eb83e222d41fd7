//! The status page: what a worker is doing, readable at any time without asking it.
//!
//! One page of shared memory per worker. The worker stores, the coordinator loads; every field is an atomic of its own,
//! so a reader sees each value whole but not all of them from the same instant. [`StatusReader::read`] copies them into
//! a plain [`Status`].

use crate::shm::{Segment, ShmError};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

const MAGIC: u32 = u32::from_le_bytes(*b"SPST");
const VERSION: u32 = 1;
const PAGE_BYTES: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

/// What a worker is in the middle of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum WorkerState {
    /// Started, has not been told what to load.
    Starting = 0,
    /// Reading and packing weights.
    Loading = 1,
    /// Waiting for a step frame.
    Idle = 2,
    /// Computing a step, or copying what came out of it.
    Stepping = 3,
    /// Waiting for room in the outgoing ring.
    Sending = 4,
    /// On the way out after `Shutdown` or end-of-file.
    Stopping = 5,
    /// On the way out after an error.
    Failed = 6,
}

impl WorkerState {
    const ALL: [WorkerState; 7] = [
        WorkerState::Starting,
        WorkerState::Loading,
        WorkerState::Idle,
        WorkerState::Stepping,
        WorkerState::Sending,
        WorkerState::Stopping,
        WorkerState::Failed,
    ];

    /// The word for people and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            WorkerState::Starting => "starting",
            WorkerState::Loading => "loading",
            WorkerState::Idle => "idle",
            WorkerState::Stepping => "stepping",
            WorkerState::Sending => "sending",
            WorkerState::Stopping => "stopping",
            WorkerState::Failed => "failed",
        }
    }
}

/// Counters of a worker, all growing from 0 at its start except where noted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Layers computed, over all steps: moves within a step, so a watchdog sees progress.
    pub layers: u64,
    /// Steps finished.
    pub steps: u64,
    /// Tokens of finished steps.
    pub tokens: u64,
    /// Nanoseconds spent computing.
    pub busy_ns: u64,
    /// Nanoseconds spent waiting for frames or for room.
    pub wait_ns: u64,
    /// Nanoseconds spent copying frames into and out of rings.
    pub copy_ns: u64,
}

/// A copy of a status page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// Process id; 0 until the worker has attached.
    pub pid: u32,
    /// Pipeline incarnation; 0 until the worker has been told.
    pub epoch: u64,
    /// What it is doing; `None` for a value this build does not know.
    pub state: Option<WorkerState>,
    /// The step in hand, or the last one.
    pub step: u64,
    /// Private bytes the worker holds for the band.
    pub bytes_allocated: u64,
    /// Work done so far.
    pub counters: Counters,
}

/// Why a status page cannot be made or attached.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    /// The shared memory itself.
    #[error(transparent)]
    Shm(#[from] ShmError),
    /// Not a status page of this version.
    #[error(
        "status page: the inherited segment is not one of this version; coordinator and worker must be the same build"
    )]
    Foreign,
}

impl StatusError {
    /// Stable name of the error.
    pub fn code(&self) -> &'static str {
        match self {
            StatusError::Shm(error) => error.code(),
            StatusError::Foreign => "status_foreign",
        }
    }
}

#[derive(Debug)]
#[repr(C)]
struct Page {
    magic: AtomicU32,
    version: AtomicU32,
    pid: AtomicU32,
    state: AtomicU32,
    epoch: AtomicU64,
    step: AtomicU64,
    bytes_allocated: AtomicU64,
    layers: AtomicU64,
    steps: AtomicU64,
    tokens: AtomicU64,
    busy_ns: AtomicU64,
    wait_ns: AtomicU64,
    copy_ns: AtomicU64,
}

const _: () = assert!(size_of::<Page>() <= PAGE_BYTES.get());

fn page(segment: &Segment) -> &Page {
    // SAFETY: every segment here is at least a page long and page aligned; all fields are atomics, valid for any bits.
    unsafe { segment.base().cast::<Page>().as_ref() }
}

/// The coordinator's side: makes the page and reads it.
#[derive(Debug)]
pub struct StatusReader {
    segment: Segment,
}

impl StatusReader {
    /// Makes a page for a worker to inherit.
    pub fn create() -> Result<Self, StatusError> {
        let segment = Segment::create(c"spillway-status", PAGE_BYTES)?;
        page(&segment).version.store(VERSION, Relaxed);
        page(&segment).magic.store(MAGIC, Relaxed);
        Ok(Self { segment })
    }

    /// Copies the page.
    pub fn read(&self) -> Status {
        let page = page(&self.segment);
        let state = page.state.load(Relaxed);
        Status {
            pid: page.pid.load(Relaxed),
            epoch: page.epoch.load(Relaxed),
            state: WorkerState::ALL.into_iter().find(|known| *known as u32 == state),
            step: page.step.load(Relaxed),
            bytes_allocated: page.bytes_allocated.load(Relaxed),
            counters: Counters {
                layers: page.layers.load(Relaxed),
                steps: page.steps.load(Relaxed),
                tokens: page.tokens.load(Relaxed),
                busy_ns: page.busy_ns.load(Relaxed),
                wait_ns: page.wait_ns.load(Relaxed),
                copy_ns: page.copy_ns.load(Relaxed),
            },
        }
    }
}

impl AsFd for StatusReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.segment.fd()
    }
}

/// The worker's side. Only one per page: counters are added by load and store.
#[derive(Debug)]
pub struct StatusWriter {
    segment: Segment,
}

impl StatusWriter {
    /// Attaches to an inherited page and enters this process's id.
    pub fn attach(fd: OwnedFd) -> Result<Self, StatusError> {
        let segment = Segment::attach(fd, PAGE_BYTES.get())?;
        let known =
            page(&segment).magic.load(Relaxed) == MAGIC && page(&segment).version.load(Relaxed) == VERSION;
        if !known {
            return Err(StatusError::Foreign);
        }
        page(&segment).pid.store(std::process::id(), Relaxed);
        Ok(Self { segment })
    }

    /// Enters what the worker is doing now.
    pub fn set_state(&self, state: WorkerState) {
        page(&self.segment).state.store(state as u32, Relaxed);
    }

    /// Enters the pipeline incarnation.
    pub fn set_epoch(&self, epoch: u64) {
        page(&self.segment).epoch.store(epoch, Relaxed);
    }

    /// Enters the step in hand.
    pub fn set_step(&self, step: u64) {
        page(&self.segment).step.store(step, Relaxed);
    }

    /// Enters the private bytes held.
    pub fn set_bytes_allocated(&self, bytes: u64) {
        page(&self.segment).bytes_allocated.store(bytes, Relaxed);
    }

    /// Counts one computed layer.
    pub fn layer_done(&self) {
        bump(&page(&self.segment).layers, 1);
    }

    /// Adds to the counters.
    pub fn add(&self, more: &Counters) {
        let page = page(&self.segment);
        bump(&page.layers, more.layers);
        bump(&page.steps, more.steps);
        bump(&page.tokens, more.tokens);
        bump(&page.busy_ns, more.busy_ns);
        bump(&page.wait_ns, more.wait_ns);
        bump(&page.copy_ns, more.copy_ns);
    }
}

/// There is one writer, so a plain load and store is enough and costs no locked instruction.
fn bump(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(by), Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (StatusReader, StatusWriter) {
        let reader = StatusReader::create().unwrap();
        let writer = StatusWriter::attach(reader.as_fd().try_clone_to_owned().unwrap()).unwrap();
        (reader, writer)
    }

    #[test]
    fn the_reader_sees_what_the_writer_enters() {
        let (reader, writer) = pair();
        assert_eq!(reader.read().state, Some(WorkerState::Starting));
        writer.set_epoch(7);
        writer.set_step(41);
        writer.set_bytes_allocated(1 << 33);
        writer.layer_done();
        let more = Counters { layers: 2, steps: 3, tokens: 4, busy_ns: 5, wait_ns: 6, copy_ns: 7 };
        writer.add(&more);
        for state in WorkerState::ALL {
            writer.set_state(state);
            assert_eq!(reader.read().state, Some(state));
        }
        let status = reader.read();
        assert_eq!((status.pid, status.epoch, status.step), (std::process::id(), 7, 41));
        assert_eq!(status.bytes_allocated, 1 << 33);
        assert_eq!(status.counters, Counters { layers: 3, ..more });
    }

    #[test]
    fn an_unknown_state_and_a_foreign_page_are_told() {
        let (reader, _writer) = pair();
        page(&reader.segment).state.store(99, Relaxed);
        assert_eq!(reader.read().state, None);
        page(&reader.segment).version.store(VERSION + 1, Relaxed);
        let again = StatusWriter::attach(reader.as_fd().try_clone_to_owned().unwrap());
        assert_eq!(again.unwrap_err().code(), "status_foreign");
    }
}
