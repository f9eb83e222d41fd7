//! Changing the configuration file: one key at a time, everything else as it stands, one change after the other.

use super::error::{ConfigError, Place};
use super::file::{ConfigFile, Lines, parse};
use super::kind::Complaint;
use super::store::Target;
use super::table::Setting;
use super::value::Value;
use std::io;
use std::path::Path;
use toml_edit::{Item, Table};

/// Sets a setting to what the user typed.
///
/// # Errors
/// The value cannot be used, or the file cannot be changed.
pub fn set(file: &ConfigFile, setting: &Setting, typed: &str) -> Result<Value, ConfigError> {
    let value = check(setting, typed)?;
    let path = file.require_path()?;
    let target = Target::lock(path).map_err(|source| unwritable(path, source))?;
    let text = file.text()?.unwrap_or_default();
    let changed = with(path, &text, setting, &value)?;
    target.replace(&changed).map_err(|source| unwritable(path, source))?;
    Ok(value)
}

/// Removes a key from the file, whether there is such a setting or not; false if it was not there. A comment behind its value
/// goes with it, those above stay.
///
/// # Errors
/// The file cannot be changed, or the key is that of a section with keys in it.
pub fn unset(file: &ConfigFile, key: &str) -> Result<bool, ConfigError> {
    let path = file.require_path()?;
    if file.text()?.is_none() {
        // Nothing is made for what is not there.
        return Ok(false);
    }
    let target = Target::lock(path).map_err(|source| unwritable(path, source))?;
    let text = file.text()?.unwrap_or_default();
    match without(path, &text, key)? {
        Some(changed) => target.replace(&changed).map(|()| true).map_err(|source| unwritable(path, source)),
        None => Ok(false),
    }
}

fn unwritable(path: &Path, source: io::Error) -> ConfigError {
    ConfigError::Unwritable { path: path.into(), source }
}

/// The file without a key; none if it has no such key.
pub(super) fn without(path: &Path, text: &str, key: &str) -> Result<Option<String>, ConfigError> {
    let (mark, text) = split_mark(text);
    let document = parse(path, text)?;
    let (section, leaf) = key.split_once('.').unwrap_or(("", key));
    let owner = if section.is_empty() { Some(document.as_item()) } else { document.get(section) };
    let Some(item) = owner.and_then(Item::as_table_like).and_then(|table| table.get(leaf)) else {
        return Ok(None);
    };
    if let Some(table) = item.as_table_like().filter(|table| section.is_empty() && !table.is_empty()) {
        let keys = table.iter().map(|(name, _)| format!("{leaf}.{name}")).collect();
        return Err(ConfigError::WholeSection { name: leaf.into(), keys });
    }
    // A value of a table has lines of its own; one of an inline table has not.
    if let (Some(Item::Table(_)), Some(span)) = (owner, item.as_value().and_then(toml_edit::Value::span)) {
        let start = text[..span.start].rfind('\n').map_or(0, |end| end + 1);
        let end = text[span.end..].find('\n').map_or(text.len(), |end| span.end + end + 1);
        return Ok(Some(format!("{mark}{}{}", &text[..start], &text[end..])));
    }
    let mut document = document.into_mut();
    let root = document.as_item_mut();
    let owner = if section.is_empty() { Some(root) } else { root.get_mut(section) };
    owner.and_then(Item::as_table_like_mut).and_then(|table| table.remove(leaf));
    Ok(Some(format!("{mark}{}", with_line_ends_of(text, &document.to_string()))))
}

/// What the user typed as a value that a file may hold: what variables may say beyond that (a relative folder, an unknown
/// word that counts as the default) is refused.
fn check(setting: &Setting, typed: &str) -> Result<Value, ConfigError> {
    let refused = |complaint| ConfigError::value(Place::CommandLine, setting, typed, complaint);
    let value = setting.kind.read_text(typed).map_err(refused)?;
    setting.kind.read_item(&Item::Value(setting.kind.in_toml(&value))).map_err(refused)?;
    if setting.kind.is_unknown_word(&value) { Err(refused(Complaint::Unreadable)) } else { Ok(value) }
}

/// The file with a setting: in the place of its old value, else at the end of its section.
pub(super) fn with(path: &Path, text: &str, setting: &Setting, value: &Value) -> Result<String, ConfigError> {
    let (mark, text) = split_mark(text);
    let document = parse(path, text)?;
    let section = document.get(setting.section());
    let lines = Lines { path, text };
    let table = section.map(|item| lines.section(&document, setting.section(), item)).transpose()?;
    let old = table.and_then(|table| table.get(setting.leaf()));
    if let Some(span) = old.and_then(Item::as_value).and_then(toml_edit::Value::span) {
        let value = setting.kind.in_toml(value);
        return Ok(format!("{mark}{}{value}{}", &text[..span.start], &text[span.end..]));
    }
    let mut document = document.into_mut();
    let section = document.entry(setting.section()).or_insert_with(|| Item::Table(Table::new()));
    if let Some(table) = section.as_table_like_mut() {
        table.insert(setting.leaf(), Item::Value(setting.kind.in_toml(value)));
    }
    Ok(format!("{mark}{}", with_line_ends_of(text, &document.to_string())))
}

/// Starts the text of a file of some editors.
const BYTE_ORDER_MARK: &str = "\u{feff}";

/// The byte order mark of a text, if it has one, and the rest.
fn split_mark(text: &str) -> (&'static str, &str) {
    match text.strip_prefix(BYTE_ORDER_MARK) {
        Some(rest) => (BYTE_ORDER_MARK, rest),
        None => ("", text),
    }
}

/// `after` with the line ends of `before`: of each line that was there, and of the first line for new ones.
fn with_line_ends_of(before: &str, after: &str) -> String {
    fn content(line: &str) -> &str {
        line.trim_end_matches(['\r', '\n'])
    }
    let end = |line: &str| line.ends_with('\n').then(|| if line.ends_with("\r\n") { "\r\n" } else { "\n" });
    let old: Vec<&str> = before.split_inclusive('\n').collect();
    let usual = old.first().and_then(|line| end(line)).unwrap_or("\n");
    let (mut text, mut next) = (String::with_capacity(after.len()), 0);
    for line in after.split_inclusive('\n') {
        let found =
            old[next..].iter().position(|old| content(old) == content(line)).map(|found| next + found);
        text.push_str(content(line));
        if line.ends_with('\n') {
            text.push_str(found.and_then(|found| end(old[found])).unwrap_or(usual));
        }
        next = found.map_or(next, |found| found + 1);
    }
    text
}
