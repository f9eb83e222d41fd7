//! How emulated devices behave: `wave=64,order=random/7,devices=2,memory=64MiB/32MiB,fail-allocation=3`. Values hold no comma.

use std::fmt;
use std::path::PathBuf;

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

/// One value for each device; the last one goes for all further devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PerDevice<T>(Vec<T>);

impl<T: Copy> PerDevice<T> {
    /// The same for all.
    pub fn all(value: T) -> Self {
        Self(vec![value])
    }

    /// The value of a device; none only for a list that was read from nothing, which [`Settings::parse`] refuses.
    pub fn of(&self, ordinal: u32) -> Option<T> {
        self.0.get(ordinal as usize).or(self.0.last()).copied()
    }

    fn parse(text: &str, read: impl Fn(&str) -> Option<T>) -> Option<Self> {
        text.split('/').map(read).collect::<Option<Vec<T>>>().map(Self)
    }
}

/// Everything about emulated devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Lanes of a wave: 32 or 64. It is the architecture, too.
    pub wave: PerDevice<u32>,
    /// Order of threads.
    pub order: LaneOrder,
    /// Number of devices.
    pub devices: u32,
    /// Bytes of memory.
    pub memory: PerDevice<u64>,
    /// Bytes in which memory is handed out: sizes are rounded up to a multiple.
    pub page: usize,
    /// Bytes a second at which copies inside a device read and write its memory, together; none for as fast as the host is.
    /// Kernels are not slowed down.
    pub bandwidth: Option<PerDevice<u64>>,
    /// Bytes a second of copies between a device and the host; none for as fast as the host is.
    pub link: Option<PerDevice<u64>>,
    /// What ids are made of. Without one devices have no ids: every process has emulated devices of its own. With one they
    /// are known to all processes, as real cards are.
    pub ids: Option<u8>,
    /// Whether devices say that they share the host's memory.
    pub integrated: bool,
    /// Failures to inject.
    pub faults: Faults,
    /// A folder in which a file that is named by a device's number takes the device away, from every process and for as long as
    /// it is there.
    pub gone: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            wave: PerDevice::all(32),
            order: LaneOrder::Forward,
            devices: 1,
            memory: PerDevice::all(4 << 30),
            page: 1,
            bandwidth: None,
            link: None,
            ids: None,
            integrated: false,
            faults: Faults::default(),
            gone: None,
        }
    }
}

/// Everything that [`Settings::parse`] reads, for messages.
const OPTIONS: &str = "wave, order, devices, memory, page, bandwidth, link, ids, integrated, gone, fail-allocation, fail-launch, hang-launch, \
                       lose-at-call, refuse-register, garble-peer, refuse-peer";

