//! What the kernel says about a GPU: its memory (HIP on AMD counts only its own allocations; the kernel counts everyone's) and
//! its place on the bus.

use super::{Memory, PciAddress};
use serde::{Deserialize, Serialize};
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

/// A device's place on the bus, as far as the system names it. Link speeds fall while a device idles.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BusFacts {
    /// Memory node that the slot belongs to.
    pub numa_node: Option<u32>,
    /// Speed of a lane now, in the kernel's words: `16.0 GT/s PCIe`.
    pub link_speed: Option<String>,
    /// Lanes now.
    pub link_width: Option<u32>,
    /// The same at most, for the device and the slot.
    pub max_link_speed: Option<String>,
    /// The same at most, for the device and the slot.
    pub max_link_width: Option<u32>,
}

impl BusFacts {
    /// Of the device at an address.
    pub fn of(address: PciAddress) -> Self {
        Self::read(Path::new(DEVICES), address)
    }

    fn read(devices: &Path, address: PciAddress) -> Self {
        let folder = devices.join(address.to_string());
        let text = |file: &str| {
            let text = std::fs::read_to_string(folder.join(file)).ok()?;
            // What a bridge or a virtual machine hides is "Unknown", or a negative number, or no lanes.
            Some(text.trim().to_owned()).filter(|text| !text.is_empty() && !text.starts_with("Unknown"))
        };
        let number = |file: &str| text(file)?.parse::<u32>().ok();
        Self {
            numa_node: number("numa_node"),
            link_speed: text("current_link_speed"),
            link_width: number("current_link_width").filter(|lanes| *lanes > 0),
            max_link_speed: text("max_link_speed"),
            max_link_width: number("max_link_width").filter(|lanes| *lanes > 0),
        }
    }
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

    /// What the system does not say is absent, not zero.
    #[test]
    fn the_bus_is_described_as_far_as_it_is_known() {
        let devices = tempfile::tempdir().unwrap();
        let address = PciAddress { domain: 0, bus: 3, device: 0 };
        assert_eq!(BusFacts::read(devices.path(), address), BusFacts::default());
        let folder = devices.path().join("0000:03:00.0");
        std::fs::create_dir(&folder).unwrap();
        let write = |file: &str, text: &str| std::fs::write(folder.join(file), text).unwrap();
        write("numa_node", "-1\n");
        write("current_link_speed", "16.0 GT/s PCIe\n");
        write("current_link_width", "8\n");
        write("max_link_speed", "Unknown\n");
        let facts = BusFacts::read(devices.path(), address);
        let link_speed = Some("16.0 GT/s PCIe".to_owned());
        assert_eq!(facts, BusFacts { link_speed, link_width: Some(8), ..BusFacts::default() });
    }
}
