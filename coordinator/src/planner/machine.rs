//! What the host offers, as plain numbers, so that planning stays a pure function.

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
    /// NUMA nodes with usable CPUs, in order of their number.
    pub nodes: Vec<NumaNode>,
    /// Memory that can be allocated without swapping, in bytes.
    pub available_bytes: u64,
}