/// Units of sizes, largest first so that the shortest form is printed.
const UNITS: &[(&str, u64)] = &[("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("", 1)];

impl Settings {
    /// Reads `option=value` pairs separated by commas; an empty text is the default.
    ///
    /// # Errors
    /// A sentence that names the unknown option, with those that there are, or the bad value.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut settings = Self::default();
        for pair in text.split(',').filter(|pair| !pair.is_empty()) {
            let (option, value) =
                pair.split_once('=').ok_or_else(|| format!("{pair:?} is not option=value"))?;
            if !OPTIONS.split(", ").any(|known| known == option) {
                return Err(format!("the option {option:?} is unknown; there are {OPTIONS}"));
            }
            settings.set(option, value).ok_or_else(|| format!("{option:?} cannot be {value:?}"))?;
        }
        Ok(settings)
    }

    fn set(&mut self, option: &str, value: &str) -> Option<()> {
        let nth = || value.parse().ok().filter(|n| *n > 0).map(Some);
        let rate = || PerDevice::parse(value, |rate| parse_size(rate).filter(|rate| *rate > 0)).map(Some);
        let faults = &mut self.faults;
        match option {
            "wave" => {
                let read = |wave: &str| wave.parse().ok().filter(|wave| matches!(wave, 32 | 64));
                self.wave = PerDevice::parse(value, read)?;
            }
            "order" => self.order = parse_order(value)?,
            "devices" => self.devices = value.parse().ok().filter(|devices| *devices <= 16)?,
            "memory" => self.memory = PerDevice::parse(value, parse_size)?,
            "page" => {
                let page = parse_size(value).and_then(|page| usize::try_from(page).ok());
                self.page = page.filter(|page| *page > 0)?;
            }
            "bandwidth" => self.bandwidth = rate()?,
            "link" => self.link = rate()?,
            "ids" => self.ids = Some(value.parse().ok()?),
            "integrated" => self.integrated = value.parse().ok()?,
            "gone" => self.gone = Some(value.into()).filter(|_| !value.is_empty()),
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

/// A size in the largest unit that has no fraction.
fn size(bytes: u64) -> String {
    let exact = UNITS.iter().find(|(_, scale)| bytes.is_multiple_of(*scale));
    let (unit, scale) = exact.copied().unwrap_or(("", 1));
    format!("{}{unit}", bytes / scale)
}

fn joined<T: Copy>(values: &PerDevice<T>, print: impl Fn(T) -> String) -> String {
    values.0.iter().map(|value| print(*value)).collect::<Vec<_>>().join("/")
}

impl fmt::Display for Settings {
    /// Prints what [`Settings::parse`] reads back.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = match self.order {
            LaneOrder::Forward => "forward".to_owned(),
            LaneOrder::Reverse => "reverse".to_owned(),
            LaneOrder::Random(seed) => format!("random/{seed}"),
        };
        let (wave, memory) = (joined(&self.wave, |wave| wave.to_string()), joined(&self.memory, size));
        write!(f, "wave={wave},order={order},devices={},memory={memory}", self.devices)?;
        if self.page > 1 {
            write!(f, ",page={}", size(self.page as u64))?;
        }
        for (option, rates) in [("bandwidth", &self.bandwidth), ("link", &self.link)] {
            if let Some(rates) = rates {
                write!(f, ",{option}={}", joined(rates, size))?;
            }
        }
        if let Some(ids) = self.ids {
            write!(f, ",ids={ids}")?;
        }
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
            ("integrated", self.integrated),
            ("refuse-register", faults.refuse_register),
            ("garble-peer", faults.garble_peer),
            ("refuse-peer", faults.refuse_peer),
        ] {
            if set {
                write!(f, ",{option}=true")?;
            }
        }
        match &self.gone {
            Some(folder) => write!(f, ",gone={}", folder.display()),
            None => Ok(()),
        }
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
            "wave=32/64,order=forward,devices=3,memory=1GiB/3MiB,ids=7,integrated=true",
            "wave=32,order=forward,devices=2,memory=4GiB,bandwidth=2GiB/500MiB,link=100MiB",
            "wave=32,order=forward,devices=2,memory=1GiB,refuse-peer=true,gone=/tmp/a=b",
        ] {
            assert_eq!(Settings::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Settings::parse("").unwrap(), Settings::default());
    }

    #[test]
    fn the_last_of_several_values_goes_for_all_further_devices() {
        let memory = Settings::parse("memory=3MiB/2MiB").unwrap().memory;
        assert_eq!([0, 1, 2].map(|ordinal| memory.of(ordinal)), [3, 2, 2].map(|size| Some(size << 20)));
    }

    /// Every option that is listed is one that is read: none of them is unknown.
    #[test]
    fn the_list_of_options_is_complete() {
        let unread = |option: &&str| Settings::default().set(option, "1").is_none();
        assert_eq!(
            OPTIONS.split(", ").filter(unread).collect::<Vec<_>>(),
            ["wave", "order", "integrated", "refuse-register", "garble-peer", "refuse-peer"]
        );
    }

    /// Every mistake is refused, and the refusal names it.
    #[test]
    fn mistakes_are_named() {
        for (text, named) in [
            ("wave=48", "wave"),
            ("order=random", "order"),
            ("wave=32/48", "48"),
            ("memory=4TB", "4TB"),
            ("memory=1GiB/", "memory"),
            ("ids=300", "ids"),
            ("memory=99999999999GiB", "memory"),
            ("fail-launch=0", "fail-launch"),
            ("speed=fast", "\"speed\" is unknown; there are wave, order"),
            ("bandwidth=0", "bandwidth"),
            ("link=1GiB/fast", "link"),
            ("wave", "option=value"),
        ] {
            assert!(Settings::parse(text).unwrap_err().contains(named), "{text}");
        }
    }
}
