//! The worker as a process: this test program is its own worker. Started as `worker-cpu …` it becomes one; started by the
//! test runner it plays the coordinator. (The usual test harness cannot be both, hence `harness = false`.)

#![allow(clippy::unwrap_used, clippy::panic, reason = "the program is a test")]

mod support;

use command_fds::{CommandFdExt, FdMapping};
use spillway_model::testing::TinyModel;
use spillway_protocol::channel::{self, CoordinatorEnd, Received};
use spillway_protocol::control::{DeviceShare, FromWorker, LoadBand, LoadStats, PROTOCOL_VERSION, ToWorker};
use spillway_protocol::frame::{
    FrameKind, FrameLimits, LogitRows, SlotWrite, SpanShape, StepFrame, read_logit_row, read_logits,
    write_tokens,
};
use spillway_protocol::plan::{Execution, Residency, Stage, StageBytes};
use spillway_protocol::ring::{Ring, RingConsumer, RingProducer, Wait};
use spillway_protocol::status::{StatusReader, WorkerState};
use spillway_worker::Worker as _;
use spillway_worker::args::WorkerArgs;
use spillway_worker_cpu::CpuWorker;
use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use support::{Pipeline, Rounding, limits, open};

const EPOCH: u64 = 3;
const PATIENCE: Duration = Duration::from_secs(60);

/// A test by name.
type Case = (&'static str, fn(&Path));

const CASES: [Case; 11] = [
    ("two_workers_give_the_bits_of_one_band_in_process", two_workers_give_the_bits_of_one_band_in_process),
    ("frames_of_another_epoch_are_dropped", frames_of_another_epoch_are_dropped),
    ("end_of_file_ends_an_idle_worker", end_of_file_ends_an_idle_worker),
    ("shutdown_before_load_ends_the_worker", shutdown_before_load_ends_the_worker),
    ("links_are_answered_before_and_between_steps", links_are_answered_before_and_between_steps),
    ("ctrl_c_does_not_reach_a_worker", ctrl_c_does_not_reach_a_worker),
    ("a_garbled_frame_is_reported", a_garbled_frame_is_reported),
    ("a_file_that_changed_is_reported", a_file_that_changed_is_reported),
    ("a_missing_file_and_a_band_that_does_not_exist_are_reported", load_errors_are_reported),
    ("a_worker_of_another_parent_ends_at_once", a_worker_of_another_parent_ends_at_once),
    ("bad_arguments_and_descriptors_are_refused", bad_arguments_and_descriptors_are_refused),
];

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    if arguments.first().is_some_and(|first| first == CpuWorker::NAME) {
        return spillway_worker::run::<CpuWorker>(arguments.into_iter().skip(1));
    }
    let filter =
        arguments.iter().filter_map(|argument| argument.to_str()).find(|text| !text.starts_with('-'));
    let model = std::env::temp_dir().join(format!("spillway-worker-test-{}.gguf", std::process::id()));
    TinyModel::new("qwen35").write(&model).unwrap();
    for (name, case) in CASES {
        if filter.is_none_or(|filter| name.contains(filter)) {
            case(&model);
            println!("test {name} ... ok");
        }
    }
    std::fs::remove_file(&model).unwrap();
    ExitCode::SUCCESS
}

/// A worker process and everything the coordinator holds of it. Dropping it kills it.
struct Worker {
    child: Child,
    control: CoordinatorEnd,
    status: StatusReader,
}

impl Worker {
    fn start(ring_in: &Ring, ring_out: &Ring, args: WorkerArgs) -> Self {
        let (control, worker_end) = channel::pair().unwrap();
        let status = StatusReader::create().unwrap();
        let inherited = [
            (worker_end.as_fd().try_clone_to_owned().unwrap(), args.control_fd),
            (ring_in.dup().unwrap(), args.ring_in_fd),
            (ring_out.dup().unwrap(), args.ring_out_fd),
            (status.as_fd().try_clone_to_owned().unwrap(), args.status_fd),
        ];
        let child = spawn(args.to_argv(CpuWorker::NAME), inherited.into());
        drop(worker_end);
        Self { child, control, status }
    }

    fn hear(&mut self) -> FromWorker {
        match self.control.receive(Some(PATIENCE)).unwrap() {
            Received::Message(message) => message,
            other => panic!("{other:?} instead of a message"),
        }
    }

