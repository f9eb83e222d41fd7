//! Another placement of a loaded model when devices are gone: the same request on what is left.

use crate::cards::CardLocks;
use crate::devices::{MissingSpeeds, THIS_PROGRAM, machine_for};
use crate::engine::{Placed, Replan, ReplanError};
use crate::open::LoadedModel;
use crate::planner::{DeviceWish, Gpu, GpuSurvey, PlacementRequest, plan};
use spillway_protocol::plan::{Execution, GpuDevice, Plan, Stage};
use std::path::Path;
use std::sync::Arc;

/// Places one model.
#[derive(Debug)]
pub struct Replanner {
    model: Arc<LoadedModel>,
    request: PlacementRequest,
}

impl Replanner {
    /// For a model that was placed with `request`.
    pub fn new(model: Arc<LoadedModel>, request: PlacementRequest) -> Replanner {
        Replanner { model, request }
    }
}

impl Replan for Replanner {
    fn replan(&self, current: &Plan, lost: &[GpuDevice]) -> Result<Placed, ReplanError> {
        // Clients wait: nothing is measured now.
        let mut machine = machine_for(&self.request, Path::new(THIS_PROGRAM), MissingSpeeds::Accept)?;
        // The search may find a device that works for everyone but its worker.
        for gpu in machine.gpus.gpus.iter_mut().filter(|gpu| is_among(&gpu.device, lost)) {
            gpu.refused.get_or_insert_with(|| "it was lost while it served".to_owned());
        }
        let seats: Vec<&GpuDevice> = current.stages.iter().filter_map(device).collect();
        let request = without(&self.request, &seats, lost, &machine.gpus)?;
        let plan = plan(self.model.summary(), &machine, &request)?;
        for warning in &plan.warnings {
            tracing::warn!("{warning}");
        }
        let cards = CardLocks::take(&plan, request.allow_shared_device)?;
        Ok(Placed { plan, cards })
    }
}

/// Whether a device is one of several, whatever numbers they have by now.
fn is_among(device: &GpuDevice, others: &[GpuDevice]) -> bool {
    others.iter().any(|other| match (&device.uuid, &other.uuid) {
        (Some(one), Some(two)) => one == two,
        _ => (&device.provider, &device.pci) == (&other.provider, &other.pci),
    })
}

/// The request as it is to be read without the lost devices, of those that the pipeline ran on. What it says of single devices or
/// of their number goes with them; when none is left, everything that needs one does.
fn without(
    request: &PlacementRequest,
    seats: &[&GpuDevice],
    lost: &[GpuDevice],
    survey: &GpuSurvey,
) -> Result<PlacementRequest, ReplanError> {
    let stays: Vec<bool> = seats.iter().map(|device| !is_among(device, lost)).collect();
    let usable = |gpu: &&Gpu| gpu.refused.is_none();
    let (devices, left) = match request.device_wish()? {
        // By the numbers that the search gives them now.
        DeviceWish::List(_) => {
            let number = |seat: &&GpuDevice| {
                let seat = std::slice::from_ref(*seat);
                let found = survey.gpus.iter().filter(usable).find(|gpu| is_among(&gpu.device, seat))?;
                Some(found.device.index.to_string())
            };
            let numbers: Vec<String> = seats.iter().filter_map(number).collect();
            (Some(numbers.join(",")), numbers.len())
        }
        _ => {
            let left = survey.gpus.iter().filter(usable).filter(|gpu| !gpu.integrated).count();
            (request.devices.clone(), left)
        }
    };
    if left == 0 {
        return Ok(request.without_gpus());
    }
    Ok(PlacementRequest {
        devices,
        pp: request.pp.map(|stages| stages.min(left)),
        pp_layers: None,
        split: request.split.as_deref().map(|split| match split.trim().strip_prefix("bytes:") {
            Some(list) => format!("bytes:{}", keep(list, &stays)),
            None => split.to_owned(),
        }),
        vram_limit: request.vram_limit.as_deref().map(|list| keep(list, &stays)),
        ..request.clone()
    })
}

fn device(stage: &Stage) -> Option<&GpuDevice> {
    match &stage.execution {
        Execution::Gpu { device } => Some(device),
        Execution::Cpu { .. } => None,
    }
}

