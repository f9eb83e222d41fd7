//! Placement on GPUs: which ones, how many layers, and what is refused.

use super::*;
use spillway_protocol::plan::GpuDevice;
use spillway_worker_gpu::speed::DeviceSpeed;

pub(super) fn gpu(index: usize, free_bytes: u64) -> Gpu {
    let device = GpuDevice {
        index,
        provider: "emulated:devices=2".into(),
        ordinal: u32::try_from(index).unwrap(),
        name: format!("GPU {index}"),
        arch: "emulated_wave32".into(),
        pci: format!("0000:0{index}:00.0"),
        uuid: Some(format!("00000000-0000-0000-0000-00000000000{index}")),
        driver: 1,
    };
    Gpu { device, free_bytes, total_bytes: 8 << 30, integrated: false, speed: None, refused: None }
}

/// A GPU's speeds in MiB a second, and hops of ten microseconds.
pub(super) fn reads(memory: u64, link: u64) -> DeviceSpeed {
    DeviceSpeed { memory: memory * MIB, link: link * MIB, hop_ns: 10_000 }
}

/// Two GPUs that can be used, one that cannot, one that shares the host's memory.
fn with_gpus(free_bytes: u64) -> Machine {
    let broken = Gpu { refused: Some("its driver fails".into()), ..gpu(2, 0) };
    let integrated = Gpu { integrated: true, ..gpu(3, free_bytes) };
    let gpus = vec![gpu(0, free_bytes), gpu(1, free_bytes), broken, integrated];
    Machine { gpus: GpuSurvey { gpus, looked_for: vec![] }, ..machine() }
}

pub(super) fn on(devices: &str) -> PlacementRequest {
    PlacementRequest { devices: text(devices), ..Default::default() }
}

/// Device of every stage; `None` is the CPU.
fn devices(plan: &Plan) -> Vec<Option<usize>> {
    let device = |stage: &Stage| match &stage.execution {
        Execution::Gpu { device } => Some(device.index),
        Execution::Cpu { .. } => None,
    };
    plan.stages.iter().map(device).collect()
}

#[test]
fn gpus_run_uniform_bands_in_the_order_in_which_they_are_named() {
    let by = |request| {
        let plan = plan(&model(9), &with_gpus(8 << 30), &request).unwrap();
        (devices(&plan), counts(&plan))
    };
    assert_eq!(by(on("0")), (vec![Some(0)], vec![9]));
    assert_eq!(by(on("1,0")), (vec![Some(1), Some(0)], vec![5, 4]));
    assert_eq!(by(on("all")), (vec![Some(0), Some(1)], vec![5, 4]), "neither broken nor integrated ones");
    assert_eq!(by(on("3")), (vec![Some(3)], vec![9]), "an integrated one that is named");
    assert_eq!(by(PlacementRequest { pp: Some(1), ..on("1,0") }), (vec![Some(1)], vec![9]));
    assert_eq!(
        by(PlacementRequest { pp_layers: text("7,2"), ..on("0,1") }),
        (vec![Some(0), Some(1)], vec![7, 2])
    );
    let shared = PlacementRequest { allow_shared_device: true, ..on("0,0") };
    assert_eq!(by(shared), (vec![Some(0), Some(0)], vec![5, 4]));
}

#[test]
fn layers_beyond_the_budget_spill_to_cpu_workers_in_front() {
    let by = |request| {
        let plan = plan(&model(9), &with_gpus(8 << 30), &request).unwrap();
        assert!(plan.stages[0].embed && plan.stages[plan.stages.len() - 1].head);
        (devices(&plan), counts(&plan))
    };
    let budget = |layers: &str, devices| {
        let (gpu_layer_budget, offload_exec) = (text(layers), text("cpu"));
        PlacementRequest { gpu_layer_budget, offload_exec, ..on(devices) }
    };
    assert_eq!(by(budget("6", "0")), (vec![None, Some(0)], vec![3, 6]));
    assert_eq!(by(budget("5", "0,1")), (vec![None, Some(0), Some(1)], vec![4, 3, 2]));
    assert_eq!(by(budget("9", "0")), (vec![Some(0)], vec![9]), "all there are");
    assert_eq!(by(budget("0", "0")), (vec![None], vec![9]));
    let two = PlacementRequest { cpu_workers: Some(2), ..budget("5", "0") };
    assert_eq!(by(two), (vec![None, None, Some(0)], vec![2, 2, 5]));
    let explicit = PlacementRequest { pp_layers: text("2,3,4"), ..on("0,1") };
    assert_eq!(by(explicit), (vec![None, Some(0), Some(1)], vec![2, 3, 4]));
}

