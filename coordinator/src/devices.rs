//! Which GPUs there are. The search runs in a process of its own, `spillway devices`: a driver that hangs or crashes takes
//! nothing with it, and the coordinator never holds device memory.

use crate::planner::{DeviceWish, Gpu, GpuSurvey, Machine, PlacementRequest, Refusal};
use crate::speeds::HostSpeed;
use spillway_protocol::plan::{Execution, GpuDevice, Plan};
use spillway_worker_gpu::devices::{DeviceReport, Measure, Survey};
use spillway_worker_gpu::speeds;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Longest search: a driver may have to wake devices up.
const SEARCH_LIMIT: Duration = Duration::from_secs(30);
/// The same with measurements, a second or so for each device.
const MEASURE_LIMIT: Duration = Duration::from_secs(120);

/// This program.
pub(crate) const THIS_PROGRAM: &str = "/proc/self/exe";

/// The host with the GPUs that `request` may mean. GPUs are looked for only when it asks for any, and speeds that are not known are
/// measured only when they decide anything.
///
/// # Errors
/// The request names GPUs in no way that is known.
pub fn machine_for(request: &PlacementRequest, exe: &Path) -> Result<Machine, Refusal> {
    let wish = request.device_wish()?;
    let gpus = survey(&wish, exe, request.asks_for_speed());
    let host = Machine::detect();
    // Without the speed of any GPU it decides nothing.
    let known = gpus.gpus.iter().any(|gpu| gpu.speed.is_some());
    let measured = (request.asks_for_host_speed() && known).then(|| {
        // More threads than processors read no faster.
        let threads = request.threads.filter(|threads| (1..host.cpus).contains(threads)).unwrap_or(host.cpus);
        HostSpeed::measure(&speeds(), threads, host.available_bytes, Measure::Missing)
    });
    let speed = measured.and_then(|speed| {
        speed
            .inspect_err(|reason| tracing::warn!(%reason, "the speed of the host's memory is not known"))
            .ok()
    });
    Ok(Machine { gpus, memory_bandwidth: speed.map(|speed| speed.memory), ..host })
}

/// Why the host could not be looked at again.
#[derive(Debug, thiserror::Error)]
pub enum SearchError {
    /// The request names GPUs in no way that is known.
    #[error(transparent)]
    Request(#[from] Refusal),
    /// The search gave no answer, which says nothing about GPUs.
    #[error("the search for GPUs failed: {0}")]
    Failed(String),
}

/// The same as [`machine_for`] after the loss of a device: nothing is measured, and a search that fails is an error and not a host
/// without GPUs.
///
/// # Errors
/// See [`SearchError`].
pub fn machine_again(request: &PlacementRequest, exe: &Path) -> Result<Machine, SearchError> {
    let gpus = try_survey(&request.device_wish()?, exe, false).map_err(SearchError::Failed)?;
    Ok(Machine { gpus, ..Machine::detect() })
}

/// The host with the GPUs that `plan` may mean.
pub fn machine_with(plan: &Plan, exe: &Path) -> Machine {
    let providers = plan.stages.iter().filter_map(|stage| match &stage.execution {
        Execution::Gpu { device } => Some(device.provider.clone()),
        Execution::Cpu { .. } => None,
    });
    // All devices of a plan come from one search: of an emulated provider, or of real ones of any.
    let wish = match providers.into_iter().next() {
        None => DeviceWish::None,
        Some(provider) if provider.starts_with("emulated") => DeviceWish::Provider(provider),
        Some(_) => DeviceWish::All,
    };
    Machine { gpus: survey(&wish, exe, false), ..Machine::detect() }
}

/// Looks for GPUs; a search that fails finds none, and says why.
fn survey(wish: &DeviceWish, exe: &Path, measure: bool) -> GpuSurvey {
    try_survey(wish, exe, measure).unwrap_or_else(|reason| {
        let looked_for = vec![SearchError::Failed(reason).to_string()];
        GpuSurvey { gpus: Vec::new(), looked_for }
    })
}

/// Looks for GPUs by running `exe`.
fn try_survey(wish: &DeviceWish, exe: &Path, measure: bool) -> Result<GpuSurvey, String> {
    if *wish == DeviceWish::None {
        return Ok(GpuSurvey::default());
    }
    let mut command = Command::new(exe);
    // Settings have been read; what the search needs of them are variables.
    command.args(["devices", "--json"]).env("SPILLWAY_CONFIG", "/dev/null");
    if let Some(provider) = wish.provider() {
        command.args(["--provider", provider]);
    }
    if measure {
        command.arg("--measure=missing");
    }
    let limit = if measure { MEASURE_LIMIT } else { SEARCH_LIMIT };
    let Survey { devices, looked_for, speed_notes, .. } = search(command, limit)?;
    speed_notes.iter().for_each(|note| tracing::warn!("{note}"));
    Ok(GpuSurvey { gpus: devices.into_iter().map(gpu).collect(), looked_for })
}

fn search(mut command: Command, limit: Duration) -> Result<Survey, String> {
    let text = |error: std::io::Error| error.to_string();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(text)?;
    let report = match read(&mut child, limit) {
        Ok(report) => report,
        Err(reason) => {
            // Fails when it has ended, which is what is wanted.
            let _ = child.kill();
            // One that is stuck in a driver ends when the driver lets it: nobody waits for that.
            drop(std::thread::Builder::new().name("devices".into()).spawn(move || child.wait()));
            return Err(reason);
        }
    };
    let status = child.wait().map_err(text)?;
    if !status.success() {
        return Err(format!("{status}: {}", String::from_utf8_lossy(&report).trim()));
    }
    serde_json::from_slice(&report).map_err(|error| error.to_string())
}

/// Everything that a child prints.
fn read(child: &mut Child, limit: Duration) -> Result<Vec<u8>, String> {
    let mut stdout = child.stdout.take().ok_or("its output cannot be read")?;
    let (sender, receiver) = mpsc::channel();
    let reader = move || {
        let mut report = Vec::new();
        let read = stdout.read_to_end(&mut report).map(|_| report);
        // Fails when nobody waits any more.
        let _ = sender.send(read);
    };
    std::thread::Builder::new().name("devices".into()).spawn(reader).map_err(|error| error.to_string())?;
    match receiver.recv_timeout(limit) {
        Ok(read) => read.map_err(|error| error.to_string()),
        Err(_) => Err(format!("a driver does not answer within {} s", limit.as_secs())),
    }
}

/// A device as plans name it.
pub(crate) fn named(report: &DeviceReport) -> GpuDevice {
    let DeviceReport { index, provider, ordinal, name, arch, pci, uuid, driver, .. } = report.clone();
    GpuDevice { index, provider, ordinal, name, arch, pci, uuid, driver }
}

fn gpu(report: DeviceReport) -> Gpu {
    Gpu {
        device: named(&report),
        free_bytes: report.free_bytes,
        total_bytes: report.total_bytes,
        integrated: report.integrated,
        speed: report.speed,
        refused: report.refused,
    }
}
