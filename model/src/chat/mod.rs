//! Conversations to prompts, by the chat template that a model file carries.
//!
//! Templates are Jinja as Python renders it; `engine` sets the same environment up. The result is checked
//! against Python's for every template and conversation of the oracle folder. A template is data from elsewhere: a render
//! cannot run for long, take much memory, overflow the stack or touch anything outside.

mod engine;
mod error;
mod json;
mod python;
#[cfg(test)]
mod tests;
mod values;

pub use error::TemplateError;
pub use jiff::civil::DateTime;

use crate::tokenizer::Tokenizer;
use jiff::fmt::strtime;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind};
use serde_json::{Map, Value as Json};
use std::borrow::Cow;
use values::Converter;

/// The common format of models without a template of their own whose vocabulary has its delimiters.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' \
                      }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// A compiled chat template. Immutable; shared between threads.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: Cow<'static, str>,
    bos: Option<String>,
    eos: Option<String>,
}

/// A conversation and how to render it.
#[derive(Debug, Clone)]
pub struct ChatRequest<'a> {
    /// A list of objects with `role`, `content` and whatever else the template knows.
    pub messages: &'a Json,
    /// A list of tool descriptions.
    pub tools: Option<&'a Json>,
    /// Ends the prompt with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// Leaves the last message open, so that the model goes on with it.
    pub continue_final_message: bool,
    /// Whether the model should think; `None` leaves the variable undefined, which means what the template says.
    pub enable_thinking: Option<bool>,
    /// Further template variables. They win over `bos_token` and `eos_token`.
    pub kwargs: Map<String, Json>,
    /// What `strftime_now` formats; `None` is the local clock.
    pub now: Option<DateTime>,
}

impl<'a> ChatRequest<'a> {
    /// A request for an answer to `messages`.
    pub fn new(messages: &'a Json) -> Self {
        Self {
            messages,
            tools: None,
            add_generation_prompt: true,
            continue_final_message: false,
            enable_thinking: None,
            kwargs: Map::new(),
            now: None,
        }
    }
}

impl ChatTemplate {
    /// The template of a model: its own, else ChatML where the vocabulary has its delimiters.
    pub fn for_model(source: Option<&str>, tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        let source = match source {
            Some(source) => Cow::Owned(source.to_owned()),
            None if tokenizer.token_id("<|im_start|>").is_some() => Cow::Borrowed(CHATML),
            None => return Err(TemplateError::NoTemplate),
        };
        let spelling = |id| Some(String::from_utf8_lossy(tokenizer.token_bytes(id?)?).into_owned());
        Self::compile(source, spelling(tokenizer.bos()), spelling(tokenizer.eos()))
    }

    /// Compiles a template; `bos` and `eos` are what it sees as `bos_token` and `eos_token`.
    pub fn new(source: &str, bos: Option<String>, eos: Option<String>) -> Result<Self, TemplateError> {
        Self::compile(Cow::Owned(source.to_owned()), bos, eos)
    }

