//! What the host offers, as plain numbers, so that planning stays a pure function.

use super::{Gpu, GpuSurvey};
use spillway_protocol::plan::{Execution, GpuDevice, Plan, Stage};
use std::fs;
use std::path::Path;

/// CPUs of one NUMA node that this process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNode {
    /// Node number of the system.
    pub id: u32,
    /// Usable CPUs of the node.
    pub cpus: usize,
}

/// The host, as far as placement is concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Usable CPUs: affinity mask and cgroup quota considered.
    pub cpus: usize,
    /// NUMA nodes with usable CPUs, in order of their number; empty when the system names none.
    pub nodes: Vec<NumaNode>,
    /// Memory that can be allocated without swapping, in bytes.
    pub available_bytes: u64,
    /// Bytes a second that the threads of CPU workers read together, where that was measured.
    pub memory_bandwidth: Option<u64>,
    /// Multiplications a second in which the threads of CPU workers run prompts, where that was measured.
    pub products: Option<u64>,
    /// GPUs, as far as they were looked for.
    pub gpus: GpuSurvey,
}

impl Machine {
    /// Reads the host this process runs on. What cannot be read counts as absent: one CPU, no NUMA node, no limit on
    /// memory. GPUs are not looked for, and nothing is measured.
    pub fn detect() -> Machine {
        Machine {
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            nodes: numa_nodes(Path::new("/sys/devices/system/node"), &allowed_cpus()),
            available_bytes: available_memory(),
            memory_bandwidth: None,
            products: None,
            gpus: GpuSurvey::default(),
        }
    }
}

impl Machine {
    /// The GPU that a plan names.
    pub(super) fn gpu(&self, device: &GpuDevice) -> Option<&Gpu> {
        self.gpus.gpus.iter().find(|gpu| is_same(gpu, device))
    }

    /// Counts the memory of a plan as free: it will be given back before the next plan is loaded.
    pub fn give_back(&mut self, plan: &Plan) {
        for Stage { bytes, execution, .. } in &plan.stages {
            let free = match execution {
                Execution::Cpu { .. } => Some(&mut self.available_bytes),
                Execution::Gpu { device } => {
                    let gpu = self.gpus.gpus.iter_mut().find(|gpu| is_same(gpu, device));
                    gpu.map(|gpu| &mut gpu.free_bytes)
                }
            };
            if let Some(free) = free {
                *free = free.saturating_add(bytes.of_processor());
            }
            self.available_bytes = self.available_bytes.saturating_add(bytes.of_host());
        }
    }
}

/// Whether a GPU is the one that a plan of the same search names.
fn is_same(gpu: &Gpu, device: &GpuDevice) -> bool {
    (&gpu.device.provider, gpu.device.ordinal) == (&device.provider, device.ordinal)
}

/// CPUs in the affinity mask of this process.
fn allowed_cpus() -> Vec<usize> {
    let Ok(set) = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)) else { return Vec::new() };
    (0..nix::sched::CpuSet::count()).filter(|&cpu| set.is_set(cpu).unwrap_or(false)).collect()
}

fn numa_nodes(root: &Path, allowed: &[usize]) -> Vec<NumaNode> {
    let Ok(entries) = fs::read_dir(root) else { return Vec::new() };
    let mut nodes: Vec<NumaNode> = entries
        .flatten()
        .filter_map(|entry| {
            let id = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let list = parse_cpu_list(&fs::read_to_string(entry.path().join("cpulist")).ok()?);
            let cpus = list.iter().filter(|cpu| allowed.contains(cpu)).count();
            (cpus > 0).then_some(NumaNode { id, cpus })
        })
        .collect();
    nodes.sort_by_key(|node| node.id);
    nodes
}

/// Reads the kernel's list format, `0-3,8`.
fn parse_cpu_list(text: &str) -> Vec<usize> {
    text.trim()
        .split(',')
        .filter_map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            Some(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?)
        })
        .flatten()
        .collect()
}

/// The smaller of what the kernel calls available and what the control group still allows.
fn available_memory() -> u64 {
    let host = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_bytes(&text, "MemAvailable"));
    let group = group_headroom(Path::new("/sys/fs/cgroup"));
    host.into_iter().chain(group).min().unwrap_or(u64::MAX)
}

fn meminfo_bytes(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Room left under `memory.max` of the group this process is in (cgroup v2). Page cache counts as used there although
/// the kernel gives it back, so inactive file pages are added again.
fn group_headroom(root: &Path) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(root.join(name)).ok()?.trim().parse::<u64>().ok();
    let limit = number("memory.max")?;
    let used = number("memory.current")?;
    let stat = fs::read_to_string(root.join("memory.stat")).unwrap_or_default();
    let cache = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse::<u64>().ok());
    Some(limit.saturating_sub(used.saturating_sub(cache.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_read_as_the_kernel_writes_them() {
        assert_eq!(parse_cpu_list("0-3,8\n"), vec![0, 1, 2, 3, 8]);
        assert_eq!(parse_cpu_list("5"), vec![5]);
        assert!(parse_cpu_list("\n").is_empty(), "a node without CPUs");
    }

    #[test]
    fn nodes_count_only_cpus_that_may_be_used() {
        let root = tempfile::tempdir().unwrap();
        for (node, list) in [("node1", "4-7"), ("node0", "0-3"), ("node2", "")] {
            fs::create_dir(root.path().join(node)).unwrap();
            fs::write(root.path().join(node).join("cpulist"), list).unwrap();
        }
        let nodes = numa_nodes(root.path(), &[0, 1, 4]);
        assert_eq!(nodes, vec![NumaNode { id: 0, cpus: 2 }, NumaNode { id: 1, cpus: 1 }]);
    }

    #[test]
    fn available_memory_is_a_field_of_meminfo() {
        assert_eq!(meminfo_bytes("MemTotal: 9 kB\nMemAvailable:    2 kB\n", "MemAvailable"), Some(2048));
        assert_eq!(meminfo_bytes("MemTotal: 9 kB\n", "MemAvailable"), None);
    }

    #[test]
    fn a_control_group_limits_memory() {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(root.path().join(name), text).unwrap();
        write("memory.max", "1000\n");
        write("memory.current", "700\n");
        write("memory.stat", "anon 100\ninactive_file 200\n");
        assert_eq!(group_headroom(root.path()), Some(500));
        write("memory.max", "max\n");
        assert_eq!(group_headroom(root.path()), None, "no limit");
    }

    #[test]
    fn this_host_has_a_cpu_and_memory() {
        let machine = Machine::detect();
        assert!(machine.cpus >= 1 && machine.available_bytes > 0);
    }
}
