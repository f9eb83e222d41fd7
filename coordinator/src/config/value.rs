//! The value of a setting, as it is shown, stored and handed on.

use serde_json::json;
use std::fmt;

/// A value that its setting's type and range allow.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// True or false.
    Bool(bool),
    /// A whole number.
    Count(u64),
    /// A number.
    Number(f64),
    /// Words, lists and paths.
    Text(String),
}

impl Value {
    /// As JSON.
    pub fn to_json(&self) -> serde_json::Value {
        match self {
            Value::Bool(on) => json!(on),
            Value::Count(count) => json!(count),
            Value::Number(number) => json!(number),
            Value::Text(text) => json!(text),
        }
    }

    /// As programs expect it in a variable: switches are 1 or 0.
    pub fn to_variable(&self) -> String {
        match self {
            Value::Bool(on) => u8::from(*on).to_string(),
            other => other.to_string(),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Bool(on) => on.fmt(f),
            Value::Count(count) => count.fmt(f),
            Value::Number(number) => number.fmt(f),
            Value::Text(text) => f.write_str(text),
        }
    }
}
