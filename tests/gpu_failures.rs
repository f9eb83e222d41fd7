//! The real program on an emulated device that fails: memory that runs out, kernels that fail or never end, a device that is gone.
//! Every request has one end, and no process stays behind.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "support/gpu.rs"]
mod gpu;
mod support;

use gpu::{can_compile, command, run};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::{Daemon, Models, endless, is_running, long_model, signal, until_running, wait, workers_of};

/// How soon a request or a command ends that waits for a kernel that never does: 2 s, and as much again for a machine that is
/// busy with other tests.
const AT_ONCE: Duration = Duration::from_secs(4);

/// Far enough into an answer that tokens have been seen, near enough to come soon.
const MIDSTREAM_LAUNCH: &str = "2000";
const MIDSTREAM_CALL: &str = "4000";

/// Memory may run out at any allocation of a load. (All of them are tried in the worker's own tests.)
#[test]
fn a_load_that_runs_out_of_memory_is_refused_and_leaves_nothing() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let model = models.tiny();
    let logits = |nth: usize| {
        let devices = format!("emulated:fail-allocation={nth}");
        run(&[
            "logits",
            "--json",
            "--quiet",
            "--ids",
            "1,2",
            "--devices",
            &devices,
            "-m",
            model.to_str().unwrap(),
        ])
    };
    // Fibonacci's numbers: many places near the beginning, and the last one beyond the load.
    let (mut nth, mut next, mut refusals) = (1, 2, 0);
    loop {
        let ran = logits(nth);
        if ran.code == Some(0) {
            break;
        }
        assert_eq!(ran.code, Some(4), "{nth}: {ran:?}");
        assert_eq!(ran.stderr.matches("error: ").count(), 1, "{nth}: one voice tells it: {ran:?}");
        let last = ran.json_lines().pop().unwrap();
        assert_eq!(last["code"], "gpu_out_of_memory", "{nth}: {last}");
        let message = last["message"].as_str().unwrap();
        assert!(message.contains("stage 0") && message.contains("fewer layers"), "{nth}: {message}");
        refusals += 1;
        (nth, next) = (next, nth + next);
    }
    assert!(refusals >= 8, "{refusals}");
}

/// The program, replacing no worker that fails.
fn without_restarts(args: &[&str]) -> Command {
    let mut command = command(args);
    command.env("SPILLWAY_RESTART_LIMIT", "0");
    command
}

/// Loads a model whose answers are long onto a device.
fn daemon_on(models: &Models, devices: &str) -> Daemon {
    let mut daemon = Daemon::spawn(without_restarts(&["daemon"]));
    daemon.main.load(&long_model(models), json!({"devices": devices}));
    daemon
}

/// A device that is lost ends the request with `gpu_lost`; the daemon goes on, and a load on a device that works serves again.
#[test]
fn a_device_lost_in_mid_answer_ends_the_request_and_the_next_load_works() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    for fault in [format!("lose-at-call={MIDSTREAM_CALL}"), format!("fail-launch={MIDSTREAM_LAUNCH}")] {
        let mut daemon = daemon_on(&models, &format!("emulated:{fault}"));
        let workers = daemon.workers();
        daemon.main.send(endless("r"));
        until_running(&mut daemon.main, "r");
        let (_, end) = daemon.main.answer("r");
        assert_eq!((&end["type"], &end["code"]), (&json!("error"), &json!("gpu_lost")), "{end}");
        assert_eq!((&end["class"], &end["retryable"]), (&json!("transient"), &json!(true)), "{end}");
        assert!(!workers.iter().any(|&pid| is_running(pid)), "{fault}");
        assert_eq!(daemon.main.ask(json!({"type": "diag"}), "diag")["state"], "failed");
        daemon.main.load(&models.tiny(), json!({"devices": "emulated"}));
        daemon.main.send(support::ask("again", 3));
        assert_eq!(daemon.main.answer("again").1["type"], "done");
        daemon.finish();
    }
}

