//! The GPUs of the host as the planner sees them, and which of them a request means.

use super::Refusal;
use spillway_protocol::plan::GpuDevice;

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
    /// By number, in pipeline order.
    Numbers(Vec<usize>),
}

/// Providers that can be named.
const PROVIDERS: [&str; 3] = ["amd", "cuda", "emulated"];

impl DeviceWish {
    /// Reads `none`, `all`, a provider with its options, or numbers separated by commas; nothing means none.
    ///
    /// # Errors
    /// It is none of these.
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
                let numbers = asked.split(',').map(|entry| entry.trim().parse());
                let numbers: Result<Vec<usize>, _> = numbers.collect();
                numbers
                    .map(DeviceWish::Numbers)
                    .map_err(|_| Refusal::DevicesUnreadable { asked: asked.into() })
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
        let selected = match self {
            DeviceWish::Numbers(numbers) => numbers.clone(),
            _ => survey.usable().collect(),
        };
        if survey.gpus.is_empty() || selected.is_empty() {
            return Err(Refusal::NoGpu { looked_for: survey.reasons() });
        }
        for (place, &index) in selected.iter().enumerate() {
            let count = survey.gpus.len();
            let gpu = survey.gpus.get(index).ok_or(Refusal::UnknownDevice { index, count })?;
            if let Some(reason) = &gpu.refused {
                return Err(Refusal::DeviceRefused { index, reason: reason.clone() });
            }
            if !share && selected[..place].contains(&index) {
                return Err(Refusal::DeviceTwice { index });
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