#[test]
fn auto_puts_as_many_layers_on_gpus_as_fit() {
    // A GPU with room for about half of the layers.
    let request = |budget: &str| PlacementRequest {
        gpu_layer_budget: text(budget),
        offload_exec: text("cpu"),
        max_seq: Some(256),
        ..on("0")
    };
    let machine = with_gpus(500 * MIB);
    let auto = plan(&model(64), &machine, &request("auto")).unwrap();
    let layers = counts(&auto)[1];
    assert!((20..60).contains(&layers), "{layers}");
    let mut same = plan(&model(64), &machine, &request(&layers.to_string())).unwrap();
    same.stages[0].why.push_str("; auto, without measured speeds: as many as fit");
    assert_eq!(auto, same);
    let more = plan(&model(64), &machine, &request(&(layers + 1).to_string())).unwrap_err();
    assert_eq!(more.code(), "out_of_memory");
}

#[test]
fn a_model_too_large_for_its_gpus_is_refused_with_the_budget_that_fits() {
    let machine = with_gpus(500 * MIB);
    let request = PlacementRequest { max_seq: Some(256), ..on("0") };
    let refusal = plan(&model(64), &machine, &request).unwrap_err();
    let Refusal::Memory(shortage) = &refusal else { panic!("{refusal:?}") };
    let budget = shortage.advice.budget.unwrap();
    let sentence = refusal.to_string();
    for part in ["device 0 (GPU 0)".to_owned(), format!("gpu_layer_budget {budget} would fit")] {
        assert!(sentence.contains(&part), "{sentence}");
    }
    let fitting = PlacementRequest { gpu_layer_budget: text(&budget.to_string()), ..request };
    assert!(plan(&model(64), &machine, &fitting).is_ok());
}

#[test]
fn each_memory_is_charged_for_what_lies_in_it() {
    let mut machine = with_gpus(8 << 30);
    let (gpu_layer_budget, offload_exec) = (text("4"), text("cpu"));
    let offload_prompts = text("cpu");
    let request = PlacementRequest { gpu_layer_budget, offload_exec, offload_prompts, ..on("0") };
    let first = plan(&model(8), &machine, &request).unwrap();
    let host: u64 = first.stages.iter().map(|stage| stage.bytes.of_host()).sum();
    machine.available_bytes = host + first.stages[0].bytes.of_processor();
    assert_eq!(
        plan(&model(8), &machine, &request).unwrap(),
        first,
        "not a byte of the device's is the host's"
    );
    machine.available_bytes -= 1;
    let shrunk = plan(&model(8), &machine, &request).unwrap();
    assert!(shrunk.limits.kv_blocks < first.limits.kv_blocks, "the smallest memory decides");
    machine.give_back(&shrunk);
    let gpu = &machine.gpus.gpus[0];
    assert_eq!(gpu.free_bytes, (8 << 30) + shrunk.stages[1].bytes.of_processor());
}

#[test]
fn steps_overlap_where_every_stage_has_a_processor_of_its_own() {
    let by = |request| steps_in_flight(&plan(&model(8), &with_gpus(8 << 30), &request).unwrap());
    assert_eq!(by(on("0,1")), 2);
    let spilled = PlacementRequest { gpu_layer_budget: text("4"), ..on("0") };
    assert_eq!(by(spilled.clone()), 1, "one device runs everything");
    assert_eq!(by(PlacementRequest { offload_exec: text("cpu"), ..spilled }), 2);
    assert_eq!(by(PlacementRequest { allow_shared_device: true, ..on("0,0") }), 1);
}