/// `run --json` on a device, with the first event it prints.
fn started(model: &Path, devices: &str) -> (std::process::Child, Value) {
    let args = ["run", "-p", "x", "-n", "60000", "--ignore-eos", "--json", "--max-seq", "4096", "--quiet"];
    let mut child =
        without_restarts(&[&args[..], &["--devices", devices, "-m", model.to_str().unwrap()]].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    // Whoever waits for the child does not read on: a thread does, so that a full pipe stops nothing.
    std::thread::spawn(move || stdout.lines().for_each(drop));
    (child, serde_json::from_str(&line).unwrap())
}

/// A command has no model that could be loaded again: what to do is said in its own words, once.
#[test]
fn a_command_that_cannot_go_on_says_to_run_it_again() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let model = long_model(&models);
    let devices = format!("emulated:fail-launch={MIDSTREAM_LAUNCH}");
    let args = [
        "run",
        "-p",
        "x",
        "-n",
        "60000",
        "--ignore-eos",
        "--max-seq",
        "4096",
        "--quiet",
        "--devices",
        &devices,
    ];
    let output = without_restarts(&[&args[..], &["-m", model.to_str().unwrap()]].concat()).output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(4), "{told}");
    let errors: Vec<&str> = told.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(errors.len() == 1 && errors[0].ends_with("; run the command again"), "{told}");
}

#[test]
fn a_device_lost_in_mid_answer_ends_a_command_with_exit_code_4() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let devices = format!("emulated:lose-at-call={MIDSTREAM_CALL}");
    let (mut child, first) = started(&long_model(&models), &devices);
    assert_eq!(first["type"], "token");
    assert_eq!(wait(&mut child).code(), Some(4));
    assert_eq!(workers_of(child.id()), [0; 0]);
}

/// A kernel that never ends holds its worker; an abort ends the request all the same, and unloading ends the worker.
#[test]
fn a_hung_kernel_does_not_hold_an_abort_or_the_end_of_its_worker() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let mut daemon = daemon_on(&models, &format!("emulated:hang-launch={MIDSTREAM_LAUNCH}"));
    let workers = daemon.workers();
    daemon.main.send(endless("r"));
    until_running(&mut daemon.main, "r");
    let quiet = daemon.main.is_quiet_for(Duration::from_secs(1));
    assert!(quiet, "the kernel hangs");
    let asked = Instant::now();
    daemon.main.send(json!({"type": "abort", "id": "r"}));
    let (_, end) = daemon.main.answer("r");
    assert_eq!((&end["type"], &end["reason"]), (&json!("aborted"), &json!("client")), "{end}");
    assert!(asked.elapsed() < AT_ONCE, "{:?}", asked.elapsed());
    let asked = Instant::now();
    daemon.main.ask(json!({"type": "unload"}), "unloaded");
    assert!(asked.elapsed() < AT_ONCE, "{:?}", asked.elapsed());
    assert!(!workers.iter().any(|&pid| is_running(pid)));
    daemon.finish();
}

/// The same for Ctrl-C, in an answer and in a load.
#[test]
fn a_hung_kernel_does_not_hold_an_interrupt() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let devices = format!("emulated:hang-launch={MIDSTREAM_LAUNCH}");
    let (mut child, first) = started(&long_model(&models), &devices);
    assert_eq!(first["type"], "token");
    let workers = workers_of(child.id());
    let busy = || workers.iter().map(|&pid| processor_time(pid)).sum::<u64>();
    support::eventually("the kernel hangs", || {
        let before = busy();
        std::thread::park_timeout(Duration::from_millis(200));
        busy() == before
    });
    let asked = Instant::now();
    signal(child.id(), Signal::SIGINT);
    assert_eq!(wait(&mut child).code(), Some(130));
    assert!(asked.elapsed() < AT_ONCE, "{:?}", asked.elapsed());
    assert!(!workers.iter().any(|&pid| is_running(pid)));
}

/// Ticks that a process has computed.
fn processor_time(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // After the name: user time is field 12, system time field 13.
    fields.get(11..13).map_or(0, |times| times.iter().map(|time| time.parse::<u64>().unwrap_or(0)).sum())
}

