//! `gpu_layer_budget` `auto`: measured speeds decide how much spills and who runs it, and never choose what is slower than
//! anything that could have been asked for.

use super::gpus::{gpu, on, reads};
use super::*;
use crate::planner::cost::token_time;

/// GPUs of so many MiB each and of so many MiB a second over the bus, and a CPU that reads so many.
fn measured(gpus: &[u64], link: u64, cpu: u64) -> Machine {
    let gpu =
        |(index, mib): (usize, &u64)| Gpu { speed: Some(reads(100_000, link)), ..gpu(index, mib * MIB) };
    let gpus = gpus.iter().enumerate().map(gpu).collect();
    let gpus = GpuSurvey { gpus, looked_for: vec![] };
    Machine { memory_bandwidth: Some(cpu * MIB), gpus, ..machine() }
}

fn auto(devices: &str) -> PlacementRequest {
    PlacementRequest { gpu_layer_budget: text("auto"), max_seq: Some(256), ..on(devices) }
}

/// Layers in GPUs' memory, layers that a GPU reads from the host's, layers of CPU workers.
fn homes(plan: &Plan) -> [usize; 3] {
    let homes = plan.stages.iter().flat_map(|stage| &stage.residency);
    [Residency::Device, Residency::HostMapped, Residency::Host]
        .map(|home| homes.clone().filter(|found| **found == home).count())
}

#[test]
fn whoever_reads_faster_runs_what_spills() {
    let place = |link, cpu, request: &PlacementRequest| {
        homes(&plan(&model(64), &measured(&[500], link, cpu), request).unwrap())
    };
    let [on_device, mapped, on_cpu] = place(25_000, 60_000, &auto("0"));
    assert!(mapped == 0 && on_cpu > 20 && on_device > 20, "the CPU is faster than the bus");
    let [on_device, mapped, on_cpu] = place(25_000, 15_000, &auto("0"));
    assert!(mapped > 20 && on_cpu == 0 && on_device > 20, "the bus is faster");
    // What the request says stays, and so does a typo.
    let with = |word| PlacementRequest { offload_exec: text(word), ..auto("0") };
    assert_eq!(place(25_000, 60_000, &with("pcie"))[2], 0);
    assert_eq!(place(25_000, 15_000, &with("cpu"))[1], 0);
    assert_eq!(place(25_000, 60_000, &with("cpuu")), place(25_000, 60_000, &with("pcie")));
    let number = PlacementRequest { gpu_layer_budget: text("30"), ..auto("0") };
    assert_eq!(place(25_000, 60_000, &number), [30, 34, 0], "a number moves nothing to the CPU");
}

#[test]
fn nothing_spills_that_fits_unless_the_gpu_is_the_slower_one() {
    let by = |link, cpu| plan(&model(64), &measured(&[8000], link, cpu), &auto("0")).unwrap();
    assert_eq!(homes(&by(25_000, 60_000)), [64, 0, 0]);
    // 100,000 MiB a second, of which decoding reaches 65 hundredths, against 90 of 400,000.
    let without = by(25_000, 400_000);
    assert_eq!((homes(&without), without.stages.len()), ([0, 0, 64], 1), "{without:?}");
    let over_the_bus = by(300_000, 1);
    assert_eq!(homes(&over_the_bus), [0, 64, 0]);
}

/// What a request says of GPUs does not keep layers from a CPU that is faster.
#[test]
fn the_cpu_alone_is_weighed_whatever_is_said_of_gpus() {
    let fast = measured(&[8000, 8000], 25_000, 400_000);
    let place = |request: PlacementRequest| plan(&model(64), &fast, &request).unwrap();
    for request in [
        PlacementRequest { vram_limit: text("4GiB"), ..auto("0,1") },
        PlacementRequest { split: text("auto"), ..auto("0,1") },
        PlacementRequest { split: text("bytes:4GiB,4GiB"), ..auto("0,1") },
        PlacementRequest { pp: Some(2), ..auto("0,1") },
        PlacementRequest { offload_exec: text("cpu"), vram_limit: text("4GiB"), ..auto("0") },
    ] {
        let alone = place(request.clone());
        assert_eq!((homes(&alone), alone.stages.len()), ([0, 0, 64], 1), "{request:?}");
    }
    let workers = PlacementRequest { pp: Some(1), cpu_workers: Some(3), ..auto("0,1") };
    assert_eq!(counts(&place(workers)), [22, 21, 21]);
    let why = |request| place(request).stages[0].why.clone();
    assert!(why(auto("0,1")).contains("every budget that fits with 2 GPUs and of the CPU alone"));
    let on_bus = why(PlacementRequest { offload_exec: text("pcie"), ..auto("0") });
    assert!(on_bus.contains("fits with 1 GPU, as was measured"), "the CPU was not asked for: {on_bus}");
}

