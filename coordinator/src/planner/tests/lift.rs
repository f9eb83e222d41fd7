//! Prompts of spilled layers: who runs them, from how many tokens on, and what that takes, to the byte.

use super::gpus::{gpu, on, reads};
use super::*;
use spillway_protocol::plan::{KV_BLOCK_TOKENS, Lift};

/// A GPU with so many MiB free, on a host with as many GiB as it needs.
fn host(mib: u64) -> Machine {
    Machine { gpus: GpuSurvey { gpus: vec![gpu(0, mib * MIB)], looked_for: vec![] }, ..machine() }
}

/// Twelve of sixteen layers on the GPU, the others on the CPU.
fn spilled(prompts: Option<&str>) -> PlacementRequest {
    let (gpu_layer_budget, offload_exec) = (text("12"), text("cpu"));
    let offload_prompts = prompts.and_then(text);
    PlacementRequest { gpu_layer_budget, offload_exec, offload_prompts, chunk: Some(512), ..on("0") }
}

fn placed(machine: &Machine, request: &PlacementRequest) -> Plan {
    plan(&model(16), machine, request).unwrap()
}

#[test]
fn what_is_lifted_is_charged_to_the_gpu_that_lifts_it_and_nothing_else_changes() {
    let without = placed(&host(8000), &spilled(Some("cpu")));
    let with = placed(&host(8000), &spilled(Some("gpu")));
    assert_eq!(without.lift, None);
    // A KV block of 32 tokens of 1024 f16 elements, 4096 f32 values a sequence, 10 MiB of weights, in each of four layers.
    let (blocks, sequences) = (with.limits.kv_blocks as u64, with.limits.max_sequences as u64);
    let (kv, state) = (4 * blocks * KV_BLOCK_TOKENS as u64 * 1024 * 2, 4 * sequences * 4096 * 4);
    let lift = Lift {
        layers: 0..4,
        stage: 1,
        from: 1,
        shared: kv + state,
        why: "offload_prompts asks for it".into(),
    };
    assert_eq!(with.lift, Some(lift));
    let (plain, lifting) = (without.stages[1].bytes, with.stages[1].bytes);
    let expected = StageBytes {
        kv: plain.kv + kv,
        state: plain.state + state,
        mapped: 4 * 10 * MIB,
        // Two places for the largest group of matrices, and the buffer that states are handed over in.
        scratch: plain.scratch + 2 * 4 * MIB,
        pinned: plain.pinned + 4 * MIB,
        ..plain
    };
    assert_eq!(lifting, expected);
    let mut same = with.clone();
    (same.lift, same.stages[1].bytes) = (None, plain);
    assert_eq!(same, without);
}

#[test]
fn the_first_gpu_lifts_from_all_cpu_workers_and_nobody_where_nothing_is_on_them() {
    let two = Machine {
        gpus: GpuSurvey { gpus: vec![gpu(0, 8000 * MIB), gpu(1, 8000 * MIB)], looked_for: vec![] },
        ..machine()
    };
    let request = PlacementRequest { cpu_workers: Some(3), ..spilled(Some("gpu")) };
    let plan = placed(&two, &PlacementRequest { devices: text("0,1"), ..request });
    let lift = plan.lift.clone().unwrap();
    assert_eq!((counts(&plan), lift.layers, lift.stage), (vec![2, 1, 1, 6, 6], 0..4, 3));
    let concerned: Vec<bool> = (0..5).map(|stage| plan.lift_at(stage).is_some()).collect();
    assert_eq!(concerned, [true, true, true, true, false]);
    assert_eq!(plan.stages[4].bytes.mapped, 0);
    for request in [
        PlacementRequest { offload_exec: text("pcie"), ..spilled(Some("gpu")) },
        PlacementRequest { gpu_layer_budget: None, offload_exec: None, ..spilled(Some("gpu")) },
        PlacementRequest { gpu_layer_budget: text("16"), ..spilled(Some("gpu")) },
        PlacementRequest::default(),
    ] {
        let plan = placed(&two, &request);
        assert_eq!((plan.lift, plan.warnings), (None, vec![]), "{request:?}");
    }
}

