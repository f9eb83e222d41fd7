//! Why a band sits where it does, in a sentence.

use super::bytes;
use super::layout::{Band, Processor};
use super::request::{Division, Wishes};

/// The sentence of one band.
pub(super) fn why(wishes: &Wishes, bands: &[Band], band: &Band, layers: usize) -> String {
    format!("{}{}", place(wishes, bands, band, layers), share(wishes, bands, band))
}

/// On which side of the spill the band is.
fn place(wishes: &Wishes, bands: &[Band], band: &Band, layers: usize) -> String {
    let gpus = wishes.seats.len();
    let on_gpus: usize = bands
        .iter()
        .filter(|band| matches!(band.processor, Processor::Gpu(_)))
        .map(|band| band.layers.len())
        .sum();
    let mapped: usize = bands.iter().map(|band| band.mapped).sum();
    let resident = on_gpus - mapped;
    match band.processor {
        _ if gpus == 0 => "no GPU in this placement".to_owned(),
        Processor::Cpu(_) => format!("the first {} of {layers} layers spill to the CPU", layers - on_gpus),
        Processor::Gpu(_) if resident == layers => format!("all {layers} layers on {gpus} GPUs"),
        Processor::Gpu(_) if band.mapped > 0 => format!(
            "the last {resident} of {layers} layers in the memory of {gpus} GPUs, the first {mapped} in host memory that \
             this GPU reads"
        ),
        Processor::Gpu(_) => format!("the last {resident} of {layers} layers in the memory of {gpus} GPUs"),
    }
}

/// What decided the band's number of layers.
fn share(wishes: &Wishes, bands: &[Band], band: &Band) -> String {
    let here = band.layers.len() - band.mapped;
    match (&wishes.division, band.processor) {
        (Division::Explicit(_), _) => format!(": pp_layers asks for {here} layers here"),
        (Division::Weighted, Processor::Gpu(seat)) => {
            let room = bytes(wishes.seats[seat].room());
            match &wishes.speeds {
                Some(speeds) => format!(
                    ", {here} here: the slowest stage is fastest so, at {}/s here, within {room}",
                    bytes(speeds[seat].memory)
                ),
                None => format!(", {here} here: the fullest device has most room left so, of {room} here"),
            }
        }
        _ if bands.len() == 1 && wishes.seats.is_empty() => ": one CPU worker runs everything".to_owned(),
        (_, Processor::Cpu(_)) => {
            let workers = bands.iter().filter(|band| matches!(band.processor, Processor::Cpu(_))).count();
            format!(", {here} here: uniform over {workers} CPU workers (remainder first)")
        }
        (_, Processor::Gpu(_)) => format!(", {here} here: uniform (remainder first)"),
    }
}
