//! The worker process of a GPU band: one device, and every call to it from one thread.

use crate::band::{Band, BandError, BandSpec};
use crate::compile::{ChildCommand, KernelCompiler, Settings};
use crate::devices;
use crate::hip::{Device, Driver, Provider};
use crate::links::LinkCache;
use crate::measurements::Measurements;
use spillway_model::file::ModelFile;
use spillway_protocol::control::{DeviceShare, LoadBand, LoadStats};
use spillway_protocol::frame::StepFrame;
use spillway_protocol::plan::{Execution, GpuDevice};
use spillway_worker::band::LogitsSink;
use spillway_worker::residual::{Incoming, Outgoing};
use spillway_worker::states::SharedStates;
use spillway_worker::weights::format_names;
use spillway_worker::{LoadProgress, Loaded, ProcessError, Rings, Worker};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Name of the hidden subcommand that [`crate::compile::nvrtc::child`] is reached by.
pub const NVRTC_SUBCOMMAND: &str = "nvrtc";

/// Name of the hidden subcommand that [`crate::compile::tied::child`] is reached by.
pub const COMPILER_SUBCOMMAND: &str = "kernel-compiler";

/// Name of the hidden subcommand that runs [`crate::links::probe::serve`].
pub const PROBE_SUBCOMMAND: &str = "link-probe";

/// How `program`, which knows [`PROBE_SUBCOMMAND`], is started as one end of a link test.
pub fn probe_command(program: &Path) -> ChildCommand {
    ChildCommand { program: program.to_owned(), arguments: vec![PROBE_SUBCOMMAND.into()] }
}

/// Results of link tests, next to compiled kernels.
pub fn link_cache() -> LinkCache {
    LinkCache::new(Settings::from_env().cache.join("links"))
}

/// Measured speeds, next to compiled kernels.
pub fn speeds() -> Measurements {
    Measurements::new(Settings::from_env().cache.join("speeds"))
}

/// Where compilers and the cache are, for a program that knows [`NVRTC_SUBCOMMAND`] and [`COMPILER_SUBCOMMAND`].
pub fn compiler_settings() -> Settings {
    let child =
        |name: &str| Some(ChildCommand { program: "/proc/self/exe".into(), arguments: vec![name.into()] });
    let (nvrtc_child, compiler_child) = (child(NVRTC_SUBCOMMAND), child(COMPILER_SUBCOMMAND));
    Settings { nvrtc_child, compiler_child, ..Settings::from_env() }
}

/// Runs bands on GPUs.
#[derive(Debug, Clone, Copy)]
pub struct GpuWorker;

impl Worker for GpuWorker {
    const NAME: &'static str = "worker-gpu";
    /// The work is the device's: this process needs one processor, and a wake-up would be a tenth of a short step.
    const PATIENCE: Duration = Duration::from_millis(20);
    type Band = Band;

    fn load(
        model: &Arc<ModelFile>,
        load: &LoadBand,
        rings: &Rings,
        progress: &mut LoadProgress<'_>,
    ) -> Result<Loaded<Band>, ProcessError> {
        let Execution::Gpu { device: planned } = &load.stage.execution else {
            return Err(ProcessError::band(
                "wrong_worker",
                "the stage is not for a GPU; this is a fault in Spillway",
            ));
        };
        let device = open(planned)?;
        let states = SharedStates::of_load(model, load, rings)?;
        let lift = load.lift.as_ref().filter(|lift| lift.stage == load.stage_index);
        let spec = BandSpec {
            layers: load.stage.layers.clone(),
            lifted: lift.map(|lift| lift.layers.clone()).unwrap_or_default(),
            embed: load.stage.embed,
            head: load.stage.head,
            residency: load.stage.residency.clone(),
            limits: load.limits,
        };
        let compiler = KernelCompiler::new(compiler_settings());
        let mut band = Band::load(model, spec, states.as_ref(), &device, &compiler, progress)?;
        band.use_rings(rings);
        let stats = LoadStats {
            device_bytes: device.ledger().device_bytes() as u64,
            pinned_bytes: device.ledger().pinned_bytes() as u64,
            layers: band.layer_bytes().to_vec(),
            lifted_bytes: band.lifted_bytes(),
            formats: format_names(model, &model.program().layers[load.stage.layers.clone()])
                .map_err(BandError::from)?,
            kernels: device.info().arch.clone(),
            notes: band.notes().to_vec(),
            ..LoadStats::default()
        };
        Ok(Loaded { band, stats })
    }
}

