//! Typed access to the fields of a JSON object, by name, with errors that name the field. What is left at the end is
//! refused.

use super::MAX_ID_BYTES;
use super::error::LineError;
use super::foreign::Foreign;
use serde_json::{Map, Value};

/// A JSON type a field may have.
pub trait FromField: Sized {
    /// What belongs in the field, for messages.
    const EXPECTED: &'static str;
    /// The value, or none if it has another type.
    fn from_field(value: &Value) -> Option<Self>;
    /// What there is instead, for messages.
    fn found(value: &Value) -> String {
        describe(value)
    }
}

/// Unread fields of one object.
#[derive(Debug)]
pub struct Fields {
    message: &'static str,
    /// Prefix of field names in messages: empty, or `params.`.
    path: &'static str,
    map: Map<String, Value>,
}

impl Fields {
    /// Fields of the message `message`; `path` is put before names in errors.
    pub fn new(message: &'static str, path: &'static str, map: Map<String, Value>) -> Self {
        Fields { message, path, map }
    }

    /// Takes a field; null counts as absent.
    pub fn take<T: FromField>(&mut self, field: &'static str) -> Result<Option<T>, LineError> {
        match self.map.remove(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match T::from_field(&value) {
                Some(parsed) => Ok(Some(parsed)),
                None => Err(LineError::WrongType {
                    field: format!("{}{field}", self.path),
                    expected: T::EXPECTED,
                    found: T::found(&value),
                }),
            },
        }
    }

    /// Whether a field is there; null counts as absent.
    pub fn has(&self, field: &str) -> bool {
        self.map.get(field).is_some_and(|value| !value.is_null())
    }

    /// Takes a field that must be there.
    pub fn require<T: FromField>(&mut self, field: &'static str) -> Result<T, LineError> {
        let message = self.message;
        self.take(field)?.ok_or(LineError::MissingField { message, field, expected: T::EXPECTED })
    }

    /// Takes a field that has two names; both at once exclude one another.
    pub fn take_either<T: FromField>(
        &mut self,
        name: &'static str,
        alias: &'static str,
    ) -> Result<Option<T>, LineError> {
        match (self.take(name)?, self.take::<T>(alias)?) {
            (Some(_), Some(_)) => Err(LineError::Conflict { first: name, second: alias }),
            (first, second) => Ok(first.or(second)),
        }
    }

    /// Takes the id of the message, checked.
    pub fn take_id(&mut self) -> Result<Option<String>, LineError> {
        let id: Option<String> = self.take("id")?;
        match id.as_ref().map(String::len) {
            Some(found) if found == 0 || found > MAX_ID_BYTES => Err(LineError::BadId { found }),
            _ => Ok(id),
        }
    }

    /// Refuses fields, taken or not, that ask for a feature in `foreign`; what nobody knows passes.
    pub fn refuse(&self, foreign: &[Foreign]) -> Result<(), LineError> {
        for (name, value) in &self.map {
            if let Some(row) = foreign.iter().find(|row| row.names(name)) {
                row.check(&format!("{}{name}", self.path), value)?;
            }
        }
        Ok(())
    }

    /// The fields that were not taken.
    pub fn into_rest(self) -> Map<String, Value> {
        self.map
    }

    /// Refuses whatever was not taken: by feature if the name is in `foreign` and asks for something, by name otherwise.
    pub fn finish(self, foreign: &[Foreign]) -> Result<(), LineError> {
        for (name, value) in &self.map {
            match foreign.iter().find(|row| row.names(name)) {
                Some(row) => row.check(&format!("{}{name}", self.path), value)?,
                None => {
                    return Err(LineError::UnknownField {
                        message: self.message,
                        field: format!("{}{name}", self.path),
                    });
                }
            }
        }
        Ok(())
    }
}

/// Longest excerpt of a value in a message, in characters.
const EXCERPT_CHARS: usize = 40;

/// A value in words, short enough for a message.
pub fn describe(value: &Value) -> String {
    let kind = kind(value);
    match value {
        Value::Null | Value::Array(_) | Value::Object(_) => kind.to_owned(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            let text = value.to_string();
            match text.char_indices().nth(EXCERPT_CHARS) {
                None => format!("{kind} {text}"),
                Some((end, _)) => format!("{kind} {}…", &text[..end]),
            }
        }
    }
}

/// An array in words, by its first entry that does not belong there.
fn describe_entries(value: &Value, belongs: impl Fn(&Value) -> bool) -> String {
    match value.as_array().and_then(|items| items.iter().find(|item| !belongs(item))) {
        Some(item) => format!("an array with {}", describe(item)),
        None => describe(value),
    }
}

/// JSON type of a value, with its article.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "the boolean",
        Value::Number(_) => "the number",
        Value::String(_) => "the string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

