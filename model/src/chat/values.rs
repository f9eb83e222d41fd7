//! JSON as the template engine's values.

use minijinja::value::Value;
use serde_json::Value as Json;

use super::error::TemplateError;

/// Most levels of nesting accepted. The engine compares, prints and drops values recursively.
const MAX_DEPTH: usize = 128;

/// Converts JSON values and keeps count of what it has converted.
#[derive(Debug, Default)]
pub(super) struct Converter {
    /// Bytes of text so far.
    pub bytes: u64,
    /// Values so far, at every level.
    pub values: u64,
}

impl Converter {
    /// Converts a JSON value; objects keep the order of their keys.
    pub fn convert(&mut self, json: &Json) -> Result<Value, TemplateError> {
        self.convert_at(json, 0)
    }

    fn convert_at(&mut self, json: &Json, depth: usize) -> Result<Value, TemplateError> {
        if depth > MAX_DEPTH {
            return Err(TemplateError::TooDeep { limit: MAX_DEPTH });
        }
        self.values += 1;
        Ok(match json {
            Json::Null => Value::from(()),
            Json::Bool(truth) => Value::from(*truth),
            Json::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
                (Some(number), _, _) => Value::from(number),
                (None, Some(number), _) => Value::from(number),
                (None, None, number) => Value::from(number),
            },
            Json::String(text) => self.text(text),
            Json::Array(items) => {
                let items = items.iter().map(|item| self.convert_at(item, depth + 1));
                Value::from(items.collect::<Result<Vec<Value>, _>>()?)
            }
            Json::Object(entries) => {
                let entries = entries
                    .iter()
                    .map(|(key, value)| Ok((self.text(key), self.convert_at(value, depth + 1)?)));
                Value::from_pairs(entries.collect::<Result<Vec<_>, TemplateError>>()?)
            }
        })
    }

    fn text(&mut self, text: &str) -> Value {
        self.bytes += text.len() as u64;
        Value::from(text)
    }
}