/// Condition → code → words that the sentence must hold.
#[test]
fn every_refusal_of_a_gpu_says_what_is_wrong() {
    let nothing = Machine {
        gpus: GpuSurvey { gpus: vec![], looked_for: vec!["cuda: install the driver".into()] },
        ..machine()
    };
    let some = with_gpus(8 << 30);
    let mut mixed = with_gpus(8 << 30);
    mixed.gpus.gpus[1].device.arch = "emulated_wave64".into();
    let mut uneven = with_gpus(8 << 30);
    uneven.gpus.gpus[1].free_bytes = (8 << 30) - 2_000_000_001;
    let poor = Machine { available_bytes: 600 * MIB, ..with_gpus(8 << 30) };
    let with = |devices| on(devices);
    let idle =
        |devices| PlacementRequest { gpu_layer_budget: text("0"), offload_exec: text("cpu"), ..on(devices) };
    let table: Vec<(&Machine, PlacementRequest, &str, &[&str])> = vec![
        (&nothing, on("0"), "no_gpu", &["install the driver", "--devices none"]),
        (&nothing, on("all"), "no_gpu", &["install the driver"]),
        (&some, on("0,7"), "unknown_device", &["no device `7`", "0 = GPU 0 (emulated_wave32, 0000:00:00.0"]),
        (&some, on("gfx1100"), "unknown_device", &["no device `gfx1100`", "3 = GPU 3"]),
        (&some, on("0;1"), "unknown_device", &["`0;1`"]),
        (&some, on("emulated_wave32"), "device_ambiguous", &["2 devices", "name it 2 times", "1 = GPU 1"]),
        (&some, PlacementRequest { activations: text("int16"), ..on("0") }, "activations_on_gpu", &["8-bit"]),
        (&some, on("2"), "device_refused", &["its driver fails"]),
        (&some, on("1,1"), "device_twice", &["device 1", "--allow-shared-device", "0 = GPU 0"]),
        (&some, on("1,0000:01:00.0"), "device_twice", &["device 1"]),
        (&some, on("0,,1"), "devices_unreadable", &["`0,,1`"]),
        (&some, PlacementRequest { pp: Some(3), ..on("0,1") }, "pp_beyond_devices", &["3", "2 devices"]),
        (&mixed, on("0,1"), "arch_mismatch", &["emulated_wave32", "emulated_wave64", "--allow-mixed-arch"]),
        (&uneven, on("0,1"), "vram_difference", &["8.0 GiB", "6.1 GiB", "1.9 GiB", "split `auto`"]),
        (
            &some,
            PlacementRequest { uniform_vram_tolerance_gb: text("some"), ..with("0,1") },
            "uniform_vram_tolerance_unreadable",
            &["`some`"],
        ),
        (
            &some,
            PlacementRequest { uniform_vram_tolerance_gb: text("-1"), ..with("0,1") },
            "uniform_vram_tolerance_unreadable",
            &["`-1`"],
        ),
        (
            &uneven,
            PlacementRequest { uniform_vram_tolerance_gb: text("1e-10"), ..with("0,1") },
            "vram_difference",
            &["more than 0 B apart"],
        ),
        (
            &some,
            PlacementRequest { split: text("fair"), ..with("0,1") },
            "split_unknown",
            &["`fair`", "`auto`"],
        ),
        (
            &some,
            PlacementRequest { split: text("auto"), pp_layers: text("4,4"), ..with("0,1") },
            "split_with_pp_layers",
            &["one of them"],
        ),
        (
            &some,
            PlacementRequest { split: text("bytes:1GiB,x"), ..with("0,1") },
            "size_unreadable",
            &["split", "`x`"],
        ),
        (
            &some,
            PlacementRequest { split: text("bytes:1GiB,1GiB,1GiB"), ..with("0,1") },
            "size_count",
            &["3 sizes", "2 devices"],
        ),
        (
            &some,
            PlacementRequest { vram_limit: text("1GiB,1GiB"), ..with("0") },
            "size_count",
            &["vram_limit", "2 sizes", "1 devices"],
        ),
        (&some, PlacementRequest { vram_limit: text("much"), ..with("0") }, "size_unreadable", &["`much`"]),
        (
            &some,
            PlacementRequest { gpu_layer_budget: text("9"), ..with("0") },
            "gpu_layer_budget_beyond_layers",
            &["9", "8 layers"],
        ),
        (
            &some,
            PlacementRequest { gpu_layer_budget: text("4"), ..with("3") },
            "gpu_layer_budget_on_unified_memory",
            &["device 3 (GPU 3)"],
        ),
        (
            &poor,
            // Weights of eight layers with 256 byte alignment, and 48 MiB and more of buffers.
            PlacementRequest {
                gpu_layer_budget: text("1"),
                max_seq: Some(256),
                chunk: Some(32),
                ..with("0")
            },
            "pinned_memory_limit",
            &["300.0 MiB", "600.0 MiB", "`cpu`"],
        ),
        (
            &some,
            PlacementRequest { gpu_layer_budget: text("1"), ..on("0,1") },
            "too_few_layers",
            &["leaves 1 layers for 2 GPUs", "at least 2"],
        ),
        (
            &some,
            PlacementRequest {
                gpu_layer_budget: text("6"),
                offload_exec: text("cpu"),
                cpu_workers: Some(3),
                ..on("0")
            },
            "too_few_layers",
            &["only 2 layers spill", "cpu_workers is 3"],
        ),
        (
            &some,
            PlacementRequest { gpu_layer_budget: text("4"), pp_layers: text("4,4"), ..on("0") },
            "gpu_layer_budget_with_pp_layers",
            &["one of them"],
        ),
        (&some, PlacementRequest { pp_layers: text("8"), ..on("0,1") }, "pp_layers_count", &["1 entries"]),
        (
            &some,
            PlacementRequest { vram_limit: text("1GiB"), ..idle("0") },
            "needs_gpu",
            &["vram_limit", "gpu_layer_budget 0 with offload_exec `cpu`", "larger budget"],
        ),
        (&some, PlacementRequest { split: text("auto"), ..idle("0,1") }, "needs_gpu", &["split", "budget 0"]),
    ];
    let deep = ModelSummary { layers: vec![model(1).layers[0].clone(); 40], ..model(40) };
    for (machine, request, code, words) in table {
        let model = if code == "pinned_memory_limit" { &deep } else { &model(8) };
        let refusal = plan(model, machine, &request).unwrap_err();
        assert_eq!(refusal.code(), code, "{request:?}: {refusal}");
        let sentence = refusal.to_string();
        for word in words {
            assert!(sentence.contains(word), "{sentence} lacks {word}");
        }
    }
}

