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

/// What is done about speeds that decide something and are not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissingSpeeds {
    /// They are measured, which takes a second or so for each device.
    Measure,
    /// They stay unknown.
    Accept,
}

/// The host with the GPUs that `request` may mean. GPUs are looked for only when it asks for any, and speeds that are not known are
/// measured, if at all, only when they decide anything, and only of GPUs that the request selects.
///
/// # Errors
/// The request names GPUs in no way that is known.
pub fn machine_for(
    request: &PlacementRequest,
    exe: &Path,
    missing: MissingSpeeds,
) -> Result<Machine, Refusal> {
    let wish = request.device_wish()?;
    let mut gpus = survey(&wish, exe);
    if missing == MissingSpeeds::Measure {
        let unmeasured = request.unmeasured(&gpus);
        if !unmeasured.is_empty() {
            gpus = measured(&wish, exe, &unmeasured).unwrap_or(gpus);
        }
    }
    Ok(host_with(gpus, request, missing))
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
    let gpus = try_survey(&request.device_wish()?, exe).map_err(SearchError::Failed)?;
    Ok(host_with(gpus, request, MissingSpeeds::Accept))
}

/// This host, with the speed of its memory where that decides anything.
fn host_with(gpus: GpuSurvey, request: &PlacementRequest, missing: MissingSpeeds) -> Machine {
    let host = Machine::detect();
    // Without the speed of any GPU it decides nothing.
    let known = gpus.gpus.iter().any(|gpu| gpu.speed.is_some());
    let speed = match () {
        () if !known => None,
        () if request.asks_for_host_speed() => host_speed(request, &host, missing),
        () if request.weighs_prompts() => host_speed(request, &host, MissingSpeeds::Accept),
        () => None,
    };
    let (memory_bandwidth, products) = (speed.map(|speed| speed.memory), speed.map(|speed| speed.products));
    Machine { gpus, memory_bandwidth, products, ..host }
}

/// How fast CPU workers of `request` read the memory of `host`.
fn host_speed(request: &PlacementRequest, host: &Machine, missing: MissingSpeeds) -> Option<HostSpeed> {
    // More threads than processors read no faster.
    let threads = request.threads.filter(|threads| (1..host.cpus).contains(threads)).unwrap_or(host.cpus);
    if missing == MissingSpeeds::Accept {
        return HostSpeed::look_up(&speeds(), threads);
    }
    HostSpeed::measure(&speeds(), threads, host.available_bytes, Measure::Missing)
        .inspect_err(|reason| tracing::warn!(%reason, "the speed of the host's memory is not known"))
        .ok()
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

/// Looks for GPUs; a search that fails finds none, and says why.
fn survey(wish: &DeviceWish, exe: &Path) -> GpuSurvey {
    try_survey(wish, exe).unwrap_or_else(|reason| {
        let looked_for = vec![SearchError::Failed(reason).to_string()];
        GpuSurvey { gpus: Vec::new(), looked_for }
    })
}

/// Looks for GPUs by running `exe`.
fn try_survey(wish: &DeviceWish, exe: &Path) -> Result<GpuSurvey, String> {
    if *wish == DeviceWish::None {
        return Ok(GpuSurvey::default());
    }
    search(command(wish, exe), SEARCH_LIMIT).map(in_survey)
}

/// Looks for them again and measures those with the given numbers. None, and a warning, where that failed: what was found before
/// holds without speeds.
fn measured(wish: &DeviceWish, exe: &Path, numbers: &[usize]) -> Option<GpuSurvey> {
    let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
    let mut command = command(wish, exe);
    command.args(["--measure=missing", "--only", &numbers.join(",")]);
    search(command, MEASURE_LIMIT)
        .inspect_err(|reason| tracing::warn!(%reason, "the speed of GPUs is not known"))
        .ok()
        .map(in_survey)
}

/// A search for GPUs as a command.
fn command(wish: &DeviceWish, exe: &Path) -> Command {
    let mut command = Command::new(exe);
    // Settings have been read; what the search needs of them are variables.
    command.args(["devices", "--json"]).env("SPILLWAY_CONFIG", "/dev/null");
    if let Some(provider) = wish.provider() {
        command.args(["--provider", provider]);
    }
    command
}

fn in_survey(Survey { devices, looked_for, speed_notes, .. }: Survey) -> GpuSurvey {
    speed_notes.iter().for_each(|note| tracing::warn!("{note}"));
    GpuSurvey { gpus: devices.into_iter().map(gpu).collect(), looked_for }
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

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_worker_gpu::devices;
    use std::fs;

    /// A program that finds three emulated devices, none with a known speed, and keeps what it was called with.
    fn finds_three(folder: &Path) {
        let found = devices::survey(Some("emulated:devices=3,memory=64MiB"));
        let (source, report) = (folder.join("source"), folder.join("report"));
        fs::write(&report, serde_json::to_vec(&found).unwrap()).unwrap();
        let (report, calls) = (report.display(), folder.join("calls"));
        let script = format!("#!/bin/sh\necho \"$*\" >> {}\ncat {report}\n", calls.display());
        fs::write(&source, script).unwrap();
        // By a process of its own: a program that is open for writing anywhere cannot be started.
        let copied =
            Command::new("install").args(["-m", "755"]).arg(&source).arg(folder.join("exe")).status();
        assert!(copied.unwrap().success());
    }

    /// Clients wait while a model is placed anew, and other cards may be in use.
    #[test]
    fn only_selected_devices_are_measured_and_none_where_missing_speeds_are_accepted() {
        let folder = tempfile::tempdir().unwrap();
        finds_three(folder.path());
        let devices = Some("emulated:devices=3".to_owned());
        let request = PlacementRequest {
            devices,
            pp: Some(2),
            split: Some("auto".into()),
            ..PlacementRequest::default()
        };
        let calls = |missing| {
            let machine = machine_for(&request, &folder.path().join("exe"), missing).unwrap();
            assert_eq!(machine.gpus.gpus.len(), 3, "{:?}", machine.gpus.looked_for);
            let calls = fs::read_to_string(folder.path().join("calls")).unwrap();
            fs::remove_file(folder.path().join("calls")).unwrap();
            calls.lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let look = "devices --json --provider emulated:devices=3";
        assert_eq!(calls(MissingSpeeds::Accept), [look]);
        assert_eq!(calls(MissingSpeeds::Measure), [look, &format!("{look} --measure=missing --only 0,1")]);
    }
}
