//! The GPUs of the host as the planner sees them, and which of them a request means.

use super::{Refusal, bytes};
use spillway_protocol::plan::GpuDevice;
use spillway_worker_gpu::speed::DeviceSpeed;

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// How workers name it.
    pub device: GpuDevice,
    /// Memory that can be allocated now, in bytes.
    pub free_bytes: u64,
    /// All its memory in bytes.
    pub total_bytes: u64,
    /// Whether it shares the host's memory; then it is only used when it is named.
    pub integrated: bool,
    /// How fast it is, if that was measured.
    pub speed: Option<DeviceSpeed>,
    /// Why it cannot be used, if so.
    pub refused: Option<String>,
}

/// What a search for GPUs brought.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuSurvey {
    /// GPUs in the order of their numbers.
    pub gpus: Vec<Gpu>,
    /// What was looked for without success, one sentence each.
    pub looked_for: Vec<String>,
}

/// How a request names GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceWish {
    /// None.
    None,
    /// Every one that can be used.
    All,
    /// Every one of a provider: `emulated:devices=2`.
    Provider(String),
    /// One by one in pipeline order, each by its number, its id, its bus address or its architecture.
    List(Vec<String>),
}

/// Providers that can be named.
const PROVIDERS: [&str; 3] = ["amd", "cuda", "emulated"];

impl DeviceWish {
    /// Reads `none`, `all`, a provider with its options, or entries separated by commas; nothing means none.
    ///
    /// # Errors
    /// An entry of a list is empty.
    pub fn read(asked: Option<&str>) -> Result<DeviceWish, Refusal> {
        let Some(asked) = asked.map(str::trim).filter(|asked| !asked.is_empty()) else {
            return Ok(DeviceWish::None);
        };
        let provider = asked.split(':').next().unwrap_or_default();
        match asked {
            "none" => Ok(DeviceWish::None),
            "all" => Ok(DeviceWish::All),
            _ if PROVIDERS.contains(&provider) => Ok(DeviceWish::Provider(asked.into())),
            _ => {
                let entries: Vec<String> = asked.split(',').map(|entry| entry.trim().to_owned()).collect();
                if entries.iter().any(String::is_empty) {
                    return Err(Refusal::DevicesUnreadable { asked: asked.into() });
                }
                Ok(DeviceWish::List(entries))
            }
        }
    }

    /// The provider that a search is for; `None` searches for real GPUs of any.
    pub fn provider(&self) -> Option<&str> {
        match self {
            DeviceWish::Provider(provider) => Some(provider),
            _ => None,
        }
    }

    /// Places in `survey` of the GPUs that are meant.
    pub(super) fn select(&self, survey: &GpuSurvey, share: bool) -> Result<Vec<usize>, Refusal> {
        if *self == DeviceWish::None {
            return Ok(Vec::new());
        }
        if survey.gpus.is_empty() {
            return Err(Refusal::NoGpu { looked_for: survey.reasons() });
        }
        let selected = match self {
            DeviceWish::List(entries) => survey.named(entries, share)?,
            _ => survey.usable().collect(),
        };
        if selected.is_empty() {
            return Err(Refusal::NoGpu { looked_for: survey.reasons() });
        }
        for (place, &index) in selected.iter().enumerate() {
            if let Some(reason) = &survey.gpus[index].refused {
                return Err(Refusal::DeviceRefused { index, reason: reason.clone() });
            }
            if !share && selected[..place].contains(&index) {
                return Err(Refusal::DeviceTwice { index, table: survey.table() });
            }
        }
        Ok(selected)
    }
}

impl GpuSurvey {
    /// GPUs that are used when none is named.
    fn usable(&self) -> impl Iterator<Item = usize> {
        let gpus = self.gpus.iter().enumerate();
        gpus.filter(|(_, gpu)| gpu.refused.is_none() && !gpu.integrated).map(|(index, _)| index)
    }

    /// The GPUs that entries of a list name. An architecture stands for all cards that have it, in their order, so it must
    /// be named once for each.
    fn named(&self, entries: &[String], share: bool) -> Result<Vec<usize>, Refusal> {
        let mut selected = Vec::with_capacity(entries.len());
        for (place, entry) in entries.iter().enumerate() {
            let unknown = || Refusal::UnknownDevice { entry: entry.clone(), table: self.table() };
            if let Some(index) = self.exactly(entry) {
                selected.push(index);
                continue;
            }
            let of_arch = self.of_arch(entry);
            let times = entries.iter().filter(|other| other.eq_ignore_ascii_case(entry)).count();
            let before = entries[..place].iter().filter(|other| other.eq_ignore_ascii_case(entry)).count();
            match of_arch.len() {
                0 => return Err(unknown()),
                cards if times < cards => {
                    return Err(Refusal::DeviceAmbiguous {
                        entry: entry.clone(),
                        cards,
                        table: self.table(),
                    });
                }
                cards if before < cards || share => selected.push(of_arch[before % cards]),
                _ => return Err(Refusal::DeviceTwice { index: of_arch[0], table: self.table() }),
            }
        }
        Ok(selected)
    }

    /// The GPU with this number, id or bus address.
    fn exactly(&self, entry: &str) -> Option<usize> {
        if let Ok(number) = entry.parse::<usize>() {
            return (number < self.gpus.len()).then_some(number);
        }
        let id = entry.strip_prefix("GPU-").unwrap_or(entry);
        // Tools leave the domain out where there is only one.
        let address =
            if entry.matches(':').count() == 1 { format!("0000:{entry}") } else { entry.to_owned() };
        self.gpus.iter().position(|gpu| {
            let GpuDevice { uuid, pci, .. } = &gpu.device;
            uuid.as_ref().is_some_and(|uuid| uuid.eq_ignore_ascii_case(id))
                || pci.eq_ignore_ascii_case(&address)
        })
    }

    /// GPUs of an architecture: those that can be used without being named, else any.
    fn of_arch(&self, arch: &str) -> Vec<usize> {
        let has = |&index: &usize| self.gpus[index].device.arch.eq_ignore_ascii_case(arch);
        let usable: Vec<usize> = self.usable().filter(has).collect();
        if usable.is_empty() { (0..self.gpus.len()).filter(has).collect() } else { usable }
    }

    /// Every GPU in a few words, for messages about names.
    pub(super) fn table(&self) -> String {
        let row = |gpu: &Gpu| {
            let GpuDevice { index, name, arch, pci, uuid, .. } = &gpu.device;
            let uuid = uuid.as_deref().unwrap_or("no id");
            format!("{index} = {name} ({arch}, {pci}, {uuid}, {} free)", bytes(gpu.free_bytes))
        };
        self.gpus.iter().map(row).collect::<Vec<_>>().join("; ")
    }

    fn reasons(&self) -> String {
        let unusable = self.gpus.iter().map(|gpu| match &gpu.refused {
            Some(reason) => format!("device {} ({}): {reason}", gpu.device.index, gpu.device.name),
            None => {
                format!("device {} ({}) is integrated; name it to use it", gpu.device.index, gpu.device.name)
            }
        });
        self.looked_for.iter().cloned().chain(unusable).collect::<Vec<_>>().join("; ")
    }
}
