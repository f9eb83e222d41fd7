//! Messages from a client.

use super::error::{LineError, Rejected};
use super::fields::{Biases, Fields, Objects, Setting, Strings, kind};
use super::foreign;
use serde_json::{Map, Value};
use std::path::PathBuf;

/// One message from a client.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// Replace the resident model.
    Load(Box<Load>),
    /// Answer a prompt.
    Generate(Box<Generate>),
    /// End a request of this connection.
    Abort {
        /// Which.
        id: String,
    },
    /// Forget the conversation of this connection.
    Reset {
        /// Echoed in the reply.
        id: Option<String>,
    },
    /// Load the resident model again, as it was asked for.
    Reload {
        /// Echoed in the reply.
        id: Option<String>,
        /// Whether to send `loading` events.
        progress: bool,
    },
    /// Drop the resident model.
    Unload {
        /// Echoed in the reply.
        id: Option<String>,
    },
    /// Is the daemon there?
    Ping {
        /// Echoed in the reply.
        id: Option<String>,
    },
    /// Report the state of the daemon.
    Diag {
        /// Echoed in the reply.
        id: Option<String>,
    },
}

/// Replace the resident model.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// Echoed in the reply.
    pub id: Option<String>,
    /// Model file.
    pub model: PathBuf,
    /// Whether to send `loading` events.
    pub progress: bool,
    /// Pre-tokenizer to use whatever the file says.
    pub assume_pre: Option<String>,
    /// File with a placement that was made before; then `params` is empty.
    pub plan: Option<PathBuf>,
    /// Placement.
    pub params: PlacementParams,
}

/// Placement options as sent; the planner gives them meaning and limits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlacementParams {
    /// Longest sequence in tokens.
    pub max_seq: Option<u64>,
    /// Number of pipeline stages.
    pub pp: Option<u64>,
    /// Layers of each stage, `a,b,…`.
    pub pp_layers: Option<String>,
    /// How GPUs share layers: `uniform`, `auto` or `bytes:A,B`.
    pub split: Option<String>,
    /// Number of CPU workers.
    pub cpu_workers: Option<u64>,
    /// Layers in GPUs' memory: a number or `auto`.
    pub gpu_layer_budget: Option<String>,
    /// Who computes spilled layers: `pcie` or `cpu`.
    pub offload_exec: Option<String>,
    /// Who runs layers for prompts that CPU workers run otherwise: `auto`, `gpu` or `cpu`.
    pub offload_prompts: Option<String>,
    /// Threads of each CPU worker.
    pub threads: Option<u64>,
    /// Devices: a list or `none`.
    pub devices: Option<String>,
    /// Whether several workers may own one device.
    pub allow_shared_device: Option<bool>,
    /// Whether devices of different architectures may work together.
    pub allow_mixed_arch: Option<bool>,
    /// Memory of devices to plan with: sizes.
    pub vram_limit: Option<String>,
    /// Largest difference of free memory between devices with uniform bands, in GB.
    pub uniform_vram_tolerance_gb: Option<String>,
    /// Sequences that may run at once.
    pub parallel: Option<u64>,
    /// Element type of the KV cache: `auto`, `f32` or `f16`.
    pub kv_type: Option<String>,
    /// Inputs of quantised matrices: `auto`, `int8` or `int16`.
    pub activations: Option<String>,
    /// Tokens of the largest step.
    pub chunk: Option<u64>,
    /// Whether GPUs may write into each other's memory: `auto` or `off`.
    pub peer_copies: Option<String>,
}

/// What to answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// A turn of this connection's conversation.
    Turn {
        /// What the user says.
        prompt: String,
        /// System prompt; counts only in the first turn.
        system: Option<String>,
    },
    /// Whole conversation; this connection's own is neither read nor changed.
    Messages(Vec<Value>),
    /// Text continued as it stands, without a chat template.
    Raw(String),
    /// Token ids continued as they stand.
    Ids(Vec<u32>),
}

