//! What a setting may be: its type, its range, and how text and TOML are read into it.

use super::value::Value;
use crate::planner::{Budget, DeviceWish, Split, read_layer_list, read_size};
use crate::sampler::Bounds;
use spillway_worker_gpu::hip::Provider;
use toml_edit::Item;

/// The largest whole number of a file.
const LARGEST: u64 = i64::MAX.unsigned_abs();

/// Type and range of a setting.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// True or false.
    Switch,
    /// A whole number.
    Count {
        /// The smallest.
        low: u64,
        /// The largest; none where only the model or the machine limits it.
        high: Option<u64>,
    },
    /// A number.
    Number(Bounds),
    /// One of a few words.
    Choice {
        /// The words.
        words: &'static [&'static str],
        /// Whether other words are let pass, since whoever uses the setting warns of them and takes the default.
        lenient: bool,
    },
    /// What the command line takes as text: in a file also a whole number, or an array of strings and whole numbers, whose
    /// entries are joined with commas.
    List {
        /// In words.
        expected: &'static str,
        /// Whether a text can be read.
        good: fn(&str) -> bool,
    },
    /// A text.
    Text {
        /// In words.
        expected: &'static str,
        /// Whether a text can be read.
        good: fn(&str) -> bool,
    },
    /// A folder. In a file its path is absolute, since programs start in many folders.
    Folder,
}

/// What is wrong with a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Complaint {
    /// Another type.
    WrongType,
    /// The right type, but too small or too large.
    OutOfRange,
    /// Text that cannot be read.
    Unreadable,
}

impl Kind {
    /// Reads what a variable or a command line says.
    ///
    /// # Errors
    /// The text is no value of this kind.
    pub fn read_text(&self, text: &str) -> Result<Value, Complaint> {
        let text = text.trim();
        match self {
            Kind::Switch => read_switch(text).map(Value::Bool).ok_or(Complaint::WrongType),
            Kind::Count { .. } => self.count(text.parse().map_err(|_| Complaint::WrongType)?),
            Kind::Number(bounds) => number(bounds, text.parse().map_err(|_| Complaint::WrongType)?),
            Kind::Choice { words, lenient } => {
                let known = *lenient || words.contains(&text);
                known.then(|| Value::Text(text.into())).ok_or(Complaint::Unreadable)
            }
            Kind::List { good, .. } | Kind::Text { good, .. } => {
                let readable = !text.is_empty() && good(text);
                readable.then(|| Value::Text(text.into())).ok_or(Complaint::Unreadable)
            }
            Kind::Folder if text.is_empty() => Err(Complaint::Unreadable),
            Kind::Folder => Ok(Value::Text(text.into())),
        }
    }

    /// Reads what a file says.
    ///
    /// # Errors
    /// The item is no value of this kind.
    pub fn read_item(&self, item: &Item) -> Result<Value, Complaint> {
        let text = || item.as_str().ok_or(Complaint::WrongType);
        match self {
            Kind::Switch => item.as_bool().map(Value::Bool).ok_or(Complaint::WrongType),
            Kind::Count { .. } => {
                let found = item.as_integer().ok_or(Complaint::WrongType)?;
                self.count(u64::try_from(found).map_err(|_| Complaint::OutOfRange)?)
            }
            Kind::Number(bounds) => {
                let whole = || item.as_integer().map(|found| found as f64);
                number(bounds, item.as_float().or_else(whole).ok_or(Complaint::WrongType)?)
            }
            Kind::Choice { .. } | Kind::Text { .. } => self.read_text(text()?),
            Kind::List { .. } => self.read_text(&joined(item).ok_or(Complaint::WrongType)?),
            Kind::Folder => {
                let path = text()?;
                let absolute = std::path::Path::new(path).is_absolute();
                absolute.then(|| Value::Text(path.into())).ok_or(Complaint::Unreadable)
            }
        }
    }

    /// A value as a file has it: a list of one whole number is that number.
    pub fn in_toml(&self, value: &Value) -> toml_edit::Value {
        let whole =
            |text: &str| text.parse().ok().filter(|count: &i64| *count >= 0 && count.to_string() == text);
        match value {
            Value::Bool(on) => (*on).into(),
            // No kind allows more than a file can hold.
            Value::Count(count) => i64::try_from(*count).unwrap_or(i64::MAX).into(),
            Value::Number(number) => (*number).into(),
            Value::Text(text) => match whole(text) {
                Some(count) if matches!(self, Kind::List { .. }) => count.into(),
                _ => text.into(),
            },
        }
    }

