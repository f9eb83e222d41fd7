//! Drives the real program: one-shot commands, daemon conversations, and the processes behind them.

#![allow(dead_code, reason = "every test file uses a part of the fixture")]

use serde_json::{Value, json};
use spillway_model::testing::TinyModel;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// Longest wait for anything. Machines under test are busy; a hang is still found.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How often a condition is looked at again.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// A folder with model files, removed at the end.
#[derive(Debug)]
pub struct Models {
    folder: tempfile::TempDir,
}

impl Models {
    /// An empty folder.
    pub fn new() -> Self {
        Models { folder: tempfile::tempdir().unwrap() }
    }

    /// A path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A tiny model with four layers and a context of 512 tokens.
    pub fn tiny(&self) -> PathBuf {
        self.write("tiny.gguf", &TinyModel::new("qwen3"))
    }

    /// Another tiny model, which answers otherwise.
    pub fn other(&self) -> PathBuf {
        self.write("other.gguf", &TinyModel::new("llama").seed(7))
    }

    /// Writes a model. A file that holds it already stays as it is: a program that has it open would take a rewritten one for another.
    pub fn write(&self, name: &str, model: &TinyModel) -> PathBuf {
        let path = self.path(name);
        let bytes = model.to_bytes().unwrap();
        if fs::read(&path).ok().as_ref() != Some(&bytes) {
            fs::write(&path, bytes).unwrap();
        }
        path
    }
}

/// What a command left behind.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    /// Standard output as one JSON value per line.
    pub fn json_lines(&self) -> Vec<Value> {
        self.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The only line of standard output, as JSON.
    pub fn json(&self) -> Value {
        let lines = self.json_lines();
        assert_eq!(lines.len(), 1, "{self:?}");
        lines.into_iter().next().unwrap()
    }
}

/// The program with arguments, not yet started; another build than that of the tests when `SPILLWAY_TEST_BINARY` names one.
pub fn spillway<I: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = I>) -> Command {
    let program = std::env::var_os("SPILLWAY_TEST_BINARY");
    let mut command = Command::new(program.unwrap_or_else(|| env!("CARGO_BIN_EXE_spillway").into()));
    // Not the settings of whoever runs the tests.
    command.args(args).env_remove("SPILLWAY_LOG").env("SPILLWAY_CONFIG", "/dev/null");
    command
}

/// Runs a command to its end, with nothing on standard input.
pub fn run(args: &[&str]) -> Ran {
    run_with_input(args, b"")
}

/// Runs a command to its end.
pub fn run_with_input(args: &[&str], input: &[u8]) -> Ran {
    let child =
        spillway(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    finish(child, input)
}

/// Feeds a started command and waits for its end.
pub fn finish(mut child: Child, input: &[u8]) -> Ran {
    let mut stdin = child.stdin.take().unwrap();
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let input = input.to_vec();
    // A command may end without reading its input.
    let feed = thread::spawn(move || drop(stdin.write_all(&input)));
    let out = thread::spawn(move || read_text(&mut stdout));
    let err = thread::spawn(move || read_text(&mut stderr));
    let status = wait(&mut child);
    feed.join().unwrap();
    Ran { code: status.code(), stdout: out.join().unwrap(), stderr: err.join().unwrap() }
}

fn read_text(from: &mut impl Read) -> String {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

/// Waits for a process, but not for ever.
pub fn wait(child: &mut Child) -> ExitStatus {
    let id = child.id();
    let mut status = None;
    eventually(&format!("process {id} ends"), || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

/// Looks at a condition until it holds.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    assert!(holds_within(PATIENCE, &mut holds), "did not happen in time: {what}");
}

/// Whether a condition holds within a time.
pub fn holds_within(limit: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    loop {
        if holds() {
            return true;
        }
        if started.elapsed() > limit {
            return false;
        }
        thread::park_timeout(LOOK_AGAIN);
    }
}

/// Sends a signal.
pub fn signal(pid: u32, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap()), signal).unwrap();
}

/// Whether a process exists and is not a zombie.
pub fn is_running(pid: u32) -> bool {
    state_and_parent(&PathBuf::from(format!("/proc/{pid}"))).is_some_and(|(state, _)| state != 'Z')
}

/// The worker processes of a coordinator, zombies included.
pub fn workers_of(parent: u32) -> Vec<u32> {
    let mut workers: Vec<u32> = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            (state_and_parent(&entry.path())?.1 == parent).then_some(pid)
        })
        .collect();
    workers.sort_unstable();
    workers
}

