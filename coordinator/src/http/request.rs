//! The bodies of completions, as OpenAI's clients send them, as one request of the program's own.
//!
//! Fields that nobody knows are passed over, because clients send many. Fields that would change the answer and are not obeyed
//! are refused by name; the tables below list them.

use super::error::ApiError;
use super::messages;
use serde_json::{Map, Value};
use spillway_protocol::jsonl::{
    Feature, Fields, Foreign, FromField, Generate, LineError, Objects, Off, Source, feature, row,
};

/// Which kind of completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Text,
}

/// What a client asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    /// The request.
    pub generate: Generate,
    /// Whether the answer is wanted as it comes.
    pub stream: bool,
    /// Whether a stream ends with the numbers of tokens.
    pub include_usage: bool,
    /// Fields that the program calls otherwise than the client does: its own name and the client's.
    pub names: Vec<(&'static str, &'static str)>,
}

/// Tokens of a text completion whose request does not say; OpenAI's.
const TEXT_MAX_TOKENS: u64 = 16;

const CHOICES: Feature = feature("n_unsupported", "several answers");
const LOGPROBS: Feature = feature("logprobs_unsupported", "log probabilities");
const CONSTRAINT: Feature = feature("response_format_unsupported", "answers of a given form");
const FUNCTIONS: Feature =
    feature("functions_unsupported", "functions (\"tools\" are passed to the template)");
const TOOL_CHOICE: Feature = feature("tool_choice_unsupported", "forced tool calls");
const AUDIO: Feature = feature("audio_unsupported", "audio");
const WEB: Feature = feature("web_search_unsupported", "web search");
const ECHO: Feature = feature("echo_unsupported", "the prompt as part of the answer");
const SUFFIX: Feature = feature("suffix_unsupported", "text to be filled in");
const SAMPLER: Feature = feature("sampler_unsupported", "another way to choose tokens");
const LENGTH: Feature = feature("min_tokens_unsupported", "a least length of the answer");
const STOP_IDS: Feature = feature("stop_token_ids_unsupported", "token ids that end the answer");
const PREFILL: Feature = feature("continue_unsupported", "a last message that goes on");

/// Refused at both.
const COMMON: &[Foreign] = &[
    row("n", CHOICES, Off::Number(1.0)),
    row("best_of", CHOICES, Off::Number(1.0)),
    row("use_beam_search", CHOICES, Off::False),
    row("response_format", CONSTRAINT, Off::Type("text")),
    row("structured_outputs", CONSTRAINT, Off::Empty),
    row("guided_*", CONSTRAINT, Off::Never),
    row("json_schema", CONSTRAINT, Off::Empty),
    row("grammar", CONSTRAINT, Off::Text(&[""])),
    row("prompt_logprobs", LOGPROBS, Off::Never),
    row("typical_p", SAMPLER, Off::Number(1.0)),
    row("top_n_sigma", SAMPLER, Off::Number(-1.0)),
    row("mirostat", SAMPLER, Off::Number(0.0)),
    row("dry_multiplier", SAMPLER, Off::Number(0.0)),
    row("xtc_probability", SAMPLER, Off::Number(0.0)),
    row("min_tokens", LENGTH, Off::Number(0.0)),
    row("stop_token_ids", STOP_IDS, Off::Empty),
    row("echo", ECHO, Off::False),
];

/// Refused at `/v1/chat/completions`.
const CHAT: &[Foreign] = &[
    row("logprobs", LOGPROBS, Off::False),
    row("top_logprobs", LOGPROBS, Off::Number(0.0)),
    row("functions", FUNCTIONS, Off::Empty),
    row("function_call", FUNCTIONS, Off::Text(&["none"])),
    row("tool_choice", TOOL_CHOICE, Off::Text(&["auto", "none"])),
    row("audio", AUDIO, Off::Empty),
    row("modalities", AUDIO, Off::Only("text")),
    row("web_search_options", WEB, Off::Never),
    row("continue_final_message", PREFILL, Off::False),
    row("add_generation_prompt", PREFILL, Off::True),
];

/// Refused among the variables of the template, where they would do the same.
const TEMPLATE: &[Foreign] =
    &[row("continue_final_message", PREFILL, Off::False), row("add_generation_prompt", PREFILL, Off::True)];

/// Refused at `/v1/completions`.
const TEXT: &[Foreign] = &[
    row("logprobs", LOGPROBS, Off::Never),
    row("suffix", SUFFIX, Off::Text(&[""])),
    row("tools", FUNCTIONS, Off::Empty),
];

/// A seed: any integer that 64 bits hold.
struct Seed(u64);

impl FromField for Seed {
    const EXPECTED: &'static str = "an integer";
    fn from_field(value: &Value) -> Option<Self> {
        value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned)).map(Seed)
    }
}

