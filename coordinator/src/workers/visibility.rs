//! Which GPUs a worker process may see: its own, and the one whose memory it writes into.
//!
//! A driver that sees one card opens one: no context, no memory and no failure of a card that is another worker's business. Cards
//! are named by id, which means the same whatever the user's own variables hide or reorder: numbers in those are relative to one
//! another. What a worker sees has other numbers than what the coordinator saw; it looks for its card's address and id.

use super::links::{Link, LinkPath};
use spillway_protocol::plan::{GpuDevice, Plan};
use std::process::Command;

/// How a driver's libraries are told what they may see.
struct Stack {
    provider: &'static str,
    /// Takes ids.
    variable: &'static str,
    /// Would choose again, by number, among what the first leaves.
    others: &'static [&'static str],
    /// What an id looks like that the variable takes, without its prefix.
    is_id: fn(&str) -> bool,
}

const STACKS: [Stack; 2] = [
    Stack {
        provider: "amd",
        variable: "ROCR_VISIBLE_DEVICES",
        others: &["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"],
        // Cards without an id of their own all have the same something else.
        is_id: |id| id.len() == 16 && id.bytes().all(|byte| byte.is_ascii_hexdigit()),
    },
    Stack {
        provider: "cuda",
        variable: "CUDA_VISIBLE_DEVICES",
        others: &[],
        is_id: |id| id.len() == 36 && id.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit()),
    },
];

/// Variables of a worker's environment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Visibility {
    set: Option<(&'static str, String)>,
    removed: &'static [&'static str],
}

impl Visibility {
    /// What the worker of a stage may see. Nothing is changed where cards cannot be named by id: then it sees what this process
    /// sees.
    pub fn of(plan: &Plan, stage: usize, links: &[Link]) -> Visibility {
        let device = |stage: usize| plan.stages.get(stage)?.device();
        let Some(own) = device(stage) else { return Visibility::default() };
        let writes_on = links.iter().any(|link| link.from == stage && link.path == LinkPath::Peer);
        let next = device(stage + 1).filter(|next| writes_on && *next != own);
        Self::only(own, next).unwrap_or_default()
    }

    fn only(own: &GpuDevice, next: Option<&GpuDevice>) -> Option<Visibility> {
        let stack = STACKS.iter().find(|stack| stack.provider == own.provider)?;
        let name = |device: &GpuDevice| {
            let id = device.uuid.as_deref().filter(|id| (stack.is_id)(id))?;
            // A slice of a card has an id of its own, which is not that of a GPU.
            (!device.name.contains(" MIG ")).then(|| format!("GPU-{id}"))
        };
        let names: Option<Vec<String>> = std::iter::once(own).chain(next).map(name).collect();
        Some(Visibility { set: Some((stack.variable, names?.join(","))), removed: stack.others })
    }

