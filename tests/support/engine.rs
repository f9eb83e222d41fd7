//! An engine with real worker processes, and what tests ask of it.

#![allow(dead_code, reason = "every test file uses a part of the fixture")]

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use spillway::engine::{
    Completion, Engine, EngineError, EngineOptions, GenerateEvent, GenerateRequest, RequestId, ScoreRequest,
};
use spillway::open::{LoadedModel, TextNeed, open_model};
use spillway::planner::{Machine, PlacementRequest, plan};
use spillway::sampler::SamplingParams;
use spillway_model::testing::TinyModel;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longest wait for anything. Machines under test are busy; a hang is still found.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A model file, removed at the end.
pub struct File {
    pub path: PathBuf,
    _folder: TempDir,
}

pub fn tiny(model: &TinyModel) -> File {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    model.write(&path).unwrap();
    File { path, _folder: folder }
}

/// Placement with `workers` CPU workers of two threads and small limits.
pub fn placement(workers: usize) -> PlacementRequest {
    PlacementRequest {
        cpu_workers: Some(workers),
        threads: Some(2),
        max_seq: Some(256),
        ..Default::default()
    }
}

pub fn open(path: &Path) -> Arc<LoadedModel> {
    Arc::new(open_model(path, TextNeed::Optional).unwrap())
}

/// Options of the tests: workers are the built program (`SPILLWAY_TEST_BINARY` names another one, for long runs beside builds),
/// four requests may wait.
pub fn options() -> EngineOptions {
    let named = std::env::var_os("SPILLWAY_TEST_BINARY").map(PathBuf::from);
    let worker_exe = Some(named.unwrap_or_else(|| env!("CARGO_BIN_EXE_spillway").into()));
    EngineOptions { worker_exe, queue: Some(4), ..Default::default() }
}

pub fn try_start(
    model: &Arc<LoadedModel>,
    request: &PlacementRequest,
    options: EngineOptions,
) -> Result<Engine, EngineError> {
    let plan = plan(model.summary(), &Machine::detect(), request).unwrap();
    Engine::start(model.clone(), plan, options, |_| {})
}

pub fn start(path: &Path, request: &PlacementRequest) -> Engine {
    try_start(&open(path), request, options()).unwrap()
}

/// A greedy request.
pub fn greedy(prompt: &[u32], max_tokens: usize) -> GenerateRequest {
    GenerateRequest {
        prompt: prompt.to_vec(),
        max_tokens,
        sampling: SamplingParams::default(),
        stop: Vec::new(),
        ignore_eos: true,
    }
}

/// A request under way.
pub struct Running {
    pub id: RequestId,
    pub events: Receiver<GenerateEvent>,
}

pub fn submit(engine: &Engine, request: GenerateRequest) -> Running {
    let (sender, events) = channel();
    let sink = Box::new(move |event| drop(sender.send(event)));
    Running { id: engine.submit(request, sink).unwrap(), events }
}

impl Running {
    /// Waits for `count` tokens.
    pub fn tokens(&self, count: usize) {
        let mut seen = 0;
        while seen < count {
            if let GenerateEvent::Token { .. } = self.events.recv_timeout(PATIENCE).unwrap() {
                seen += 1;
            }
        }
    }

    /// The terminal event, which is the last one.
    pub fn end(&self) -> GenerateEvent {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let event = self.events.recv_timeout(deadline - Instant::now()).expect("a terminal event");
            if let GenerateEvent::Done(_) | GenerateEvent::Failed(_) | GenerateEvent::Aborted(_) = event {
                assert!(self.events.recv_timeout(PATIENCE).is_err(), "nothing follows the terminal event");
                return event;
            }
        }
    }

    pub fn done(&self) -> Completion {
        match self.end() {
            GenerateEvent::Done(completion) => completion,
            other => panic!("{other:?}"),
        }
    }
}

pub fn answer(engine: &Engine, request: GenerateRequest) -> Completion {
    submit(engine, request).done()
}

/// The bits of the logits of every position.
pub fn logits(engine: &Engine, ids: &[u32], chunk: usize) -> Vec<Vec<u32>> {
    let mut rows = Vec::new();
    let request = ScoreRequest { ids: ids.to_vec(), chunk: Some(chunk) };
    let result = engine.score(&request, &mut |position, row| {
        assert_eq!(position, rows.len());
        rows.push(row.iter().map(|value| value.to_bits()).collect());
        ControlFlow::Continue(())
    });
    result.unwrap();
    rows
}

/// A prompt of `count` ids that differ with `seed`.
pub fn prompt(seed: u32, count: u32) -> Vec<u32> {
    (0..count).map(|i| (i * 37 + seed * 101 + i * i * seed) % 250).collect()
}

static TURN: Mutex<()> = Mutex::new(());

/// One test at a time, for tests that count the processes and descriptors of the test program.
pub fn take_turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Process ids of the workers, in pipeline order.
pub fn pids(engine: &Engine) -> Vec<u32> {
    engine.status().stages.iter().map(|stage| stage.pid).collect()
}

pub fn signal_worker(engine: &Engine, stage: usize, signal: Signal) {
    let pid = i32::try_from(pids(engine)[stage]).unwrap();
    kill(Pid::from_raw(pid), signal).unwrap();
}

/// What [`children`] is when every worker is gone and reaped.
pub const NOBODY: [i32; 0] = [];

/// Child processes of this one, zombies included.
pub fn children() -> Vec<i32> {
    let own = std::process::id().to_string();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // After the command in parentheses: state, parent.
        stat.rsplit_once(')').is_some_and(|(_, rest)| rest.split_whitespace().nth(1) == Some(own.as_str()))
    })
    .collect()
}

/// Whether a process exists, as a zombie or otherwise.
pub fn exists(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// Open descriptors of this process by what they refer to, without those of the test harness.
pub fn descriptors() -> Vec<String> {
    let links = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let mut targets: Vec<String> = links
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .map(|target| target.to_string_lossy().into_owned())
        .filter(|target| ["memfd:", "socket:", "pidfd", "eventfd"].iter().any(|kind| target.contains(kind)))
        .collect();
    targets.sort();
    targets
}
