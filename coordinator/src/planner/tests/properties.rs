//! Proves, for any sizes: a placement on GPUs covers every layer once, keeps every budget it was given, never gets worse with
//! more memory, and is a function of its input.

use super::gpus::{gpu, on, reads};
use super::*;
use crate::planner::cost::weighed_time;
use spillway_protocol::plan::GpuDevice;

/// What a request adds to the number of GPUs.
#[derive(Debug, Clone)]
struct Wanted {
    devices: usize,
    split: Option<&'static str>,
    budget: Option<String>,
    offload: Option<&'static str>,
    limit_mib: Option<u64>,
    parallel: usize,
}

prop_compose! {
    fn any_wanted()(
        devices in 1usize..5,
        split in prop::option::of(prop::sample::select(vec!["uniform", "auto", "bytes:600MiB", "bytes:1GiB"])),
        budget in prop::option::of(prop::sample::select(vec!["auto", "1", "5", "9", "20"])),
        offload in prop::option::of(prop::sample::select(vec!["pcie", "cpu"])),
        limit_mib in prop::option::of(100u64..2000),
        parallel in 1usize..6,
    ) -> Wanted {
        Wanted { devices, split, budget: budget.map(str::to_owned), offload, limit_mib, parallel }
    }
}

prop_compose! {
    /// Layers of 1 to 40 MiB, some with keys and values, some with a state.
    fn any_gpu_model()(layers in prop::collection::vec((1u64..40, 0u64..4096, 0u64..1 << 18), 2..30)) -> ModelSummary {
        let layers: Vec<LayerSizes> = layers.into_iter()
            .map(|(mib, kv_elements, state_values)| {
                let mut layer = model(1).layers.remove(0);
                let mut gpu = GpuSizes::default();
                gpu.add(mib * MIB - 40);
                (layer.weights, layer.kv_elements, layer.state_values, layer.gpu) = (mib * MIB, kv_elements, state_values, gpu);
                layer
            })
            .collect();
        ModelSummary { layers, ..model(0) }
    }
}

fn asked(wanted: &Wanted) -> PlacementRequest {
    let numbers: Vec<String> = (0..wanted.devices).map(|index| index.to_string()).collect();
    PlacementRequest {
        split: wanted.split.map(str::to_owned),
        gpu_layer_budget: wanted.budget.clone(),
        offload_exec: wanted.offload.map(str::to_owned),
        vram_limit: wanted.limit_mib.map(|mib| format!("{mib}MiB")),
        parallel: Some(wanted.parallel),
        max_seq: Some(512),
        chunk: Some(64),
        uniform_vram_tolerance_gb: text("100"),
        ..on(&numbers.join(","))
    }
}

fn host_with(free: &[u64], host: u64) -> Machine {
    let gpus = free.iter().enumerate().map(|(index, &free)| gpu(index, free)).collect();
    Machine { available_bytes: host, gpus: GpuSurvey { gpus, looked_for: vec![] }, ..machine() }
}

fn resident(plan: &Plan) -> usize {
    plan.stages.iter().flat_map(|stage| &stage.residency).filter(|home| **home == Residency::Device).count()
}

fn device(stage: &Stage) -> Option<&GpuDevice> {
    match &stage.execution {
        Execution::Gpu { device } => Some(device),
        Execution::Cpu { .. } => None,
    }
}