#[test]
fn devices_are_named_by_number_id_address_or_architecture() {
    let by = |names: &str| devices(&plan(&model(9), &with_gpus(8 << 30), &on(names)).unwrap());
    assert_eq!(by("GPU-00000000-0000-0000-0000-000000000001, 0"), [Some(1), Some(0)]);
    assert_eq!(by("0000:01:00.0"), [Some(1)]);
    assert_eq!(by("01:00.0"), [Some(1)], "without the domain");
    assert_eq!(by("emulated_wave32,EMULATED_WAVE32"), [Some(0), Some(1)], "all cards of the kind, in order");
}

#[test]
fn what_is_accepted_explicitly_is_not_refused() {
    let mut machine = with_gpus(8 << 30);
    machine.gpus.gpus[1].device.arch = "emulated_wave64".into();
    machine.gpus.gpus[1].free_bytes = 4 << 30;
    let request = PlacementRequest { allow_mixed_arch: true, ..on("0,1") };
    assert_eq!(plan(&model(9), &machine, &request).unwrap_err().code(), "vram_difference");
    for accepted in [
        PlacementRequest { uniform_vram_tolerance_gb: text("4.3"), ..request.clone() },
        PlacementRequest { uniform_vram_tolerance_gb: text("4.29496729600001"), ..request.clone() },
        PlacementRequest { uniform_vram_tolerance_gb: text("1e30"), ..request.clone() },
        PlacementRequest { pp_layers: text("5,4"), ..request.clone() },
        PlacementRequest { split: text("auto"), ..request.clone() },
        PlacementRequest { vram_limit: text("4GiB"), ..request },
    ] {
        assert!(plan(&model(9), &machine, &accepted).is_ok(), "{accepted:?}");
    }
}