#[test]
fn measured_speeds_say_which_prompts_are_lifted() {
    let from = |link: Option<u64>, products: Option<u64>, prompts: Option<&str>| {
        let mut machine = Machine { products, ..host(8000) };
        machine.gpus.gpus[0].speed = link.map(|link| reads(100_000, link));
        placed(&machine, &spilled(prompts)).lift.map(|lift| (lift.from, lift.why))
    };
    // 40 MiB at 88 hundredths of 1000 MiB a second are 45.5 ms; 80 million multiplications at 8 billion a second are 10 ms a token.
    let (tokens, why) = from(Some(1000), Some(8_000_000_000), None).unwrap();
    assert_eq!(tokens, 5, "{why}");
    assert!(why.contains("45.5 ms over the bus") && why.contains("10.00 ms a token"), "{why}");
    assert_eq!(from(Some(1000), Some(8_000_000_000), Some("auto")).unwrap().0, tokens);
    assert_eq!(from(Some(100_000), Some(1_000_000_000), None).unwrap().0, 1);
    for unknown in [from(None, Some(1), None), from(Some(1), None, None)] {
        assert_eq!(unknown, Some((32, "speeds were not measured".into())));
    }
    assert_eq!(from(Some(1), Some(1 << 50), None), None, "no prompt is that long");
    assert_eq!(from(Some(1), Some(1 << 50), Some("gpu")).unwrap().0, 1);
    assert_eq!(from(Some(1000), Some(1), Some("cpu")), None);
}

#[test]
fn without_room_prompts_stay_on_the_cpu_and_the_plan_says_what_would_help() {
    // The least with which everything fits but what lifting takes.
    let enough = (1..8000).find(|mib| plan(&model(16), &host(*mib), &spilled(Some("cpu"))).is_ok()).unwrap();
    let alone = PlacementRequest { parallel: Some(1), ..spilled(None) };
    let tight = placed(&host(enough), &alone);
    assert_eq!(tight.lift, None);
    let [warning] = tight.warnings.as_slice() else { panic!("{:?}", tight.warnings) };
    for part in ["prompts run on the CPU in the 4 layers", "of device 0", "with gpu_layer_budget "] {
        assert!(warning.contains(part), "{warning} lacks {part}");
    }
    let budget: String = warning
        .rsplit("gpu_layer_budget ")
        .next()
        .unwrap()
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    let followed = placed(&host(enough), &PlacementRequest { gpu_layer_budget: Some(budget), ..alone });
    assert!(followed.lift.is_some() && followed.warnings.is_empty(), "{followed:?}");
    let refusal = plan(&model(16), &host(enough), &spilled(Some("gpu"))).unwrap_err();
    assert_eq!(refusal.code(), "out_of_memory");
    let sentence = refusal.to_string();
    assert!(
        sentence.starts_with("offload_prompts `gpu` takes memory") && sentence.contains("MiB"),
        "{sentence}"
    );
    // A little more, and blocks of further sequences are in the way: they are not given up unasked.
    let mut seen = [false; 2];
    for mib in (enough..enough + 1500).step_by(7) {
        let [cpu, auto] = ["cpu", "auto"].map(|who| placed(&host(mib), &spilled(Some(who))));
        assert_eq!(auto.limits, cpu.limits, "{mib}");
        let forced = plan(&model(16), &host(mib), &spilled(Some("gpu")));
        if let Ok(forced) = forced.as_ref()
            && auto.lift.is_none()
        {
            assert!(forced.limits.kv_blocks < cpu.limits.kv_blocks);
            assert!(auto.warnings[0].contains("KV blocks"), "{:?}", auto.warnings);
        }
        seen[usize::from(auto.lift.is_some())] = true;
    }
    assert_eq!(seen, [true; 2]);
}

#[test]
fn page_locked_memory_has_its_limit() {
    let poor = Machine { available_bytes: 450 * MIB, ..host(8000) };
    let one = |prompts| PlacementRequest { parallel: Some(1), max_seq: Some(256), ..spilled(prompts) };
    let mut large = model(16);
    large.layers.iter_mut().for_each(|layer| layer.gpu.mapped = 60 * MIB);
    let auto = plan(&large, &poor, &one(None)).unwrap();
    assert!(auto.lift.is_none() && auto.warnings[0].contains("would be page-locked"), "{:?}", auto.warnings);
    let refusal = plan(&large, &poor, &one(Some("gpu"))).unwrap_err();
    assert_eq!(refusal.code(), "pinned_memory_limit");
    assert!(refusal.to_string().starts_with("offload_prompts `gpu`"), "{refusal}");
}

