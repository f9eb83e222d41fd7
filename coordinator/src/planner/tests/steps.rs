//! Larger steps: taken where one GPU computes everything, and only where nothing else changes for them.

use super::gpus::{gpu, on};
use super::*;

fn with(free: u64) -> Machine {
    let gpus = vec![gpu(0, free), gpu(1, free)];
    Machine { gpus: GpuSurvey { gpus, looked_for: vec![] }, ..machine() }
}

fn step(machine: &Machine, request: &PlacementRequest) -> usize {
    plan(&model(9), machine, request).unwrap().limits.max_step_tokens
}

#[test]
fn one_gpu_takes_larger_steps_and_the_largest_where_nobody_waits() {
    let ample = with(8 << 30);
    let alone = |request| PlacementRequest { parallel: Some(1), ..request };
    let on_cpu = |prompts| {
        let (gpu_layer_budget, offload_exec) = (text("3"), text("cpu"));
        PlacementRequest { gpu_layer_budget, offload_exec, offload_prompts: text(prompts), ..on("0") }
    };
    let table: [(PlacementRequest, usize); 9] = [
        (on("0"), 1024),
        (alone(on("0")), 2048),
        (PlacementRequest { max_seq: Some(1500), ..alone(on("0")) }, 1500),
        (PlacementRequest { chunk: Some(300), ..alone(on("0")) }, 300),
        (PlacementRequest { gpu_layer_budget: text("3"), ..alone(on("0")) }, 2048),
        (alone(on_cpu("cpu")), 512),
        (alone(on_cpu("auto")), 2048),
        (alone(on("0,1")), 512),
        (alone(PlacementRequest::default()), 512),
    ];
    for (request, expected) in table {
        assert_eq!(step(&ample, &request), expected, "{request:?}");
    }
}

/// From the least memory in which the model fits on, no layer, no block of the cache and no refusal depends on larger steps.
#[test]
fn nothing_else_changes_for_larger_steps() {
    let mut sizes = Vec::new();
    for mib in 1..1000 {
        let machine = with(mib * MIB);
        let request =
            PlacementRequest { gpu_layer_budget: text("auto"), offload_exec: text("pcie"), ..on("0") };
        let fixed = PlacementRequest { chunk: Some(512), ..request.clone() };
        let (open, small) = (plan(&model(9), &machine, &request), plan(&model(9), &machine, &fixed));
        let Ok(small) = small else {
            assert!(open.is_err(), "{mib} MiB");
            continue;
        };
        let open = open.unwrap();
        let of = |plan: &Plan| {
            (plan.stages[0].residency.clone(), plan.limits.kv_blocks, plan.stages[0].why.clone())
        };
        assert_eq!(of(&open), of(&small), "{mib} MiB");
        sizes.push(open.limits.max_step_tokens);
    }
    assert!(sizes.contains(&512) && sizes.contains(&1024), "{sizes:?}");
    // With ever more memory there is room in the end.
    assert_eq!(sizes.last(), Some(&1024));
}