#[test]
fn layers_beyond_the_budget_stay_in_host_memory_for_the_first_gpu() {
    let by = |request: PlacementRequest| plan(&model(9), &with_gpus(8 << 30), &request).unwrap();
    let budget = |layers: &str, devices| PlacementRequest { gpu_layer_budget: text(layers), ..on(devices) };
    let mapped = |plan: &Plan| -> Vec<usize> {
        let of =
            |stage: &Stage| stage.residency.iter().filter(|home| **home == Residency::HostMapped).count();
        plan.stages.iter().map(of).collect()
    };
    let one = by(budget("6", "0"));
    assert_eq!((devices(&one), counts(&one), mapped(&one)), (vec![Some(0)], vec![9], vec![3]));
    let first = &one.stages[0];
    assert_eq!(
        first.residency[2..4],
        [Residency::HostMapped, Residency::Device],
        "the last six are resident"
    );
    assert_eq!(first.bytes.mapped, 3 * 10 * MIB);
    assert_eq!(first.bytes.weights, 6 * 10 * MIB + 30 * MIB, "with the head");
    let all = by(on("0"));
    assert_eq!(first.bytes.of_processor() + first.bytes.mapped, all.stages[0].bytes.of_processor());
    let two = by(budget("5", "0,1"));
    assert_eq!((counts(&two), mapped(&two)), (vec![4 + 3, 2], vec![4, 0]));
    let scratch = |plan: &Plan| plan.stages[0].bytes.scratch;
    assert_eq!(scratch(&one), scratch(&all), "three layers are read where they are");
    assert_eq!(
        scratch(&two) - scratch(&by(on("0,1"))),
        2 * 4 * MIB,
        "prompts take four by way of two places"
    );
    let none = by(budget("0", "0"));
    assert_eq!((counts(&none), mapped(&none)), (vec![9], vec![9]));
}

#[test]
fn a_typo_in_offload_exec_moves_nothing_and_is_told() {
    let request =
        |word: &str| PlacementRequest { gpu_layer_budget: text("6"), offload_exec: text(word), ..on("0") };
    let by = |word| plan(&model(9), &with_gpus(8 << 30), &request(word)).unwrap();
    let (typo, pcie) = (by("cpuu"), by("pcie"));
    assert_eq!(typo.stages, pcie.stages);
    assert!(typo.warnings[0].contains("`cpuu`") && table(&typo).contains("warning: offload_exec"));
    assert_eq!((by("").stages, by("").warnings), (pcie.stages, pcie.warnings));
}

#[test]
fn automatic_splits_follow_memory_and_measured_speed() {
    let mut machine = with_gpus(9 << 30);
    machine.gpus.gpus[1].free_bytes = 3 << 30;
    let request = |split: &str| PlacementRequest { split: text(split), max_seq: Some(256), ..on("0,1") };
    let by = |machine: &Machine, split: &str| counts(&plan(&model(64), machine, &request(split)).unwrap());
    let automatic = by(&machine, "auto");
    assert!(
        (46..=54).contains(&automatic[0]),
        "three quarters and what scratch leaves of the memory: {automatic:?}"
    );
    let budgets = by(&machine, "bytes:2GiB,2GiB");
    assert!((31..=34).contains(&budgets[0]), "equal budgets: {budgets:?}");
    // The small card is three times as fast: 640 MiB of weights take as long as 210 MiB there.
    machine.gpus.gpus[0].speed = Some(reads(500 << 10, 1));
    machine.gpus.gpus[1].speed = Some(reads(1500 << 10, 1));
    let measured = by(&machine, "auto");
    assert!((16..=18).contains(&measured[0]), "{measured:?}");
    // Alike cards are not told apart by what measurements scatter.
    let alike = [(950, 1000), (1000, 950), (800, 1000)].map(|(first, second)| {
        let mut alike = with_gpus(8 << 30);
        alike.gpus.gpus[0].speed = Some(reads(first, 1));
        alike.gpus.gpus[1].speed = Some(reads(second, 1));
        by(&alike, "auto")
    });
    assert_eq!(alike[0], alike[1]);
    assert!(alike[2][0] < alike[0][0], "{alike:?}");
    // Unless it cannot hold so much.
    machine.gpus.gpus[1].free_bytes = 400 * MIB;
    let held = by(&machine, "auto");
    assert!(held[1] < 40 && held[1] > 20, "{held:?}");
}

