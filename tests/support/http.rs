//! A server, and a client of HTTP/1.1 that is as simple, as slow or as rude as a test wants.

#![allow(dead_code, reason = "every test file uses a part of the fixture")]

use crate::support::{PATIENCE, eventually, spillway, wait, workers_of};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

/// Where completions are asked for.
pub const CHAT: &str = "/v1/chat/completions";
pub const TEXT: &str = "/v1/completions";

/// A running `spillway serve`; killed at the end if it still runs.
pub struct Server {
    child: Child,
    /// What it has said on standard error.
    said: Arc<Mutex<Vec<String>>>,
    pub http: Http,
}

impl Server {
    /// Starts a server on a free port and waits until it listens.
    pub fn start(args: &[&str], env: &[(&str, &str)]) -> Self {
        let args = ["serve", "--http", "127.0.0.1:0", "-q"].iter().chain(args);
        let mut command = spillway(args);
        command.envs(env.iter().copied()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let said = Arc::new(Mutex::new(Vec::new()));
        let saying = said.clone();
        thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                eprintln!("{line}");
                saying.lock().unwrap().push(line);
            }
        });
        let mut server = Server { child, said, http: Http { address: String::new() } };
        server.http.address = server.heard("listening on http://");
        server
    }

    /// Starts a server and waits until it has loaded a model.
    pub fn with_model(model: &Path, args: &[&str]) -> Self {
        Self::with_model_and_env(model, args, &[])
    }

    /// The same, with environment variables.
    pub fn with_model_and_env(model: &Path, args: &[&str], env: &[(&str, &str)]) -> Self {
        let args: Vec<&str> = ["-m", model.to_str().unwrap()].iter().chain(args).copied().collect();
        let server = Server::start(&args, env);
        server.heard("ready: ");
        server
    }

    /// Waits for a line on standard error; what follows its beginning.
    fn heard(&self, beginning: &str) -> String {
        let mut found = None;
        eventually(beginning, || {
            let said = self.said.lock().unwrap();
            found = said.iter().find_map(|line| line.strip_prefix(beginning).map(str::to_owned));
            found.is_some()
        });
        found.unwrap()
    }

    pub fn signal(&self, which: nix::sys::signal::Signal) {
        crate::support::signal(self.child.id(), which);
    }

    pub fn workers(&self) -> Vec<u32> {
        workers_of(self.child.id())
    }

    /// Waits for its end and gives the exit code.
    pub fn wait(&mut self) -> Option<i32> {
        wait(&mut self.child).code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails when it has ended, which is what is wanted.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Somebody who asks a server.
#[derive(Clone)]
pub struct Http {
    pub address: String,
}

/// An answer.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Reply {
    /// Reads a reply to what has been sent.
    pub fn of(stream: TcpStream) -> Self {
        let mut incoming = Incoming::read_head(stream);
        let mut body = String::new();
        incoming.body.read_to_string(&mut body).unwrap();
        Reply { status: incoming.status, headers: incoming.headers, body }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("not JSON: {self:?}"))
    }

    /// Expects a success and gives its body.
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        self.json()
    }

    /// Expects an error in OpenAI's shape; its code.
    pub fn error(&self) -> String {
        let error = &self.json()["error"];
        assert!(self.status >= 400 && error["message"].is_string() && error["type"].is_string(), "{self:?}");
        error["code"].as_str().unwrap().to_owned()
    }
}

impl Http {
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    pub fn get(&self, path: &str) -> Reply {
        self.send(&format!("GET {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n", self.address))
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.send(&self.request(path, &body.to_string(), ""))
    }

    /// Sends bytes as they are and reads one reply.
    pub fn send(&self, bytes: &str) -> Reply {
        let mut stream = self.connect();
        stream.write_all(bytes.as_bytes()).unwrap();
        Reply::of(stream)
    }