proptest! {
    #[test]
    fn placements_on_gpus_hold_what_they_promise(
        model in any_gpu_model(), wanted in any_wanted(),
        free in prop::collection::vec(64u64..3000, 4..5), host in 64u64..4000, more in 0u64..2000,
    ) {
        let free: Vec<u64> = free.iter().map(|mib| mib * MIB).collect();
        let host = host * MIB;
        let request = asked(&wanted);
        let machine = host_with(&free, host);
        let first = plan(&model, &machine, &request);
        prop_assert_eq!(&first, &plan(&model, &machine, &request), "planning is a function");
        let Ok(plan) = first else { return Ok(()) };

        // Every layer once, with its weights in one place.
        let mut next = 0;
        for stage in &plan.stages {
            prop_assert_eq!((stage.layers.start, stage.residency.len()), (next, stage.layers.len()));
            prop_assert!(!stage.layers.is_empty());
            next = stage.layers.end;
        }
        prop_assert_eq!(next, model.layers.len());
        let spilled = model.layers.len() - resident(&plan);
        let homes: Vec<Residency> = plan.stages.iter().flat_map(|stage| stage.residency.iter().copied()).collect();
        prop_assert!(homes[..spilled].iter().all(|home| *home != Residency::Device), "the first layers spill");
        if let Some(Ok(budget)) = wanted.budget.as_ref().map(|budget| budget.parse::<usize>()) {
            prop_assert_eq!(resident(&plan), budget);
        }

        // No memory takes more than it was given.
        let in_host = |stage: &Stage| stage.bytes.of_host() + device(stage).map_or(stage.bytes.of_processor(), |_| 0);
        prop_assert!(plan.stages.iter().map(in_host).sum::<u64>() <= host);
        let locked = |stage: &Stage| stage.bytes.mapped + stage.bytes.pinned;
        if plan.stages.iter().any(|stage| stage.bytes.mapped > 0) {
            prop_assert!(plan.stages.iter().map(locked).sum::<u64>() <= host / 2);
        }
        for stage in &plan.stages {
            let Some(device) = device(stage) else { continue };
            let limit = wanted.limit_mib.map_or(u64::MAX, |mib| mib * MIB);
            prop_assert!(stage.bytes.of_processor() <= free[device.index].min(limit));
            if let Some(budget) = wanted.split.and_then(|split| split.strip_prefix("bytes:")) {
                prop_assert!(stage.bytes.of_processor() <= super::size::read(budget).unwrap());
            }
        }

        // More memory never takes anything away.
        let richer: Vec<u64> = free.iter().map(|free| free + more * MIB).collect();
        let richer = super::plan(&model, &host_with(&richer, host + more * MIB), &request);
        prop_assert!(richer.is_ok(), "{:?}", richer);
        let richer = richer.unwrap();
        prop_assert!(resident(&richer) >= resident(&plan));
        if matches!(wanted.split, None | Some("uniform")) && resident(&richer) == resident(&plan) {
            prop_assert!(richer.limits.kv_blocks >= plan.limits.kv_blocks);
        }
    }

    /// Whatever budget could have been asked for, and fits, is no faster; and more memory never makes it slower.
    #[test]
    fn auto_is_never_slower_than_a_budget_that_fits(
        model in any_gpu_model(), devices in 1usize..4, offload in prop::option::of(prop::sample::select(vec!["pcie", "cpu"])),
        speeds in prop::collection::vec((1u64..100_000, 1u64..30_000), 4..5), cpu in 1u64..100_000,
        free in prop::collection::vec(64u64..1500, 4..5), host in 64u64..4000, more in 0u64..2000, weighted: bool,
        products in prop::option::of(1u64..1_000_000_000_000), parallel in 1usize..3,
    ) {
        let at = |more: u64| {
            let free: Vec<u64> = free.iter().map(|mib| (mib + more) * MIB).collect();
            let mut machine = host_with(&free, (host + more) * MIB);
            (machine.memory_bandwidth, machine.products) = (Some(cpu * MIB), products);
            for (gpu, (memory, link)) in machine.gpus.gpus.iter_mut().zip(&speeds) {
                gpu.speed = Some(reads(*memory, *link));
            }
            machine
        };
        let machine = at(0);
        let split = weighted.then_some("auto");
        let wanted = Wanted { devices, split, budget: text("auto"), offload, limit_mib: None, parallel };
        let request = asked(&wanted);
        let auto = super::plan(&model, &machine, &request);
        for word in ["pcie", "cpu"].into_iter().filter(|word| offload.is_none_or(|offload| offload == *word)) {
            for budget in 0..=model.layers.len() {
                let (gpu_layer_budget, offload_exec) = (Some(budget.to_string()), text(word));
                let fixed = PlacementRequest { gpu_layer_budget, offload_exec, ..request.clone() };
                let Ok(fixed) = super::plan(&model, &machine, &fixed) else { continue };
                prop_assert!(auto.is_ok(), "{:?}", auto);
                let (auto, fixed) = (auto.as_ref().unwrap(), weighed_time(&model, &fixed, &machine).unwrap());
                prop_assert!(weighed_time(&model, auto, &machine).unwrap() <= fixed, "{budget} {word}");
            }
        }
        // Of several sequences, more blocks of the cache may leave no room for what prompts would gain by.
        if let Ok(auto) = auto && !weighted && parallel == 1 {
            let richer = at(more);
            let faster = super::plan(&model, &richer, &request).unwrap();
            let time = |plan, machine| weighed_time(&model, plan, machine).unwrap();
            prop_assert!(time(&faster, &richer) <= time(&auto, &machine));
        }
    }

    #[test]
    fn uniform_bands_differ_by_one_layer_at_most(layers in 1usize..200, gpus in 1usize..9) {
        let names: Vec<String> = (0..gpus).map(|index| index.to_string()).collect();
        let machine = host_with(&[8 << 30; 8], 64 << 30);
        match plan(&model(layers), &machine, &on(&names.join(","))) {
            Ok(plan) => {
                let counts = counts(&plan);
                prop_assert!(counts[0] - counts[gpus - 1] <= 1 && counts.is_sorted_by(|one, next| one >= next));
            }
            Err(refusal) => prop_assert_eq!((refusal.code(), layers < gpus), ("too_few_layers", true)),
        }
    }
}
