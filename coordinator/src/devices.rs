//! Which GPUs there are. The search runs in a process of its own, `spillway devices`: a driver that hangs or crashes takes
//! nothing with it, and the coordinator never holds device memory.

use crate::planner::{DeviceWish, Gpu, GpuSurvey, Machine, PlacementRequest, Refusal};
use spillway_protocol::plan::{Execution, GpuDevice, Plan};
use spillway_worker_gpu::devices::{DeviceReport, Survey};
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Longest search: a driver may have to wake devices up.
const SEARCH_LIMIT: Duration = Duration::from_secs(30);

/// This program.
pub(crate) const THIS_PROGRAM: &str = "/proc/self/exe";

/// The host with the GPUs that `request` may mean. GPUs are looked for only when it asks for any.
///
/// # Errors
/// The request names GPUs in no way that is known.
pub fn machine_for(request: &PlacementRequest, exe: &Path) -> Result<Machine, Refusal> {
    let wish = request.device_wish()?;
    Ok(Machine { gpus: survey(&wish, exe), ..Machine::detect() })
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
    Machine { gpus: survey(&wish, exe), ..Machine::detect() }
}

/// Looks for GPUs by running `exe`.
fn survey(wish: &DeviceWish, exe: &Path) -> GpuSurvey {
    if *wish == DeviceWish::None {
        return GpuSurvey::default();
    }
    let mut command = Command::new(exe);
    // Settings have been read; what the search needs of them are variables.
    command.args(["devices", "--json"]).env("SPILLWAY_CONFIG", "/dev/null");
    if let Some(provider) = wish.provider() {
        command.args(["--provider", provider]);
    }
    match search(command) {
        Ok(Survey { devices, looked_for, .. }) => {
            GpuSurvey { gpus: devices.into_iter().map(gpu).collect(), looked_for }
        }
        Err(reason) => {
            GpuSurvey { gpus: Vec::new(), looked_for: vec![format!("the search for GPUs failed: {reason}")] }
        }
    }
}

fn search(mut command: Command) -> Result<Survey, String> {
    let text = |error: std::io::Error| error.to_string();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(text)?;
    let report = read(&mut child);
    if report.is_err() {
        // Fails when it has ended, which is what is wanted.
        let _ = child.kill();
    }
    let status = child.wait().map_err(text)?;
    let report = report?;
    if !status.success() {
        return Err(format!("{status}: {}", String::from_utf8_lossy(&report).trim()));
    }
    serde_json::from_slice(&report).map_err(|error| error.to_string())
}

/// Everything that a child prints.
fn read(child: &mut Child) -> Result<Vec<u8>, String> {
    let mut stdout = child.stdout.take().ok_or("its output cannot be read")?;
    let (sender, receiver) = mpsc::channel();
    let reader = move || {
        let mut report = Vec::new();
        let read = stdout.read_to_end(&mut report).map(|_| report);
        // Fails when nobody waits any more.
        let _ = sender.send(read);
    };
    std::thread::Builder::new().name("devices".into()).spawn(reader).map_err(|error| error.to_string())?;
    match receiver.recv_timeout(SEARCH_LIMIT) {
        Ok(read) => read.map_err(|error| error.to_string()),
        Err(_) => Err(format!("a driver does not answer within {} s", SEARCH_LIMIT.as_secs())),
    }
}

fn gpu(report: DeviceReport) -> Gpu {
    let DeviceReport { index, provider, ordinal, name, arch, pci, uuid, driver, .. } = report;
    Gpu {
        device: GpuDevice { index, provider, ordinal, name, arch, pci, uuid, driver },
        free_bytes: report.free_bytes,
        total_bytes: report.total_bytes,
        integrated: report.integrated,
        bandwidth: None,
        refused: report.refused,
    }
}