#[test]
fn the_reason_has_the_numbers_it_was_found_by() {
    let plan = plan(&model(64), &measured(&[500, 500], 25_600, 61_440), &auto("0,1")).unwrap();
    let why = &plan.stages[0].why;
    for part in
        ["device 1 reads 97.7 GiB/s", "25.0 GiB/s of the host's", "the CPU 60.0 GiB/s", "ms for a token"]
    {
        assert!(why.contains(part), "{why}");
    }
}

/// Layers of 65 MiB at 65 % of 100,000 MiB a second, one of 88 MiB over the bus at 88 % of 10,000 or of 54 MiB with the CPU at 90 %
/// of as many, and a hop between the stages.
#[test]
fn time_is_that_of_bytes_at_the_share_of_the_speed_that_is_reached() {
    let mut bare = model(2);
    bare.layers.iter_mut().for_each(|layer| {
        layer.gpu.weights = 65 * MIB;
        layer.gpu.mapped = 88 * MIB;
        (layer.weights, layer.kv_elements, layer.state_values) = (54 * MIB, 0, 0);
    });
    (bare.gpu_head_bytes, bare.head_bytes) = (0, 0);
    let host = measured(&[8000], 10_000, 10_000);
    let time = |budget, offload| {
        let request =
            PlacementRequest { gpu_layer_budget: text(budget), offload_exec: text(offload), ..on("0") };
        token_time(&plan(&bare, &host, &request).unwrap(), &host).unwrap().0
    };
    assert_eq!(time("2", "pcie"), 2_000_000_000, "1 ms each");
    assert_eq!(time("1", "pcie"), 1_000_000_000 + 10_000_000_000);
    assert_eq!(time("1", "cpu"), 1_000_000_000 + 6_000_000_000 + 1_500_000 + 5_000_000);
    assert_eq!(token_time(&plan(&bare, &host, &on("0")).unwrap(), &machine()), None, "not measured");
}

/// A layer more on the CPU costs answers little, and prompts of all layers there gain much by it.
#[test]
fn a_layer_makes_room_for_prompts_where_that_pays() {
    let at = |products| Machine { products, ..measured(&[450], 25_000, 60_000) };
    let request = PlacementRequest { offload_exec: text("cpu"), ..auto("0") };
    let place = |products, request: &PlacementRequest| plan(&model(64), &at(products), request).unwrap();
    let most = place(Some(u64::MAX), &request);
    assert!(most.lift.is_none(), "{most:?}");
    let slow = place(Some(20_000_000_000), &request);
    let [resident, _, on_cpu] = homes(&slow);
    let fewer = homes(&most)[0] - resident;
    assert!(slow.lift.is_some() && (1..20).contains(&fewer), "{fewer} layers less");
    assert_eq!(slow.lift.as_ref().unwrap().layers, 0..on_cpu);
    // What is given up for it is asked for, or nothing is.
    let never = PlacementRequest { offload_prompts: text("cpu"), ..request };
    assert_eq!(homes(&place(Some(20_000_000_000), &never)), homes(&most));
}

