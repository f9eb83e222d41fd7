//! Changing the configuration file: one key at a time, everything else as it stands, all or nothing on disk.

use super::error::{ConfigError, Place};
use super::file::{ConfigFile, Lines, parse};
use super::kind::Complaint;
use super::table::Setting;
use super::value::Value;
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use toml_edit::{Item, Table};

/// Permissions of a new file, less what the process masks.
const NEW_FILE: u32 = 0o666;

/// Sets a setting to what the user typed.
///
/// # Errors
/// The value cannot be used, or the file cannot be changed.
pub fn set(file: &ConfigFile, setting: &Setting, typed: &str) -> Result<Value, ConfigError> {
    let value = check(setting, typed)?;
    let path = file.require_path()?;
    let text = file.text()?.unwrap_or_default();
    write(path, &with(path, &text, setting, &value)?)?;
    Ok(value)
}

/// Removes a key from the file, whether there is such a setting or not; false if it was not there. A comment behind its value
/// goes with it, those above stay.
///
/// # Errors
/// The file cannot be changed.
pub fn unset(file: &ConfigFile, key: &str) -> Result<bool, ConfigError> {
    let path = file.require_path()?;
    let Some(text) = file.text()? else { return Ok(false) };
    match without(path, &text, key)? {
        Some(changed) => write(path, &changed).map(|()| true),
        None => Ok(false),
    }
}

/// The file without a key; none if it has no such key.
pub(super) fn without(path: &Path, text: &str, key: &str) -> Result<Option<String>, ConfigError> {
    let document = parse(path, text)?;
    let (section, leaf) = key.split_once('.').unwrap_or(("", key));
    let owner = if section.is_empty() { Some(document.as_item()) } else { document.get(section) };
    let Some(item) = owner.and_then(Item::as_table_like).and_then(|table| table.get(leaf)) else {
        return Ok(None);
    };
    // A value of a table has lines of its own; one of an inline table has not.
    if let (Some(Item::Table(_)), Some(span)) = (owner, item.as_value().and_then(toml_edit::Value::span)) {
        let start = text[..span.start].rfind('\n').map_or(0, |end| end + 1);
        let end = text[span.end..].find('\n').map_or(text.len(), |end| span.end + end + 1);
        return Ok(Some(format!("{}{}", &text[..start], &text[end..])));
    }
    let mut document = document.into_mut();
    let root = document.as_item_mut();
    let owner = if section.is_empty() { Some(root) } else { root.get_mut(section) };
    owner.and_then(Item::as_table_like_mut).and_then(|table| table.remove(leaf));
    Ok(Some(document.to_string()))
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
    let document = parse(path, text)?;
    let section = document.get(setting.section());
    let lines = Lines { path, text };
    let table = section.map(|item| lines.section(&document, setting.section(), item)).transpose()?;
    let old = table.and_then(|table| table.get(setting.leaf()));
    if let Some(span) = old.and_then(Item::as_value).and_then(toml_edit::Value::span) {
        return Ok(format!("{}{}{}", &text[..span.start], setting.kind.in_toml(value), &text[span.end..]));
    }
    let mut document = document.into_mut();
    let section = document.entry(setting.section()).or_insert_with(|| Item::Table(Table::new()));
    if let Some(table) = section.as_table_like_mut() {
        table.insert(setting.leaf(), Item::Value(setting.kind.in_toml(value)));
    }
    Ok(document.to_string())
}

/// Replaces the file, in one step for whoever reads it. A link stays a link to the file that it names.
fn write(path: &Path, text: &str) -> Result<(), ConfigError> {
    replace(path, text).map_err(|source| ConfigError::Unwritable { path: path.into(), source })
}

fn replace(path: &Path, text: &str) -> io::Result<()> {
    let target = match std::fs::canonicalize(path) {
        Ok(target) => target,
        Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
        Err(error) => return Err(error),
    };
    let old = std::fs::metadata(&target).ok();
    if old.as_ref().is_some_and(|old| !old.is_file()) {
        // A device or a folder would be gone.
        return Err(io::Error::other("it is no regular file"));
    }
    let folder = target.parent().ok_or(io::ErrorKind::InvalidInput)?;
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::Builder::new()
        .prefix(".config.")
        .permissions(Permissions::from_mode(NEW_FILE))
        .tempfile_in(folder)?;
    if let Some(old) = old {
        file.as_file().set_permissions(old.permissions())?;
    }
    file.write_all(text.as_bytes())?;
    file.as_file().sync_all()?;
    file.persist(&target)?;
    Ok(())
}