/// The prompt of a text completion, looked at later.
struct Prompt(Value);

impl FromField for Prompt {
    const EXPECTED: &'static str = "a string or an array of token ids";
    fn from_field(value: &Value) -> Option<Self> {
        Some(Prompt(value.clone()))
    }
}

/// Reads a body. `id` names the request, `seed` stands in where none is given.
pub fn parse(endpoint: Endpoint, body: Map<String, Value>, id: String, seed: u64) -> Result<Asked, ApiError> {
    let mut fields = Fields::new("the request", "", body);
    fields.refuse(COMMON)?;
    let names = names(endpoint, &fields);
    fields.refuse(match endpoint {
        Endpoint::Chat => CHAT,
        Endpoint::Text => TEXT,
    })?;
    // Whatever name a client uses, there is one model. Only the type is checked.
    fields.take::<String>("model")?;
    let stream = fields.take("stream")?.unwrap_or(false);
    let include_usage = take_include_usage(&mut fields, stream)?;
    let max_tokens = fields.take_either("max_tokens", "max_completion_tokens")?;
    let (source, tools) = match endpoint {
        Endpoint::Chat => (take_messages(&mut fields)?, take_tools(&mut fields)?),
        Endpoint::Text => (take_prompt(&mut fields)?, None),
    };
    let generate = Generate {
        id,
        tools,
        enable_thinking: fields.take("enable_thinking")?,
        template_kwargs: take_template_kwargs(&mut fields)?,
        max_tokens: max_tokens.or(match endpoint {
            Endpoint::Chat => None,
            Endpoint::Text => Some(TEXT_MAX_TOKENS),
        }),
        seed: Some(fields.take("seed")?.map_or(seed, |Seed(seed)| seed)),
        ..Generate::with_choices(source, &mut fields)?
    };
    Ok(Asked { generate, stream, include_usage, names })
}

fn names(endpoint: Endpoint, fields: &Fields) -> Vec<(&'static str, &'static str)> {
    let source = (endpoint == Endpoint::Chat).then_some(("prompt", "messages"));
    let penalty = fields.has("repetition_penalty").then_some(("repeat_penalty", "repetition_penalty"));
    source.into_iter().chain(penalty).collect()
}

fn take_include_usage(fields: &mut Fields, stream: bool) -> Result<bool, ApiError> {
    let options: Option<Map<String, Value>> = fields.take("stream_options")?;
    if options.is_some() && !stream {
        let message = "\"stream_options\" needs \"stream\": true; send both or neither";
        return Err(ApiError::field("conflicting_fields", "stream_options", message));
    }
    let mut options = Fields::new("the request", "stream_options.", options.unwrap_or_default());
    Ok(options.take("include_usage")?.unwrap_or(false))
}

fn take_messages(fields: &mut Fields) -> Result<Source, ApiError> {
    let Objects(messages) = fields.require("messages")?;
    Ok(Source::Messages(messages::normalise(messages)?))
}

fn take_template_kwargs(fields: &mut Fields) -> Result<Map<String, Value>, LineError> {
    let kwargs = fields.take("chat_template_kwargs")?.unwrap_or_default();
    let kwargs = Fields::new("the request", "chat_template_kwargs.", kwargs);
    kwargs.refuse(TEMPLATE)?;
    Ok(kwargs.into_rest())
}

/// Tools for the template, unless there are none or the model is told not to use them.
fn take_tools(fields: &mut Fields) -> Result<Option<Vec<Value>>, LineError> {
    let tools = fields.take("tools")?.map(|Objects(tools)| tools);
    let unwanted = fields.take::<Value>("tool_choice")?.is_some_and(|choice| choice == "none");
    Ok(tools.filter(|tools| !tools.is_empty() && !unwanted))
}

/// The prompt of a text completion: a text or token ids, alone or as the only element of a list.
fn take_prompt(fields: &mut Fields) -> Result<Source, ApiError> {
    let Prompt(mut prompt) = fields.require("prompt")?;
    if let Value::Array(items) = &mut prompt
        && items.iter().all(|item| item.is_string() || item.is_array())
    {
        if items.len() > 1 {
            let message = format!(
                "\"prompt\" has {} texts, but one request answers one; send a request for each",
                items.len()
            );
            return Err(ApiError::field("n_unsupported", "prompt", message));
        }
        prompt = items.pop().unwrap_or_else(|| Value::Array(Vec::new()));
    }
    match prompt {
        Value::String(text) => Ok(Source::Raw(text)),
        other => match Vec::<u32>::from_field(&other) {
            Some(ids) => Ok(Source::Ids(ids)),
            None => {
                let (expected, found) = (Prompt::EXPECTED, Vec::<u32>::found(&other));
                Err(LineError::WrongType { field: "prompt".to_owned(), expected, found }.into())
            }
        },
    }
}