    /// Loads a band and lets it serve; its statistics, or the code of the failure.
    fn load(&mut self, load: LoadBand) -> Result<LoadStats, String> {
        let stats = self.load_without_serving(load)?;
        self.control.send(&ToWorker::Serve).unwrap();
        Ok(stats)
    }

    fn load_without_serving(&mut self, load: LoadBand) -> Result<LoadStats, String> {
        let hello = FromWorker::Hello { protocol: PROTOCOL_VERSION, pid: self.child.id() };
        assert_eq!(self.hear(), hello);
        self.control.send(&ToWorker::Load(Box::new(load))).unwrap();
        loop {
            match self.hear() {
                FromWorker::Progress { done, total } => assert!(done <= total),
                FromWorker::Loaded(stats) => return Ok(stats),
                FromWorker::Failed { code, .. } => return Err(code),
                other => panic!("{other:?} during a load"),
            }
        }
    }

    /// Waits for the end of the process.
    fn exit(&mut self, patience: Duration) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < patience, "the worker is still there");
            std::thread::park_timeout(Duration::from_millis(2));
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(argv: Vec<OsString>, inherited: Vec<(OwnedFd, i32)>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(argv).stdout(Stdio::null()).stderr(Stdio::null());
    let mappings = inherited.into_iter().map(|(parent_fd, child_fd)| FdMapping { parent_fd, child_fd });
    command.fd_mappings(mappings.collect()).unwrap();
    command.spawn().unwrap()
}

/// The rings of a pipeline of `stages` stages, and how to load each of them.
struct Setup {
    rings: Vec<Ring>,
    loads: Vec<LoadBand>,
    limits: FrameLimits,
}

impl Setup {
    fn new(path: &Path, cuts: &[usize]) -> Self {
        let model = open(path);
        let program = model.program();
        let limits = limits(Rounding::LEAST);
        let frames = FrameLimits::new(&limits, program.d_model, program.vocab);
        let edge = |index: usize| match index {
            0 => FrameKind::Tokens,
            _ if index == cuts.len() => FrameKind::Logits,
            _ => FrameKind::Residual,
        };
        let rings = (0..=cuts.len()).map(|index| Ring::create(2, frames.slot_bytes(edge(index))).unwrap());
        let mut start = 0;
        let load = |(stage_index, count): (usize, &usize)| {
            let layers = start..start + count;
            start += count;
            let stage = Stage {
                embed: layers.start == 0,
                head: layers.end == program.layers.len(),
                layers,
                execution: Execution::Cpu { threads: 1, node: None },
                residency: vec![Residency::Host; *count],
                bytes: StageBytes::default(),
                why: String::new(),
            };
            let file_bytes = model.gguf().file_len() as u64;
            let file_stamp = model.gguf().stamp();
            LoadBand {
                model: path.to_owned(),
                file_bytes,
                file_stamp,
                epoch: EPOCH,
                stage_index,
                stage,
                lift: None,
                limits,
            }
        };
        let loads = cuts.iter().enumerate().map(load).collect();
        Self { rings: rings.collect(), loads, limits: frames }
    }

    /// One stage with the whole model.
    fn single(path: &Path) -> Self {
        let layers = open(path).program().layers.len();
        Self::new(path, &[layers])
    }

    fn start(&self) -> Vec<Worker> {
        let args = WorkerArgs::standard(std::process::id(), false);
        self.rings.windows(2).map(|pair| Worker::start(&pair[0], &pair[1], args)).collect()
    }

    fn start_loaded(&self) -> Vec<Worker> {
        let mut workers = self.start();
        for (worker, load) in workers.iter_mut().zip(&self.loads) {
            worker.load(load.clone()).unwrap();
        }
        workers
    }

    /// The coordinator's ends of the first and the last ring.
    fn ends(&self) -> (RingProducer, RingConsumer) {
        let (first, last) = (&self.rings[0], &self.rings[self.rings.len() - 1]);
        (
            RingProducer::attach(first.dup().unwrap()).unwrap(),
            RingConsumer::attach(last.dup().unwrap()).unwrap(),
        )
    }

