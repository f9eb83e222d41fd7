//! Settings: one table of them, a file and the environment that set them, and what they come to for a load.
//!
//! A flag or a parameter of a message wins over the environment, the environment over the file, the file over the default. A
//! command reads everything once, before it does anything else; the daemon once per load. Whatever cannot be used (a key
//! that no setting has, a wrong type, a number out of range) refuses the command or the load, with its place in the message.

mod apply;
mod document;
mod edit;
mod error;
mod file;
mod kind;
mod store;
pub(crate) mod table;
#[cfg(test)]
mod tests;
mod value;

pub use apply::{AskedPlacement, Generation, Generations, flag_help};
pub use document::schema;
pub use edit::{set, unset};
pub use error::ConfigError;
pub use file::{ConfigFile, require};
pub use table::{Fallback, SETTINGS, Setting};
pub use value::Value;

use error::Place;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

/// Who has set a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A variable of the environment.
    Variable(String),
    /// A line of the file.
    File {
        /// The file.
        path: PathBuf,
        /// 1-based.
        line: usize,
    },
    /// Nobody.
    Default,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Variable(name) => f.write_str(name),
            Source::File { path, line } => write!(f, "{}:{line}", path.display()),
            Source::Default => f.write_str("default"),
        }
    }
}

/// A value and who has set it.
#[derive(Debug, Clone)]
pub struct Found {
    /// The setting.
    pub setting: &'static Setting,
    /// Its value.
    pub value: Value,
    /// Who has set it.
    pub source: Source,
}

/// What the environment and the file say. Everything in it can be used.
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// What wins comes first.
    found: Vec<Found>,
}

impl Config {
    /// Reads the environment and a file.
    ///
    /// # Errors
    /// Something in them cannot be used.
    pub fn load(file: &ConfigFile) -> Result<Config, ConfigError> {
        Config::read(|name| std::env::var_os(name), file)
    }

    fn read(variable: impl Fn(&str) -> Option<OsString>, file: &ConfigFile) -> Result<Config, ConfigError> {
        let mut found = Vec::new();
        for &setting in SETTINGS {
            for name in setting.variables() {
                let Some(said) = variable(&name).filter(|said| !said.is_empty()) else { continue };
                let said = said.to_string_lossy();
                let value = setting.kind.read_text(&said).map_err(|complaint| {
                    ConfigError::value(Place::Variable(name.clone()), setting, &said, complaint)
                })?;
                found.push(Found { setting, value, source: Source::Variable(name) });
            }
        }
        let of_file = file.read()?.into_iter();
        found.extend(of_file.map(|(setting, value, source)| Found { setting, value, source }));
        Ok(Config { found })
    }

    /// Everything that sets a setting; the first one counts, and overrides the others.
    pub fn all(&self, setting: &Setting) -> impl Iterator<Item = &Found> {
        self.found.iter().filter(move |found| found.setting.key == setting.key)
    }

    /// What counts, unless the default does.
    pub fn set(&self, setting: &Setting) -> Option<&Found> {
        self.all(setting).next()
    }

    /// The value that counts; none where the program works it out.
    pub fn value(&self, setting: &Setting) -> Option<Value> {
        self.set(setting).map(|found| found.value.clone()).or_else(|| setting.default.value())
    }

    /// Who has set the value that counts.
    pub fn source(&self, setting: &Setting) -> Source {
        self.set(setting).map_or(Source::Default, |found| found.source.clone())
    }
}