/// State letter and parent from a process's `stat`.
fn state_and_parent(folder: &Path) -> Option<(char, u32)> {
    let stat = fs::read_to_string(folder.join("stat")).ok()?;
    // The name, in parentheses, may hold anything.
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// One connection to a daemon: lines in, events out.
pub struct Conversation {
    to: Option<Box<dyn Write + Send>>,
    events: Receiver<Value>,
    /// Ends the reading thread at its next event.
    deaf: Arc<AtomicBool>,
    stream: Option<UnixStream>,
}

impl Conversation {
    fn new(to: impl Write + Send + 'static, from: impl Read + Send + 'static) -> Self {
        let (sender, events) = mpsc::channel();
        let deaf = Arc::new(AtomicBool::new(false));
        let is_deaf = deaf.clone();
        thread::spawn(move || {
            for line in BufReader::new(from).lines() {
                let Ok(line) = line else { return };
                let event = serde_json::from_str(&line).unwrap_or_else(|_| panic!("not JSON: {line}"));
                if is_deaf.load(Ordering::Relaxed) || sender.send(event).is_err() {
                    return;
                }
            }
        });
        Conversation { to: Some(Box::new(to)), events, deaf, stream: None }
    }

    /// Connects to the socket of a daemon.
    pub fn connect(path: &Path) -> Self {
        let mut stream = None;
        eventually("the socket answers", || {
            stream = UnixStream::connect(path).ok();
            stream.is_some()
        });
        let stream = stream.unwrap();
        let mut conversation = Conversation::new(stream.try_clone().unwrap(), stream.try_clone().unwrap());
        conversation.stream = Some(stream);
        conversation
    }

    /// Goes away: closes both directions of a socket, or the reading end of a pipe at its next event.
    pub fn hang_up(&mut self) {
        self.deaf.store(true, Ordering::Relaxed);
        if let Some(stream) = &self.stream {
            stream.shutdown(Shutdown::Both).unwrap();
        }
    }

    /// Sends a message.
    pub fn send(&mut self, message: Value) {
        self.send_bytes(format!("{message}\n").as_bytes());
    }

    /// Sends bytes as they are.
    pub fn send_bytes(&mut self, bytes: &[u8]) {
        let to = self.to.as_mut().unwrap();
        to.write_all(bytes).unwrap();
        to.flush().unwrap();
    }

    /// Ends the messages; answers still come.
    pub fn close(&mut self) {
        self.to = None;
        if let Some(stream) = &self.stream {
            stream.shutdown(Shutdown::Write).unwrap();
        }
    }

    /// The next event.
    pub fn next(&mut self) -> Value {
        match self.events.recv_timeout(PATIENCE) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => panic!("no event came"),
            Err(RecvTimeoutError::Disconnected) => panic!("the daemon has closed the connection"),
        }
    }

    /// Takes in what comes until nothing has come for a time; false when that is not before long.
    pub fn is_quiet_for(&mut self, time: Duration) -> bool {
        let started = Instant::now();
        while started.elapsed() < PATIENCE {
            if self.events.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
                return true;
            }
        }
        false
    }

    /// Whether the daemon closes the connection without another event.
    pub fn is_closed(&mut self) -> bool {
        self.events.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Disconnected)
    }

    /// Events up to and including the first that fulfils the condition.
    pub fn until(&mut self, mut last: impl FnMut(&Value) -> bool) -> Vec<Value> {
        let mut events = Vec::new();
        loop {
            let event = self.next();
            let is_last = last(&event);
            events.push(event);
            if is_last {
                return events;
            }
        }
    }

    /// The last event of a request, and the text before it. Events of others are passed over.
    pub fn answer(&mut self, id: &str) -> (String, Value) {
        let events = self.until(|event| event["id"] == id && is_terminal(event));
        let text = events
            .iter()
            .filter(|event| event["type"] == "token" && event["id"] == id)
            .map(|event| event["text"].as_str().unwrap())
            .collect();
        (text, events.into_iter().last().unwrap())
    }

    /// Loads a model and expects success.
    pub fn load(&mut self, model: &Path, params: Value) -> Value {
        self.send(json!({"type": "load", "model": model, "params": params}));
        let event = self.next();
        assert_eq!(event["type"], "loaded", "{event}");
        event
    }

    /// Sends a message and expects one event of a type in reply.
    pub fn ask(&mut self, message: Value, expected: &str) -> Value {
        self.send(message);
        let event = self.next();
        assert_eq!(event["type"], expected, "{event}");
        event
    }

    /// Sends bytes and expects an error with a code.
    pub fn expect_error(&mut self, bytes: &[u8], code: &str) -> Value {
        self.send_bytes(bytes);
        let event = self.next();
        assert_eq!((event["type"].as_str(), event["code"].as_str()), (Some("error"), Some(code)), "{event}");
        event
    }
}

