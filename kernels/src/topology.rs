//! Which processors this process may use: affinity, physical cores, cgroup quota, NUMA nodes.
//!
//! Sixteen threads on a quota of four CPUs, or two on one core, are slower than fewer threads, many times so with
//! fork/join work: a thread that the scheduler stops holds up all others.

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Threads to use by default: physical cores that the affinity mask allows, at most the cgroup CPU quota rounded
/// down, at least 1.
pub fn available_threads() -> usize {
    threads_under(Path::new("/"), &allowed_cpus())
}

/// CPUs the calling thread may run on, ascending. Never empty.
pub fn allowed_cpus() -> Vec<usize> {
    let set = sched_getaffinity(Pid::from_raw(0)).unwrap_or_default();
    let cpus: Vec<_> = (0..CpuSet::count()).filter(|&cpu| set.is_set(cpu).unwrap_or(false)).collect();
    if cpus.is_empty() { vec![0] } else { cpus }
}

/// Lets the calling thread, and threads it starts later, run on `cpus` only.
///
/// # Errors
/// The system's error when the list is empty or names no CPU that the process may use.
pub fn bind_current_thread(cpus: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        set.set(cpu)?;
    }
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}

/// A memory node and the CPUs near it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNode {
    /// The system's number.
    pub id: u32,
    /// CPUs of the node, ascending; empty for a node of memory only.
    pub cpus: Vec<usize>,
}

/// NUMA nodes of the machine by ascending id; empty when the system does not say.
pub fn numa_nodes() -> Vec<NumaNode> {
    numa_nodes_under(Path::new("/"))
}

fn numa_nodes_under(root: &Path) -> Vec<NumaNode> {
    let Ok(entries) = fs::read_dir(root.join("sys/devices/system/node")) else { return Vec::new() };
    let mut nodes: Vec<_> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let id = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let cpus = parse_cpu_list(&fs::read_to_string(entry.path().join("cpulist")).ok()?)?;
            Some(NumaNode { id, cpus })
        })
        .collect();
    nodes.sort_by_key(|node| node.id);
    nodes
}

fn threads_under(root: &Path, allowed: &[usize]) -> usize {
    let cores = physical_cores(root, allowed);
    cgroup_quota(root).map_or(cores, |quota| cores.min(quota)).max(1)
}

/// Distinct cores behind `allowed`. CPUs that share a core name the same sibling list; a CPU without one counts as a
/// core of its own.
fn physical_cores(root: &Path, allowed: &[usize]) -> usize {
    let first_sibling = |cpu: usize| {
        let path = root.join(format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"));
        let list = parse_cpu_list(&fs::read_to_string(path).ok()?)?;
        list.first().copied()
    };
    allowed.iter().map(|&cpu| first_sibling(cpu).unwrap_or(cpu)).collect::<BTreeSet<_>>().len()
}

/// Whole CPUs that the tightest cgroup above this process grants, version 2 or 1; `None` when nothing limits it.
fn cgroup_quota(root: &Path) -> Option<usize> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    groups
        .lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            if controllers.is_empty() {
                return tightest(&root.join("sys/fs/cgroup"), path, quota_v2);
            }
            let is_cpu = controllers.split(',').any(|controller| controller == "cpu");
            is_cpu.then(|| tightest(&root.join("sys/fs/cgroup/cpu"), path, quota_v1))?
        })
        .min()
}

/// Smallest quota of the group `path` and of the groups above it. Inside a container the path may lie outside the
/// mounted tree; then only the mount's root is there to ask.
fn tightest(mount: &Path, path: &str, quota: fn(&Path) -> Option<usize>) -> Option<usize> {
    let group = Path::new(path.trim_start_matches('/'));
    group.ancestors().filter_map(|dir| quota(&mount.join(dir))).min()
}

fn quota_v2(dir: &Path) -> Option<usize> {
    parse_cpu_max(&fs::read_to_string(dir.join("cpu.max")).ok()?)
}

fn quota_v1(dir: &Path) -> Option<usize> {
    let read = |name: &str| -> Option<i64> {
        let path: PathBuf = dir.join(name);
        fs::read_to_string(path).ok()?.trim().parse().ok()
    };
    whole_cpus(read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?)
}

/// `cpu.max` of cgroup version 2: `<quota|max> <period>`, microseconds.
fn parse_cpu_max(text: &str) -> Option<usize> {
    let mut fields = text.split_whitespace();
    let quota = fields.next()?.parse().ok()?;
    whole_cpus(quota, fields.next()?.parse().ok()?)
}