impl FromField for String {
    const EXPECTED: &'static str = "a string";
    fn from_field(value: &Value) -> Option<Self> {
        value.as_str().map(str::to_owned)
    }
}

impl FromField for bool {
    const EXPECTED: &'static str = "true or false";
    fn from_field(value: &Value) -> Option<Self> {
        value.as_bool()
    }
}

impl FromField for u64 {
    const EXPECTED: &'static str = "a non-negative integer";
    fn from_field(value: &Value) -> Option<Self> {
        value.as_u64()
    }
}

impl FromField for f64 {
    const EXPECTED: &'static str = "a number";
    fn from_field(value: &Value) -> Option<Self> {
        value.as_f64()
    }
}

impl FromField for Value {
    const EXPECTED: &'static str = "any value";
    fn from_field(value: &Value) -> Option<Self> {
        Some(value.clone())
    }
}

impl FromField for Map<String, Value> {
    const EXPECTED: &'static str = "an object";
    fn from_field(value: &Value) -> Option<Self> {
        value.as_object().cloned()
    }
}

/// An array of objects: messages, tools.
#[derive(Debug, Clone, PartialEq)]
pub struct Objects(pub Vec<Value>);

impl FromField for Objects {
    const EXPECTED: &'static str = "an array of objects";
    fn from_field(value: &Value) -> Option<Self> {
        let items = value.as_array()?;
        items.iter().all(Value::is_object).then(|| Objects(items.clone()))
    }
    fn found(value: &Value) -> String {
        describe_entries(value, Value::is_object)
    }
}

fn token_id(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

impl FromField for Vec<u32> {
    const EXPECTED: &'static str = "an array of token ids";
    fn from_field(value: &Value) -> Option<Self> {
        value.as_array()?.iter().map(token_id).collect()
    }
    fn found(value: &Value) -> String {
        describe_entries(value, |item| token_id(item).is_some())
    }
}

/// One string or several.
#[derive(Debug, Clone, PartialEq)]
pub struct Strings(pub Vec<String>);

impl FromField for Strings {
    const EXPECTED: &'static str = "a string or an array of strings";
    fn from_field(value: &Value) -> Option<Self> {
        match value {
            Value::String(one) => Some(Strings(vec![one.clone()])),
            Value::Array(items) => {
                items.iter().map(|item| item.as_str().map(str::to_owned)).collect::<Option<_>>().map(Strings)
            }
            _ => None,
        }
    }
    fn found(value: &Value) -> String {
        describe_entries(value, Value::is_string)
    }
}

/// A setting that the command line takes as text: here a string, a non-negative number, or an array of strings and
/// non-negative integers (joined with commas).
#[derive(Debug, Clone, PartialEq)]
pub struct Setting(pub String);

impl Setting {
    /// An entry of an array, or all there is.
    fn entry(value: &Value) -> Option<String> {
        match value {
            Value::String(text) => Some(text.clone()),
            value => value.as_u64().map(|n| n.to_string()),
        }
    }
}

impl FromField for Setting {
    const EXPECTED: &'static str = "a string, a non-negative number or an array of strings and integers";
    fn from_field(value: &Value) -> Option<Self> {
        match value {
            Value::Number(number) if number.as_f64()? >= 0.0 => Some(Setting(number.to_string())),
            Value::Array(items) => items
                .iter()
                .map(Setting::entry)
                .collect::<Option<Vec<_>>>()
                .map(|list| Setting(list.join(","))),
            value => Setting::entry(value).map(Setting),
        }
    }
    fn found(value: &Value) -> String {
        describe_entries(value, |item| Setting::entry(item).is_some())
    }
}

/// Additions to logits by token id: `{"13": -1.5}`.
#[derive(Debug, Clone, PartialEq)]
pub struct Biases(pub Vec<(u32, f32)>);

impl Biases {
    #[expect(clippy::cast_possible_truncation, reason = "a bias is used as f32; rounding it is the point")]
    fn entry((id, bias): (&String, &Value)) -> Option<(u32, f32)> {
        Some((id.parse().ok()?, bias.as_f64()? as f32))
    }
}

impl FromField for Biases {
    const EXPECTED: &'static str = "an object from token ids to numbers";
    fn from_field(value: &Value) -> Option<Self> {
        value.as_object()?.iter().map(Biases::entry).collect::<Option<_>>().map(Biases)
    }
    fn found(value: &Value) -> String {
        match value.as_object().and_then(|map| map.iter().find(|&entry| Biases::entry(entry).is_none())) {
            Some((id, bias)) => {
                format!("an object with {} for {}", describe(bias), describe(&Value::from(id.as_str())))
            }
            None => describe(value),
        }
    }
}
