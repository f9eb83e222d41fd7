//! `devices`: which GPUs there are, and why one cannot be used. With `--json` it is also how the coordinator asks, so that
//! no other process opens a driver.

use super::args::DevicesArgs;
use super::failure::Failure;
use super::output;
use crate::planner::bytes;
use spillway_worker_gpu::devices::{DeviceReport, Survey, survey};
use std::fmt::Write as _;

/// Environment variable with the provider to look at when none is named: for machines with several, and for tests.
const PROVIDER_ENV: &str = "SPILLWAY_PROVIDER";

/// Prints the devices.
pub fn devices(args: &DevicesArgs) -> Result<(), Failure> {
    let from_env = || std::env::var(PROVIDER_ENV).ok().filter(|provider| !provider.is_empty());
    let survey = survey(args.provider.clone().or_else(from_env).as_deref());
    if args.json { output::json(&survey) } else { output::text(&listing(&survey)) }
}

fn listing(survey: &Survey) -> String {
    let mut text = String::new();
    for device in &survey.devices {
        // Writing to a String cannot fail.
        let _ = write!(text, "{}", entry(device));
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
    if device.integrated {
        text.push_str("   integrated: used only when it is named\n");
    }
    if let Some(reason) = &device.refused {
        let _ = writeln!(text, "   refused: {reason}");
    }
    text
}
