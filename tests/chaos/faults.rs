//! What can go wrong with a worker, as rows of a table.

use crate::dice::Dice;
use crate::support::workers_of;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, Resource, Rlimit, pidfd_getfd, pidfd_open, prlimit};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Descriptor of a worker's end of its control socket (`WorkerArgs::standard` in `worker/src/args.rs`).
const CONTROL_FD: i32 = 3;

/// Something bad, and how it is done to a worker of a coordinator.
pub struct Fault {
    /// What it is called in reports.
    pub name: &'static str,
    /// Whether it looks like the work of what the worker was computing: such faults may condemn a request that is hit twice.
    pub is_crash: bool,
    act: fn(&mut Dice, Target),
}

/// A coordinator and one of its workers.
#[derive(Debug, Clone, Copy)]
struct Target {
    coordinator: u32,
    worker: u32,
}

impl Target {
    fn signal(self, signal: Signal) {
        // A process that has ended meanwhile is as good as a victim.
        let _ = kill(Pid::from_raw(self.worker as i32), signal);
    }

    /// The worker's end of its control socket.
    fn control(self) -> Option<OwnedFd> {
        let pid = rustix::process::Pid::from_raw(self.worker as i32)?;
        let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        pidfd_getfd(process, CONTROL_FD, PidfdGetfdFlags::empty()).ok()
    }

    /// Writes into the control socket as if the worker had.
    fn say(self, bytes: &[u8]) {
        if let Some(control) = self.control() {
            let _ = nix::unistd::write(control, bytes);
        }
    }
}

/// All of them. Those that are named twice are twice as likely.
pub const FAULTS: &[Fault] = &[
    Fault { name: "kill", is_crash: false, act: |_, worker| worker.signal(Signal::SIGKILL) },
    Fault { name: "kill", is_crash: false, act: |_, worker| worker.signal(Signal::SIGKILL) },
    Fault { name: "kill all", is_crash: false, act: kill_all },
    Fault { name: "stop", is_crash: false, act: |_, worker| worker.signal(Signal::SIGSTOP) },
    Fault { name: "pause", is_crash: false, act: pause },
    Fault { name: "slow down", is_crash: false, act: slow_down },
    // Workers leave it to their coordinator to end them.
    Fault { name: "terminate", is_crash: false, act: |_, worker| worker.signal(Signal::SIGTERM) },
    Fault { name: "crash", is_crash: true, act: |_, worker| worker.signal(Signal::SIGSEGV) },
    Fault { name: "torn frame", is_crash: false, act: |_, worker| worker.say(&[9, 0, 0, 0, 1]) },
    Fault { name: "garbage frame", is_crash: false, act: garbage },
    Fault { name: "closed control socket", is_crash: false, act: close_control },
    Fault { name: "no memory", is_crash: true, act: starve_worker },
    Fault { name: "no descriptors for a new worker", is_crash: false, act: starve_coordinator },
];

/// Does something bad to some worker, also to one that is just being started; none when there is no worker.
pub fn disturb(dice: &mut Dice, coordinator: u32) -> Option<&'static Fault> {
    let workers = workers_of(coordinator);
    if workers.is_empty() {
        return None;
    }
    let worker = *dice.pick(&workers);
    let fault = dice.pick(FAULTS);
    (fault.act)(dice, Target { coordinator, worker });
    Some(fault)
}

fn kill_all(_: &mut Dice, target: Target) {
    for worker in workers_of(target.coordinator) {
        Target { worker, ..target }.signal(Signal::SIGKILL);
    }
}

fn pause(dice: &mut Dice, worker: Target) {
    worker.signal(Signal::SIGSTOP);
    std::thread::park_timeout(Duration::from_millis(dice.below(300)));
    worker.signal(Signal::SIGCONT);
}

/// About twenty times slower for a while: it progresses, and is not to be taken for a hung one.
fn slow_down(dice: &mut Dice, worker: Target) {
    let until = Instant::now() + Duration::from_millis(200 + dice.below(400));
    while Instant::now() < until {
        worker.signal(Signal::SIGSTOP);
        std::thread::park_timeout(Duration::from_millis(19));
        worker.signal(Signal::SIGCONT);
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

fn garbage(dice: &mut Dice, worker: Target) {
    let bytes: Vec<u8> = (0..64).map(|_| dice.below(256) as u8).collect();
    worker.say(&bytes);
}

fn close_control(_: &mut Dice, worker: Target) {
    if let Some(control) = worker.control() {
        let _ = rustix::net::shutdown(control, rustix::net::Shutdown::Both);
    }
}

/// A worker that may map nothing more.
fn starve_worker(_: &mut Dice, worker: Target) {
    let pid = rustix::process::Pid::from_raw(worker.worker as i32);
    let _ = prlimit(pid, Resource::As, Rlimit { current: Some(1 << 20), maximum: Some(1 << 20) });
}

/// A coordinator that can open nothing for a moment in which it needs to replace a worker.
fn starve_coordinator(dice: &mut Dice, target: Target) {
    let pid = rustix::process::Pid::from_raw(target.coordinator as i32);
    let maximum = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap().1;
    let limit =
        |current| prlimit(pid, Resource::Nofile, Rlimit { current: Some(current), maximum: Some(maximum) });
    let before = limit(8).unwrap();
    target.signal(Signal::SIGKILL);
    std::thread::park_timeout(Duration::from_millis(dice.below(400)));
    limit(before.current.unwrap_or(maximum)).unwrap();
}
