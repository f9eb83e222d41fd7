//! Why a conversation cannot become a prompt.

/// A chat template that cannot be used, or a conversation it does not accept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The model has no template and no vocabulary that suggests one.
    #[error(
        "the model has no chat template and its vocabulary has no `<|im_start|>`; it continues text rather than answer: \
         send a raw prompt (`--raw`)"
    )]
    NoTemplate,
    /// The template is not valid Jinja.
    #[error("the model's chat template is not valid at line {line}: {message}; send a raw prompt (`--raw`)")]
    Syntax {
        /// Where, counted from 1; 0 when unknown.
        line: usize,
        /// What the template engine says.
        message: String,
    },
    /// The template is larger than any real one.
    #[error("the model's chat template has {found} bytes, more than the {limit} that are accepted")]
    TooLarge {
        /// Bytes of source.
        found: usize,
        /// Bytes accepted.
        limit: usize,
    },
    /// The template could not be compiled for a reason that is not in it.
    #[error("the model's chat template could not be compiled: {reason}")]
    Compiler {
        /// What happened.
        reason: String,
    },
    /// The template itself declined the conversation, in its own words.
    #[error("the model's chat template declines this conversation: {message}")]
    Refused {
        /// What the template passed to `raise_exception`.
        message: String,
    },
    /// The conversation has a shape that the template does not handle.
    #[error("the model's chat template cannot render this conversation (line {line}): {message}")]
    Render {
        /// Line of the template, counted from 1; 0 when unknown.
        line: usize,
        /// What the template engine says.
        message: String,
    },
    /// The template does more work than a conversation can need.
    #[error("the model's chat template takes too much time or memory with this conversation")]
    OutOfFuel,
    /// Messages or arguments are nested deeper than anything sensible.
    #[error("the conversation is nested deeper than {limit} levels")]
    TooDeep {
        /// Levels accepted.
        limit: usize,
    },
    /// `messages` is no list.
    #[error("messages must be a list of objects, found {found}")]
    NotAList {
        /// What it is.
        found: &'static str,
    },
    /// A template argument that would replace the conversation itself.
    #[error("the template argument `messages` is the conversation itself: send messages instead")]
    ReservedArgument,
    /// Two options that exclude each other.
    #[error(
        "continue_final_message and add_generation_prompt exclude each other: a message stays open or a new one begins"
    )]
    ContinueAndGenerate,
    /// There is no text to continue.
    #[error("continue_final_message needs a last message with text: {reason}")]
    NothingToContinue {
        /// What is missing.
        reason: &'static str,
    },
}

impl TemplateError {
    /// A stable name for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoTemplate => "no_chat_template",
            Self::Syntax { .. } => "chat_template_syntax",
            Self::TooLarge { .. } => "chat_template_too_large",
            Self::Compiler { .. } => "chat_template_compiler",
            Self::Refused { .. } => "chat_template_refused",
            Self::Render { .. } => "chat_template_failed",
            Self::OutOfFuel => "chat_template_out_of_fuel",
            Self::TooDeep { .. } => "messages_too_deep",
            Self::NotAList { .. } => "messages_not_a_list",
            Self::ReservedArgument => "template_argument_reserved",
            Self::ContinueAndGenerate => "continue_and_generate",
            Self::NothingToContinue { .. } => "nothing_to_continue",
        }
    }
}