    /// A request with a JSON body; `headers` are further lines.
    pub fn request(&self, path: &str, body: &str, headers: &str) -> String {
        format!(
            "POST {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        )
    }

    /// Asks for a stream; `body` gets `stream`.
    pub fn stream(&self, path: &str, body: &Value) -> Events {
        let mut body = body.clone();
        body["stream"] = Value::from(true);
        let mut stream = self.connect();
        stream.write_all(self.request(path, &body.to_string(), "").as_bytes()).unwrap();
        Events::of(stream)
    }

    /// A value of `/metrics`.
    pub fn metric(&self, name: &str) -> f64 {
        let reply = self.get("/metrics");
        let line = reply.body.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {reply:?}")).parse().unwrap()
    }

    /// Waits until no request is in flight.
    pub fn until_idle(&self) {
        eventually("nothing is in flight", || self.metric("spillway_requests_in_flight") == 0.0);
    }
}

/// A reply whose head has come.
struct Incoming {
    status: u16,
    headers: Vec<(String, String)>,
    body: Box<dyn Read + Send>,
}

impl Incoming {
    fn read_head(stream: TcpStream) -> Self {
        let mut stream = BufReader::new(stream);
        let mut line = || {
            let mut line = String::new();
            stream.read_line(&mut line).unwrap();
            line.trim_end().to_owned()
        };
        let status = line();
        let status = status.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
        let status = status.unwrap();
        let mut headers = Vec::new();
        loop {
            let line = line();
            let Some((name, value)) = line.split_once(": ") else { break };
            headers.push((name.to_lowercase(), value.to_owned()));
        }
        let chunked = headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
        let body: Box<dyn Read + Send> =
            if chunked { Box::new(Chunked { stream, left: 0, ended: false }) } else { Box::new(stream) };
        Incoming { status, headers, body }
    }
}

/// A body in chunks. It fails when the stream ends before the last one.
struct Chunked {
    stream: BufReader<TcpStream>,
    left: usize,
    ended: bool,
}

impl Read for Chunked {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        while self.left == 0 && !self.ended {
            let mut line = String::new();
            if self.stream.read_line(&mut line)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            // The line feed behind a chunk is passed over.
            if let Ok(size) = usize::from_str_radix(line.trim(), 16) {
                (self.left, self.ended) = (size, size == 0);
            }
        }
        let most = buffer.len().min(self.left);
        let read = self.stream.read(&mut buffer[..most])?;
        if read == 0 && most > 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= read;
        Ok(read)
    }
}

/// Server-sent events.
pub struct Events {
    body: BufReader<Box<dyn Read + Send>>,
}

/// One of them.
#[derive(Debug, Clone, PartialEq)]
pub enum Sent {
    Comment(String),
    Data(Value),
    Done,
    /// The reply is over.
    End,
    /// The connection has broken off.
    Broken,
}

impl Events {
    /// The events that come in reply to what has been sent.
    pub fn of(stream: TcpStream) -> Self {
        let incoming = Incoming::read_head(stream);
        assert_eq!(incoming.status, 200);
        let kind = incoming.headers.iter().find(|(name, _)| name == "content-type").unwrap();
        assert_eq!(kind.1, "text/event-stream");
        Events { body: BufReader::new(incoming.body) }
    }

    pub fn next(&mut self) -> Sent {
        loop {
            let mut line = String::new();
            match self.body.read_line(&mut line) {
                Ok(0) => return Sent::End,
                Ok(_) => {}
                Err(_) => return Sent::Broken,
            }
            let line = line.trim_end_matches('\n');
            if let Some(comment) = line.strip_prefix(':') {
                return Sent::Comment(comment.trim().to_owned());
            }
            match line.strip_prefix("data: ") {
                Some("[DONE]") => return Sent::Done,
                Some(data) => return Sent::Data(serde_json::from_str(data).unwrap()),
                None => assert_eq!(line, "", "neither data nor comment"),
            }
        }
    }

    /// Everything to the end.
    pub fn rest(mut self) -> Vec<Sent> {
        let mut all = Vec::new();
        loop {
            all.push(self.next());
            if matches!(all.last(), Some(Sent::End | Sent::Broken)) {
                return all;
            }
        }
    }

    /// Waits for a first piece of text.
    pub fn until_text(&mut self) -> String {
        loop {
            match self.next() {
                Sent::Data(data) if !piece(&data).is_empty() => return piece(&data),
                Sent::Data(_) | Sent::Comment(_) => {}
                other => panic!("the stream ended: {other:?}"),
            }
        }
    }
}

/// The text of a chunk, of either endpoint.
pub fn piece(chunk: &Value) -> String {
    let choice = &chunk["choices"][0];
    choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default().to_owned()
}

/// The text of a stream.
pub fn text_of(sent: &[Sent]) -> String {
    sent.iter()
        .map(|sent| match sent {
            Sent::Data(chunk) => piece(chunk),
            _ => String::new(),
        })
        .collect()
}

/// Waits until the server closes a connection on which nothing more is sent.
pub fn until_closed(mut stream: TcpStream) {
    // The patience of the read is an error, too; an end is none.
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
}
