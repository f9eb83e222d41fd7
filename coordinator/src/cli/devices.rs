//! `devices`: which GPUs there are, and why one cannot be used. With `--json` it is also how the coordinator asks, so that
//! no other process opens a driver.

use super::args::DevicesArgs;
use super::failure::Failure;
use super::output;
use crate::devices::THIS_PROGRAM;
use crate::planner::bytes;
use spillway_worker_gpu::devices::{DeviceReport, LinkReport, Survey, survey};
use spillway_worker_gpu::hip::BusFacts;
use spillway_worker_gpu::links::{Speed, Verdict};
use spillway_worker_gpu::{link_cache, probe_command};
use std::fmt::Write as _;
use std::path::Path;

/// Environment variable with the provider to look at when none is named: for machines with several, and for tests.
const PROVIDER_ENV: &str = "SPILLWAY_PROVIDER";

/// Prints the devices.
pub fn devices(args: &DevicesArgs) -> Result<(), Failure> {
    let from_env = || std::env::var(PROVIDER_ENV).ok().filter(|provider| !provider.is_empty());
    let mut survey = survey(args.provider.clone().or_else(from_env).as_deref());
    if args.test_links {
        survey.test_links(&link_cache(), &probe_command(Path::new(THIS_PROGRAM)));
    } else {
        survey.look_up_links(&link_cache());
    }
    if args.json { output::json(&survey) } else { output::text(&listing(&survey)) }
}

fn listing(survey: &Survey) -> String {
    let mut text = String::new();
    for device in &survey.devices {
        // Writing to a String cannot fail.
        let _ = write!(text, "{}", entry(device));
    }
    for link in &survey.links {
        let _ = writeln!(text, "{}", link_line(link));
    }
    if survey.devices.is_empty() {
        text.push_str("no GPU was found\n");
    }
    for reason in &survey.looked_for {
        let _ = writeln!(text, "  looked for: {reason}");
    }
    text
}

fn entry(device: &DeviceReport) -> String {
    let DeviceReport { index, provider, ordinal, name, arch, pci, .. } = device;
    let uuid = device.uuid.as_deref().unwrap_or("no id");
    let mut text = format!(
        "{index}: {name} ({arch})\n   {provider} {ordinal}, PCI {pci}, {uuid}\n   {} free of {}, {} compute units, waves of {}\n",
        bytes(device.free_bytes),
        bytes(device.total_bytes),
        device.compute_units,
        device.wave,
    );
    if let Some(place) = bus_place(&device.bus) {
        let _ = writeln!(text, "   {place}");
    }
    for caution in &device.cautions {
        let _ = writeln!(text, "   note: {caution}");
    }
    if let Some(reason) = &device.refused {
        let _ = writeln!(text, "   refused: {reason}");
    }
    text
}

/// Lanes, speed and memory node, as far as the system names them.
fn bus_place(bus: &BusFacts) -> Option<String> {
    let link =
        |width: Option<u32>, speed: &Option<String>| Some(format!("x{} {}", width?, speed.as_deref()?));
    let now = link(bus.link_width, &bus.link_speed);
    let most = link(bus.max_link_width, &bus.max_link_speed).map(|most| format!("at most {most}"));
    let node = bus.numa_node.map(|node| format!("memory node {node}"));
    let parts: Vec<String> = now.into_iter().chain(most).chain(node).collect();
    (!parts.is_empty()).then(|| format!("bus: {}", parts.join(", ")))
}

fn link_line(LinkReport { from, to, found }: &LinkReport) -> String {
    let pair = if from == to { format!("link {from} with itself") } else { format!("link {from} - {to}") };
    let speed =
        |Speed { gb_per_s, small_us }: &Speed| format!("{gb_per_s:.1} GB/s, {small_us:.1} us for 20 KiB");
    match found {
        None => format!("{pair}: staged, not tested yet (a load tests, or --test-links)"),
        Some(Verdict::Refused { reason }) => format!("{pair}: staged, refused: {reason}"),
        Some(Verdict::Works { there, back }) => {
            format!("{pair}: peer ok, there {}, back {}", speed(there), speed(back))
        }
    }
}
