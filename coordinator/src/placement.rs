//! Where a placement comes from: made from options, or from a file in which an earlier one was kept.

use crate::config::{AskedPlacement, Source};
use crate::devices::{MissingSpeeds, machine_for, machine_with};
use crate::planner::{ModelSummary, PlacementRequest, Refusal, plan, replay};
use spillway_protocol::plan::{ActivationType, Execution, KvType, Limits, Plan, Residency, Stage};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// What a user asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// A placement that is made by these options.
    New(Box<AskedPlacement>),
    /// The one in a file, if it still holds.
    Saved {
        /// The file.
        file: PathBuf,
        /// Lets other processes that allow it use its devices, too.
        allow_shared_device: bool,
    },
}

/// A placement that cannot be had. Nothing has been touched.
#[derive(Debug, Error)]
pub enum PlacementError {
    /// It was refused.
    #[error("{refusal}{settings}")]
    Refused {
        /// Why.
        refusal: Refusal,
        /// What the user may not be aware of having asked for: the end of a sentence, or nothing.
        settings: String,
    },
    /// A file with a plan cannot be read or written.
    #[error("the plan file {} cannot be used: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

impl PlacementError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        match self {
            PlacementError::Refused { refusal, .. } => refusal.code(),
            PlacementError::File { .. } => "plan_file",
        }
    }
}

impl Placement {
    /// The saved plan if there is one, else what is asked for; that others may use its devices, too, is asked for in either case.
    pub fn of(saved: Option<PathBuf>, asked: AskedPlacement) -> Placement {
        let allow_shared_device = asked.request.allow_shared_device;
        match saved {
            Some(file) => Placement::Saved { file, allow_shared_device },
            None => Placement::New(Box::new(asked)),
        }
    }

    /// Places a model on this host as it is now. The memory of `given_back` counts as free; `exe` is this program.
    ///
    /// # Errors
    /// The placement cannot be had; a file of a plan cannot be read.
    pub fn place(
        &self,
        model: &ModelSummary,
        exe: &Path,
        given_back: Option<&Plan>,
    ) -> Result<Plan, PlacementError> {
        match self {
            Placement::New(asked) => {
                let AskedPlacement { request, settings } = &**asked;
                let refused = |refusal| PlacementError::Refused { refusal, settings: words(settings) };
                let mut machine = machine_for(request, exe, MissingSpeeds::Measure).map_err(refused)?;
                given_back.into_iter().for_each(|resident| machine.give_back(resident));
                plan(model, &machine, request).map_err(refused)
            }
            Placement::Saved { file, .. } => {
                let saved = read(file)?;
                let mut machine = machine_with(&saved, exe);
                given_back.into_iter().for_each(|resident| machine.give_back(resident));
                replay(&saved, model, &machine)
                    .map_err(|refusal| PlacementError::Refused { refusal, settings: String::new() })
            }
        }
    }

    /// The options to place the model with anew when `plan`, which this placement is, cannot be kept.
    pub fn request(&self, plan: &Plan) -> PlacementRequest {
        match self {
            Placement::New(asked) => asked.request.clone(),
            Placement::Saved { allow_shared_device, .. } => {
                PlacementRequest { allow_shared_device: *allow_shared_device, ..request_of(plan) }
            }
        }
    }

    /// Whether other processes may use its devices, too.
    pub fn shares_devices(&self) -> bool {
        match self {
            Placement::New(asked) => asked.request.allow_shared_device,
            Placement::Saved { allow_shared_device, .. } => *allow_shared_device,
        }
    }
}

/// Which settings a refused placement had a part of, for the end of the refusal.
fn words(settings: &[(&str, Source)]) -> String {
    let names: Vec<String> = settings.iter().map(|(key, source)| format!("{key} ({source})")).collect();
    if names.is_empty() { String::new() } else { format!("; settings in use: {}", names.join(", ")) }
}

/// Options that ask for the devices, the spill and the sizes of a plan, and leave its cuts to the planner.
fn request_of(plan: &Plan) -> PlacementRequest {
    let on_gpu = |stage: &&Stage| matches!(stage.execution, Execution::Gpu { .. });
    let gpus: Vec<&Stage> = plan.stages.iter().filter(on_gpu).collect();
    // Numbers are those of cards; other devices are known by their provider alone.
    let name = |stage: &&Stage| match &stage.execution {
        Execution::Gpu { device } if matches!(&*device.provider, "amd" | "cuda") => {
            Some(device.index.to_string())
        }
        Execution::Gpu { device } => Some(device.provider.clone()),
        Execution::Cpu { .. } => None,
    };
    let mut names: Vec<String> = gpus.iter().filter_map(name).collect();
    names.dedup();
    let of = |home: Residency| {
        plan.stages.iter().flat_map(|stage| &stage.residency).filter(|it| **it == home).count()
    };
    let spills = !gpus.is_empty() && of(Residency::Device) < plan.model.layers;
    let cpu_stages = plan.stages.len() - gpus.len();
    let threads = plan.stages.iter().filter_map(|stage| match &stage.execution {
        Execution::Cpu { threads, .. } => Some(*threads),
        Execution::Gpu { .. } => None,
    });
    // Workers of different nodes may have different numbers, which no option asks for.
    let one_number = threads.clone().min() == threads.clone().max();
    // Blocks are as many as fit, and rows follow from the other sizes.
    let Limits {
        max_seq,
        max_sequences,
        kv_blocks: _,
        kv_type,
        activations,
        max_step_tokens,
        max_logit_rows: _,
    } = plan.limits;
    PlacementRequest {
        devices: (!names.is_empty()).then(|| names.join(",")),
        pp: (!gpus.is_empty()).then_some(gpus.len()),
        allow_mixed_arch: true,
        cpu_workers: (cpu_stages > 0).then_some(cpu_stages),
        split: (gpus.len() > 1).then(|| "auto".to_owned()),
        gpu_layer_budget: spills.then(|| of(Residency::Device).to_string()),
        offload_exec: spills.then(|| if of(Residency::Host) > 0 { "cpu" } else { "pcie" }.to_owned()),
        // Lifting again what is lifted, if there is memory for it on what is left.
        offload_prompts: Some(if plan.lift.is_some() { "auto" } else { "cpu" }.to_owned()),
        max_seq: Some(max_seq),
        parallel: Some(max_sequences),
        threads: threads.max().filter(|_| one_number),
        chunk: Some(max_step_tokens),
        kv_type: Some(if kv_type == KvType::F32 { "f32" } else { "f16" }.to_owned()),
        activations: Some(
            match activations {
                ActivationType::Int8 => "int8",
                ActivationType::Int16 => "int16",
            }
            .to_owned(),
        ),
        peer_copies: Some(if plan.peer_copies { "auto" } else { "off" }.to_owned()),
        ..PlacementRequest::default()
    }
}