/// A GPU worker that answers nothing, not even a request to end, is killed after its time.
#[test]
fn a_worker_that_does_not_answer_is_killed() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let mut daemon = daemon_on(&models, "emulated");
    let workers = daemon.workers();
    signal(workers[0], Signal::SIGSTOP);
    let asked = Instant::now();
    daemon.main.ask(json!({"type": "unload"}), "unloaded");
    assert!(asked.elapsed() < AT_ONCE, "{:?}", asked.elapsed());
    assert!(!is_running(workers[0]));
    daemon.finish();
}

/// Workers of a pipeline that copies from device to device are killed in turn: each is replaced and linked anew, and the answer is
/// that of an undisturbed run.
#[test]
fn a_killed_worker_is_replaced_and_linked_anew() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let mut daemon = Daemon::spawn(command(&["daemon"]));
    daemon.main.load(&models.tiny(), json!({"devices": "emulated:devices=3"}));
    let answer = |daemon: &mut Daemon, victim: Option<usize>| {
        let workers = daemon.workers();
        daemon.main.send(support::ask("r", 40));
        if let Some(victim) = victim {
            until_running(&mut daemon.main, "r");
            signal(workers[victim], Signal::SIGKILL);
        }
        let end = daemon.main.until(support::is_terminal).pop().unwrap();
        assert_eq!(end["type"], "done", "{end}");
        daemon.main.send(support::ask("whole", 40));
        daemon.main.answer("whole").0
    };
    let undisturbed = answer(&mut daemon, None);
    for victim in 0..3 {
        assert_eq!(answer(&mut daemon, Some(victim)), undisturbed, "stage {victim}");
    }
    let diag = daemon.main.ask(json!({"type": "diag"}), "diag");
    assert_eq!(diag["restarts"], 3, "{diag}");
    let peers = diag["stages"].as_array().unwrap().iter().filter(|stage| stage["link"] == "peer").count();
    assert_eq!(peers, 2, "{diag}");
    daemon.finish();
}

/// A load that fails when the model before it has gone already: that one is started again and answers as before.
#[test]
fn a_load_that_fails_brings_the_model_before_it_back() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let mut daemon = Daemon::spawn(command(&["daemon"]));
    daemon.main.load(&models.tiny(), json!({"devices": "emulated"}));
    daemon.main.send(support::ask("before", 20));
    let before = daemon.main.answer("before").0;
    daemon.main.send(json!({"type": "load", "id": "bad", "model": models.tiny(),
        "params": {"devices": "emulated:fail-allocation=3"}}));
    let (_, end) = daemon.main.answer("bad");
    assert_eq!((&end["type"], &end["code"]), (&json!("error"), &json!("gpu_out_of_memory")), "{end}");
    assert!(end["message"].as_str().unwrap().ends_with("the model before it serves again"), "{end}");
    assert_eq!(daemon.main.ask(json!({"type": "diag"}), "diag")["state"], "ready");
    daemon.main.send(support::ask("after", 20));
    assert_eq!(daemon.main.answer("after").0, before);
    daemon.finish();
}

/// A daemon on three emulated devices of `memory` bytes each, from which they can be taken away.
struct Rig {
    models: Models,
    daemon: Daemon,
}

impl Rig {
    fn new(memory: u64, params: Value, env: &[(&str, &str)]) -> Rig {
        let models = Models::new();
        std::fs::create_dir(models.path("gone")).unwrap();
        // With ids, which every process sees, so that they are locked.
        let devices = format!(
            "emulated:devices=3,ids=1,memory={memory},gone={}",
            models.path("gone").to_str().unwrap()
        );
        let mut daemon = command(&["daemon"]);
        daemon.env("SPILLWAY_LOCK_DIR", models.path("locks")).envs(env.iter().copied());
        let mut daemon = Daemon::spawn(daemon);
        let mut all = json!({"devices": devices});
        if params.get("plan").is_some() {
            let (model, plan) = (models.tiny(), params["plan"].as_str().unwrap());
            let args = ["plan", "-m", model.to_str().unwrap(), "--devices", &devices, "--save", plan];
            assert_eq!(run(&args).code, Some(0));
            all = json!({});
        }
        all.as_object_mut().unwrap().extend(params.as_object().unwrap().clone());
        daemon.main.load(&models.tiny(), all);
        Rig { models, daemon }
    }

