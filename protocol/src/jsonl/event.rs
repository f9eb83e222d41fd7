//! Messages to a client.

use super::error::{Class, Rejected};
use serde::Serialize;

/// One message to a client; serialises to one line.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event {
    /// The model can be used.
    Loaded(Loaded),
    /// A worker has stored more of the model; only if the load asked for it.
    Loading {
        /// Id of the load.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<String>,
        /// Stage the figures belong to, 0-based.
        stage: usize,
        /// Weight bytes stored.
        done: u64,
        /// Weight bytes in all.
        total: u64,
    },
    /// It is known how rows get from a stage on a GPU to the next one; only if the load asked for progress.
    Link {
        /// Id of the load.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<String>,
        /// The earlier stage.
        from: usize,
        /// The later stage.
        to: usize,
        /// `peer` or `staged`.
        path: &'static str,
        /// Why rows do not take the shorter way.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A piece of an answer: complete UTF-8, never part of a stop string.
    Token {
        /// Id of the request.
        id: String,
        /// The text.
        text: String,
    },
    /// A worker has failed and is being replaced; the answer goes on where it was.
    Recovering {
        /// Id of the request.
        id: String,
        /// Code of the failure.
        code: &'static str,
        /// What happened.
        message: String,
    },
    /// Something the client should know that ends nothing.
    Info {
        /// Id of the request.
        id: String,
        /// Stable code.
        code: &'static str,
        /// One sentence.
        message: String,
    },
    /// A request has ended well.
    Done(Done),
    /// A request or a line has failed.
    Error(ErrorEvent),
    /// A request has ended because the client asked for it.
    Aborted {
        /// Id of the request.
        id: String,
        /// Who asked.
        reason: &'static str,
    },
    /// The conversation is empty.
    Reset {
        /// Id of the message.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<String>,
        /// Tokens in the conversation: 0.
        seq_pos: u64,
    },
    /// No model is resident.
    Unloaded {
        /// Id of the message.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<String>,
    },
    /// Answer to `ping`.
    Pong {
        /// Id of the message.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<String>,
    },
    /// Answer to `diag`.
    Diag(Box<Diagnosis>),
}

/// What was loaded.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Loaded {
    /// Id of the load.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Architecture name of the file.
    pub arch: String,
    /// Width of the residual stream.
    pub dim: usize,
    /// Layers.
    pub layers: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Whether images can be given: never.
    pub vl: bool,
    /// Longest sequence in tokens.
    pub max_seq: usize,
    /// Sequences that may run at once.
    pub parallel: usize,
    /// Who runs which layers.
    pub stages: Vec<StageSummary>,
    /// From the message to this event.
    pub load_ms: u64,
}

/// One stage of the pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StageSummary {
    /// First layer.
    pub first_layer: usize,
    /// Number of layers.
    pub layers: usize,
    /// `cpu`.
    pub target: &'static str,
    /// Process id of the worker.
    pub pid: u32,
    /// Private memory the stage is charged for.
    pub bytes: u64,
    /// From a stage on a GPU to another on a GPU: how rows get there, `peer` or `staged`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link: Option<&'static str>,
    /// Why they do not take the shorter way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_reason: Option<String>,
    /// What does not work as well as it might, one sentence each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// One stage as it is now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StageReport {
    /// The stage.
    #[serde(flatten)]
    pub stage: StageSummary,
    /// Where the worker is between its start and its end: `spawning`, `loading`, `loaded` (the others are waited for), `ready`,
    /// `draining`, `dead`, `backing_off` or `failed`.
    pub lifecycle: &'static str,
    /// What the worker is in the middle of; `ended` when the process is gone.
    pub state: &'static str,
    /// Bytes of weights stored so far; 0 until the worker says so.
    pub stored_bytes: u64,
    /// Bytes of weights of the band; 0 until the worker says so.
    pub stored_of: u64,
    /// Step in hand, or the last one.
    pub step: u64,
    /// Steps since the worker started.
    pub steps: u64,
    /// Nanoseconds computing.
    pub busy_ns: u64,
    /// Nanoseconds waiting for input or for room.
    pub wait_ns: u64,
    /// Nanoseconds copying frames.
    pub copy_ns: u64,
}

