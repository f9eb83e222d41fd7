//! What GPUs this machine has, and what was looked for.
//!
//! Asking a driver for a device's free memory takes some of that memory for as long as the process lives, so this runs in
//! a process of its own (`spillway devices`).

use crate::compile::{Arch, ChildCommand};
use crate::hip::{BusFacts, Device, DeviceInfo, Driver, HipError, Provider, search};
use crate::links::{self, End, LinkCache, Verdict};
use crate::measurements::Measurements;
use crate::speed::DeviceSpeed;
use serde::{Deserialize, Serialize};
use std::rc::Rc;

/// One device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Number in the report.
    pub index: usize,
    /// Where it comes from, as [`Provider`] is written.
    pub provider: String,
    /// Number at its provider.
    pub ordinal: u32,
    /// Marketing name.
    pub name: String,
    /// Architecture as the kernel compiler names it.
    pub arch: String,
    /// Unique id, where the driver has one.
    pub uuid: Option<String>,
    /// Version of the driver, as it counts.
    pub driver: i32,
    /// Bus address.
    pub pci: String,
    /// What the system knows about its place on the bus.
    pub bus: BusFacts,
    /// All memory in bytes.
    pub total_bytes: u64,
    /// Free memory in bytes: the smaller of what the driver and the kernel say.
    pub free_bytes: u64,
    /// Compute units (AMD) or multiprocessors (NVIDIA).
    pub compute_units: u32,
    /// Lanes of a wave.
    pub wave: u32,
    /// Whether it shares the host's memory; then it is not used unless it is named.
    pub integrated: bool,
    /// How fast it is, where that was measured.
    #[serde(default)]
    pub speed: Option<DeviceSpeed>,
    /// Why a plan refuses it, if so.
    pub refused: Option<String>,
    /// Why it may not be used although nothing refuses it, one sentence each.
    pub cautions: Vec<String>,
}

/// A pair of devices.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkReport {
    /// Number of one device in the report.
    pub from: usize,
    /// Number of the other; the same for two processes on one device.
    pub to: usize,
    /// What the last test found; none without one: then rows go through the host's memory until a load has tested.
    pub found: Option<Verdict>,
}

/// All devices.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Survey {
    /// Devices in the order of their numbers.
    pub devices: Vec<DeviceReport>,
    /// What was looked for without success, one sentence each.
    pub looked_for: Vec<String>,
    /// Why the speed of a device was not measured, or not kept, one sentence each.
    #[serde(default)]
    pub speed_notes: Vec<String>,
    /// Pairs of devices, as far as they were looked up.
    #[serde(default)]
    pub links: Vec<LinkReport>,
}

/// Free memory below which hardly a band of any model fits: its working memory alone may be more.
const LITTLE_MEMORY: u64 = 512 << 20;

/// Looks for real devices, or for those of one provider. They are numbered in the order of their bus addresses, which does not
/// depend on drivers and their settings.
pub fn survey(provider: Option<&str>) -> Survey {
    let (drivers, absent) = match provider {
        None => {
            let found = search();
            (found.drivers, found.absent)
        }
        Some(provider) => match provider.parse::<Provider>().and_then(|provider| Driver::open(&provider)) {
            Ok(driver) => (vec![driver], Vec::new()),
            Err(reason) => (Vec::new(), vec![reason]),
        },
    };
    let looked_for = absent.iter().map(HipError::to_string).collect();
    let mut survey = Survey { looked_for, ..Survey::default() };
    for driver in &drivers {
        for ordinal in 0..driver.device_count() {
            match report(driver, ordinal) {
                Ok(device) => survey.devices.push(device),
                Err(error) => survey.looked_for.push(error.to_string()),
            }
        }
    }
    survey.devices.sort_by(|one, other| one.pci.cmp(&other.pci));
    survey.devices.iter_mut().enumerate().for_each(|(index, device)| device.index = index);
    survey
}

