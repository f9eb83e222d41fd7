//! Which GPUs there are. The search runs in a process of its own, `spillway devices`: a driver that hangs or crashes takes
//! nothing with it, and the coordinator never holds device memory.

use crate::planner::{DeviceWish, Gpu, GpuSurvey, Machine, PlacementRequest, Refusal};
use spillway_protocol::plan::GpuDevice;
use spillway_worker_gpu::devices::{DeviceReport, Survey};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest search: a driver may have to wake devices up.
const SEARCH_LIMIT: Duration = Duration::from_secs(30);
/// How often the search is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

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

/// Looks for GPUs by running `exe`.
fn survey(wish: &DeviceWish, exe: &Path) -> GpuSurvey {
    if *wish == DeviceWish::None {
        return GpuSurvey::default();
    }
    let mut command = Command::new(exe);
    command.args(["devices", "--json"]);
    if let Some(provider) = wish.provider() {
        command.args(["--provider", provider]);
    }
    match search(command) {
        Ok(Survey { devices, looked_for }) => {
            GpuSurvey { gpus: devices.into_iter().map(gpu).collect(), looked_for }
        }
        Err(reason) => {
            GpuSurvey { gpus: Vec::new(), looked_for: vec![format!("the search for GPUs failed: {reason}")] }
        }
    }
}

fn search(mut command: Command) -> Result<Survey, String> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let output = wait(child.map_err(|error| error.to_string())?)?;
    if !output.status.success() {
        return Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim()));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())
}

/// The report fits into a pipe, so the child never waits for its reader.
fn wait(mut child: Child) -> Result<std::process::Output, String> {
    let deadline = Instant::now() + SEARCH_LIMIT;
    while child.try_wait().map_err(|error| error.to_string())?.is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("a driver does not answer within {} s", SEARCH_LIMIT.as_secs()));
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    child.wait_with_output().map_err(|error| error.to_string())
}

fn gpu(report: DeviceReport) -> Gpu {
    let DeviceReport { index, provider, ordinal, name, arch, uuid, .. } = report;
    Gpu {
        device: GpuDevice { index, provider, ordinal, name, arch, uuid },
        free_bytes: report.free_bytes,
        total_bytes: report.total_bytes,
        integrated: report.integrated,
        refused: report.refused,
    }
}