/// Answer a prompt. None: the default of the program.
#[derive(Debug, Clone, PartialEq)]
pub struct Generate {
    /// Names the request in every reply; unique among this connection's requests in flight.
    pub id: String,
    /// What to answer.
    pub source: Source,
    /// Tools offered to the chat template.
    pub tools: Option<Vec<Value>>,
    /// Variable `enable_thinking` of the chat template.
    pub enable_thinking: Option<bool>,
    /// Further variables of the chat template.
    pub template_kwargs: Map<String, Value>,
    /// Tokens to generate at most.
    pub max_tokens: Option<u64>,
    /// Whether end-of-text tokens are generated like others.
    pub ignore_eos: bool,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// 0 = always the most probable token.
    pub temperature: Option<f64>,
    /// Nucleus.
    pub top_p: Option<f64>,
    /// Most probable tokens kept; 0 = all.
    pub top_k: Option<u64>,
    /// Least probability relative to the best.
    pub min_p: Option<f64>,
    /// Divides the logits of recent tokens.
    pub repeat_penalty: Option<f64>,
    /// How many tokens are recent.
    pub repeat_window: Option<u64>,
    /// Subtracted from the logits of tokens that occurred.
    pub presence_penalty: Option<f64>,
    /// Subtracted per occurrence.
    pub frequency_penalty: Option<f64>,
    /// Seed of the random numbers.
    pub seed: Option<u64>,
    /// Added to logits, by token id.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Generate {
    /// A request with what `fields` say of how tokens are chosen and when the answer ends: OpenAI's clients name that alike.
    ///
    /// # Errors
    /// A field has the wrong type.
    pub fn with_choices(source: Source, fields: &mut Fields) -> Result<Self, LineError> {
        Ok(Generate {
            id: String::new(),
            source,
            tools: None,
            enable_thinking: None,
            template_kwargs: Map::new(),
            max_tokens: None,
            ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
            stop: fields.take("stop")?.map(|Strings(stop)| stop).unwrap_or_default(),
            temperature: fields.take("temperature")?,
            top_p: fields.take("top_p")?,
            top_k: fields.take("top_k")?,
            min_p: fields.take("min_p")?,
            repeat_penalty: fields.take_either("repeat_penalty", "repetition_penalty")?,
            repeat_window: fields.take("repeat_window")?,
            presence_penalty: fields.take("presence_penalty")?,
            frequency_penalty: fields.take("frequency_penalty")?,
            seed: None,
            logit_bias: fields.take("logit_bias")?.map(|Biases(biases)| biases).unwrap_or_default(),
        })
    }
}

/// Parses one line (without its line feed).
pub fn parse_line(line: &str) -> Result<Request, Rejected> {
    let value: Value =
        serde_json::from_str(line).map_err(|error| LineError::NotJson { reason: error.to_string() })?;
    let Value::Object(map) = value else {
        return Err(LineError::NotObject { found: kind(&value) }.into());
    };
    // The id is looked at first, so that whatever else is wrong can be reported under it.
    let mut fields = Fields::new("the message", "", map);
    let id = fields.take_id()?;
    parse_message(id.clone(), fields).map_err(|error| Rejected { id, error })
}

fn parse_message(id: Option<String>, mut fields: Fields) -> Result<Request, LineError> {
    let kind: String = fields.require("type")?;
    let map = fields.into_rest();
    match kind.as_str() {
        "load" => parse_load(id, map).map(|load| Request::Load(Box::new(load))),
        "generate" => parse_generate(id, map).map(|generate| Request::Generate(Box::new(generate))),
        "abort" => control("abort", map).and_then(|()| Ok(Request::Abort { id: require_id("abort", id)? })),
        "reset" => control("reset", map).map(|()| Request::Reset { id }),
        "reload" => parse_reload(id, map),
        "unload" => control("unload", map).map(|()| Request::Unload { id }),
        "ping" => control("ping", map).map(|()| Request::Ping { id }),
        "diag" => control("diag", map).map(|()| Request::Diag { id }),
        other if foreign::TYPES.contains(&other) => Err(LineError::UnsupportedType { found: kind }),
        _ => Err(LineError::UnknownType { found: excerpt(kind) }),
    }
}