#[test]
fn words_are_read_and_plans_are_shown() {
    let refused = |request: &PlacementRequest| plan(&model(16), &host(8000), request).unwrap_err();
    let typo = refused(&spilled(Some("cpuu")));
    assert_eq!(typo.code(), "offload_prompts_unknown");
    assert!(typo.to_string().contains("`cpuu`"), "{typo}");
    let without = PlacementRequest { offload_prompts: text("gpu"), ..PlacementRequest::default() };
    assert_eq!(refused(&without).code(), "needs_gpu");
    let unused = PlacementRequest { gpu_layer_budget: text("0"), ..spilled(Some("gpu")) };
    assert_eq!(refused(&unused).code(), "needs_gpu");
    let shown = table(&placed(&host(8000), &spilled(None)));
    let line = "prompts: of 32 new tokens or more, stage 1 runs layers 0-3, too: speeds were not measured";
    assert!(shown.contains(line), "{shown}");
}

#[test]
fn a_saved_plan_lifts_what_it_lifted_and_nothing_else() {
    let (model, host) = (model(16), host(8000));
    let saved = placed(&host, &spilled(Some("gpu")));
    let read: Plan = serde_json::from_str(&serde_json::to_string(&saved).unwrap()).unwrap();
    assert_eq!(replay(&read, &model, &host).unwrap(), saved);
    // One of a version that knew nothing of it.
    let mut old = serde_json::to_value(placed(&host, &spilled(Some("cpu")))).unwrap();
    old.as_object_mut().unwrap().remove("lift");
    let old: Plan = serde_json::from_value(old).unwrap();
    assert_eq!(replay(&old, &model, &host).unwrap().lift, None);
    let changes: [fn(&mut Lift); 5] = [
        |lift| lift.layers = 0..3,
        |lift| lift.layers = 1..4,
        |lift| lift.stage = 0,
        |lift| lift.from = 0,
        |lift| lift.shared += 1,
    ];
    for change in changes {
        let mut changed = saved.clone();
        change(changed.lift.as_mut().unwrap());
        assert_eq!(replay(&changed, &model, &host).unwrap_err().code(), "plan_malformed", "{changed:?}");
    }
    let bytes = replay(&Plan { lift: None, ..saved }, &model, &host).unwrap_err();
    assert_eq!(bytes.code(), "plan_malformed", "charged for what it does not do");
}

proptest! {
    /// With any sizes: what is lifted changes only what its GPU is charged, and with more memory it is still lifted.
    #[test]
    fn lifting_is_charged_and_more_memory_does_not_undo_it(
        layers in 2usize..40, spill in 1usize..20, mib in 100u64..2000, more in 0u64..2000, parallel in 1usize..6,
    ) {
        let resident = layers.saturating_sub(spill).max(1);
        let request = |prompts| PlacementRequest {
            gpu_layer_budget: Some(resident.to_string()), parallel: Some(parallel), max_seq: Some(512), ..spilled(Some(prompts))
        };
        let at = |mib, prompts| plan(&model(layers), &host(mib), &request(prompts));
        if let Ok(gpu) = at(mib, "gpu") {
            let cpu = at(mib, "cpu").unwrap();
            prop_assert_eq!(gpu.lift.is_some(), resident < layers);
            for (with, without) in gpu.stages.iter().zip(&cpu.stages) {
                let is_cpu = matches!(with.execution, Execution::Cpu { .. });
                let lifts = gpu.lift.is_some() && !is_cpu;
                prop_assert_eq!(with.bytes.mapped > 0, lifts);
                prop_assert!(gpu.limits != cpu.limits || is_cpu == (with.bytes == without.bytes) || gpu.lift.is_none());
            }
            prop_assert!(at(mib + more, "gpu").is_ok());
        }
    }
}