/// The entries of a list with one for each GPU that belong to those which stay; a list of another length as it is.
fn keep(list: &str, stays: &[bool]) -> String {
    let entries: Vec<&str> = list.split(',').collect();
    if entries.len() != stays.len() {
        return list.to_owned();
    }
    let kept = entries.into_iter().zip(stays).filter(|(_, stays)| **stays).map(|(entry, _)| entry);
    kept.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A card at a place of the bus, under a number that may change.
    fn card(index: usize, place: u32) -> GpuDevice {
        GpuDevice {
            index,
            provider: "amd".into(),
            ordinal: u32::try_from(index).unwrap(),
            name: "GPU".into(),
            arch: "gfx1100".into(),
            pci: format!("0000:{place:02}:00.0"),
            uuid: None,
            driver: 1,
        }
    }

    fn survey(cards: &[GpuDevice], lost: &[GpuDevice]) -> GpuSurvey {
        let gpu = |device: &GpuDevice| Gpu {
            device: device.clone(),
            free_bytes: 8 << 30,
            total_bytes: 8 << 30,
            integrated: false,
            speed: None,
            refused: is_among(device, lost).then(|| "lost".to_owned()),
        };
        GpuSurvey { gpus: cards.iter().map(gpu).collect(), looked_for: Vec::new() }
    }

    fn asked() -> PlacementRequest {
        PlacementRequest {
            devices: Some("0,1,2".into()),
            pp: Some(3),
            pp_layers: Some("4,4,4".into()),
            vram_limit: Some("8GiB,6GiB,4GiB".into()),
            split: Some("bytes:1GiB,2GiB,3GiB".into()),
            max_seq: Some(99),
            ..PlacementRequest::default()
        }
    }
    /// The request without the card at place 2, when the search finds what is left under other numbers.
    fn without_the_second(request: &PlacementRequest) -> PlacementRequest {
        let before = [card(0, 1), card(1, 2), card(2, 3)];
        let seats: Vec<&GpuDevice> = before.iter().collect();
        let found = survey(&[card(0, 1), card(1, 3), card(2, 4)], &[]);
        without(request, &seats, &before[1..2], &found).unwrap()
    }

    #[test]
    fn what_is_said_of_a_card_goes_with_it_and_the_rest_stays() {
        let request = without_the_second(&asked());
        assert_eq!(request.devices.as_deref(), Some("0,1"), "numbers are those that cards have now");
        assert_eq!((request.pp, request.pp_layers), (Some(2), None));
        assert_eq!(request.vram_limit.as_deref(), Some("8GiB,4GiB"));
        assert_eq!(request.split.as_deref(), Some("bytes:1GiB,3GiB"));
        assert_eq!(request.max_seq, Some(99));
        let all = PlacementRequest {
            devices: Some("all".into()),
            vram_limit: Some("5GiB".into()),
            split: Some("auto".into()),
            ..PlacementRequest::default()
        };
        assert_eq!(without_the_second(&all), all, "what holds for any number of cards");
    }

    #[test]
    fn without_any_card_the_cpu_is_left() {
        let cards = [card(0, 1)];
        let lost = survey(&cards, &cards);
        for devices in ["0", "all", "amd"] {
            let request = PlacementRequest { devices: Some(devices.into()), pp: Some(1), ..asked() };
            let left = without(&request, &[&cards[0]], &cards, &lost).unwrap();
            assert_eq!(
                left,
                PlacementRequest { max_seq: Some(99), ..PlacementRequest::default() },
                "{devices}"
            );
        }
    }

    #[test]
    fn a_card_is_known_by_its_id_wherever_it_is() {
        let with_id = |place, id: &str| GpuDevice { uuid: Some(id.into()), ..card(0, place) };
        assert!(is_among(&with_id(1, "a"), &[with_id(2, "a")]));
        assert!(!is_among(&with_id(1, "a"), &[with_id(1, "b")]));
        assert!(is_among(&card(3, 1), &[card(0, 1)]) && !is_among(&card(0, 1), &[card(0, 2)]));
    }
}