    /// Puts the variables into the environment of a process that is about to be started.
    pub fn apply(&self, command: &mut Command) {
        for name in self.removed {
            command.env_remove(name);
        }
        if let Some((name, value)) = &self.set {
            command.env(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_protocol::plan::{
        ActivationType, Execution, KvType, Limits, PLAN_VERSION, PlannedModel, Stage, StageBytes,
    };

    fn gpu(provider: &str, uuid: Option<&str>) -> Execution {
        Execution::Gpu {
            device: GpuDevice {
                index: 0,
                provider: provider.into(),
                ordinal: 0,
                name: "GPU".into(),
                arch: "gfx1100".into(),
                pci: "0000:03:00.0".into(),
                uuid: uuid.map(str::to_owned),
                driver: 1,
            },
        }
    }

    fn plan(executions: &[Execution]) -> Plan {
        let stage = |(index, execution): (usize, &Execution)| Stage {
            layers: index..index + 1,
            embed: false,
            head: false,
            execution: execution.clone(),
            residency: vec![],
            bytes: StageBytes::default(),
            why: String::new(),
        };
        Plan {
            version: PLAN_VERSION,
            model: PlannedModel {
                path: "m".into(),
                file_bytes: 0,
                architecture: "llama".into(),
                layers: executions.len(),
                d_model: 1,
                vocab: 1,
                context_length: 1,
            },
            limits: Limits {
                max_seq: 1,
                max_sequences: 1,
                kv_blocks: 1,
                kv_type: KvType::F16,
                activations: ActivationType::Int8,
                max_step_tokens: 1,
                max_logit_rows: 1,
            },
            peer_copies: true,
            stages: executions.iter().enumerate().map(stage).collect(),
            lift: None,
            warnings: vec![],
        }
    }

    fn links(paths: &[LinkPath]) -> Vec<Link> {
        paths.iter().enumerate().map(|(from, &path)| Link { from, path, reason: None }).collect()
    }

    /// Variable and value of every stage.
    fn seen(executions: &[Execution], paths: &[LinkPath]) -> Vec<Option<(&'static str, String)>> {
        let (plan, links) = (plan(executions), links(paths));
        (0..executions.len()).map(|stage| Visibility::of(&plan, stage, &links).set).collect()
    }

    const A: &str = "00a1b2c3d4e5f607";
    const B: &str = "10a1b2c3d4e5f607";
    const NVIDIA: &str = "05050505-0505-0505-0505-050500000002";

    fn rocr(ids: &str) -> Option<(&'static str, String)> {
        Some(("ROCR_VISIBLE_DEVICES", ids.to_owned()))
    }

    /// Its own card and no other; with peer copies also the card that it writes into, its own first.
    #[test]
    fn a_worker_sees_its_card_and_the_one_it_writes_into() {
        let two = [gpu("amd", Some(A)), gpu("amd", Some(B))];
        let (a, b) = (format!("GPU-{A}"), format!("GPU-{B}"));
        assert_eq!(seen(&two, &[LinkPath::Staged]), [rocr(&a), rocr(&b)]);
        assert_eq!(seen(&two, &[LinkPath::Peer]), [rocr(&format!("{a},{b}")), rocr(&b)]);
        let shared = [gpu("amd", Some(A)), gpu("amd", Some(A))];
        assert_eq!(seen(&shared, &[LinkPath::Peer]), [rocr(&a), rocr(&a)], "one card, named once");
        let nvidia = gpu("cuda", Some(NVIDIA));
        let expected = Some(("CUDA_VISIBLE_DEVICES", format!("GPU-{NVIDIA}")));
        let mixed = [Execution::Cpu { threads: 1, node: None }, nvidia];
        assert_eq!(seen(&mixed, &[]), [None, expected], "a CPU worker's environment stays");
    }

    /// Variables that number what is left would hide the card: `HIP_VISIBLE_DEVICES=1` beside one visible card is none.
    #[test]
    fn numbers_of_the_user_do_not_count_a_second_time() {
        let plan = plan(&[gpu("amd", Some(A))]);
        let mut command = Command::new("worker");
        command.env("HIP_VISIBLE_DEVICES", "1").env("GPU_DEVICE_ORDINAL", "1").env("OTHER", "1");
        Visibility::of(&plan, 0, &[]).apply(&mut command);
        let mut environment: Vec<_> = command
            .get_envs()
            .map(|(name, value)| (name.to_str().unwrap(), value.map(|v| v.to_str().unwrap())))
            .collect();
        environment.sort_unstable();
        let own = format!("GPU-{A}");
        assert_eq!(
            environment,
            [
                ("CUDA_VISIBLE_DEVICES", None),
                ("GPU_DEVICE_ORDINAL", None),
                ("HIP_VISIBLE_DEVICES", None),
                ("OTHER", Some("1")),
                ("ROCR_VISIBLE_DEVICES", Some(own.as_str())),
            ]
        );
    }

    /// What cannot be named stays visible as it was: the worker looks for its card itself.
    #[test]
    fn nothing_is_hidden_where_ids_do_not_name_cards() {
        for execution in [
            gpu("amd", None),
            // What HIP makes of `GPU-XX`.
            gpu("amd", Some("58580000-0000-0000-0000-000000000000")),
            gpu("cuda", Some(A)),
            gpu("emulated:ids=1", Some(NVIDIA)),
        ] {
            assert_eq!(seen(std::slice::from_ref(&execution), &[]), [None], "{execution:?}");
        }
        let mut slice = gpu("cuda", Some(NVIDIA));
        if let Execution::Gpu { device } = &mut slice {
            device.name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb".into();
        }
        assert_eq!(seen(&[slice], &[]), [None]);
        let half = [gpu("amd", Some(A)), gpu("amd", None)];
        assert_eq!(seen(&half, &[LinkPath::Peer]), [None, None], "both or neither");
    }
}
