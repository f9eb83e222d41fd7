//! `config`: show and change settings.

use super::args::{ConfigCommand, ConfigKeyArgs, ConfigListArgs, ConfigSetArgs};
use super::failure::Failure;
use super::output;
use crate::config::{Config, ConfigFile, SETTINGS, Setting, Source, require, schema, set, unset};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Runs a command on settings. Only what shows values reads them all, so that the others can repair a file.
pub fn config(command: &ConfigCommand, file: &ConfigFile) -> Result<(), Failure> {
    match command {
        ConfigCommand::List(args) => list(args, file),
        ConfigCommand::Get(args) => get(args, file),
        ConfigCommand::Set(args) => write(args, file),
        ConfigCommand::Unset(args) => remove(&args.key, file),
        ConfigCommand::Explain(args) => explain(args, file),
        ConfigCommand::Path => output::text(&format!("{}\n", file.require_path()?.display())),
        ConfigCommand::Schema => output::text(&format!("{:#}\n", schema())),
    }
}

fn list(args: &ConfigListArgs, file: &ConfigFile) -> Result<(), Failure> {
    let config = Config::load(file)?;
    if args.json {
        let settings: Vec<Value> = SETTINGS.iter().map(|setting| in_full(&config, setting)).collect();
        return output::json(&json!({"file": file.path(), "settings": settings}));
    }
    let mut text = String::new();
    for setting in SETTINGS {
        // Writing to a String cannot fail.
        let _ =
            writeln!(text, "{:<36} {:<32} {}", setting.key, shown(&config, setting), config.source(setting));
    }
    output::text(&text)
}

fn get(args: &ConfigKeyArgs, file: &ConfigFile) -> Result<(), Failure> {
    let setting = require(&args.key)?;
    let config = Config::load(file)?;
    if args.json {
        return output::json(&in_full(&config, setting));
    }
    output::text(&format!("{}\n", shown(&config, setting)))
}

fn write(args: &ConfigSetArgs, file: &ConfigFile) -> Result<(), Failure> {
    let setting = require(&args.key)?;
    set(file, setting, &args.value)?;
    let overriding =
        setting.variables().find(|name| std::env::var_os(name).is_some_and(|said| !said.is_empty()));
    if let Some(name) = overriding {
        output::note(&format!("note: the variable {name} is set and overrides the file"));
    }
    Ok(())
}

fn remove(key: &str, file: &ConfigFile) -> Result<(), Failure> {
    if !unset(file, key)? {
        // A key that is neither there nor a setting is a typing error.
        require(key)?;
        output::note(&format!("note: {key} was not set in {}", file.require_path()?.display()));
    }
    Ok(())
}

fn explain(args: &ConfigKeyArgs, file: &ConfigFile) -> Result<(), Failure> {
    let setting = require(&args.key)?;
    let config = Config::load(file)?;
    if args.json {
        return output::json(&in_full(&config, setting));
    }
    let mut rows = vec![
        ("value", shown(&config, setting)),
        ("set by", config.source(setting).to_string()),
        ("must be", setting.kind.expected()),
        ("default", setting.default.words()),
        ("read", setting.scope.words().to_owned()),
        ("variables", setting.variables().collect::<Vec<_>>().join(", ")),
    ];
    rows.extend(setting.flag.map(|flag| ("flag", format!("--{flag}"))));
    rows.extend(setting.param.map(|param| ("parameter", param.to_owned())));
    let overridden = config.all(setting).skip(1);
    rows.extend(overridden.map(|found| ("overrides", format!("{} of {}", found.value, found.source))));
    let mut text = format!("{}: {}\n", setting.key, setting.help);
    for (name, value) in rows {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "  {name:<10} {value}");
    }
    output::text(&text)
}

/// The value, or in words what the program works out.
fn shown(config: &Config, setting: &Setting) -> String {
    config.value(setting).map_or_else(|| format!("({})", setting.default.words()), |value| value.to_string())
}

/// Everything about a setting.
fn in_full(config: &Config, setting: &Setting) -> Value {
    let overrides: Vec<Value> = config
        .all(setting)
        .skip(1)
        .map(|found| json!({"value": found.value.to_json(), "source": source(&found.source)}))
        .collect();
    json!({
        "key": setting.key,
        "value": config.value(setting).map(|value| value.to_json()),
        "source": source(&config.source(setting)),
        "overrides": overrides,
        "default": setting.default.value().map(|value| value.to_json()),
        "default_in_words": setting.default.words(),
        "type": setting.kind.name(),
        "expected": setting.kind.expected(),
        "choices": setting.kind.words(),
        "help": setting.help,
        "read": setting.scope.words(),
        "variables": setting.variables().collect::<Vec<_>>(),
        "flag": setting.flag.map(|flag| format!("--{flag}")),
        "param": setting.param,
    })
}

fn source(source: &Source) -> Value {
    match source {
        Source::Variable(name) => json!({"kind": "environment", "name": name}),
        Source::File { path, line } => json!({"kind": "file", "path": path, "line": line}),
        Source::Default => json!({"kind": "default"}),
    }
}
