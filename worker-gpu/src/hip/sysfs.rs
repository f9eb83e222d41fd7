//! What the kernel says about a GPU's memory. HIP on AMD counts only its own allocations; the kernel counts everyone's.

use super::{Memory, PciAddress};
use std::path::Path;

/// Where devices are listed by bus address.
pub(super) const DEVICES: &str = "/sys/bus/pci/devices";

/// Memory of the GPU at an address, by amdgpu's files. `None` for other drivers.
pub(super) fn memory(devices: &Path, address: PciAddress) -> Option<Memory> {
    let folder = devices.join(address.to_string());
    let read = |file: &str| -> Option<usize> {
        std::fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()
    };
    let (total, used) = (read("mem_info_vram_total")?, read("mem_info_vram_used")?);
    Some(Memory { free: total.saturating_sub(used), total })
}

impl Memory {
    /// The smaller of two accounts, each in itself.
    pub(super) fn at_most(self, other: Option<Memory>) -> Memory {
        let other = other.unwrap_or(self);
        Memory { free: self.free.min(other.free), total: self.total.min(other.total) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A compositor's memory is invisible to HIP: the kernel's smaller figure counts. Anything unreadable is no figure.
    #[test]
    fn the_smaller_account_counts() {
        let devices = tempfile::tempdir().unwrap();
        let address = PciAddress { domain: 0, bus: 3, device: 0 };
        let by_hip = Memory { free: 900, total: 1000 };
        assert_eq!(by_hip.at_most(memory(devices.path(), address)), by_hip);
        let folder = devices.path().join("0000:03:00.0");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("mem_info_vram_total"), "1000\n").unwrap();
        std::fs::write(folder.join("mem_info_vram_used"), "garbage\n").unwrap();
        assert_eq!(by_hip.at_most(memory(devices.path(), address)), by_hip);
        std::fs::write(folder.join("mem_info_vram_used"), "400\n").unwrap();
        assert_eq!(by_hip.at_most(memory(devices.path(), address)), Memory { free: 600, total: 1000 });
    }
}
