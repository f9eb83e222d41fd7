//! Fields that ask for features this program does not have, as rows of tables; and the tables of the v1 and v2 protocols.
//!
//! Those are fields that belong to features this program does not have. Values that mean "off" pass,
//! because clients send them by default; anything else is refused by name.

use super::error::LineError;
use serde_json::Value;

/// A feature this program does not have.
#[derive(Debug, Clone, Copy)]
pub struct Feature {
    /// Stable code of the refusal.
    code: &'static str,
    /// In words.
    words: &'static str,
}

/// One such field.
#[derive(Debug)]
pub struct Foreign {
    /// Its name; a trailing `*` stands for any ending.
    name: &'static str,
    /// What it asks for.
    feature: Feature,
    /// Values that ask for nothing.
    off: Off,
}

/// Which values ask for nothing. Null always does.
#[derive(Debug)]
pub enum Off {
    /// Any value: the field tunes a feature that has a switch of its own.
    Tuning,
    /// One of these strings.
    Text(&'static [&'static str]),
    /// `false`.
    False,
    /// `true`.
    True,
    /// An array or object with nothing in it.
    Empty,
    /// An array of nothing but this string.
    Only(&'static str),
    /// An object whose `type` is this string.
    Type(&'static str),
    /// This number.
    Number(f64),
    /// No value but null.
    Never,
}

impl Foreign {
    /// Whether the row is about the field `name`.
    pub fn names(&self, name: &str) -> bool {
        match self.name.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => self.name == name,
        }
    }

    /// Refuses a value that asks for the feature; `field` is the name with its path.
    pub fn check(&self, field: &str, value: &Value) -> Result<(), LineError> {
        let off = match (&self.off, value) {
            (_, Value::Null) | (Off::Tuning, _) => true,
            (Off::Text(words), Value::String(text)) => words.contains(&text.as_str()),
            (Off::False, Value::Bool(on)) => !on,
            (Off::True, Value::Bool(on)) => *on,
            (Off::Empty, Value::Array(items)) => items.is_empty(),
            (Off::Empty, Value::Object(map)) => map.is_empty(),
            (Off::Only(word), Value::Array(items)) => items.iter().all(|item| item == word),
            (Off::Type(word), Value::Object(map)) => map.get("type").is_some_and(|found| found == word),
            (Off::Number(number), Value::Number(n)) => n.as_f64() == Some(*number),
            _ => false,
        };
        if off {
            return Ok(());
        }
        let remedy = match &self.off {
            Off::Text([first, ..]) => format!("remove it or send \"{first}\""),
            Off::False => "remove it or send false".to_owned(),
            Off::True => "remove it or send true".to_owned(),
            Off::Only(word) => format!("remove it or send [\"{word}\"]"),
            Off::Type(word) => format!("remove it or send {{\"type\":\"{word}\"}}"),
            Off::Number(number) => format!("remove it or send {number}"),
            Off::Text([]) | Off::Empty | Off::Tuning | Off::Never => "remove it".to_owned(),
        };
        let Feature { code, words } = self.feature;
        Err(LineError::UnsupportedField { code, field: field.to_owned(), feature: words, remedy })
    }
}

/// A row.
pub const fn row(name: &'static str, feature: Feature, off: Off) -> Foreign {
    Foreign { name, feature, off }
}

/// A feature, by the code of its refusal and in words.
pub const fn feature(code: &'static str, words: &'static str) -> Feature {
    Feature { code, words }
}

const DRAFT: Feature = feature("draft_unsupported", "speculative decoding");
const CASK: Feature = feature("cask_unsupported", "eviction of old keys and values");
const MMQ: Feature = feature("mmq_unsupported", "a choice of matrix kernels");
const COMPRESSION: Feature = feature("prefill_compression_unsupported", "prompt compression");
const PROFILE: Feature = feature("prefill_profile_unsupported", "prefill profiling");
const VISION: Feature = feature("vision_unsupported", "image input");
const KV: Feature = feature("kv_mode_unsupported", "another format of the KV cache");
const STATE: Feature = feature("state_quant_unsupported", "quantised recurrent state");
const TENSOR_PARALLEL: Feature = feature("tp_unsupported", "tensor parallelism");
const REPLAY: Feature = feature("replay_unsupported", "a replay backend");
const SLOTS: Feature = feature("batching_unsupported", "a choice of the batching scheme");
const TURNS: Feature = feature("unsupported_field", "two-phase turns");
const THINKING: Feature = feature("unsupported_field", "limits on thinking");
const PREFIX: Feature = feature("unsupported_field", "a forced start of the answer");
const LOGPROBS: Feature = feature("unsupported_field", "log probabilities");

