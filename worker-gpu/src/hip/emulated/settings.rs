//! How the emulated device behaves: `wave=64,order=random/7,devices=2,memory=64MiB,fail-allocation=3`.

use std::fmt;

/// In which order the threads of a block get to run between barriers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LaneOrder {
    /// By number.
    #[default]
    Forward,
    /// By number, last first.
    Reverse,
    /// A permutation that the seed chooses.
    Random(u32),
}

/// Failures to inject, each at the n-th call of its kind, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Faults {
    /// This call that takes a resource (memory, registration, stream, event, module, graph) is out of memory.
    pub fail_allocation: Option<u64>,
    /// This kernel fails, which loses the device.
    pub fail_launch: Option<u64>,
    /// This kernel never ends: waits on its stream do not return.
    pub hang_launch: Option<u64>,
    /// From this call on the device is gone.
    pub lose_at_call: Option<u64>,
    /// Host memory cannot be registered.
    pub refuse_register: bool,
    /// Copies between devices report success and deliver garbage.
    pub garble_peer: bool,
    /// Memory of other processes cannot be opened.
    pub refuse_peer: bool,
}

/// Everything about the emulated device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Lanes of a wave: 32 or 64.
    pub wave: u32,
    /// Order of threads.
    pub order: LaneOrder,
    /// Number of devices.
    pub devices: u32,
    /// Bytes of memory of each device.
    pub memory: u64,
    /// Failures to inject.
    pub faults: Faults,
}

impl Default for Settings {
    fn default() -> Self {
        Self { wave: 32, order: LaneOrder::Forward, devices: 1, memory: 4 << 30, faults: Faults::default() }
    }
}

/// Units of sizes, largest first so that the shortest form is printed.
const UNITS: &[(&str, u64)] = &[("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("", 1)];

impl Settings {
    /// Reads `option=value` pairs separated by commas; an empty text is the default.
    ///
    /// # Errors
    /// A sentence that names the unknown option or the bad value.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut settings = Self::default();
        for pair in text.split(',').filter(|pair| !pair.is_empty()) {
            let (option, value) =
                pair.split_once('=').ok_or_else(|| format!("{pair:?} is not option=value"))?;
            settings.set(option, value).ok_or_else(|| format!("{option:?} cannot be {value:?}"))?;
        }
        Ok(settings)
    }

    fn set(&mut self, option: &str, value: &str) -> Option<()> {
        let nth = || value.parse().ok().filter(|n| *n > 0).map(Some);
        let faults = &mut self.faults;
        match option {
            "wave" => self.wave = value.parse().ok().filter(|wave| matches!(wave, 32 | 64))?,
            "order" => self.order = parse_order(value)?,
            "devices" => self.devices = value.parse().ok().filter(|devices| *devices <= 16)?,
            "memory" => self.memory = parse_size(value)?,
            "fail-allocation" => faults.fail_allocation = nth()?,
            "fail-launch" => faults.fail_launch = nth()?,
            "hang-launch" => faults.hang_launch = nth()?,
            "lose-at-call" => faults.lose_at_call = nth()?,
            "refuse-register" => faults.refuse_register = value.parse().ok()?,
            "garble-peer" => faults.garble_peer = value.parse().ok()?,
            "refuse-peer" => faults.refuse_peer = value.parse().ok()?,
            _ => return None,
        }
        Some(())
    }
}

fn parse_order(value: &str) -> Option<LaneOrder> {
    match value.split_once('/') {
        None if value == "forward" => Some(LaneOrder::Forward),
        None if value == "reverse" => Some(LaneOrder::Reverse),
        Some(("random", seed)) => seed.parse().ok().map(LaneOrder::Random),
        _ => None,
    }
}

fn parse_size(value: &str) -> Option<u64> {
    let (number, scale) =
        UNITS.iter().find_map(|(unit, scale)| value.strip_suffix(unit).map(|number| (number, scale)))?;
    number.parse::<u64>().ok()?.checked_mul(*scale)
}

impl fmt::Display for Settings {
    /// Prints what [`Settings::parse`] reads back.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = match self.order {
            LaneOrder::Forward => "forward".to_owned(),
            LaneOrder::Reverse => "reverse".to_owned(),
            LaneOrder::Random(seed) => format!("random/{seed}"),
        };
        let exact = UNITS.iter().find(|(_, scale)| self.memory.is_multiple_of(*scale));
        let (unit, scale) = exact.copied().unwrap_or(("", 1));
        write!(
            f,
            "wave={},order={order},devices={},memory={}{unit}",
            self.wave,
            self.devices,
            self.memory / scale
        )?;
        let faults = self.faults;
        for (option, nth) in [
            ("fail-allocation", faults.fail_allocation),
            ("fail-launch", faults.fail_launch),
            ("hang-launch", faults.hang_launch),
            ("lose-at-call", faults.lose_at_call),
        ] {
            if let Some(nth) = nth {
                write!(f, ",{option}={nth}")?;
            }
        }
        for (option, set) in [
            ("refuse-register", faults.refuse_register),
            ("garble-peer", faults.garble_peer),
            ("refuse-peer", faults.refuse_peer),
        ] {
            if set {
                write!(f, ",{option}=true")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker gets its device as text, so what is printed must be what is read.
    #[test]
    fn settings_survive_their_text() {
        for text in [
            "wave=32,order=forward,devices=1,memory=4GiB",
            "wave=64,order=random/7,devices=3,memory=1025KiB,fail-allocation=3,hang-launch=2",
            "wave=64,order=reverse,devices=1,memory=0GiB,refuse-register=true,garble-peer=true,refuse-peer=true",
        ] {
            assert_eq!(Settings::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Settings::parse("").unwrap(), Settings::default());
    }

    /// Every mistake is refused, and the refusal names it.
    #[test]
    fn mistakes_are_named() {
        for (text, named) in [
            ("wave=48", "wave"),
            ("order=random", "order"),
            ("memory=4TB", "4TB"),
            ("memory=99999999999GiB", "memory"),
            ("fail-launch=0", "fail-launch"),
            ("speed=fast", "speed"),
            ("wave", "option=value"),
        ] {
            assert!(Settings::parse(text).unwrap_err().contains(named), "{text}");
        }
    }
}
