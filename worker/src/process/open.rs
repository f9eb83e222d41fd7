//! From the `Load` message to a loaded band.

use super::ProcessError;
use super::stop::Stop;
use crate::band::{Loaded, Rings, Worker};
use spillway_model::file::ModelFile;
use spillway_model::gguf::{FileStamp, stamp_of};
use spillway_protocol::channel::Sender;
use spillway_protocol::control::{FromWorker, LoadBand, LoadStats};
use spillway_protocol::frame::FrameLimits;
use spillway_protocol::status::StatusWriter;
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Shortest time between two progress messages.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// A band that is ready to serve.
#[derive(Debug)]
pub(super) struct Served<B> {
    pub(super) band: B,
    pub(super) ends: Ends,
    pub(super) limits: FrameLimits,
}

/// Which ends of the pipeline a band is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ends {
    pub(super) embed: bool,
    pub(super) head: bool,
}

/// Opens the file, loads the band, reports `Loaded`.
pub(super) fn open<W: Worker>(
    load: &LoadBand,
    rings: &Rings,
    sender: &mut Sender<FromWorker>,
    status: &StatusWriter,
    stop: &Stop,
) -> Result<Served<W::Band>, ProcessError> {
    let start = Instant::now();
    // Before it is read: another file may have come there that is not even a model.
    if load.file_stamp.is_some_and(|stamp| is_another(&load.model, &stamp)) {
        return Err(ProcessError::FileReplaced { path: load.model.clone() });
    }
    let model = ModelFile::open(&load.model)?;
    let found = model.gguf().file_len() as u64;
    if found != load.file_bytes {
        return Err(ProcessError::FileChanged { path: load.model.clone(), expected: load.file_bytes, found });
    }
    if load.file_stamp.is_some() && load.file_stamp != model.gguf().stamp() {
        return Err(ProcessError::FileReplaced { path: load.model.clone() });
    }
    let limits = FrameLimits::new(&load.limits, model.program().d_model, model.program().vocab);
    let mut progress = Progress { sender, stop, last: None, given_up: None };
    let loaded = W::load(&Arc::new(model), load, rings, &mut |done, total| progress.tell(done, total));
    let Loaded { band, stats } = match (loaded, progress.given_up) {
        (Ok(loaded), None) => loaded,
        // Whatever the load ended with follows from giving it up.
        (_, Some(cause)) => return Err(cause),
        (Err(error), None) => return Err(error),
    };
    status.set_bytes_allocated(stats.host_bytes + stats.pinned_bytes + stats.device_bytes);
    let load_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
    sender.send(&FromWorker::Loaded(LoadStats { load_ms, ..stats }))?;
    let ends = Ends { embed: load.stage.embed, head: load.stage.head };
    Ok(Served { band, ends, limits })
}

/// Whether a path does not name the file any more that it named. What else is wrong with it is found when it is opened.
fn is_another(path: &Path, stamp: &FileStamp) -> bool {
    match stamp_of(path) {
        Ok(found) => found != *stamp,
        Err(error) => error.kind() == ErrorKind::NotFound,
    }
}

/// Tells the coordinator how far the load is, not too often, and gives up when asked to stop.
struct Progress<'a> {
    sender: &'a mut Sender<FromWorker>,
    stop: &'a Stop,
    last: Option<Instant>,
    /// Why the load was given up.
    given_up: Option<ProcessError>,
}

impl Progress<'_> {
    fn tell(&mut self, done: u64, total: u64) -> ControlFlow<()> {
        if self.stop.requested() {
            return self.give_up(ProcessError::Stopped);
        }
        if done < total && self.last.is_some_and(|last| last.elapsed() < PROGRESS_INTERVAL) {
            return ControlFlow::Continue(());
        }
        self.last = Some(Instant::now());
        match self.sender.send(&FromWorker::Progress { done, total }) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => self.give_up(error.into()),
        }
    }

    fn give_up(&mut self, cause: ProcessError) -> ControlFlow<()> {
        self.given_up = Some(cause);
        ControlFlow::Break(())
    }
}
