//! The configuration file: where it is, and what stands in it.

use super::Source;
use super::error::{ConfigError, Place};
use super::kind::Complaint;
use super::table::{SETTINGS, Setting};
use super::value::Value;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use toml_edit::{Document, Item, TableLike};

/// Names the file where no flag does.
const FILE_VARIABLE: &str = "SPILLWAY_CONFIG";

/// Names that are no less like a key than this are taken for a typing error, on a scale from 0 to 1.
const ALIKE: f64 = 0.8;

/// Which file holds the settings. It need not exist, unless the command line names it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConfigFile {
    path: Option<PathBuf>,
    /// Whether the command line names it.
    named: bool,
}

impl ConfigFile {
    /// The file that the command line names, else that of `SPILLWAY_CONFIG`, else the user's.
    pub fn locate(named: Option<&Path>) -> ConfigFile {
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        match named {
            Some(path) => ConfigFile { path: Some(absolute(path.to_owned())), named: true },
            None => ConfigFile { path: of_user(|name| std::env::var_os(name)).map(absolute), named: false },
        }
    }

    /// Its absolute path; none where nothing says where files of the user are.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The path, for a command that cannot do without.
    ///
    /// # Errors
    /// There is none.
    pub fn require_path(&self) -> Result<&Path, ConfigError> {
        self.path().ok_or(ConfigError::NoPlace)
    }

    /// What is written in the file; none if it does not exist.
    ///
    /// # Errors
    /// It cannot be read, or is not UTF-8.
    pub fn text(&self) -> Result<Option<String>, ConfigError> {
        let Some(path) = self.path() else { return Ok(None) };
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(ConfigError::Unreadable { path: path.into(), source }),
        };
        let text = String::from_utf8(bytes).map_err(|error| {
            let before = error.utf8_error().valid_up_to();
            let line = line_of(&error.as_bytes()[..before]);
            ConfigError::Malformed { path: path.into(), line, reason: "it is not UTF-8".into() }
        })?;
        Ok(Some(text))
    }

    /// The settings of the file.
    ///
    /// # Errors
    /// The file cannot be used, or a line of it.
    pub(super) fn read(&self) -> Result<Vec<(&'static Setting, Value, Source)>, ConfigError> {
        match (self.text()?, self.path()) {
            (Some(text), Some(path)) => read(path, &text),
            (None, Some(path)) if self.named => Err(ConfigError::Missing { path: path.into() }),
            _ => Ok(Vec::new()),
        }
    }
}

/// Where a user's file is, as the XDG specification says: an unset, empty or relative folder means `~/.config`.
fn of_user(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    path(FILE_VARIABLE).or_else(|| {
        let folder = path("XDG_CONFIG_HOME").filter(|folder| folder.is_absolute());
        Some(folder.or_else(|| Some(path("HOME")?.join(".config")))?.join("spillway").join("config.toml"))
    })
}

/// Number of the line that begins after, or goes on after, `before`.
fn line_of(before: &[u8]) -> usize {
    before.iter().filter(|&&byte| byte == b'\n').count() + 1
}

/// A TOML file, with positions.
pub(super) struct Lines<'a> {
    pub path: &'a Path,
    pub text: &'a str,
}

impl Lines<'_> {
    fn line(&self, item: &Item, table: &dyn TableLike, name: &str) -> usize {
        let key = table.get_key_value(name).and_then(|(key, _)| key.span());
        let start = key.or_else(|| item.span()).map_or(0, |span| span.start);
        line_of(self.text.as_bytes().get(..start).unwrap_or_default())
    }

    fn place(&self, line: usize) -> Place {
        Place::File { path: self.path.into(), line }
    }

    /// A section of the file.
    pub fn section<'d>(
        &self,
        document: &'d Document<&str>,
        name: &str,
        item: &'d Item,
    ) -> Result<&'d dyn TableLike, ConfigError> {
        item.as_table_like().ok_or_else(|| ConfigError::Value {
            place: self.place(self.line(item, document.as_table(), name)),
            key: name.into(),
            found: "no section".into(),
            expected: format!("a section: [{name}]"),
            complaint: Complaint::WrongType,
        })
    }

    /// A value as it is written.
    fn written(&self, item: &Item) -> String {
        match item {
            Item::Value(value) => {
                value.span().and_then(|span| self.text.get(span)).unwrap_or_default().to_owned()
            }
            _ => "a table".to_owned(),
        }
    }
}

