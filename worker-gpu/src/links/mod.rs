//! Links between GPUs: whether one process's device can write into another one's memory, found out by trying.
//!
//! Drivers report success for copies that deliver garbage, so nothing but a test counts. For a pair of devices two processes are
//! started, each opens one of them ([`probe`]), and [`test()`] has them copy into each other's memory the way two stages of
//! a pipeline do: sizes from a row to a large chunk, several patterns, repeated, in both directions, every byte compared. What came out is kept per
//! pair, driver version and version of this program ([`LinkCache`]).

mod cache;
pub mod probe;
mod test;

pub use cache::LinkCache;
pub use test::test;

use serde::{Deserialize, Serialize};
use spillway_protocol::plan::GpuDevice;

/// One end of a link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// Source of devices as `Provider` is written.
    pub provider: String,
    /// Number of the device there.
    pub ordinal: u32,
    /// Unique id, where the driver has one.
    pub uuid: Option<String>,
    /// Version of the driver, as it counts.
    pub driver: i32,
}

impl From<&GpuDevice> for End {
    fn from(device: &GpuDevice) -> Self {
        let GpuDevice { provider, ordinal, uuid, driver, .. } = device;
        Self { provider: provider.clone(), ordinal: *ordinal, uuid: uuid.clone(), driver: *driver }
    }
}

impl End {
    /// What stays the same when devices are numbered in another way.
    pub(crate) fn identity(&self) -> (&str, Option<&str>, Option<u32>, i32) {
        let number = self.uuid.is_none().then_some(self.ordinal);
        (&self.provider, self.uuid.as_deref(), number, self.driver)
    }
}

/// How fast a direction is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// 10⁹ bytes a second in copies of 16 MiB.
    pub gb_per_s: f64,
    /// How long rows take, of 20 KiB and of 10 MiB, by either way.
    pub hops: Vec<Hop>,
}

/// How long rows of a step take from device to device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Hop {
    /// Which way.
    pub way: Way,
    /// Bytes of the rows.
    pub bytes: usize,
    /// Microseconds from queueing the copy to knowing that it is there: half of the hops take no longer.
    pub p50_us: f64,
    /// 99 of 100 take no longer.
    pub p99_us: f64,
}

/// Which way rows take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// One copy into the other device's memory.
    Peer,
    /// A copy to page-locked memory of the host and then one from there, each waited for.
    Staged,
}

/// What a test found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    /// Every byte arrived, in both directions.
    Works {
        /// From the first end to the second.
        there: Speed,
        /// From the second to the first.
        back: Speed,
    },
    /// It does not work: rows go through the host's memory.
    Refused {
        /// Why, in a sentence.
        reason: String,
    },
}

impl Verdict {
    /// The same with the ends exchanged.
    pub fn reversed(self) -> Self {
        match self {
            Verdict::Works { there, back } => Verdict::Works { there: back, back: there },
            refused @ Verdict::Refused { .. } => refused,
        }
    }
}