/// A quota as whole CPUs, rounded down but at least 1. Version 1 writes -1 for "no limit".
fn whole_cpus(quota: i64, period: i64) -> Option<usize> {
    (quota > 0 && period > 0).then(|| usize::try_from(quota / period).unwrap_or(usize::MAX).max(1))
}

/// The kernel's list format: `0-3,8,10-11`. `None` when the text is not such a list; an empty text is an empty list.
fn parse_cpu_list(text: &str) -> Option<Vec<usize>> {
    /// More CPUs than any machine has: a longer range is a damaged file.
    const LIMIT: usize = 1 << 16;
    let mut cpus = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last >= LIMIT {
            return None;
        }
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    cpus.dedup();
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine as files under a temporary root.
    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const SIBLINGS: &str = "topology/thread_siblings_list";

    /// Two threads per core: four CPUs are two cores, and the affinity mask counts, not the machine.
    #[test]
    fn counts_physical_cores() {
        let lists = ["0,2\n", "1,3\n", "0,2\n", "1,3\n"];
        let files: Vec<_> = lists
            .iter()
            .enumerate()
            .map(|(cpu, list)| (format!("sys/devices/system/cpu/cpu{cpu}/{SIBLINGS}"), *list))
            .collect();
        let files: Vec<_> = files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        let root = machine(&files);
        assert_eq!(threads_under(root.path(), &[0, 1, 2, 3]), 2);
        assert_eq!(threads_under(root.path(), &[0, 2]), 1);
        assert_eq!(threads_under(root.path(), &[0, 1]), 2);
        // CPUs that sysfs does not describe count one each.
        assert_eq!(threads_under(root.path(), &[8, 9, 10]), 3);
    }

    /// The tightest group on the way to the root wins; quotas round down but never to zero.
    #[test]
    fn honours_cgroup_v2_quota() {
        let root = machine(&[
            ("proc/self/cgroup", "0::/pod/app\n"),
            ("sys/fs/cgroup/pod/cpu.max", "250000 100000\n"),
            ("sys/fs/cgroup/pod/app/cpu.max", "max 100000\n"),
        ]);
        assert_eq!(threads_under(root.path(), &[0, 1, 2, 3, 4, 5, 6, 7]), 2);
        let root = machine(&[("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.max", "50000 100000\n")]);
        assert_eq!(threads_under(root.path(), &[0, 1, 2, 3]), 1);
    }

    /// Version 1 groups, with the no-limit marker.
    #[test]
    fn honours_cgroup_v1_quota() {
        let groups = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n";
        let limited = |quota: &'static str| {
            machine(&[
                ("proc/self/cgroup", groups),
                ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota),
                ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
            ])
        };
        assert_eq!(threads_under(limited("300000\n").path(), &[0, 1, 2, 3]), 3);
        assert_eq!(threads_under(limited("-1\n").path(), &[0, 1, 2, 3]), 4);
    }

    /// Nodes come in order of id, memory-only nodes included, other entries ignored.
    #[test]
    fn reads_numa_nodes() {
        let root = machine(&[
            ("sys/devices/system/node/node1/cpulist", "4-6,8\n"),
            ("sys/devices/system/node/node0/cpulist", "0-3\n"),
            ("sys/devices/system/node/node2/cpulist", "\n"),
            ("sys/devices/system/node/possible", "0-2\n"),
        ]);
        let nodes = numa_nodes_under(root.path());
        assert_eq!(nodes.iter().map(|n| n.id).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(nodes[0].cpus, [0, 1, 2, 3]);
        assert_eq!(nodes[1].cpus, [4, 5, 6, 8]);
        assert!(nodes[2].cpus.is_empty());
        assert!(numa_nodes_under(Path::new("/nonexistent")).is_empty());
    }

    /// Damaged lists are refused, not guessed at, and cannot ask for much memory.
    #[test]
    fn refuses_damaged_lists() {
        for bad in ["x", "1-", "-3", "0-99999999999999999999", "0-4000000000"] {
            assert_eq!(parse_cpu_list(bad), None, "{bad}");
        }
        assert_eq!(parse_cpu_max("max 100000"), None);
        assert_eq!(parse_cpu_max(""), None);
        assert_eq!(parse_cpu_max("100000 0"), None);
    }

    /// On this machine the answer is sane.
    #[test]
    fn this_machine() {
        let threads = available_threads();
        assert!(threads >= 1 && threads <= allowed_cpus().len());
    }
}