pub(super) fn read(path: &Path, text: &str) -> Result<Vec<(&'static Setting, Value, Source)>, ConfigError> {
    let document = parse(path, text)?;
    let lines = Lines { path, text };
    let mut found = Vec::new();
    for (section, item) in document.iter() {
        if !SETTINGS.iter().any(|setting| setting.section() == section) {
            let line = lines.line(item, document.as_table(), section);
            return Err(unknown(lines.place(line), section));
        }
        let table = lines.section(&document, section, item)?;
        for (name, item) in table.iter() {
            let line = lines.line(item, table, name);
            let key = format!("{section}.{name}");
            let Some(setting) = find(&key) else { return Err(unknown(lines.place(line), &key)) };
            let value = setting.kind.read_item(item).map_err(|complaint| {
                ConfigError::value(lines.place(line), setting, &lines.written(item), complaint)
            })?;
            found.push((setting, value, Source::File { path: path.into(), line }));
        }
    }
    Ok(found)
}

/// The file as TOML.
pub(super) fn parse<'a>(path: &Path, text: &'a str) -> Result<Document<&'a str>, ConfigError> {
    Document::parse(text).map_err(|error| {
        let start = error.span().map_or(0, |span| span.start);
        let line = line_of(text.as_bytes().get(..start).unwrap_or_default());
        ConfigError::Malformed { path: path.into(), line, reason: error.message().trim().replace('\n', "; ") }
    })
}

/// The setting with a key.
pub fn find(key: &str) -> Option<&'static Setting> {
    SETTINGS.iter().copied().find(|setting| setting.key == key)
}

/// The setting with a key that a user typed.
///
/// # Errors
/// There is none.
pub fn require(key: &str) -> Result<&'static Setting, ConfigError> {
    find(key).ok_or_else(|| unknown(Place::CommandLine, key))
}

fn unknown(place: Place, key: &str) -> ConfigError {
    ConfigError::UnknownKey { place, key: key.into(), nearest: nearest(key) }
}

/// The key that is most like `typed`, if any is: whole, or by its last part where the section was left out or is another.
fn nearest(typed: &str) -> Option<&'static str> {
    let leaf = typed.rsplit_once('.').map_or(typed, |(_, leaf)| leaf);
    let likeness = |setting: &Setting| {
        strsim::normalized_damerau_levenshtein(typed, setting.key)
            .max(strsim::normalized_damerau_levenshtein(leaf, setting.leaf()))
    };
    let best = SETTINGS.iter().map(|setting| (likeness(setting), setting.key));
    let (likeness, key) = best.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (likeness >= ALIKE).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_where_xdg_says_unless_a_variable_names_another() {
        let with = |set: &[(&str, &str)]| {
            of_user(|name| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
        };
        let all = [("SPILLWAY_CONFIG", "/s.toml"), ("XDG_CONFIG_HOME", "/x"), ("HOME", "/h")];
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(with(&all), path("/s.toml"));
        assert_eq!(with(&all[1..]), path("/x/spillway/config.toml"));
        assert_eq!(with(&all[2..]), path("/h/.config/spillway/config.toml"));
        assert_eq!(
            with(&[("SPILLWAY_CONFIG", ""), ("XDG_CONFIG_HOME", "x"), ("HOME", "/h")]),
            with(&all[2..])
        );
        assert_eq!(with(&[]), None);
    }

    #[test]
    fn a_typing_error_is_told_from_a_wrong_name() {
        assert_eq!(nearest("memory.max_sep"), Some("memory.max_seq"));
        assert_eq!(nearest("hardware.max_seq"), Some("memory.max_seq"));
        assert_eq!(nearest("pp_layer"), Some("placement.pp_layers"));
        assert_eq!(nearest("reasoning.effort"), None);
    }
}
