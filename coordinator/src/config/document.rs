//! The table of settings as documents: the reference in docs/configuration.md and a JSON schema of the file.

use super::kind::Kind;
use super::table::{SETTINGS, Setting};
use serde_json::{Map, Value, json};

/// A JSON schema of the file, for editors that check and complete TOML.
pub fn schema() -> Value {
    let mut sections = Map::new();
    for setting in SETTINGS {
        let section = sections
            .entry(setting.section())
            .or_insert_with(|| json!({"type": "object", "additionalProperties": false, "properties": {}}));
        section["properties"][setting.leaf()] = property(setting);
    }
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Spillway's configuration",
        "type": "object",
        "additionalProperties": false,
        "properties": sections,
    })
}

fn property(setting: &Setting) -> Value {
    let mut property = match setting.kind {
        Kind::Switch => json!({"type": "boolean"}),
        Kind::Count { low, high: Some(high) } => json!({"type": "integer", "minimum": low, "maximum": high}),
        Kind::Count { low, high: None } => json!({"type": "integer", "minimum": low}),
        Kind::Number(bounds) => {
            let mut number = json!({"type": "number", "minimum": decimal(bounds.low)});
            if bounds.high.is_finite() {
                number["maximum"] = decimal(bounds.high);
            }
            number
        }
        Kind::Choice { words, .. } => json!({"enum": words}),
        Kind::List { .. } => {
            let one = json!([{"type": "string"}, {"type": "integer", "minimum": 0}]);
            json!({"anyOf": [one[0], one[1], {"type": "array", "items": {"anyOf": one}}]})
        }
        Kind::Text { .. } | Kind::Folder => json!({"type": "string"}),
    };
    property["description"] = json!(format!("{}. Must be {}.", setting.help, setting.kind.expected()));
    if let Some(default) = setting.default.value() {
        property["default"] = default.to_json();
    }
    property
}

/// The shortest decimal of a number, not the digits of its widening.
fn decimal(number: f32) -> Value {
    json!(number.to_string().parse::<f64>().ok())
}

/// The generated part of docs/configuration.md.
#[cfg(test)]
pub(super) fn reference() -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    let mut section = "";
    for setting in SETTINGS {
        if setting.section() != section {
            section = setting.section();
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                "\n### {section}\n\n| key | value | default | read | |\n|---|---|---|---|---|\n"
            );
        }
        let flag = setting.flag.map(|flag| format!("flag `--{flag}`"));
        let param = setting.param.map(|param| format!("parameter `{param}`"));
        let also = setting.also.iter().map(|name| format!("`{name}`"));
        let names: Vec<String> = flag.into_iter().chain(param).chain(also).collect();
        let names = if names.is_empty() { String::new() } else { format!(". Also: {}", names.join(", ")) };
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {} | {}{names} |",
            setting.leaf(),
            setting.kind.expected(),
            setting.default.words(),
            setting.scope.words(),
            setting.help,
        );
    }
    text
}
