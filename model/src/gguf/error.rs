//! Why a GGUF file is refused.

use std::path::PathBuf;

/// A refusal of a GGUF file. The message says what was found, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// Any other refusal, with the file it is about.
    #[error("{}: {error}", path.display())]
    InFile {
        /// The file that was opened.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        error: Box<GgufError>,
    },
    /// The operating system did not give us the file.
    #[error("cannot be read: {0}")]
    Io(#[source] std::io::Error),
    /// A directory, pipe, socket or device.
    #[error("is not a regular file (it is {kind}); give the path of a .gguf file")]
    NotAFile {
        /// What the path names instead.
        kind: &'static str,
    },
    /// The process may not address the whole file.
    #[error(
        "cannot be mapped: this process may not address {bytes} bytes more; raise its memory limit (`ulimit -v`)"
    )]
    AddressSpace {
        /// Length of the file.
        bytes: u64,
    },
    /// There is nothing in it.
    #[error("is empty; if it was downloaded or copied, do it again")]
    Empty,
    /// The first four bytes are not `GGUF`.
    #[error("is not a GGUF file: it starts with {found:02x?} instead of \"GGUF\"")]
    NotGguf {
        /// The bytes found, at most four.
        found: Vec<u8>,
    },
    /// The file was written for a big-endian machine.
    #[error(
        "is a big-endian GGUF file; only little-endian files are read, convert it again without the big-endian option"
    )]
    BigEndian,
    /// A container version we do not read.
    #[error(
        "is GGUF version {found}; versions 2 and 3 are read, convert the model again with a current converter"
    )]
    Version {
        /// The version field.
        found: u32,
    },
    /// The file ends before the thing it announces.
    #[error(
        "ends too early: {what} at byte {at} needs {need} bytes, {have} are left; the file is truncated or damaged"
    )]
    Truncated {
        /// What was being read.
        what: String,
        /// Where it starts, in bytes from the start of the file.
        at: usize,
        /// Bytes it needs.
        need: u64,
        /// Bytes left.
        have: u64,
    },
    /// A count or length above what we accept, or above what the file can hold.
    #[error("announces {what} of {found} at byte {at}, but {limit} is the most {why}")]
    TooLarge {
        /// What is counted.
        what: String,
        /// Where the number stands.
        at: usize,
        /// The number in the file.
        found: u64,
        /// The most we accept.
        limit: u64,
        /// What sets the limit.
        why: &'static str,
    },
    /// A key or its value is malformed.
    #[error("metadata key {key:?} at byte {at}: {reason}")]
    BadMetadata {
        /// The key, or its position when it has no readable name.
        key: String,
        /// Where the entry starts.
        at: usize,
        /// What is wrong.
        reason: String,
    },
    /// A tensor's description is malformed or its data does not lie inside the file.
    #[error("tensor {name:?} (number {index}): {reason}")]
    BadTensor {
        /// The tensor's name, or empty when it has no readable one.
        name: String,
        /// Its position among the tensor descriptions, from 0.
        index: usize,
        /// What is wrong.
        reason: String,
    },
    /// One part of a model that was split over several files.
    #[error("is part {part} of {count} of a split model; merge the parts into one file first")]
    Split {
        /// Part number, from 1.
        part: u64,
        /// Number of parts.
        count: u64,
    },
    /// A key we need is absent.
    #[error("has no metadata key {key:?}, which this model needs")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A key holds another type than the one it is defined with.
    #[error("metadata key {key:?} holds {found}, expected {expected}")]
    WrongType {
        /// The key.
        key: String,
        /// Type in the file.
        found: String,
        /// Type it must have.
        expected: &'static str,
    },
    /// A key holds a value of the right type that cannot be represented or used.
    #[error("metadata key {key:?}: {reason}")]
    BadValue {
        /// The key.
        key: String,
        /// What is wrong with the value.
        reason: String,
    },
}

impl GgufError {
    /// Stable name of the kind of refusal.
    pub fn code(&self) -> &'static str {
        match self {
            GgufError::InFile { error, .. } => error.code(),
            GgufError::Io(_) => "file_unreadable",
            GgufError::AddressSpace { .. } => "out_of_address_space",
            GgufError::Empty => "file_empty",
            GgufError::NotAFile { .. } => "not_a_file",
            GgufError::NotGguf { .. } => "not_gguf",
            GgufError::BigEndian => "gguf_big_endian",
            GgufError::Version { .. } => "gguf_version",
            GgufError::Truncated { .. } => "gguf_truncated",
            GgufError::TooLarge { .. } => "gguf_too_large",
            GgufError::BadMetadata { .. } => "gguf_bad_metadata",
            GgufError::BadTensor { .. } => "gguf_bad_tensor",
            GgufError::Split { .. } => "gguf_split",
            GgufError::MissingKey { .. } => "metadata_missing",
            GgufError::WrongType { .. } => "metadata_wrong_type",
            GgufError::BadValue { .. } => "metadata_bad_value",
        }
    }
}