/// Load parameters.
pub const LOAD_PARAMS: &[Foreign] = &[
    row("kv_mode", KV, Off::Text(&["", "auto"])),
    row("kv_backend", KV, Off::Text(&["", "auto"])),
    row("kv_adaptive", KV, Off::Text(&["off", ""])),
    row("state_quant", STATE, Off::Text(&["fp32"])),
    row("draft", DRAFT, Off::Text(&[""])),
    row("drafter", DRAFT, Off::Text(&[""])),
    row("spec", DRAFT, Off::Text(&["off", ""])),
    row("dflash_mode", DRAFT, Off::Text(&["off", "auto"])),
    row("dflash_adaptive_b", DRAFT, Off::Tuning),
    row("mtp_mode", DRAFT, Off::Text(&["off", "auto"])),
    row("mtp_k", DRAFT, Off::Tuning),
    row("ngram_*", DRAFT, Off::Never),
    row("ddtree_*", DRAFT, Off::Never),
    row("dspark_*", DRAFT, Off::Never),
    row("cask_sidecar", CASK, Off::Text(&[""])),
    row("cask", CASK, Off::False),
    row("cask_*", CASK, Off::Tuning),
    row("mmq_screen", MMQ, Off::False),
    row("mmq_screen_threshold", MMQ, Off::Tuning),
    row("prefill_compression", COMPRESSION, Off::Text(&["off", ""])),
    row("prefill_drafter", COMPRESSION, Off::Text(&[""])),
    row("prefill_drafter_device", COMPRESSION, Off::Number(-1.0)),
    row("prefill_profile", PROFILE, Off::False),
    row("prefill_*", COMPRESSION, Off::Tuning),
    row("tp", TENSOR_PARALLEL, Off::Number(1.0)),
    row("replay", REPLAY, Off::False),
    row("backend", REPLAY, Off::Text(&["", "auto"])),
    row("vision", VISION, Off::Text(&["off", ""])),
    row("vision_mode", VISION, Off::Text(&["off", ""])),
    row("continuous_batch", SLOTS, Off::False),
    row("experimental_multi_slot", SLOTS, Off::False),
];

/// Fields of `load` itself.
pub const LOAD: &[Foreign] = &[row("attempt_id", TURNS, Off::Never)];

/// Fields of `generate`.
pub const GENERATE: &[Foreign] = &[
    row("attempt_id", TURNS, Off::Never),
    row("image", VISION, Off::Text(&[""])),
    row("image_base64", VISION, Off::Text(&[""])),
    row("max_think_tokens", THINKING, Off::Number(0.0)),
    row("thinking_budget", THINKING, Off::Number(0.0)),
    row("thinking_mode", THINKING, Off::Text(&["auto", ""])),
    row("reasoning_effort", THINKING, Off::Text(&["auto", ""])),
    row("budget_alert_*", THINKING, Off::Never),
    row("assistant_prefix", PREFIX, Off::Text(&["plain", ""])),
    row("logprobs", LOGPROBS, Off::False),
    row("top_logprobs", LOGPROBS, Off::Number(0.0)),
    row("serve_continuous_batch", SLOTS, Off::False),
];

/// Fields of `generate`'s `params`.
pub const GENERATE_PARAMS: &[Foreign] = &[
    row("prefill_compression", COMPRESSION, Off::Text(&["off", ""])),
    row("prefill_drafter", COMPRESSION, Off::Text(&[""])),
    row("prefill_profile", PROFILE, Off::False),
    row("prefill_*", COMPRESSION, Off::Tuning),
];

/// Fields of the messages that carry nothing but an id.
pub const CONTROL: &[Foreign] = &[row("attempt_id", TURNS, Off::Never)];

/// Message types of the v1 and v2 protocols that this program does not have.
pub const TYPES: &[&str] =
    &["bench_prefill", "profile", "configure", "commit", "force_answer", "img_generate", "img_load"];