/// Reads a plan that was kept.
///
/// # Errors
/// The file cannot be read, or holds something else.
pub fn read(file: &Path) -> Result<Plan, PlacementError> {
    let text = std::fs::read(file).map_err(|error| unusable(file, &error))?;
    serde_json::from_slice(&text).map_err(|error| unusable(file, &error))
}

/// Keeps a plan.
///
/// # Errors
/// The file cannot be written.
pub fn write(file: &Path, plan: &Plan) -> Result<(), PlacementError> {
    let mut text = serde_json::to_vec_pretty(plan).map_err(|error| unusable(file, &error))?;
    text.push(b'\n');
    std::fs::write(file, text).map_err(|error| unusable(file, &error))
}

fn unusable(file: &Path, reason: &dyn std::error::Error) -> PlacementError {
    PlacementError::File { path: file.into(), reason: reason.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_protocol::plan::{GpuDevice, PLAN_VERSION, PlannedModel, StageBytes};

    fn stage(layers: std::ops::Range<usize>, execution: Execution, home: Residency) -> Stage {
        let residency = vec![home; layers.len()];
        let (embed, head) = (layers.start == 0, layers.end == 9);
        Stage { layers, embed, head, execution, residency, bytes: StageBytes::default(), why: String::new() }
    }

    fn card(index: usize) -> Execution {
        let device = GpuDevice {
            index,
            provider: "amd".into(),
            ordinal: 0,
            name: "GPU".into(),
            arch: "gfx1100".into(),
            pci: format!("0000:{index:02}:00.0"),
            uuid: None,
            driver: 1,
        };
        Execution::Gpu { device }
    }

    fn plan_of(stages: Vec<Stage>, activations: ActivationType) -> Plan {
        let model = PlannedModel {
            path: "/some.gguf".into(),
            file_bytes: 1,
            architecture: "qwen3".into(),
            layers: 9,
            d_model: 64,
            vocab: 300,
            context_length: 512,
        };
        let limits = Limits {
            max_seq: 99,
            max_sequences: 3,
            kv_blocks: 5,
            kv_type: KvType::F32,
            activations,
            max_step_tokens: 17,
            max_logit_rows: 6,
        };
        let (lift, warnings) = (None, Vec::new());
        Plan { version: PLAN_VERSION, model, limits, peer_copies: false, stages, lift, warnings }
    }

    /// Cards are asked for by their numbers, and everything that changes results or sizes stays.
    #[test]
    fn a_plan_is_asked_for_anew_with_all_that_it_was_made_with() {
        let cpu = |threads, node| Execution::Cpu { threads, node };
        let stages = vec![
            stage(0..2, cpu(5, None), Residency::Host),
            stage(2..6, card(3), Residency::Device),
            stage(6..9, card(1), Residency::Device),
        ];
        let text = |text: &str| Some(text.to_owned());
        let asked = PlacementRequest {
            devices: text("3,1"),
            allow_shared_device: false,
            allow_mixed_arch: true,
            vram_limit: None,
            uniform_vram_tolerance_gb: None,
            cpu_workers: Some(1),
            pp: Some(2),
            pp_layers: None,
            split: text("auto"),
            gpu_layer_budget: text("7"),
            offload_exec: text("cpu"),
            offload_prompts: text("cpu"),
            max_seq: Some(99),
            threads: Some(5),
            parallel: Some(3),
            kv_type: text("f32"),
            activations: text("int8"),
            chunk: Some(17),
            peer_copies: text("off"),
        };
        assert_eq!(request_of(&plan_of(stages, ActivationType::Int8)), asked);
        let nodes = vec![
            stage(0..5, cpu(5, Some(0)), Residency::Host),
            stage(5..9, cpu(4, Some(1)), Residency::Host),
        ];
        let on_cpu = request_of(&plan_of(nodes, ActivationType::Int16));
        assert_eq!((on_cpu.devices, on_cpu.cpu_workers, on_cpu.threads), (None, Some(2), None));
        assert_eq!(on_cpu.activations, text("int16"));
    }
}