/// Describes a device; only one that cannot even be described is an error.
fn report(driver: &Rc<Driver>, ordinal: u32) -> Result<DeviceReport, HipError> {
    let info = driver.describe(ordinal)?;
    let memory = Device::open(driver, ordinal).and_then(|device| device.memory());
    let free_bytes = memory.as_ref().map_or(0, |memory| memory.free as u64);
    let refused = memory.err().map(|error| error.to_string()).or_else(|| without_kernels(&info.arch));
    let mut cautions = Vec::new();
    if info.integrated {
        cautions.push("it shares the host's memory: used only when it is named".to_owned());
    }
    if refused.is_none() && free_bytes < LITTLE_MEMORY {
        cautions.push(format!("{} MiB free are too little for most bands", free_bytes >> 20));
    }
    Ok(DeviceReport {
        index: 0,
        provider: driver.provider().to_string(),
        ordinal,
        uuid: uuid(&info),
        driver: driver.version(),
        bus: BusFacts::of(info.pci),
        name: info.name,
        arch: info.arch,
        pci: info.pci.to_string(),
        total_bytes: info.total_bytes,
        free_bytes,
        compute_units: info.compute_units,
        wave: info.wave,
        integrated: info.integrated,
        speed: None,
        refused,
        cautions,
    })
}

/// Why there are no kernels for an architecture, if so.
fn without_kernels(arch: &str) -> Option<String> {
    match arch.parse::<Arch>() {
        Ok(known) => known.without_kernels().map(str::to_owned),
        Err(unknown) => Some(unknown.to_string()),
    }
}

impl Survey {
    /// Fills in what the last tests of links found.
    pub fn look_up_links(&mut self, cache: &LinkCache) {
        let pairs = self.pairs();
        let report = |(from, to): (usize, usize)| {
            let found = self.verdict(from, to, |from, to| cache.find(from, to));
            (from != to || found.is_some()).then_some(LinkReport { from, to, found })
        };
        self.links = pairs.into_iter().filter_map(report).collect();
    }

    /// Tests every link between usable devices, and of every device with itself, and keeps what came out. A test that could
    /// not be made leaves what was known, and says why among the things that were looked for.
    pub fn test_links(&mut self, cache: &LinkCache, probe: &ChildCommand) {
        let mut troubles = Vec::new();
        for (from, to) in self.pairs() {
            self.verdict(from, to, |first, second| {
                let found = links::test(probe, first, second).and_then(|found| {
                    let kept = cache.store(first, second, &found);
                    kept.map_err(|error| format!("the result cannot be kept: {error}"))
                });
                troubles.extend(found.err().map(|reason| format!("link {from} to {to}: {reason}")));
                None
            });
        }
        self.looked_for.append(&mut troubles);
        self.look_up_links(cache);
    }

    /// Fills in how fast devices are, as far as it was measured before.
    pub fn look_up_speeds(&mut self, results: &Measurements) {
        for device in &mut self.devices {
            device.speed = results.find(&speed_subject(device));
        }
    }

    /// Measures usable devices, all of them or those of which no speed is known, and keeps what came out. `meant` tells by its
    /// number whether a device may be measured at all; `own` gives the device to this process alone for as long as its result lives.
    pub fn measure<G>(
        &mut self,
        results: &Measurements,
        which: Measure,
        meant: impl Fn(usize) -> bool,
        mut own: impl FnMut(&DeviceReport) -> Result<G, String>,
    ) {
        self.look_up_speeds(results);
        let wanted =
            |device: &DeviceReport| meant(device.index) && (which == Measure::Anew || device.speed.is_none());
        for device in &mut self.devices {
            if device.refused.is_some() || !wanted(device) {
                continue;
            }
            match own(device).and_then(|_owned| measure(device)) {
                Ok(speed) => {
                    device.speed = Some(speed);
                    let kept = results.store(&speed_subject(device), &speed).err();
                    let note =
                        |error| format!("the speed of device {} cannot be kept: {error}", device.index);
                    self.speed_notes.extend(kept.map(note));
                }
                Err(reason) => {
                    self.speed_notes.push(format!("device {} is not measured: {reason}", device.index));
                }
            }
        }
    }

    /// All pairs of devices that can be used.
    fn pairs(&self) -> Vec<(usize, usize)> {
        let usable =
            || self.devices.iter().filter(|device| device.refused.is_none()).map(|device| device.index);
        usable().flat_map(|from| usable().filter(move |to| from <= *to).map(move |to| (from, to))).collect()
    }

    fn verdict(
        &self,
        from: usize,
        to: usize,
        find: impl FnOnce(&End, &End) -> Option<Verdict>,
    ) -> Option<Verdict> {
        let (from, to) = (self.devices.get(from)?, self.devices.get(to)?);
        if from.provider != to.provider {
            return Some(Verdict::Refused { reason: "they belong to different drivers".into() });
        }
        find(&End::from(from), &End::from(to))
    }
}