    /// Sends one sequence's tokens as one step that wants all logits.
    fn send(&self, ring: &mut RingProducer, epoch: u64, ids: &[u32]) {
        let mut frame = StepFrame::default();
        frame.begin(epoch, 1);
        let tokens = u32::try_from(ids.len()).unwrap();
        let shape =
            SpanShape { sequence: 1, state_slot: 0, start: 0, tokens, logits: LogitRows::All, lifted: false };
        let blocks: Vec<u32> = (0..tokens.div_ceil(32)).collect();
        frame.push(shape, &blocks, &self.limits).unwrap();
        let Wait::Ready(mut slot) = ring.wait(PATIENCE).unwrap() else { panic!("no room") };
        write_tokens(&mut slot, &frame, ids).unwrap();
        slot.publish();
    }

    /// Receives the logits of a step, however many frames they take.
    fn receive(&self, ring: &mut RingConsumer) -> Vec<Vec<f32>> {
        let mut rows = Vec::new();
        loop {
            let Wait::Ready(slot) = ring.wait(PATIENCE).unwrap() else { panic!("no logits") };
            let about = read_logits(&slot, &self.limits).unwrap();
            assert_eq!((about.epoch, about.first_row), (EPOCH, rows.len()));
            for row in 0..about.rows {
                let mut logits = vec![0.0; self.limits.vocab];
                read_logit_row(&slot, &about, row, &self.limits, &mut logits).unwrap();
                rows.push(logits);
            }
            if about.last {
                return rows;
            }
        }
    }
}

fn two_workers_give_the_bits_of_one_band_in_process(model: &Path) {
    let layers = open(model).program().layers.len();
    let setup = Setup::new(model, &[1, layers - 1]);
    let mut workers = setup.start_loaded();
    let (mut first, mut last) = setup.ends();
    // More rows than a logits frame holds.
    let ids: Vec<u32> = (0..120).map(|i| i * 7 % 200).collect();
    setup.send(&mut first, EPOCH, &ids);
    let ours = setup.receive(&mut last);
    let in_process = Pipeline::whole(&open(model), Rounding::LEAST).score(&ids, 33);
    assert!(support::same_bits(&ours, &in_process));
    for (worker, layers) in workers.iter_mut().zip([1, layers as u64 - 1]) {
        worker.control.send(&ToWorker::Shutdown).unwrap();
        assert_eq!(worker.exit(PATIENCE).code(), Some(0));
        let status = worker.status.read();
        assert_eq!((status.pid, status.epoch, status.step), (worker.child.id(), EPOCH, 1));
        assert_eq!(status.state, Some(WorkerState::Stopping));
        assert!(status.bytes_allocated > 0 && status.counters.busy_ns > 0);
        let counters = status.counters;
        assert_eq!((counters.layers, counters.steps, counters.tokens), (layers, 1, 120));
    }
}

fn frames_of_another_epoch_are_dropped(model: &Path) {
    let setup = Setup::single(model);
    let mut workers = setup.start_loaded();
    let (mut first, mut last) = setup.ends();
    setup.send(&mut first, EPOCH - 1, &[1, 2, 3, 4]);
    setup.send(&mut first, EPOCH, &[5, 6]);
    assert_eq!(setup.receive(&mut last).len(), 2);
    workers[0].control.send(&ToWorker::Shutdown).unwrap();
    assert_eq!(workers[0].exit(PATIENCE).code(), Some(0));
    assert_eq!(workers[0].status.read().counters.tokens, 2);
}

