//! From the `Load` message to a loaded band.

use super::ProcessError;
use super::stop::Stop;
use crate::band::{Band, BandLoadError, BandSpec};
use crate::load::LoadError;
use spillway_kernels::pool::ThreadPool;
use spillway_kernels::topology;
use spillway_model::file::ModelFile;
use spillway_protocol::channel::Sender;
use spillway_protocol::control::{FromWorker, LoadBand, LoadStats};
use spillway_protocol::frame::FrameLimits;
use spillway_protocol::plan::Execution;
use spillway_protocol::status::StatusWriter;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Shortest time between two progress messages.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// A band that is ready to serve.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) band: Band,
    pub(super) limits: FrameLimits,
}

/// Opens the file, loads the band, reports `Loaded`.
pub(super) fn open(
    load: &LoadBand,
    sender: &mut Sender<FromWorker>,
    status: &StatusWriter,
    stop: &Stop,
) -> Result<Served, ProcessError> {
    let start = Instant::now();
    let model = ModelFile::open(&load.model)?;
    let found = model.gguf().file_len() as u64;
    if found != load.file_bytes {
        return Err(ProcessError::FileChanged { path: load.model.clone(), expected: load.file_bytes, found });
    }
    let Execution::Cpu { threads, node } = load.stage.execution;
    let pool = pool(threads, node)?;
    let spec = BandSpec {
        layers: load.stage.layers.clone(),
        embed: load.stage.embed,
        head: load.stage.head,
        limits: load.limits,
    };
    let limits = FrameLimits::new(&load.limits, model.program().d_model, model.program().vocab);
    let mut progress = Progress::new(sender, stop);
    let band = match Band::load(&Arc::new(model), spec, pool, &mut |done, total| progress.tell(done, total)) {
        Err(BandLoadError::Load(LoadError::Cancelled)) => return Err(progress.cause()),
        loaded => loaded?,
    };
    let bytes = band.bytes().private();
    status.set_bytes_allocated(bytes);
    let stats = LoadStats {
        device_bytes: 0,
        pinned_bytes: 0,
        host_bytes: bytes,
        layer_bytes: band.layer_bytes().to_vec(),
        kernels: band.kernels().into(),
        load_ms: u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX),
    };
    sender.send(&FromWorker::Loaded(stats))?;
    Ok(Served { band, limits })
}

/// A pool of `threads`, kept to a NUMA node if the plan names one.
fn pool(threads: usize, node: Option<u32>) -> Result<ThreadPool, ProcessError> {
    let Some(node) = node else { return Ok(ThreadPool::new(threads)?) };
    let allowed = topology::allowed_cpus();
    let on_node = topology::numa_nodes().into_iter().find(|known| known.id == node);
    let mut cpus = on_node.map(|known| known.cpus).unwrap_or_default();
    cpus.retain(|cpu| allowed.contains(cpu));
    if cpus.is_empty() {
        return Err(ProcessError::Node { node });
    }
    prefer_memory_of(node);
    Ok(ThreadPool::with_cpus(threads, &cpus)?)
}

/// Memory touched from now on comes from the node while it has some. Advice: where the system forbids it, pages still come
/// from the node of the thread that touches them first.
fn prefer_memory_of(node: u32) {
    const BITS: usize = libc::c_ulong::BITS as usize;
    let mut mask: [libc::c_ulong; 16] = [0; 16];
    let Some(word) = mask.get_mut(node as usize / BITS) else { return };
    *word |= 1 << (node as usize % BITS);
    // SAFETY: the kernel reads `mask`, `BITS * 16` bits of it, and writes nothing. One more bit than it holds is what the
    // call expects (it decrements).
    let result = unsafe {
        libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_PREFERRED, mask.as_ptr(), BITS * mask.len() + 1)
    };
    if result != 0 {
        tracing::warn!(node, error = %std::io::Error::last_os_error(), "no memory policy for the node");
    }
}

/// Tells the coordinator how far the load is, not too often, and gives up when asked to stop.
struct Progress<'a> {
    sender: &'a mut Sender<FromWorker>,
    stop: &'a Stop,
    last: Option<Instant>,
    failed: Option<ProcessError>,
}

impl<'a> Progress<'a> {
    fn new(sender: &'a mut Sender<FromWorker>, stop: &'a Stop) -> Self {
        Self { sender, stop, last: None, failed: None }
    }

    fn tell(&mut self, done: u64, total: u64) -> ControlFlow<()> {
        if self.stop.requested() {
            return ControlFlow::Break(());
        }
        if done < total && self.last.is_some_and(|last| last.elapsed() < PROGRESS_INTERVAL) {
            return ControlFlow::Continue(());
        }
        self.last = Some(Instant::now());
        match self.sender.send(&FromWorker::Progress { done, total }) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                self.failed = Some(error.into());
                ControlFlow::Break(())
            }
        }
    }

    /// Why the load was given up.
    fn cause(self) -> ProcessError {
        self.failed.unwrap_or(ProcessError::Stopped)
    }
}