    fn compile(
        source: Cow<'static, str>,
        bos: Option<String>,
        eos: Option<String>,
    ) -> Result<Self, TemplateError> {
        Ok(Self { environment: engine::compile(&source)?, source, bos, eos })
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template reads the variable `name` anywhere.
    pub fn reads(&self, name: &str) -> Result<bool, TemplateError> {
        engine::reads(&self.environment, name)
    }

    /// The prompt of a conversation. Its control tokens are spelled out, BOS included: encode it with
    /// [`EncodeOptions::RENDERED_CHAT`](crate::tokenizer::EncodeOptions::RENDERED_CHAT).
    pub fn render(&self, request: &ChatRequest<'_>) -> Result<String, TemplateError> {
        let Json::Array(messages) = request.messages else {
            return Err(TemplateError::NotAList { found: type_name(request.messages) });
        };
        if request.kwargs.contains_key("messages") {
            return Err(TemplateError::ReservedArgument);
        }
        if !request.continue_final_message {
            return self.render_messages(request, request.messages);
        }
        if request.add_generation_prompt {
            return Err(TemplateError::ContinueAndGenerate);
        }
        let marker = Marker::absent_from(messages);
        let prompt = self.render_messages(request, &Json::Array(marker.put(messages)?))?;
        marker.cut(prompt)
    }

    fn render_messages(&self, request: &ChatRequest<'_>, messages: &Json) -> Result<String, TemplateError> {
        let mut converter = Converter::default();
        let mut variables = vec![
            ("messages", converter.convert(messages)?),
            ("tools", converter.convert(request.tools.unwrap_or(&Json::Null))?),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(request.add_generation_prompt)),
            ("strftime_now", strftime_now(request.now)),
        ];
        let named = [("bos_token", &self.bos), ("eos_token", &self.eos)];
        variables
            .extend(named.into_iter().filter_map(|(name, text)| Some((name, Value::from(text.as_deref()?)))));
        variables.extend(request.enable_thinking.map(|on| ("enable_thinking", Value::from(on))));
        for (name, json) in &request.kwargs {
            variables.push((name, converter.convert(json)?)); // the last of a name wins
        }
        // A copy, because the budget belongs to the environment. Templates and filters are shared between copies.
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(engine::fuel(&converter)));
        let template = environment.get_template(engine::TEMPLATE);
        template
            .and_then(|template| template.render(Value::from_pairs(variables)))
            .map_err(|error| engine::template_error(&error))
    }
}

fn type_name(json: &Json) -> &'static str {
    match json {
        Json::Null => "null",
        Json::Bool(_) => "a truth value",
        Json::Number(_) => "a number",
        Json::String(_) => "a string",
        Json::Array(_) => "a list",
        Json::Object(_) => "an object",
    }
}

/// The function of the same name: the time in the format of C's `strftime`.
fn strftime_now(now: Option<DateTime>) -> Value {
    Value::from_function(move |format: &str| {
        let time = now.unwrap_or_else(|| jiff::Zoned::now().datetime());
        strtime::format(format, time)
            .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
    })
}

/// Marks the end of the text that is to be continued. The prompt is cut where the mark comes out.
#[derive(Debug)]
struct Marker(String);

impl Marker {
    /// A mark that no text of `messages` holds.
    fn absent_from(messages: &[Json]) -> Self {
        let text = messages.last().map(Json::to_string).unwrap_or_default();
        let mut mark = "CONTINUE_FINAL_MESSAGE".to_owned();
        while text.contains(&mark) {
            mark.push('_');
        }
        Self(mark)
    }

    /// The messages with the mark, and a space, behind the last text: the content, or its last part that has a text.
    fn put(&self, messages: &[Json]) -> Result<Vec<Json>, TemplateError> {
        let mut messages = messages.to_vec();
        let nothing = |reason| TemplateError::NothingToContinue { reason };
        let last = messages.last_mut().ok_or(nothing("there are no messages"))?;
        let content = last.get_mut("content").ok_or(nothing("the last message has no content"))?;
        let text = match content {
            Json::Array(parts) => parts.iter_mut().rev().find_map(|part| part.get_mut("text")),
            other => Some(other),
        };
        match text {
            Some(Json::String(text)) => text.extend([self.0.as_str(), " "]),
            _ => return Err(nothing("the last message's content is no text")),
        }
        Ok(messages)
    }

    /// The prompt up to the mark. If the template has trimmed the text, the space is gone, and white space before the mark goes
    /// as it would have.
    fn cut(&self, mut prompt: String) -> Result<String, TemplateError> {
        let reason = "the template does not show it";
        let at = prompt.rfind(&self.0).ok_or(TemplateError::NothingToContinue { reason })?;
        let trimmed = !prompt[at + self.0.len()..].starts_with(' ');
        prompt.truncate(at);
        if trimmed {
            prompt.truncate(prompt.trim_end_matches(python::is_space).len());
        }
        Ok(prompt)
    }
}
