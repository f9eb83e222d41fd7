//! Opening a model: everything that can be refused is refused here, before any side effect. `inspect`, `plan` and a load
//! all come through this one door, so that none of them is more lenient than another.

mod sizes;

use crate::planner::ModelSummary;
use sizes::Sizer;
use spillway_kernels::formats::FormatError;
use spillway_kernels::isa::{IsaError, KernelSet};
use spillway_model::error::ModelError;
use spillway_model::file::ModelFile;
use spillway_model::gguf::{GgufError, Metadata};
use spillway_model::tokenizer::{Tokenizer, TokenizerError, TokenizerOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;

/// How much of the text layer a command needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextNeed {
    /// A tokenizer must be present and valid.
    Required,
    /// A model without a tokenizer is fine; a broken one is refused.
    Optional,
    /// Token ids only: the tokenizer is not looked at.
    Ignored,
}

/// A validated model: the header of its file, its program, its tokenizer, its sizes. Nothing of the file stays mapped: one that
/// someone truncates would end whoever reads it.
#[derive(Debug)]
pub struct LoadedModel {
    path: PathBuf,
    file: ModelFile,
    tokenizer: Option<Arc<Tokenizer>>,
    chat_template: Option<String>,
    summary: ModelSummary,
}

/// Metadata key of the chat template.
const TEMPLATE_KEY: &str = "tokenizer.chat_template";

impl LoadedModel {
    /// Absolute path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Container without weights, configuration and program.
    pub fn file(&self) -> &ModelFile {
        &self.file
    }

    /// The tokenizer; absent when it was not asked for, or the file has none.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// The file's chat template; absent when text was not asked for, or the file has none.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// Sizes for the planner.
    pub fn summary(&self) -> &ModelSummary {
        &self.summary
    }
}

/// A model that cannot be used.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The path cannot be made absolute.
    #[error("the path {path:?} cannot be used: {source}")]
    Path {
        /// As given.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A plan carries the path as text.
    #[error("{}: the path is not valid UTF-8, which plans and messages need; rename the file or its folder", path.display())]
    PathText {
        /// As given.
        path: PathBuf,
    },
    /// The kernels that the environment asks for.
    #[error(transparent)]
    Kernels(#[from] IsaError),
    /// The file, its configuration or its tensors.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A weight that the kernels cannot hold.
    #[error("{}: tensor `{tensor}`: {reason}", path.display())]
    Weight {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Why.
        reason: WeightRefusal,
    },
    /// The tokenizer.
    #[error("{}: {source}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// Why.
        source: TokenizerError,
    },
    /// Text was asked for from a model that has no tokenizer.
    #[error(
        "{}: the file has no tokenizer, so it cannot read or write text; use `logits` or `bench` with token ids, or \
         convert the model with its tokenizer", path.display()
    )]
    NoTokenizer {
        /// The file.
        path: PathBuf,
    },
}

/// Why a weight cannot be held in memory for the kernels.
#[derive(Debug, Error)]
pub enum WeightRefusal {
    /// A format without kernels.
    #[error("format {0} has no CPU kernel; convert the model to one of the supported formats")]
    NoKernel(String),
    /// A shape that its format cannot have.
    #[error(transparent)]
    Shape(#[from] FormatError),
}

impl OpenError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        match self {
            OpenError::Path { .. } => "path_unusable",
            OpenError::PathText { .. } => "path_not_utf8",
            OpenError::Kernels(error) => error.code(),
            OpenError::Model(error) => error.code(),
            OpenError::Weight { reason: WeightRefusal::NoKernel(_), .. } => "tensor_unusable_format",
            OpenError::Weight { reason: WeightRefusal::Shape(error), .. } => error.code(),
            OpenError::Tokenizer { source, .. } => source.code(),
            OpenError::NoTokenizer { .. } => "no_tokenizer",
        }
    }
}

/// Opens and validates a model file.
pub fn open_model(path: &Path, text: TextNeed) -> Result<LoadedModel, OpenError> {
    open_model_with(path, text, &TokenizerOptions::default())
}

/// Opens and validates a model file, with choices that the file leaves to the user.
pub fn open_model_with(
    path: &Path,
    text: TextNeed,
    options: &TokenizerOptions,
) -> Result<LoadedModel, OpenError> {
    let absolute =
        std::path::absolute(path).map_err(|source| OpenError::Path { path: path.into(), source })?;
    if absolute.to_str().is_none() {
        return Err(OpenError::PathText { path: absolute });
    }
    // Workers would find out after they have been started.
    KernelSet::from_env()?;
    let file = ModelFile::open_header(&absolute)?;
    let summary = Sizer { file: &file, path: &absolute }.summary()?;
    let tokenizer = tokenizer(&file, &absolute, text, options)?.map(Arc::new);
    let chat_template = match text {
        TextNeed::Ignored => None,
        _ => chat_template(&file, &absolute)?,
    };
    Ok(LoadedModel { path: absolute, file, tokenizer, chat_template, summary })
}

fn tokenizer(
    file: &ModelFile,
    path: &Path,
    text: TextNeed,
    options: &TokenizerOptions,
) -> Result<Option<Tokenizer>, OpenError> {
    let refused = |source| OpenError::Tokenizer { path: path.into(), source };
    let metadata = file.gguf().metadata();
    match text {
        TextNeed::Ignored => Ok(None),
        _ if has_tokenizer(metadata).map_err(|error| refused(error.into()))? => {
            Tokenizer::from_metadata(metadata, options).map(Some).map_err(refused)
        }
        TextNeed::Optional => Ok(None),
        TextNeed::Required => Err(OpenError::NoTokenizer { path: path.into() }),
    }
}

fn chat_template(file: &ModelFile, path: &Path) -> Result<Option<String>, OpenError> {
    let refused = |error: GgufError| OpenError::Tokenizer { path: path.into(), source: error.into() };
    Ok(file.gguf().metadata().str(TEMPLATE_KEY).map_err(refused)?.map(str::to_owned))
}

/// Converters write the model `none` where they had no tokenizer.
fn has_tokenizer(metadata: Metadata<'_>) -> Result<bool, GgufError> {
    Ok(!matches!(metadata.str("tokenizer.ggml.model")?, None | Some("none")))
}