    /// Takes devices away for good.
    fn take_away(&self, devices: &[u32]) {
        for device in devices {
            std::fs::write(self.models.path("gone").join(device.to_string()), "").unwrap();
        }
    }

    /// An answer during which devices are taken away: its last event, and the codes of the pauses before.
    fn lose(&mut self, devices: &[u32]) -> (Value, Vec<Value>) {
        self.daemon.main.send(support::ask("r", 400));
        until_running(&mut self.daemon.main, "r");
        self.take_away(devices);
        let mut events = self.daemon.main.until(support::is_terminal);
        let end = events.pop().unwrap();
        events.retain(|event| event["type"] == "recovering");
        (end, events)
    }

    /// Which devices are locked, by number.
    fn locked(&self) -> Vec<bool> {
        let mut locks: Vec<_> =
            std::fs::read_dir(self.models.path("locks")).unwrap().map(|lock| lock.unwrap().path()).collect();
        // A name is an id, which ends with the number.
        locks.sort();
        locks.iter().map(|lock| std::fs::File::open(lock).unwrap().try_lock_shared().is_err()).collect()
    }

    fn diag(&mut self) -> Value {
        self.daemon.main.ask(json!({"type": "diag"}), "diag")
    }
}

const AMPLE: u64 = 1 << 30;

/// A device that does not come back: the answer goes on on the others, or on the CPU when there is none, and the client is told.
#[test]
fn an_answer_goes_on_on_the_devices_that_are_left() {
    if !can_compile() {
        return;
    }
    for (lost, left, target) in [(&[1][..], 2, "gpu"), (&[0, 1, 2][..], 1, "cpu")] {
        let mut rig = Rig::new(AMPLE, json!({"pp": 3, "vram_limit": "1GiB,1GiB,1GiB"}), &[]);
        assert_eq!(rig.locked(), [true; 3]);
        let (end, pauses) = rig.lose(lost);
        assert_eq!((&end["type"], &end["tokens"]), (&json!("done"), &json!(400)), "{end}");
        let last = pauses.last().unwrap();
        assert_eq!((&pauses[0]["code"], &last["code"]), (&json!("gpu_lost"), &json!("device_replanned")));
        assert!(last["message"].as_str().unwrap().contains("may differ by rounding"), "{last}");
        let diag = rig.diag();
        assert_eq!((&diag["state"], &diag["ready"]), (&json!("ready"), &json!(true)), "{diag}");
        let stages = diag["stages"].as_array().unwrap();
        assert!(stages.len() == left && stages.iter().all(|stage| stage["target"] == target), "{diag}");
        assert_eq!(rig.daemon.workers().len(), left, "no worker of the old placement is left");
        let used: Vec<bool> = (0..3).map(|device| target == "gpu" && !lost.contains(&device)).collect();
        assert_eq!(rig.locked(), used, "others may have what is not used any more");
        assert!(diag["recovery"]["replan_ms"].as_f64().unwrap() > 0.0, "{diag}");
        rig.daemon.main.send(support::ask("next", 5));
        assert_eq!(rig.daemon.main.answer("next").1["type"], "done");
        rig.daemon.finish();
    }
}

/// The same for a placement that was kept in a file: it names devices, of which those that are left are used.
#[test]
fn a_saved_plan_is_left_when_one_of_its_devices_is_lost() {
    if !can_compile() {
        return;
    }
    let folder = Models::new();
    let mut rig = Rig::new(AMPLE, json!({"plan": folder.path("plan.json")}), &[]);
    assert_eq!(rig.locked(), [true; 3]);
    let (end, pauses) = rig.lose(&[1]);
    assert_eq!((&end["type"], &end["tokens"]), (&json!("done"), &json!(400)), "{end}");
    assert_eq!(pauses.last().unwrap()["code"], "device_replanned");
    assert_eq!(rig.locked(), [true, false, true]);
    assert_eq!(rig.diag()["stages"].as_array().unwrap().len(), 2);
    rig.daemon.finish();
}