fn end_of_file_ends_an_idle_worker(model: &Path) {
    let setup = Setup::single(model);
    let mut worker = setup.start_loaded().remove(0);
    // The coordinator's end closes while its rings stay open, as if it had crashed.
    let (dead, _) = channel::pair().unwrap();
    drop(std::mem::replace(&mut worker.control, dead));
    let start = Instant::now();
    assert_eq!(worker.exit(PATIENCE).code(), Some(0));
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

fn shutdown_before_load_ends_the_worker(model: &Path) {
    let mut worker = Setup::single(model).start().remove(0);
    worker.control.send(&ToWorker::Shutdown).unwrap();
    assert_eq!(worker.exit(PATIENCE).code(), Some(0));
}

/// A CPU worker has no device to link, and says so at any time; steps come all the same.
fn links_are_answered_before_and_between_steps(path: &Path) {
    let setup = Setup::single(path);
    let mut worker = setup.start().remove(0);
    let (mut tokens, mut logits) = setup.ends();
    worker.load_without_serving(setup.loads[0].clone()).unwrap();
    let share = DeviceShare { handle: vec![0; 64], bytes: 1 << 30, area_bytes: 1 << 20 };
    for round in 0..2 {
        worker.control.send(&ToWorker::Offer).unwrap();
        assert!(matches!(worker.hear(), FromWorker::Offered(Err(reason)) if reason.contains("CPU")));
        worker.control.send(&ToWorker::Connect(Some(share.clone()))).unwrap();
        assert!(matches!(worker.hear(), FromWorker::Connected(Err(reason)) if reason.contains("CPU")));
        worker.control.send(&ToWorker::Connect(None)).unwrap();
        assert_eq!(worker.hear(), FromWorker::Connected(Ok(())));
        worker.control.send(&ToWorker::Serve).unwrap();
        setup.send(&mut tokens, EPOCH, &[1, 2, round]);
        assert_eq!(setup.receive(&mut logits).len(), 3);
    }
}

fn ctrl_c_does_not_reach_a_worker(model: &Path) {
    let setup = Setup::single(model);
    let worker = setup.start_loaded().remove(0);
    let pid = nix::unistd::Pid::from_raw(i32::try_from(worker.child.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    let (mut first, mut last) = setup.ends();
    setup.send(&mut first, EPOCH, &[1]);
    assert_eq!(setup.receive(&mut last).len(), 1);
}

fn a_garbled_frame_is_reported(model: &Path) {
    let setup = Setup::single(model);
    let mut worker = setup.start_loaded().remove(0);
    let (mut first, _last) = setup.ends();
    let Wait::Ready(mut slot) = first.wait(PATIENCE).unwrap() else { panic!("no room") };
    slot.put(0, b"this is not a frame").unwrap();
    slot.publish();
    let FromWorker::Failed { code, message } = worker.hear() else { panic!("not reported") };
    assert_eq!(code, "frame_magic", "{message}");
    assert_eq!(worker.exit(PATIENCE).code(), Some(4));
    assert_eq!(worker.status.read().state, Some(WorkerState::Failed));
}

fn a_file_that_changed_is_reported(model: &Path) {
    let setup = Setup::single(model);
    let mut worker = setup.start().remove(0);
    let mut load = setup.loads[0].clone();
    load.file_bytes += 1;
    assert_eq!(worker.load(load).unwrap_err(), "file_changed");
    assert_eq!(worker.exit(PATIENCE).code(), Some(4));
}

fn load_errors_are_reported(model: &Path) {
    let setup = Setup::single(model);
    let mut beyond = setup.loads[0].clone();
    beyond.stage.layers.end += 1;
    let mut missing = setup.loads[0].clone();
    missing.model = PathBuf::from("/nonexistent/model.gguf");
    let mut nowhere = setup.loads[0].clone();
    nowhere.stage.execution = Execution::Cpu { threads: 1, node: Some(4_000) };
    for (load, expected) in [(beyond, Some("band_spec")), (missing, None), (nowhere, Some("numa_node"))] {
        let mut worker = setup.start().remove(0);
        let code = worker.load(load).unwrap_err();
        assert_eq!(expected.unwrap_or(&code), code);
        assert_eq!(worker.exit(PATIENCE).code(), Some(4));
    }
}

fn a_worker_of_another_parent_ends_at_once(model: &Path) {
    let setup = Setup::single(model);
    let args = WorkerArgs::standard(1, false);
    let mut worker = Worker::start(&setup.rings[0], &setup.rings[1], args);
    assert_eq!(worker.control.receive(Some(PATIENCE)).unwrap(), Received::Closed);
    assert_eq!(worker.exit(PATIENCE).code(), Some(4));
}

fn bad_arguments_and_descriptors_are_refused(_model: &Path) {
    let code = |argv: Vec<OsString>| spawn(argv, Vec::new()).wait().unwrap().code();
    assert_eq!(code(vec![CpuWorker::NAME.into(), "--help".into()]), Some(2));
    let args = WorkerArgs::standard(std::process::id(), false);
    let twice = WorkerArgs { ring_in_fd: args.ring_out_fd, ..args };
    let not_open = WorkerArgs { control_fd: 900, ring_in_fd: 901, ring_out_fd: 902, status_fd: 903, ..args };
    for args in [twice, not_open] {
        assert_eq!(code(args.to_argv(CpuWorker::NAME)), Some(4), "{args:?}");
    }
}