    /// Whether a value is let pass only because whoever uses the setting warns of it.
    pub fn is_unknown_word(&self, value: &Value) -> bool {
        matches!((self, value), (Kind::Choice { words, .. }, Value::Text(text)) if !words.contains(&text.as_str()))
    }

    /// What belongs there, for messages: "must be …".
    pub fn expected(&self) -> String {
        match self {
            Kind::Switch => "true or false".into(),
            Kind::Count { low, high: Some(high) } => format!("a whole number between {low} and {high}"),
            Kind::Count { low, high: None } => format!("a whole number of at least {low}"),
            Kind::Number(bounds) => format!("a number {}", bounds.words),
            Kind::Choice { words, .. } => alternatives(words),
            Kind::List { expected, .. } | Kind::Text { expected, .. } => (*expected).into(),
            Kind::Folder => "a folder; in the file, an absolute path".into(),
        }
    }

    /// The words of a choice.
    pub fn words(&self) -> &'static [&'static str] {
        match self {
            Kind::Choice { words, .. } => words,
            _ => &[],
        }
    }

    /// The type in one word.
    pub fn name(&self) -> &'static str {
        match self {
            Kind::Switch => "boolean",
            Kind::Count { .. } => "integer",
            Kind::Number(_) => "number",
            Kind::Choice { .. } => "choice",
            Kind::List { .. } => "list",
            Kind::Text { .. } => "text",
            Kind::Folder => "folder",
        }
    }

    fn count(&self, found: u64) -> Result<Value, Complaint> {
        match self {
            Kind::Count { low, high } if (*low..=high.unwrap_or(LARGEST)).contains(&found) => {
                Ok(Value::Count(found))
            }
            _ => Err(Complaint::OutOfRange),
        }
    }
}

/// Words as people list them.
fn alternatives(words: &[&str]) -> String {
    match words {
        [first @ .., last] if !first.is_empty() => format!("`{}` or `{last}`", first.join("`, `")),
        words => format!("`{}`", words.concat()),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "whoever computes with the number does so in f32")]
fn number(bounds: &Bounds, found: f64) -> Result<Value, Complaint> {
    let within = found.is_finite() && bounds.contains(found as f32);
    within.then_some(Value::Number(found)).ok_or(Complaint::OutOfRange)
}

fn read_switch(text: &str) -> Option<bool> {
    let says = |words: [&str; 4]| words.iter().any(|word| word.eq_ignore_ascii_case(text));
    match (says(["1", "true", "on", "yes"]), says(["0", "false", "off", "no"])) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        _ => None,
    }
}

/// A string, a whole number, or an array of them joined with commas.
fn joined(item: &Item) -> Option<String> {
    let one = |value: &toml_edit::Value| match value {
        toml_edit::Value::String(text) => Some(text.value().clone()),
        value => value.as_integer().filter(|number| *number >= 0).map(|number| number.to_string()),
    };
    match item.as_array() {
        Some(array) => array.iter().map(one).collect::<Option<Vec<_>>>().map(|entries| entries.join(",")),
        None => one(item.as_value()?),
    }
}

/// A text of any kind.
pub fn any(_: &str) -> bool {
    true
}

/// Devices as the planner reads them; which there are is seen later.
pub fn is_devices(text: &str) -> bool {
    DeviceWish::read(Some(text)).is_ok()
}

/// A provider, with options that it has.
pub fn is_provider(text: &str) -> bool {
    text.parse::<Provider>().is_ok()
}

/// Sizes separated by commas.
pub fn is_sizes(text: &str) -> bool {
    text.split(',').all(|entry| read_size(entry).is_some())
}

/// A way to split layers.
pub fn is_split(text: &str) -> bool {
    match Split::read(text) {
        Ok(Split::Bytes(list)) => is_sizes(list),
        read => read.is_ok(),
    }
}

/// Layers of each stage.
pub fn is_layers(text: &str) -> bool {
    read_layer_list(text).is_ok_and(|counts| !counts.contains(&0))
}

/// A number of layers, or `auto`.
pub fn is_budget(text: &str) -> bool {
    Budget::read(text).is_ok()
}

/// A log filter.
pub fn is_log_filter(text: &str) -> bool {
    tracing_subscriber::EnvFilter::try_new(text).is_ok()
}
