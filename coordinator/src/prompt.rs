//! From what a user says to token ids.

use crate::open::LoadedModel;
use serde_json::{Map, Value};
use spillway_model::chat::{ChatRequest, ChatTemplate, TemplateError};
use spillway_model::tokenizer::{EncodeOptions, Tokenizer};

/// A conversation to be answered.
#[derive(Debug, Clone, Copy)]
pub struct ChatPrompt<'a> {
    /// Messages with `role` and `content`, oldest first.
    pub messages: &'a [Value],
    /// Tools offered to the model.
    pub tools: Option<&'a [Value]>,
    /// Variable `enable_thinking` of the template; none leaves it undefined.
    pub enable_thinking: Option<bool>,
    /// Further variables of the template.
    pub kwargs: &'a Map<String, Value>,
}

/// Why there is no prompt.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The model was opened without its tokenizer, or has none.
    #[error("the model has no tokenizer, so it cannot read text; send token ids")]
    NoTokenizer,
    /// The template says nothing about tools.
    #[error(
        "the model's chat template does not know tools, so the model would never hear of them; leave \"tools\" out"
    )]
    NoTools,
    /// So long a text has more tokens than the context, whatever it says.
    #[error(
        "the prompt has {bytes} bytes, which are at least {tokens} tokens and do not fit the loaded context length of {max_seq} tokens; \
         shorten the prompt or load with a larger max_seq"
    )]
    TooLong {
        /// Length of the text.
        bytes: usize,
        /// Tokens that it has at least.
        tokens: usize,
        /// Tokens of the context.
        max_seq: usize,
    },
    /// The template cannot be used or declines the conversation.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

impl PromptError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        match self {
            PromptError::NoTokenizer => "no_tokenizer",
            PromptError::NoTools => "tools_unsupported",
            PromptError::TooLong { .. } => "context_length_exceeded",
            PromptError::Template(error) => error.code(),
        }
    }
}

/// The tokenizer of a model that was opened with one.
pub fn tokenizer(model: &LoadedModel) -> Result<&Tokenizer, PromptError> {
    model.tokenizer().map(AsRef::as_ref).ok_or(PromptError::NoTokenizer)
}

/// The prompt that asks for an answer to a conversation, through the model's chat template. It may be longer than `max_seq`
/// tokens, but is not made where that is certain.
pub fn chat(model: &LoadedModel, chat: &ChatPrompt<'_>, max_seq: usize) -> Result<Vec<u32>, PromptError> {
    let tokenizer = tokenizer(model)?;
    let template = ChatTemplate::for_model(model.chat_template(), tokenizer)?;
    if chat.tools.is_some() && !template.reads("tools")? {
        return Err(PromptError::NoTools);
    }
    let messages = Value::from(chat.messages);
    let tools = chat.tools.map(Value::from);
    let request = ChatRequest {
        tools: tools.as_ref(),
        enable_thinking: chat.enable_thinking,
        kwargs: chat.kwargs.clone(),
        ..ChatRequest::new(&messages)
    };
    encode(tokenizer, &template.render(&request)?, EncodeOptions::RENDERED_CHAT, max_seq)
}

/// Text as it stands, with what the vocabulary puts in front of a text. The user wrote it all, so control tokens may be
/// spelled out. Bounded by `max_seq` as [`chat`] is.
pub fn raw(model: &LoadedModel, text: &str, max_seq: usize) -> Result<Vec<u32>, PromptError> {
    let options = EncodeOptions { add_special: true, parse_special: true };
    encode(tokenizer(model)?, text, options, max_seq)
}

/// Tokens of a text, unless it is certain to be too long: making tokens of megabytes takes seconds.
fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    options: EncodeOptions,
    max_seq: usize,
) -> Result<Vec<u32>, PromptError> {
    let (bytes, tokens) = (text.len(), tokenizer.least_tokens(text));
    if tokens > max_seq {
        return Err(PromptError::TooLong { bytes, tokens, max_seq });
    }
    Ok(tokenizer.encode(text, options))
}