/// Opens the device of the plan, and no other. Its number may be another one here: this process may see fewer devices.
fn open(planned: &GpuDevice) -> Result<Device, BandError> {
    let provider: Provider = planned.provider.parse()?;
    let driver = Driver::open(&provider)?;
    let name = |pci: &str, uuid: Option<&str>| format!("{pci} ({})", uuid.unwrap_or("no id"));
    let mut visible = Vec::new();
    for ordinal in 0..driver.device_count() {
        let info = driver.describe(ordinal)?;
        let (pci, uuid) = (info.pci.to_string(), devices::uuid(&info));
        if (&pci, &uuid) == (&planned.pci, &planned.uuid) {
            return Ok(Device::open(&driver, ordinal)?);
        }
        visible.push(name(&pci, uuid.as_deref()));
    }
    Err(BandError::OtherDevice {
        provider: planned.provider.clone(),
        planned: name(&planned.pci, planned.uuid.as_deref()),
        visible: visible.join(", "),
    })
}

impl spillway_worker::Band for Band {
    fn embed(&mut self, ids: &[u32]) -> Result<(), ProcessError> {
        Ok(Band::embed(self, ids)?)
    }

    fn receive<'a>(&mut self, rows: Incoming<'a>) -> Result<Option<Incoming<'a>>, ProcessError> {
        Band::receive(self, rows)
    }

    fn run(
        &mut self,
        frame: &StepFrame,
        pending: Option<Incoming<'_>>,
        layer_done: &mut dyn FnMut(),
    ) -> Result<(), ProcessError> {
        Ok(Band::run(self, frame, pending, layer_done)?)
    }

    fn send(&mut self, rows: Outgoing<'_, '_>) -> Result<(), ProcessError> {
        Band::send(self, rows)
    }

    fn logits(&mut self, frame: &StepFrame, sink: &mut LogitsSink<'_>) -> Result<(), ProcessError> {
        Band::logits(self, frame, sink)
    }

    /// Nothing on a device spins between steps.
    fn rest(&mut self) {}

    fn offer(&mut self) -> Result<DeviceShare, String> {
        Band::offer(self).map_err(|error| error.to_string())
    }

    fn connect(&mut self, share: Option<&DeviceShare>) -> Result<(), String> {
        Band::connect(self, share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that sees fewer devices numbers them otherwise; what counts is the device's address and id.
    #[test]
    fn a_planned_device_is_found_whatever_its_number_and_no_other_is_taken() {
        let planned = |pci: &str, uuid: &str| GpuDevice {
            index: 0,
            provider: "emulated:devices=2,ids=0".into(),
            ordinal: 7,
            name: "some".into(),
            arch: "emulated_wave32".into(),
            pci: pci.into(),
            uuid: Some(uuid.into()),
            driver: 1,
        };
        let second = "00000000-0000-0000-0000-000000000001";
        assert_eq!(open(&planned("ffff:01:00.0", second)).unwrap().info().ordinal, 1);
        for wrong in [planned("ffff:00:00.0", second), planned("ffff:01:00.0", "other")] {
            let error = open(&wrong).unwrap_err();
            assert_eq!(error.code(), "gpu_other_device");
            assert!(
                error.to_string().contains("sees only ffff:00:00.0 (no id), ffff:01:00.0 (00"),
                "{error}"
            );
        }
    }
}