/// Whether an event ends the request it names.
pub fn is_terminal(event: &Value) -> bool {
    matches!(event["type"].as_str(), Some("done" | "error" | "aborted"))
}

/// A running daemon with its standard streams as a connection; killed at the end if it still runs.
pub struct Daemon {
    child: Child,
    /// Standard input and output.
    pub main: Conversation,
}

impl Daemon {
    /// Starts a daemon.
    pub fn start(args: &[&str]) -> Self {
        Self::start_with_env(args, &[])
    }

    /// Starts a daemon with environment variables.
    pub fn start_with_env(args: &[&str], env: &[(&str, &str)]) -> Self {
        let mut command = spillway(["daemon"].iter().chain(args));
        command.envs(env.iter().copied());
        Self::spawn(command)
    }

    /// Starts a daemon with a command made elsewhere, which says where its standard error goes.
    pub fn spawn(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout): (ChildStdin, _) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Daemon { main: Conversation::new(stdin, stdout), child }
    }

    /// Starts a daemon and loads a tiny model.
    pub fn with_model(models: &Models, params: Value) -> Self {
        let mut daemon = Daemon::start(&[]);
        daemon.main.load(&models.tiny(), params);
        daemon
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its workers.
    pub fn workers(&self) -> Vec<u32> {
        workers_of(self.pid())
    }

    /// Sends it a signal.
    pub fn signal(&self, which: nix::sys::signal::Signal) {
        signal(self.pid(), which);
    }

    /// Waits for its end and gives the exit code.
    pub fn wait(&mut self) -> Option<i32> {
        wait(&mut self.child).code()
    }

    /// Ends its input and expects an orderly end.
    pub fn finish(mut self) {
        self.main.close();
        assert_eq!(self.wait(), Some(0));
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Fails when it has ended, which is what is wanted.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A stateless request with a varied and reproducible answer.
pub fn ask(id: &str, max_tokens: u32) -> Value {
    json!({"type": "generate", "id": id, "messages": [{"role": "user", "content": "the word"}],
        "temperature": 1.5, "top_p": 1, "seed": 11, "max_tokens": max_tokens, "ignore_eos": true})
}

/// A request that runs until it is ended.
pub fn endless(id: &str) -> Value {
    ask(id, 1 << 20)
}

/// A model with a context so long that an answer does not end by itself during a test.
pub fn long_model(models: &Models) -> PathBuf {
    models.write("long.gguf", &TinyModel::new("qwen3").context_length(1 << 16))
}

pub fn daemon_with_long_model(models: &Models, params: Value) -> Daemon {
    let mut daemon = Daemon::start(&[]);
    daemon.main.load(&long_model(models), params);
    daemon
}

/// Waits for a first token of a request.
pub fn until_running(client: &mut Conversation, id: &str) {
    client.until(|event| event["type"] == "token" && event["id"] == id);
}