/// One recovery: from the failure of a worker until requests are where they were. Times in milliseconds; where several attempts
/// were needed, those of all of them. One that another failure interrupts is not told of.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Recovery {
    /// The pipeline incarnation that it began.
    pub epoch: u64,
    /// Code of the failure that began it.
    pub code: &'static str,
    /// Stages whose workers were replaced, in any of the attempts; those of the new placement where the model was placed anew.
    pub stages: Vec<usize>,
    /// Starts that it took.
    pub attempts: u32,
    /// From the failure until it was noticed; at most this long: from the last sign of life.
    pub detect_ms: f64,
    /// Waiting before starts that follow others which failed.
    pub backoff_ms: f64,
    /// Finding another placement after the loss of a device.
    pub replan_ms: f64,
    /// Ending processes and starting others.
    pub respawn_ms: f64,
    /// Loading bands and arranging links.
    pub load_ms: f64,
    /// Computing sequences again up to where they were.
    pub replay_ms: f64,
}

/// Figures of a finished request.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Done {
    /// Id of the request.
    pub id: String,
    /// Tokens generated.
    pub tokens: usize,
    /// Generated tokens per second, prefill included.
    pub tok_s: f64,
    /// Tokens of the prompt.
    pub prefill_tokens: usize,
    /// Prompt tokens that were still there from an earlier request and not computed again.
    pub cached_tokens: usize,
    /// Time from start to the last prompt token.
    pub prefill_ms: f64,
    /// Computed prompt tokens per second.
    pub prefill_tok_s: f64,
    /// Generated tokens per second after the first.
    pub decode_tok_s: f64,
    /// From acceptance to the first token.
    pub ttft_ms: f64,
    /// `stop` or `length`.
    pub finish_reason: &'static str,
}

/// A failure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorEvent {
    /// Id of the message, if it had one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Stable code.
    pub code: String,
    /// Kind of failure.
    pub class: Class,
    /// Whether the same message may succeed later without a change.
    pub retryable: bool,
    /// What happened, why, what to do: one sentence.
    pub message: String,
}

impl ErrorEvent {
    /// A failure; whether it may be retried follows from its class.
    pub fn new(id: Option<String>, code: &str, class: Class, message: String) -> Self {
        ErrorEvent { id, code: code.to_owned(), class, retryable: class.retryable(), message }
    }
}

impl From<Rejected> for ErrorEvent {
    fn from(Rejected { id, error }: Rejected) -> Self {
        ErrorEvent::new(id, error.code(), error.class(), error.to_string())
    }
}

/// State of the daemon.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Diagnosis {
    /// Id of the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Version of the program.
    pub version: &'static str,
    /// Processor that computes: `cpu`.
    pub arch: &'static str,
    /// Version of the device library: none without GPU workers.
    pub hip_version: Option<String>,
    /// Free device memory.
    pub vram_free_mb: u64,
    /// Device memory.
    pub vram_total_mb: u64,
    /// Host memory a load could use.
    pub host_available_mb: u64,
    /// Whether a model is resident.
    pub model_loaded: bool,
    /// Its architecture, or `none`.
    pub model_arch: String,
    /// Its file.
    pub model_path: Option<String>,
    /// Whether a request that came now would be answered.
    pub ready: bool,
    /// `none`, `loading`, `ready`, `recovering` (a worker is being replaced, requests wait), `stalled` (a step does not get
    /// on), `failed` or `draining`.
    pub state: &'static str,
    /// Why, unless it is `ready`.
    pub reason: Option<String>,
    /// Workers of the resident model that have been replaced.
    pub restarts: u64,
    /// The last recovery of the resident model that is over.
    pub recovery: Option<Recovery>,
    /// Pipeline incarnation: one more with every recovery.
    pub epoch: u64,
    /// Kernel set of the workers.
    pub kernels: Vec<String>,
    /// Requests in flight, of all clients.
    pub requests: usize,
    /// Who runs which layers.
    pub stages: Vec<StageReport>,
    /// Requests that generate.
    pub live: usize,
    /// Requests that wait for a slot.
    pub queued: usize,
    /// Tokens run by the resident model, prompt and answer.
    pub tokens_done: u64,
}

impl Event {
    /// The line, line feed included.
    pub fn to_line(&self) -> String {
        // Strings, numbers and lists of them always serialise; the fallback keeps the promise of one line per event.
        let mut line = serde_json::to_string(self).unwrap_or_else(|error| {
            format!(r#"{{"type":"error","code":"internal","class":"internal","retryable":false,"message":"an event could not be written: {}"}}"#, error.to_string().replace('"', "'"))
        });
        line.push('\n');
        line
    }
}
