//! A plan in words: which process runs which layers, and what every byte is for.

use spillway_protocol::plan::{Execution, GpuDevice, Lift, Plan, Stage, StageBytes};
use std::fmt::Write as _;

/// Bytes in the largest binary unit that keeps three digits.
pub fn bytes(count: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];
    let (unit, size) = UNITS.iter().find(|(_, size)| count >= *size).unwrap_or(&UNITS[3]);
    match size {
        1 => format!("{count} B"),
        size => format!("{:.1} {unit}", count as f64 / *size as f64),
    }
}

const HEADINGS: [&str; 11] = [
    "stage",
    "process",
    "layers",
    "threads",
    "weights",
    "embedding",
    "KV",
    "states",
    "scratch",
    "buffers",
    "mapped",
];

/// The plan as a table for people, ending with a line break.
pub fn table(plan: &Plan) -> String {
    let mut rows = vec![HEADINGS.map(String::from)];
    rows.extend(plan.stages.iter().enumerate().map(|(index, stage)| row(index, stage)));
    let mut text = header(plan);
    for row in &rows {
        let cells: Vec<String> = (0..HEADINGS.len())
            .map(|column| {
                let width = rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
                format!("{:<width$}", row[column])
            })
            .collect();
        let _ = writeln!(text, "  {}", cells.join("  ").trim_end());
    }
    for (index, stage) in plan.stages.iter().enumerate() {
        let _ = writeln!(text, "  why {index}: {}", stage.why);
    }
    if let Some(Lift { layers, stage, from, why, .. }) = &plan.lift {
        let last = layers.end.saturating_sub(1);
        let _ = writeln!(
            text,
            "  prompts: of {from} new tokens or more, stage {stage} runs layers {}-{last}, too: {why}",
            layers.start
        );
    }
    for warning in &plan.warnings {
        let _ = writeln!(text, "  warning: {warning}");
    }
    for memory in memories(plan) {
        let _ = writeln!(text, "  {memory}");
    }
    text
}

/// What the plan takes of every device and of the host.
fn memories(plan: &Plan) -> Vec<String> {
    let mut devices: Vec<(&GpuDevice, u64)> = Vec::new();
    let (mut host, mut locked) = (0, 0);
    for Stage { execution, bytes, .. } in &plan.stages {
        host += bytes.of_host();
        locked += bytes.pinned + bytes.mapped;
        match execution {
            Execution::Cpu { .. } => host += bytes.of_processor(),
            Execution::Gpu { device } => match devices.iter_mut().find(|(other, _)| *other == device) {
                Some((_, sum)) => *sum += bytes.of_processor(),
                None => devices.push((device, bytes.of_processor())),
            },
        }
    }
    let device = |(device, sum): (&GpuDevice, u64)| {
        format!("device {} ({}): {}", device.index, device.name, bytes(sum))
    };
    let of_host = match locked {
        0 => format!("host: {}; the embedding stays in the mapped file", bytes(host)),
        locked => format!(
            "host: {}, {} of it page-locked; the embedding stays in the mapped file",
            bytes(host),
            bytes(locked)
        ),
    };
    devices.into_iter().map(device).chain([of_host]).collect()
}

fn header(plan: &Plan) -> String {
    let (model, limits) = (&plan.model, &plan.limits);
    format!(
        "{} · {} · {} layers, width {}, vocabulary {}\n  max_seq {} of {} · {} sequences · {} KV blocks of {:?} · {:?} activations \
         · steps of up to {} tokens\n",
        model.path.display(),
        model.architecture,
        model.layers,
        model.d_model,
        model.vocab,
        limits.max_seq,
        model.context_length,
        limits.max_sequences,
        limits.kv_blocks,
        limits.kv_type,
        limits.activations,
        limits.max_step_tokens,
    )
}

fn row(index: usize, stage: &Stage) -> [String; HEADINGS.len()] {
    let StageBytes { weights, embedding, kv, state, scratch, rings, pinned, mapped } = stage.bytes;
    let (process, threads) = match &stage.execution {
        Execution::Cpu { threads, node: Some(node) } => {
            (format!("worker-cpu on node {node}"), threads.to_string())
        }
        Execution::Cpu { threads, node: None } => ("worker-cpu".to_owned(), threads.to_string()),
        Execution::Gpu { device } => {
            (format!("worker-gpu on device {} ({})", device.index, device.name), "-".to_owned())
        }
    };
    let [first, last] = [stage.layers.start, stage.layers.end.saturating_sub(1)];
    let ends = match (stage.embed, stage.head) {
        (true, true) => " + embedding + head",
        (true, false) => " + embedding",
        (false, true) => " + head",
        (false, false) => "",
    };
    let sizes = [weights, embedding, kv, state, scratch, rings + pinned, mapped].map(bytes);
    let [weights, embedding, kv, state, scratch, buffers, mapped] = sizes;
    let layers = format!("{first}-{last}{ends}");
    [index.to_string(), process, layers, threads, weights, embedding, kv, state, scratch, buffers, mapped]
}