/// Which devices are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// Those of which no speed is known.
    Missing,
    /// All.
    Anew,
}

fn measure(device: &DeviceReport) -> Result<DeviceSpeed, String> {
    let text = |error: HipError| error.to_string();
    let provider: Provider = device.provider.parse().map_err(text)?;
    let driver = Driver::open(&provider).map_err(text)?;
    Device::open(&driver, device.ordinal).and_then(|device| DeviceSpeed::measure(&device)).map_err(text)
}

/// What a device's speed is kept under.
fn speed_subject(device: &DeviceReport) -> String {
    format!("speed of {:?}", End::from(device).identity())
}

impl From<&DeviceReport> for End {
    fn from(device: &DeviceReport) -> Self {
        let DeviceReport { provider, ordinal, uuid, driver, .. } = device;
        Self { provider: provider.clone(), ordinal: *ordinal, uuid: uuid.clone(), driver: *driver }
    }
}

/// A device's unique id in the spelling of its vendor's tools, without their prefix `GPU-`.
pub fn uuid(info: &DeviceInfo) -> Option<String> {
    let bytes = info.uuid?;
    // AMD's driver gives sixteen hexadecimal digits, NVIDIA's sixteen bytes.
    if bytes.iter().all(u8::is_ascii_hexdigit) {
        return Some(bytes.iter().map(|&digit| char::from(digit)).collect());
    }
    let mut text = String::with_capacity(36);
    for (place, byte) in bytes.iter().enumerate() {
        if matches!(place, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_device_of_a_provider_is_listed_with_its_memory() {
        let survey = survey(Some("emulated:devices=2,memory=64MiB"));
        assert_eq!(survey.looked_for, Vec::<String>::new());
        let seen = survey.devices.iter().map(|d| (d.index, d.ordinal, d.total_bytes, d.refused.as_ref()));
        assert_eq!(seen.collect::<Vec<_>>(), [(0, 0, 64 << 20, None), (1, 1, 64 << 20, None)]);
    }

    #[test]
    fn ids_are_spelled_as_vendors_tools_spell_them() {
        let survey = survey(Some("emulated:devices=2,ids=171"));
        assert_eq!(survey.devices[1].uuid.as_deref(), Some("abababab-abab-abab-abab-abab00000001"));
        let driver = Driver::open(&"emulated".parse().unwrap()).unwrap();
        let amd = DeviceInfo { uuid: Some(*b"0123456789abcdef"), ..driver.describe(0).unwrap() };
        assert_eq!(uuid(&amd).as_deref(), Some("0123456789abcdef"));
    }

    /// A device that someone else uses keeps the speed that is known of it, and why is told; what is known is not measured
    /// again unless it is asked for.
    #[test]
    fn speeds_are_measured_once_and_only_of_devices_that_are_free() {
        let folder = tempfile::tempdir().unwrap();
        let results = Measurements::new(folder.path().to_owned());
        let look = || survey(Some("emulated:devices=2,memory=8MiB,bandwidth=1GiB"));
        let known = |survey: &Survey| survey.devices.iter().map(|d| d.speed.is_some()).collect::<Vec<_>>();
        let mut first = look();
        let all = |_| true;
        first.measure(&results, Measure::Missing, all, |device| {
            if device.index == 1 { Err("in use".to_owned()) } else { Ok(()) }
        });
        assert_eq!(known(&first), [true, false]);
        assert_eq!(first.speed_notes, ["device 1 is not measured: in use"]);
        let mut second = look();
        second.look_up_speeds(&results);
        assert_eq!(second.devices[0].speed, first.devices[0].speed);
        let mut asked = Vec::new();
        let mut own = |device: &DeviceReport| -> Result<(), String> {
            asked.push(device.index);
            Ok(())
        };
        second.measure(&results, Measure::Missing, |number| number == 0, &mut own);
        assert_eq!(known(&second), [true, false], "the other one is not meant");
        second.measure(&results, Measure::Missing, all, &mut own);
        assert_eq!(known(&second), [true, true]);
        second.measure(&results, Measure::Anew, all, &mut own);
        assert_eq!(asked, [1, 0, 1]);
    }

    #[test]
    fn a_provider_without_a_device_says_why() {
        let survey = survey(Some("emulated:nothing=1"));
        assert!(survey.devices.is_empty());
        assert!(survey.looked_for[0].contains("nothing"), "{survey:?}");
    }
}