#[test]
fn budgets_in_bytes_are_kept() {
    let request = PlacementRequest { split: text("bytes:700MiB,500MiB"), max_seq: Some(256), ..on("0,1") };
    let plan = plan(&model(64), &with_gpus(8 << 30), &request).unwrap();
    for (stage, budget) in plan.stages.iter().zip([700 * MIB, 500 * MIB]) {
        assert!(stage.bytes.of_processor() <= budget, "{stage:?}");
    }
    let small = PlacementRequest { split: text("bytes:300MiB,300MiB"), ..request };
    let refusal = super::super::plan(&model(64), &with_gpus(8 << 30), &small).unwrap_err();
    assert_eq!(refusal.code(), "out_of_memory");
}

#[test]
fn a_context_that_fits_is_named_where_one_does_not() {
    let request = PlacementRequest { vram_limit: text("800MiB"), max_seq: Some(8192), ..on("0") };
    let machine = with_gpus(8 << 30);
    let refusal = plan(&model(64), &machine, &request).unwrap_err();
    let Refusal::Memory(shortage) = &refusal else { panic!("{refusal:?}") };
    let context = shortage.advice.context.unwrap();
    assert!(refusal.to_string().contains(&format!("max_seq {context} would fit")), "{refusal}");
    let with_context =
        |max_seq| plan(&model(64), &machine, &PlacementRequest { max_seq: Some(max_seq), ..request.clone() });
    assert!(with_context(context).is_ok() && with_context(context + 32).is_err());
}

/// A context shorter than the usual step takes a smaller step.
#[test]
fn a_context_below_the_step_is_found_with_its_own_step() {
    let machine = with_gpus(8 << 30);
    let with = |limit: u64, max_seq| PlacementRequest {
        vram_limit: Some(limit.to_string()),
        max_seq: Some(max_seq),
        parallel: Some(1),
        ..on("0")
    };
    let needed = plan(&model(8), &machine, &with(8 << 30, 64)).unwrap().stages[0].bytes.of_processor();
    // Room for a context of 64 tokens and what is the driver's.
    let limit = needed + needed / 60;
    let Refusal::Memory(shortage) = plan(&model(8), &machine, &with(limit, 4096)).unwrap_err() else {
        panic!("memory is too small")
    };
    let context = shortage.advice.context.unwrap();
    assert!((64..512).contains(&context), "{context}");
    assert!(plan(&model(8), &machine, &with(limit, context)).is_ok());
}

#[test]
fn a_shortage_says_what_allows_no_more_and_what_can_be_lower() {
    let sentence =
        |request: PlacementRequest| plan(&model(64), &with_gpus(8 << 30), &request).unwrap_err().to_string();
    let split = sentence(PlacementRequest { split: text("bytes:300MiB"), ..on("0,1") });
    assert!(split.contains("but split allows 300.0 MiB: ") && !split.contains("available"), "{split}");
    let limit = sentence(PlacementRequest { vram_limit: text("64MiB"), ..on("0") });
    assert!(limit.contains("but vram_limit allows 63.0 MiB: "), "{limit}");
    let few = sentence(PlacementRequest {
        vram_limit: text("64MiB"),
        parallel: Some(1),
        chunk: Some(1),
        ..on("0")
    });
    assert!(
        few.contains("use a smaller file, or lower max_seq (4096)") && !few.contains("parallel ("),
        "{few}"
    );
    let poor = Machine { available_bytes: MIB, ..machine() };
    let none = PlacementRequest { max_seq: Some(1), parallel: Some(1), ..Default::default() };
    let refusal = plan(&model(64), &poor, &none).unwrap_err().to_string();
    assert!(
        refusal.contains("1.0 MiB are available") && refusal.ends_with("use a smaller file"),
        "{refusal}"
    );
}
