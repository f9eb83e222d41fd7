//! The worker process of a CPU band.

use crate::band::{Band, BandError, BandLoadError, BandSpec, Observer};
use crate::load::LoadError;
use crate::trace::ExecTrace;
use spillway_kernels::pool::{PoolError, ThreadPool};
use spillway_kernels::topology;
use spillway_model::file::ModelFile;
use spillway_protocol::control::{DeviceShare, LayerBytes, LoadBand, LoadStats};
use spillway_protocol::frame::{LogitsFrame, StepFrame};
use spillway_protocol::plan::Execution;
use spillway_protocol::ring::SPIN_LIMIT;
use spillway_worker::band::{Logits, LogitsSink};
use spillway_worker::residual::{Incoming, Outgoing};
use spillway_worker::states::SharedStates;
use spillway_worker::weights::format_names;
use spillway_worker::{LoadProgress, Loaded, ProcessError, Rings, Worker};
use std::sync::Arc;
use std::time::Duration;

/// Why a CPU worker has no links to devices.
const NO_DEVICE: &str = "a CPU worker has no device";

/// Runs bands on the CPU.
#[derive(Debug, Clone, Copy)]
pub struct CpuWorker;

impl Worker for CpuWorker {
    const NAME: &'static str = "worker-cpu";
    /// The processors may be wanted by the stage that the next step comes from.
    const PATIENCE: Duration = SPIN_LIMIT;
    type Band = Traced;

    fn load(
        model: &Arc<ModelFile>,
        load: &LoadBand,
        rings: &Rings,
        progress: &mut LoadProgress<'_>,
    ) -> Result<Loaded<Traced>, ProcessError> {
        let Execution::Cpu { threads, node } = load.stage.execution else {
            return Err(ProcessError::band(
                "wrong_worker",
                "the stage is not for a CPU; this is a fault in Spillway",
            ));
        };
        let spec = BandSpec {
            layers: load.stage.layers.clone(),
            embed: load.stage.embed,
            head: load.stage.head,
            limits: load.limits,
        };
        let states = SharedStates::of_load(model, load, rings)?;
        let band = Band::load(model, spec, states.as_ref(), pool(threads, node)?, progress)?;
        let stats = LoadStats {
            host_bytes: band.bytes().private(),
            layers: band
                .layer_bytes()
                .iter()
                .map(|&host| LayerBytes { host, ..LayerBytes::default() })
                .collect(),
            formats: format_names(model, &model.program().layers[load.stage.layers.clone()])
                .map_err(LoadError::from)
                .map_err(BandLoadError::from)?,
            kernels: band.kernels().into(),
            ..LoadStats::default()
        };
        let trace = ExecTrace::from_env(load.stage.layers.clone(), &stats.formats);
        Ok(Loaded { band: Traced { band, trace }, stats })
    }
}

/// A band and what is told of its steps.
#[derive(Debug)]
pub struct Traced {
    band: Band,
    trace: ExecTrace,
}

/// Tells that layers are done.
struct Counter<'a>(&'a mut dyn FnMut());

impl Observer for Counter<'_> {
    fn layer_done(&mut self, _layer: usize, _residual: &[f32]) {
        (self.0)();
    }
}

impl spillway_worker::Band for Traced {
    fn embed(&mut self, ids: &[u32]) -> Result<(), ProcessError> {
        Ok(self.band.embed(ids)?)
    }

    fn receive<'a>(&mut self, rows: Incoming<'a>) -> Result<Option<Incoming<'a>>, ProcessError> {
        rows.copy_to(self.band.input(rows.tokens())?)?;
        Ok(None)
    }

    fn run(
        &mut self,
        frame: &StepFrame,
        _pending: Option<Incoming<'_>>,
        layer_done: &mut dyn FnMut(),
    ) -> Result<(), ProcessError> {
        self.trace.see(frame);
        Ok(self.band.run(frame, &mut Counter(layer_done))?)
    }

    fn send(&mut self, rows: Outgoing<'_, '_>) -> Result<(), ProcessError> {
        let tokens = rows.tokens();
        Ok(rows.copy_from(self.band.residual(tokens))?)
    }

    fn logits(&mut self, frame: &StepFrame, sink: &mut LogitsSink<'_>) -> Result<(), ProcessError> {
        self.band.logits(frame, |about: &LogitsFrame, values: &[f32]| sink(about, Logits::Values(values)))
    }

    fn rest(&mut self) {
        self.band.rest();
    }

    fn offer(&mut self) -> Result<DeviceShare, String> {
        Err(NO_DEVICE.into())
    }

    fn connect(&mut self, share: Option<&DeviceShare>) -> Result<(), String> {
        share.map_or(Ok(()), |_| Err(NO_DEVICE.into()))
    }
}

impl From<BandError> for ProcessError {
    fn from(error: BandError) -> Self {
        ProcessError::band(error.code(), error)
    }
}

impl From<BandLoadError> for ProcessError {
    fn from(error: BandLoadError) -> Self {
        ProcessError::band(error.code(), error)
    }
}

/// A pool of `threads`, kept to a NUMA node if the plan names one.
fn pool(threads: usize, node: Option<u32>) -> Result<ThreadPool, ProcessError> {
    let refused = |error: PoolError| ProcessError::band(error.code(), error);
    let Some(node) = node else { return ThreadPool::new(threads).map_err(refused) };
    let allowed = topology::allowed_cpus();
    let on_node = topology::numa_nodes().into_iter().find(|known| known.id == node);
    let mut cpus = on_node.map(|known| known.cpus).unwrap_or_default();
    cpus.retain(|cpu| allowed.contains(cpu));
    if cpus.is_empty() {
        return Err(ProcessError::band(
            "numa_node",
            format!(
                "NUMA node {node} has no CPU that this process may use; plan without a node, or widen the CPU affinity"
            ),
        ));
    }
    prefer_memory_of(node);
    ThreadPool::with_cpus(threads, &cpus).map_err(refused)
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
