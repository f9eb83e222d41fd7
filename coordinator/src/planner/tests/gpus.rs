//! Placement on GPUs: which ones, how many layers, and what is refused.

use super::*;
use spillway_protocol::plan::GpuDevice;

fn gpu(index: usize, free_bytes: u64) -> Gpu {
    let device = GpuDevice {
        index,
        provider: "emulated:devices=2".into(),
        ordinal: u32::try_from(index).unwrap(),
        name: format!("GPU {index}"),
        arch: "emulated_wave32".into(),
        uuid: None,
        driver: 1,
    };
    Gpu { device, free_bytes, total_bytes: 8 << 30, integrated: false, refused: None }
}

/// Two GPUs that can be used, one that cannot, one that shares the host's memory.
fn with_gpus(free_bytes: u64) -> Machine {
    let broken = Gpu { refused: Some("its driver fails".into()), ..gpu(2, 0) };
    let integrated = Gpu { integrated: true, ..gpu(3, free_bytes) };
    let gpus = vec![gpu(0, free_bytes), gpu(1, free_bytes), broken, integrated];
    Machine { gpus: GpuSurvey { gpus, looked_for: vec![] }, ..machine() }
}

fn on(devices: &str) -> PlacementRequest {
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
    let budget = |layers: &str, devices| PlacementRequest { gpu_layer_budget: text(layers), ..on(devices) };
    assert_eq!(by(budget("6", "0")), (vec![None, Some(0)], vec![3, 6]));
    assert_eq!(by(budget("5", "0,1")), (vec![None, Some(0), Some(1)], vec![4, 3, 2]));
    assert_eq!(by(budget("99", "0")), (vec![Some(0)], vec![9]), "more than there are");
    assert_eq!(by(budget("0", "0")), (vec![None], vec![9]));
    let two = PlacementRequest { cpu_workers: Some(2), ..budget("5", "0") };
    assert_eq!(by(two), (vec![None, None, Some(0)], vec![2, 2, 5]));
    let explicit = PlacementRequest { pp_layers: text("2,3,4"), ..on("0,1") };
    assert_eq!(by(explicit), (vec![None, Some(0), Some(1)], vec![2, 3, 4]));
}

#[test]
fn auto_puts_as_many_layers_on_gpus_as_fit() {
    // A GPU with room for about half of the layers.
    let request =
        |budget: &str| PlacementRequest { gpu_layer_budget: text(budget), max_seq: Some(256), ..on("0") };
    let machine = with_gpus(500 * MIB);
    let auto = plan(&model(64), &machine, &request("auto")).unwrap();
    let layers = counts(&auto)[1];
    assert!((20..60).contains(&layers), "{layers}");
    assert_eq!(auto, plan(&model(64), &machine, &request(&layers.to_string())).unwrap());
    let more = plan(&model(64), &machine, &request(&(layers + 1).to_string())).unwrap_err();
    assert_eq!(more.code(), "out_of_memory");
}

#[test]
fn a_model_too_large_for_its_gpus_is_refused_with_the_budget_that_fits() {
    let machine = with_gpus(500 * MIB);
    let request = PlacementRequest { max_seq: Some(256), ..on("0") };
    let refusal = plan(&model(64), &machine, &request).unwrap_err();
    let Refusal::Memory(shortage) = &refusal else { panic!("{refusal:?}") };
    let budget = shortage.fitting_budget.unwrap();
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
    let request = PlacementRequest { gpu_layer_budget: text("4"), ..on("0") };
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
    assert_eq!(by(PlacementRequest { gpu_layer_budget: text("4"), ..on("0") }), 2);
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
    let table: Vec<(&Machine, PlacementRequest, &str, &[&str])> = vec![
        (&nothing, on("0"), "no_gpu", &["install the driver", "--devices none"]),
        (&nothing, on("all"), "no_gpu", &["install the driver"]),
        (&some, on("0,7"), "unknown_device", &["no device 7", "4 were found"]),
        (&some, PlacementRequest { activations: text("int16"), ..on("0") }, "activations_on_gpu", &["8-bit"]),
        (&some, on("2"), "device_refused", &["its driver fails"]),
        (&some, on("1,1"), "device_twice", &["device 1", "--allow-shared-device"]),
        (&some, on("0;1"), "devices_unreadable", &["`0;1`"]),
        (&some, PlacementRequest { pp: Some(3), ..on("0,1") }, "pp_beyond_devices", &["3", "2 devices"]),
        (
            &some,
            PlacementRequest { offload_exec: text("pcie"), ..on("0") },
            "offload_exec_unsupported",
            &["pcie"],
        ),
        (&some, PlacementRequest { gpu_layer_budget: text("1"), ..on("0,1") }, "too_few_layers", &["2", "1"]),
        (
            &some,
            PlacementRequest { gpu_layer_budget: text("4"), pp_layers: text("4,4"), ..on("0") },
            "gpu_layer_budget_with_pp_layers",
            &["one of them"],
        ),
        (&some, PlacementRequest { pp_layers: text("8"), ..on("0,1") }, "pp_layers_count", &["1 entries"]),
    ];
    for (machine, request, code, words) in table {
        let refusal = plan(&model(8), machine, &request).unwrap_err();
        assert_eq!(refusal.code(), code, "{request:?}");
        let sentence = refusal.to_string();
        for word in words {
            assert!(sentence.contains(word), "{sentence} lacks {word}");
        }
    }
}