/// What is left is too small: the request ends with the planner's arithmetic, and the model can be loaded again when the device is
/// back.
#[test]
fn a_model_that_does_not_fit_what_is_left_ends_its_requests_with_the_arithmetic() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let model = models.tiny();
    let fits = |devices: u32, memory: u64| {
        let devices = format!("emulated:devices={devices},memory={memory}");
        run(&["plan", "--json", "--devices", &devices, "-m", model.to_str().unwrap()]).code == Some(0)
    };
    // The least memory of each of three devices, to 4 KiB: two of that size are too few.
    let (mut too_small, mut enough) = (0, AMPLE);
    while enough - too_small > 4096 {
        let middle = too_small + (enough - too_small) / 2;
        if fits(3, middle) { enough = middle } else { too_small = middle }
    }
    assert!(!fits(2, enough), "the test is of no use");
    let mut rig = Rig::new(enough, json!({}), &[]);
    let (end, _) = rig.lose(&[1]);
    assert_eq!((&end["type"], &end["code"]), (&json!("error"), &json!("gpu_lost")), "{end}");
    let message = end["message"].as_str().unwrap();
    assert!(message.contains("device 1") && message.contains("KiB"), "{message}");
    let diag = rig.diag();
    assert_eq!((&diag["state"], &diag["reason"]), (&json!("failed"), &end["message"]), "{diag}");
    std::fs::remove_file(rig.models.path("gone").join("1")).unwrap();
    rig.daemon.main.ask(json!({"type": "reload"}), "loaded");
    rig.daemon.main.send(support::ask("next", 5));
    assert_eq!(rig.daemon.main.answer("next").1["type"], "done");
    rig.daemon.finish();
}

#[test]
fn a_lost_device_ends_requests_at_once_where_the_user_wants_that() {
    if !can_compile() {
        return;
    }
    let mut rig = Rig::new(AMPLE, json!({}), &[("SPILLWAY_DEVICE_LOST", "fail")]);
    let (end, _) = rig.lose(&[2]);
    assert_eq!((&end["type"], &end["code"]), (&json!("error"), &json!("gpu_lost")), "{end}");
    assert!(end["message"].as_str().unwrap().contains("device 2"), "{end}");
    assert_eq!(rig.diag()["restarts"], 0);
    rig.daemon.finish();
}

/// A test of a link that takes long while the model is placed anew holds nobody up.
#[test]
fn requests_are_served_while_links_of_another_placement_are_tested() {
    if !can_compile() {
        return;
    }
    let mut rig = Rig::new(AMPLE, json!({"pp": 3, "vram_limit": "1GiB,1GiB,1GiB"}), &[]);
    rig.daemon.main.send(support::ask("r", 400));
    until_running(&mut rig.daemon.main, "r");
    rig.take_away(&[1]);
    // Devices 0 and 2 were no neighbours before.
    let is_end_of_test = |pid: &u32| {
        std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.contains(spillway_worker_gpu::PROBE_SUBCOMMAND))
    };
    let mut found = None;
    let started = Instant::now();
    while found.is_none() {
        assert!(started.elapsed() < support::PATIENCE, "no link was tested");
        found = rig.daemon.workers().into_iter().find(is_end_of_test);
        std::thread::park_timeout(Duration::from_millis(1));
    }
    let probe = found.unwrap();
    signal(probe, Signal::SIGSTOP);
    let asked = Instant::now();
    rig.daemon.main.send(json!({"type": "abort", "id": "r"}));
    let (_, end) = rig.daemon.main.answer("r");
    assert_eq!((&end["type"], &end["reason"]), (&json!("aborted"), &json!("client")), "{end}");
    assert!(asked.elapsed() < AT_ONCE, "{:?}", asked.elapsed());
    let diag = rig.diag();
    assert_eq!(diag["state"], "recovering", "{diag}");
    rig.daemon.main.send(support::ask("next", 5));
    signal(probe, Signal::SIGCONT);
    assert_eq!(rig.daemon.main.answer("next").1["type"], "done");
    let diag = rig.diag();
    assert_eq!(diag["stages"][0]["link"], "peer", "{diag}");
    rig.daemon.finish();
}