/// Keeps a message about a huge type name short.
fn excerpt(text: String) -> String {
    match text.char_indices().nth(40) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

fn require_id(message: &'static str, id: Option<String>) -> Result<String, LineError> {
    id.ok_or(LineError::MissingField { message, field: "id", expected: "a string" })
}

/// A message without fields of its own.
fn control(message: &'static str, map: Map<String, Value>) -> Result<(), LineError> {
    Fields::new(message, "", map).finish(foreign::CONTROL)
}

fn parse_load(id: Option<String>, map: Map<String, Value>) -> Result<Load, LineError> {
    let mut fields = Fields::new("load", "", map);
    let model: String = fields.require("model")?;
    let progress = fields.take("progress")?.unwrap_or(false);
    let mut params = Fields::new("load", "params.", fields.take("params")?.unwrap_or_default());
    fields.finish(foreign::LOAD)?;
    let assume_pre = params.take("assume_pre")?;
    let plan: Option<String> = params.take("plan")?;
    let placement = take_placement(&mut params)?;
    params.finish(foreign::LOAD_PARAMS)?;
    // Whether others may use its devices, too, is no part of a plan.
    let others = PlacementParams { allow_shared_device: None, ..placement.clone() };
    if plan.is_some() && others != PlacementParams::default() {
        return Err(LineError::PlanWithPlacement);
    }
    let plan = plan.map(PathBuf::from);
    Ok(Load { id, model: PathBuf::from(model), progress, assume_pre, plan, params: placement })
}

fn parse_reload(id: Option<String>, map: Map<String, Value>) -> Result<Request, LineError> {
    let mut fields = Fields::new("reload", "", map);
    let progress = fields.take("progress")?.unwrap_or(false);
    fields.finish(foreign::CONTROL)?;
    Ok(Request::Reload { id, progress })
}

fn take_placement(fields: &mut Fields) -> Result<PlacementParams, LineError> {
    let text = |setting: Option<Setting>| setting.map(|Setting(text)| text);
    Ok(PlacementParams {
        max_seq: fields.take("max_seq")?,
        pp: fields.take("pp")?,
        pp_layers: text(fields.take("pp_layers")?),
        split: fields.take("split")?,
        cpu_workers: fields.take("cpu_workers")?,
        gpu_layer_budget: text(fields.take("gpu_layer_budget")?),
        offload_exec: fields.take("offload_exec")?,
        offload_prompts: fields.take("offload_prompts")?,
        threads: fields.take("threads")?,
        devices: text(fields.take("devices")?),
        allow_shared_device: fields.take("allow_shared_device")?,
        allow_mixed_arch: fields.take("allow_mixed_arch")?,
        vram_limit: text(fields.take("vram_limit")?),
        uniform_vram_tolerance_gb: text(fields.take("uniform_vram_tolerance_gb")?),
        parallel: fields.take("parallel")?,
        kv_type: fields.take("kv_type")?,
        activations: fields.take("activations")?,
        chunk: fields.take("chunk")?,
        peer_copies: fields.take("peer_copies")?,
    })
}

fn parse_generate(id: Option<String>, map: Map<String, Value>) -> Result<Generate, LineError> {
    let id = require_id("generate", id)?;
    let mut fields = Fields::new("generate", "", map);
    let source = parse_source(&mut fields)?;
    let tools = fields.take("tools")?.map(|Objects(tools)| tools);
    if tools.is_some() && matches!(source, Source::Raw(_) | Source::Ids(_)) {
        let second = if matches!(source, Source::Raw(_)) { "raw" } else { "prompt_ids" };
        return Err(LineError::Conflict { first: "tools", second });
    }
    let generate = Generate {
        id,
        tools,
        enable_thinking: fields.take_either("enable_thinking", "thinking_enabled")?,
        template_kwargs: fields.take("chat_template_kwargs")?.unwrap_or_default(),
        max_tokens: fields.take("max_tokens")?,
        seed: fields.take("seed")?,
        ..Generate::with_choices(source, &mut fields)?
    };
    if let Some(params) = fields.take::<Map<String, Value>>("params")? {
        Fields::new("generate", "params.", params).finish(foreign::GENERATE_PARAMS)?;
    }
    fields.finish(foreign::GENERATE)?;
    Ok(generate)
}

/// What to answer: exactly one of `prompt`, `messages` and `prompt_ids`, with `raw` and `system` where they make sense.
fn parse_source(fields: &mut Fields) -> Result<Source, LineError> {
    let prompt: Option<String> = fields.take("prompt")?;
    let messages: Option<Objects> = fields.take("messages")?;
    let ids: Option<Vec<u32>> = fields.take("prompt_ids")?;
    let system: Option<String> = fields.take("system")?;
    let raw: bool = fields.take("raw")?.unwrap_or(false);
    let conflict = |first, second| Err(LineError::Conflict { first, second });
    match (prompt, messages, ids) {
        (None, None, None) => Err(LineError::MissingField {
            message: "generate",
            field: "prompt",
            expected: "a string; or \"messages\" or \"prompt_ids\"",
        }),
        (Some(_), Some(_), _) => conflict("prompt", "messages"),
        (Some(_), _, Some(_)) => conflict("prompt", "prompt_ids"),
        (_, Some(_), Some(_)) => conflict("messages", "prompt_ids"),
        (None, Some(_), None) if raw => conflict("messages", "raw"),
        (None, Some(_), None) if system.is_some() => conflict("messages", "system"),
        (None, None, Some(_)) if system.is_some() => conflict("prompt_ids", "system"),
        (Some(_), None, None) if raw && system.is_some() => conflict("raw", "system"),
        (Some(prompt), None, None) if raw => Ok(Source::Raw(prompt)),
        (Some(prompt), None, None) => Ok(Source::Turn { prompt, system }),
        (None, Some(Objects(messages)), None) => Ok(Source::Messages(messages)),
        (None, None, Some(ids)) => Ok(Source::Ids(ids)),
    }
}