/// Keys and values of layers that a GPU reads stay with it, so that more of them fit where the CPU runs the others.
#[test]
fn without_measured_speeds_every_way_is_tried() {
    let place = |mib, more: PlacementRequest| plan(&model(64), &with_gpus_of(&[mib]), &more);
    let long = || PlacementRequest { max_seq: Some(1024), ..auto("0") };
    let pcie = || PlacementRequest { offload_exec: text("pcie"), ..long() };
    assert!(place(130, pcie()).is_err());
    let [on_device, mapped, on_cpu] = homes(&place(130, long()).unwrap());
    assert!(on_device > 0 && mapped == 0 && on_cpu > 0);
    // The head alone is too much for the card.
    assert_eq!(homes(&place(20, long()).unwrap()), [0, 0, 64]);
    assert_eq!(homes(&place(8000, long()).unwrap()), [64, 0, 0]);
}

#[test]
fn what_would_fit_is_told_when_no_budget_does() {
    let refused = |machine: &Machine, request: &PlacementRequest| {
        let refusal = plan(&model(64), machine, request).unwrap_err();
        let Refusal::Memory(shortage) = &refusal else { panic!("{refusal:?}") };
        (shortage.advice, refusal.to_string())
    };
    // Keys and values of 64 layers stay with the first GPU unless layers go to the CPU.
    let unmeasured = with_gpus_of(&[130]);
    let request = PlacementRequest { max_seq: Some(1024), gpu_layer_budget: None, ..auto("0") };
    let (advice, sentence) = refused(&unmeasured, &request);
    assert!(advice.on_cpu && advice.budget.is_some() && !advice.no_budget, "{advice:?}");
    assert!(sentence.contains("with offload_exec `cpu` would fit"), "{sentence}");
    // The head alone is too much for the card, and both are for a poor host.
    let tiny = with_gpus_of(&[20]);
    let all = PlacementRequest { gpu_layer_budget: None, ..auto("0") };
    let (_, sentence) = refused(&tiny, &all);
    assert!(sentence.contains("gpu_layer_budget 0 with offload_exec `cpu` would fit, all layers spill"));
    let zero = PlacementRequest { gpu_layer_budget: text("0"), offload_exec: text("cpu"), ..all.clone() };
    assert!(plan(&model(64), &tiny, &zero).is_ok());
    // No number of layers goes with a limit that would be about no GPU.
    let limited = PlacementRequest { vram_limit: text("20MiB"), ..all.clone() };
    let (advice, sentence) = refused(&tiny, &limited);
    assert!(advice.auto && sentence.contains("gpu_layer_budget `auto` would fit"), "{sentence}");
    let limited = PlacementRequest { gpu_layer_budget: text("auto"), ..limited };
    assert!(plan(&model(64), &tiny, &limited).is_ok());
    let (advice, sentence) = refused(&Machine { available_bytes: 20 * MIB, ..tiny }, &all);
    assert!(
        advice.no_budget && sentence.contains("no gpu_layer_budget would fit, `auto` neither"),
        "{sentence}"
    );
    // Half of the layers, 320 MiB, and the head are too much for the smaller card.
    let uneven = with_gpus_of(&[370, 900]);
    let request = PlacementRequest { gpu_layer_budget: None, ..auto("1,0") };
    let (advice, sentence) = refused(&uneven, &request);
    assert!(advice.split && sentence.contains("split `auto` would fit"), "{sentence}");
    assert!(plan(&model(64), &uneven, &PlacementRequest { split: text("auto"), ..request }).is_ok());
}

/// A GPU whose memory is the host's may have no budget but none at all.
#[test]
fn no_budget_is_spoken_of_where_none_is_allowed() {
    let mut machine = with_gpus_of(&[370]);
    machine.gpus.gpus[0].integrated = true;
    let request = PlacementRequest { gpu_layer_budget: None, ..auto("0") };
    let sentence = |machine: &Machine| plan(&model(64), machine, &request).unwrap_err().to_string();
    assert!(sentence(&machine).contains("gpu_layer_budget 0 with offload_exec `cpu` would fit"));
    machine.available_bytes = 370 * MIB;
    assert!(!sentence(&machine).contains("gpu_layer_budget"), "{}", sentence(&machine));
}

fn with_gpus_of(mib: &[u64]) -> Machine {
    let gpus = mib.iter().enumerate().map(|(index, mib)| gpu(index, mib * MIB)).collect();
    Machine { gpus: GpuSurvey { gpus, looked_for: vec![] }, ..machine() }
}
