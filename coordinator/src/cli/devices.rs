//! `devices`: which GPUs there are, and why one cannot be used. With `--json` it is also how the coordinator asks, so that
//! no other process opens a driver.

use super::args::{DevicesArgs, MeasureArg};
use super::failure::Failure;
use super::output;
use crate::cards::CardLocks;
use crate::devices::{THIS_PROGRAM, named};
use crate::planner::{Machine, bytes};
use crate::speeds::HostSpeed;
use serde::Serialize;
use spillway_worker_gpu::devices::{DeviceReport, LinkReport, Measure, Survey, survey};
use spillway_worker_gpu::hip::BusFacts;
use spillway_worker_gpu::links::{Hop, Speed, Verdict, Way};
use spillway_worker_gpu::speed::DeviceSpeed;
use spillway_worker_gpu::{link_cache, probe_command, speeds};
use std::fmt::Write as _;
use std::path::Path;

/// Environment variable with the provider to look at when none is named: for machines with several, and for tests.
const PROVIDER_ENV: &str = "SPILLWAY_PROVIDER";

/// What is printed.
#[derive(Debug, Serialize)]
struct Listing {
    #[serde(flatten)]
    survey: Survey,
    /// Speed of the host's memory with all usable CPUs, where it was measured.
    host: Option<HostSpeed>,
}

/// Prints the devices.
pub fn devices(args: &DevicesArgs) -> Result<(), Failure> {
    let from_env = || std::env::var(PROVIDER_ENV).ok().filter(|provider| !provider.is_empty());
    let mut survey = survey(args.provider.clone().or_else(from_env).as_deref());
    if let Some(number) = args.only.iter().find(|number| **number >= survey.devices.len()) {
        let found = survey.devices.len();
        return Err(Failure::BadInput(format!(
            "--only names device {number}, but {found} were found; `spillway devices` lists them"
        )));
    }
    if args.test_links {
        survey.test_links(&link_cache(), &probe_command(Path::new(THIS_PROGRAM)));
    } else {
        survey.look_up_links(&link_cache());
    }
    let host = measure(&mut survey, args.measure, &args.only);
    let listing = Listing { survey, host };
    if args.json { output::json(&listing) } else { output::text(&text(&listing)) }
}

/// Fills in the speeds of devices, and gives the host's. With numbers in `only` nothing else is measured.
fn measure(survey: &mut Survey, wanted: Option<MeasureArg>, only: &[usize]) -> Option<HostSpeed> {
    let (results, Machine { cpus: threads, available_bytes, .. }) = (speeds(), Machine::detect());
    let which = match wanted {
        None | Some(MeasureArg::Missing) => Measure::Missing,
        Some(MeasureArg::Anew) => Measure::Anew,
    };
    if wanted.is_none() {
        survey.look_up_speeds(&results);
    } else {
        // A device that serves would be disturbed, and its speed would be wrong.
        let own =
            |device: &DeviceReport| CardLocks::take_alone(&named(device)).map_err(|busy| busy.to_string());
        survey.measure(&results, which, |index| only.is_empty() || only.contains(&index), own);
    }
    // Whoever asks for what is missing measures the host with the threads of its own workers.
    if wanted != Some(MeasureArg::Anew) || !only.is_empty() {
        return HostSpeed::look_up(&results, threads);
    }
    let measured = HostSpeed::measure(&results, threads, available_bytes, which);
    measured.map_err(|reason| survey.speed_notes.push(format!("the host is not measured: {reason}"))).ok()
}

fn text(Listing { survey, host }: &Listing) -> String {
    let mut text = String::new();
    for device in &survey.devices {
        // Writing to a String cannot fail.
        let _ = write!(text, "{}", entry(device));
    }
    for link in &survey.links {
        let _ = writeln!(text, "{}", link_line(link));
    }
    if let Some(HostSpeed { threads, memory, products }) = host {
        let (memory, billions) = (bytes(*memory), products / 1_000_000_000);
        let _ = writeln!(
            text,
            "host: {threads} threads read {memory}/s of its memory, and multiply {billions} billion weights/s"
        );
    }
    for note in &survey.speed_notes {
        let _ = writeln!(text, "  note: {note}");
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
    if let Some(DeviceSpeed { memory, link, hop_ns }) = device.speed {
        let (memory, link, hop) = (bytes(memory), bytes(link), hop_ns as f64 / 1e3);
        let _ = writeln!(
            text,
            "   reads {memory}/s of its memory, {link}/s of the host's; {hop:.1} us for a row to the host and back"
        );
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
    let hop = |hop: &Hop| {
        let way = match hop.way {
            Way::Peer => "peer",
            Way::Staged => "staged",
        };
        format!("{} {way} {:.1} us (p99 {:.1})", bytes(hop.bytes as u64), hop.p50_us, hop.p99_us)
    };
    let speed = |Speed { gb_per_s, hops }: &Speed| {
        let hops: Vec<String> = hops.iter().map(hop).collect();
        format!("{gb_per_s:.1} GB/s, {}", hops.join(", "))
    };
    match found {
        None => format!("{pair}: staged, not tested yet (a load tests, or --test-links)"),
        Some(Verdict::Refused { reason }) => format!("{pair}: staged, refused: {reason}"),
        Some(Verdict::Works { there, back }) => {
            format!("{pair}: peer ok\n   there {}\n   back {}", speed(there), speed(back))
        }
    }
}
