//! A saved plan is used only where it still holds; two plans are compared field by field.

use super::gpus::{gpu, on};
use super::*;
use spillway_protocol::plan::Limits;

fn host() -> Machine {
    Machine {
        gpus: GpuSurvey { gpus: vec![gpu(0, 8 << 30), gpu(1, 8 << 30)], looked_for: vec![] },
        ..machine()
    }
}

fn saved() -> Plan {
    plan(&model(9), &host(), &on("0,1")).unwrap()
}

#[test]
fn a_plan_survives_its_file_and_holds_where_nothing_has_changed() {
    let text = serde_json::to_string(&saved()).unwrap();
    let read: Plan = serde_json::from_str(&text).unwrap();
    let mut moved = model(9);
    moved.model.path = "/elsewhere/some.gguf".into();
    let mut renumbered = host();
    renumbered.gpus.gpus.reverse();
    let replayed = replay(&read, &moved, &renumbered).unwrap();
    assert_eq!(replayed, Plan { model: moved.model, ..saved() });
}

#[test]
fn what_has_changed_is_named() {
    let refused = |plan: &Plan, model: &ModelSummary, machine: &Machine, code: &str, words: &[&str]| {
        let refusal = replay(plan, model, machine).unwrap_err();
        assert_eq!(refusal.code(), code, "{refusal}");
        for word in words {
            assert!(refusal.to_string().contains(word), "{refusal} lacks {word}");
        }
    };
    let (model, host) = (model(9), host());
    refused(&Plan { version: 99, ..saved() }, &model, &host, "plan_version", &["99"]);
    let mut other = model.clone();
    other.model.file_bytes += 1;
    refused(&saved(), &other, &host, "plan_other_model", &["file length", "419430400", "419430401"]);
    let mut swapped = host.clone();
    swapped.gpus.gpus[1].device.uuid = Some("another".into());
    refused(&saved(), &model, &swapped, "plan_other_device", &["GPU 1", "0000:01:00.0", "another"]);
    refused(&saved(), &model, &machine(), "plan_other_device", &["there are: none"]);
    let mut fuller = host.clone();
    fuller.gpus.gpus[0].free_bytes = 50 * MIB;
    refused(&saved(), &model, &fuller, "out_of_memory", &["device 0 (GPU 0)", "49.2 MiB"]);
    let poor = Machine { available_bytes: MIB, ..host.clone() };
    refused(&saved(), &model, &poor, "out_of_memory", &["the host", "1.0 MiB"]);
    let mut broken = host.clone();
    broken.gpus.gpus[1] = Gpu { refused: Some("its driver fails".into()), free_bytes: 0, ..gpu(1, 0) };
    refused(&saved(), &model, &broken, "device_refused", &["device 1", "its driver fails"]);
    let mut gone = machine();
    gone.gpus.looked_for = vec!["amd: no driver".into()];
    refused(&saved(), &model, &gone, "plan_other_device", &["none (amd: no driver)"]);
    // What may be page-locked is half of what is available.
    let spilled = PlacementRequest { gpu_layer_budget: text("2"), ..on("0,1") };
    let spilled = plan(&model, &host, &spilled).unwrap();
    let in_host: u64 = spilled.stages.iter().map(|stage| stage.bytes.of_host()).sum();
    let scarce = Machine { available_bytes: in_host + MIB, ..host.clone() };
    refused(&spilled, &model, &scarce, "pinned_memory_limit", &["page-lock", "half of"]);
    let mut gap = saved();
    gap.stages[1].layers.start += 1;
    refused(&gap, &model, &host, "plan_malformed", &["layers 6-8 of 9"]);
    let mut short = saved();
    short.stages.pop();
    refused(&short, &model, &host, "plan_malformed", &["layers 5-8 of 9"]);
    let mut heavy = saved();
    heavy.stages[0].bytes.weights = u64::MAX;
    refused(&heavy, &model, &host, "plan_malformed", &["layers 0-4", "other bytes"]);
    let mut shuffled = spilled.clone();
    shuffled.stages[0].residency.reverse();
    refused(&shuffled, &model, &host, "plan_malformed", &["where no plan has them"]);
    let mut elsewhere = saved();
    elsewhere.stages[1].residency[0] = Residency::Host;
    refused(&elsewhere, &model, &host, "plan_malformed", &["layers 5-8"]);
    // What is left to the driver is left to it by a saved plan, too.
    let mut tight = host.clone();
    tight.gpus.gpus[0].free_bytes = saved().stages[0].bytes.of_processor() + 1;
    refused(&saved(), &model, &tight, "out_of_memory", &["device 0"]);
    type Number = fn(&mut Limits) -> &mut usize;
    let numbers: [(Number, &str); 4] = [
        (|limits| &mut limits.max_seq, "max_seq"),
        (|limits| &mut limits.max_sequences, "max_sequences"),
        (|limits| &mut limits.kv_blocks, "kv_blocks"),
        (|limits| &mut limits.max_logit_rows, "max_logit_rows"),
    ];
    for (number, name) in numbers {
        for value in [0, usize::MAX] {
            let mut plan = saved();
            *number(&mut plan.limits) = value;
            refused(&plan, &model, &host, "plan_malformed", &[name]);
        }
    }
    let mut idle = plan(&model, &machine(), &PlacementRequest::default()).unwrap();
    idle.stages[0].execution = Execution::Cpu { threads: 0, node: None };
    refused(&idle, &model, &machine(), "plan_malformed", &["threads is 0"]);
    let mut bound = plan(&model, &machine(), &PlacementRequest::default()).unwrap();
    bound.stages[0].execution = Execution::Cpu { threads: 1, node: Some(77) };
    refused(&bound, &model, &machine(), "plan_other_device", &["NUMA node 77"]);
}

#[test]
fn two_plans_are_compared_field_by_field() {
    assert_eq!(diff(&saved(), &saved()), []);
    assert_eq!(differences(&[]), "the plans are the same\n");
    let other = plan(&model(9), &host(), &PlacementRequest { pp_layers: text("6,3"), ..on("0,1") }).unwrap();
    let found = diff(&saved(), &other);
    let at = |path: &str| found.iter().find(|difference| difference.path == path).unwrap();
    assert_eq!(
        (&at("stages[0].layers.end").first, &at("stages[0].layers.end").second),
        (&5.into(), &6.into())
    );
    assert!(at("stages[0].residency[5]").first.is_null(), "one has no sixth layer there");
    let text = differences(&found);
    assert!(text.contains("stages[0].bytes.weights: 50.0 MiB -> 60.0 MiB\n"), "{text}");
    assert!(!found.iter().any(|difference| difference.path.starts_with("model")));
}
