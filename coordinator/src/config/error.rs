//! Why settings cannot be used.

use super::kind::Complaint;
use super::table::Setting;
use std::fmt;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Where a setting was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In the file.
    File {
        /// The file.
        path: PathBuf,
        /// 1-based.
        line: usize,
    },
    /// In the environment.
    Variable(String),
    /// On the command line.
    CommandLine,
}

/// As the start of a sentence.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::File { path, line } => write!(f, "{}:{line}: ", path.display()),
            Place::Variable(name) => write!(f, "the variable {name}: "),
            Place::CommandLine => Ok(()),
        }
    }
}

/// Settings that cannot be used. Nothing has been touched when it is returned.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("the configuration file {} cannot be read: {source}; make it readable, or name another one with --config", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The file that was named on the command line does not exist.
    #[error("the configuration file {} does not exist; create it with `config set`, or leave --config out", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The file is not TOML.
    #[error("{}:{line}: the configuration file is not TOML: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// 1-based.
        line: usize,
        /// What the parser says.
        reason: String,
    },
    /// A key that no setting has.
    #[error("{place}there is no setting `{key}`; {}", match nearest {
        Some(nearest) => format!("did you mean `{nearest}`?"),
        None => "`spillway config list` shows all".to_owned(),
    })]
    UnknownKey {
        /// Where it stands.
        place: Place,
        /// The key.
        key: String,
        /// The setting that is spelled most like it.
        nearest: Option<&'static str>,
    },
    /// A value that its setting cannot have.
    #[error("{place}{key} is {found}, but must be {expected}")]
    Value {
        /// Where it stands.
        place: Place,
        /// The setting, or the section.
        key: String,
        /// The value as written.
        found: String,
        /// What belongs there.
        expected: String,
        /// What is wrong with it.
        complaint: Complaint,
    },
    /// A section with settings in it was to be removed as if it were one.
    #[error("{name} is a section, not a setting, and it holds {}; unset them one by one; nothing has changed", keys.join(", "))]
    WholeSection {
        /// The section.
        name: String,
        /// What stands in it.
        keys: Vec<String>,
    },
    /// There is no place for a file.
    #[error(
        "there is no place for a configuration file: none of SPILLWAY_CONFIG, XDG_CONFIG_HOME and HOME is set; name a \
         file with --config"
    )]
    NoPlace,
    /// The file cannot be written.
    #[error("the configuration file {} cannot be written: {source}; nothing has changed", path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

impl ConfigError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        match self {
            ConfigError::Unreadable { .. } => "config_unreadable",
            ConfigError::Missing { .. } => "config_missing",
            ConfigError::Malformed { .. } => "config_malformed",
            ConfigError::UnknownKey { .. } => "config_unknown_key",
            ConfigError::Value { complaint: Complaint::WrongType, .. } => "config_wrong_type",
            ConfigError::Value { complaint: Complaint::OutOfRange, .. } => "config_out_of_range",
            ConfigError::Value { complaint: Complaint::Unreadable, .. } => "config_value_unusable",
            ConfigError::WholeSection { .. } => "config_whole_section",
            ConfigError::NoPlace => "config_no_place",
            ConfigError::Unwritable { .. } => "config_unwritable",
        }
    }

    /// A complaint about the value of a setting.
    pub(super) fn value(place: Place, setting: &Setting, found: &str, complaint: Complaint) -> ConfigError {
        let (found, expected) = (quoted(found), setting.kind.expected());
        ConfigError::Value { place, key: setting.key.into(), found, expected, complaint }
    }
}

/// Longest value that a message repeats.
const EXCERPT: usize = 80;

/// A value as a message repeats it; TOML strings bring their quotes along.
fn quoted(found: &str) -> String {
    let found = found.trim();
    let mut text: String = found.chars().take(EXCERPT).collect();
    if text.len() < found.len() {
        text.push('…');
    }
    format!("`{text}`")
}
