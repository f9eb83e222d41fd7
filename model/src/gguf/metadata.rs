//! The key/value section: parsing its entries, and getters that say what is wrong with a value.

use super::cursor::Cursor;
use super::error::GgufError;
use super::limits::{MAX_ARRAY_DEPTH, MAX_ELEMENTS, MAX_KEY_BYTES};
use super::value::{Array, Value, ValueType, decode};
use std::ops::Range;

/// One entry as the parser leaves it: where the value's bytes are.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    key: Box<str>,
    kind: ValueType,
    /// Element type and count of an array.
    array: Option<(ValueType, usize)>,
    range: Range<usize>,
}

impl Entry {
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// Reads one key and checks its value's extent; scalars and strings are checked in full.
    pub(super) fn parse(cursor: &mut Cursor<'_>, index: u64) -> Result<Entry, GgufError> {
        let at = cursor.pos();
        let bad = |key: &str, reason: String| GgufError::BadMetadata { key: key.to_owned(), at, reason };
        let number = format!("metadata key number {index}");
        let key = cursor.string(MAX_KEY_BYTES, &number)?;
        let key = std::str::from_utf8(key).map_err(|_| bad(&number, "the key is not UTF-8".to_owned()))?;
        if key.is_empty() {
            return Err(bad(&number, "the key is empty".to_owned()));
        }
        let what = format!("the value of metadata key {key:?}");
        let kind = value_type(cursor, &what).map_err(|reason| reason.into_error(key, at))?;
        let mut array = None;
        let start;
        match kind {
            ValueType::Array => {
                let elem = value_type(cursor, &what).map_err(|reason| reason.into_error(key, at))?;
                let count = cursor.u64(&what)?;
                start = cursor.pos();
                skip_elements(cursor, elem, count, 1, &what).map_err(|reason| reason.into_error(key, at))?;
                // Every element takes at least one byte of the file, so the count fits.
                array = Some((elem, usize::try_from(count).unwrap_or(usize::MAX)));
            }
            ValueType::Str => {
                let text = cursor.string(u64::MAX, &what)?;
                start = cursor.pos() - text.len();
            }
            _ => {
                start = cursor.pos();
                cursor.take(kind.size().unwrap_or(0), &what)?;
            }
        }
        Ok(Entry { key: key.into(), kind, array, range: start..cursor.pos() })
    }

    /// The value; the reason when its bytes do not form one.
    fn value<'a>(&self, file: &'a [u8]) -> Result<Value<'a>, &'static str> {
        let bytes = &file[self.range.clone()];
        match self.array {
            Some((elem, len)) => Ok(Value::Array(Array { elem, len, bytes })),
            None => decode(self.kind, bytes).ok_or(match self.kind {
                ValueType::Bool => "the value is neither 0 nor 1, as a bool must be",
                _ => "the string is not UTF-8",
            }),
        }
    }

    /// Refuses a scalar or string whose bytes do not form a value.
    pub(super) fn check(&self, file: &[u8]) -> Result<(), GgufError> {
        self.value(file).map(drop).map_err(|reason| GgufError::BadMetadata {
            key: self.key.to_string(),
            at: self.range.start,
            reason: reason.to_owned(),
        })
    }
}

/// What can go wrong inside a value, before the key is attached.
enum ValueFault {
    Cursor(GgufError),
    Reason(String),
}

impl From<GgufError> for ValueFault {
    fn from(error: GgufError) -> Self {
        ValueFault::Cursor(error)
    }
}

impl ValueFault {
    fn into_error(self, key: &str, at: usize) -> GgufError {
        match self {
            ValueFault::Cursor(error) => error,
            ValueFault::Reason(reason) => GgufError::BadMetadata { key: key.to_owned(), at, reason },
        }
    }
}

fn value_type(cursor: &mut Cursor<'_>, what: &str) -> Result<ValueType, ValueFault> {
    let id = cursor.u32(what)?;
    ValueType::from_id(id)
        .ok_or_else(|| ValueFault::Reason(format!("value type {id} does not exist (0 to 12 do)")))
}

/// Skips the elements of an array after checking that the file holds them: one multiplication for fixed sizes, one
/// comparison per string.
fn skip_elements(
    cursor: &mut Cursor<'_>,
    elem: ValueType,
    count: u64,
    depth: usize,
    what: &str,
) -> Result<(), ValueFault> {
    // The smallest element: its size, a string's length field, or a nested array's type and count.
    let least = elem.size().unwrap_or(if elem == ValueType::Array { 12 } else { 8 });
    let need = count.checked_mul(least);
    if need.is_none_or(|need| need > cursor.remaining() as u64) {
        let most = cursor.remaining() as u64 / least;
        return Err(ValueFault::Reason(format!(
            "an array of {count} {}s is announced, at most {most} fit in what is left of the header",
            elem.name()
        )));
    }
    match elem {
        ValueType::Str if count > MAX_ELEMENTS as u64 => Err(ValueFault::Reason(format!(
            "an array of {count} strings is longer than the accepted {MAX_ELEMENTS}"
        ))),
        ValueType::Str => Ok(cursor.skip_strings(count, what)?),
        ValueType::Array if depth >= MAX_ARRAY_DEPTH => {
            Err(ValueFault::Reason(format!("arrays are nested deeper than {MAX_ARRAY_DEPTH} levels")))
        }
        ValueType::Array => {
            for _ in 0..count {
                let inner = value_type(cursor, what)?;
                let len = cursor.u64(what)?;
                skip_elements(cursor, inner, len, depth + 1, what)?;
            }
            Ok(())
        }
        _ => Ok(cursor.take(need.unwrap_or(u64::MAX), what).map(drop)?),
    }
}

/// The key/value section of a file.
#[derive(Debug, Clone, Copy)]
pub struct Metadata<'a> {
    pub(super) file: &'a [u8],
    /// Entries in file order.
    pub(super) entries: &'a [Entry],
    /// Positions in `entries`, sorted by key.
    pub(super) by_key: &'a [u32],
}

impl<'a> Metadata<'a> {
    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All keys and values in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, Value<'a>)> + use<'a> {
        let file = self.file;
        self.entries.iter().filter_map(move |entry| Some((entry.key(), entry.value(file).ok()?)))
    }

    /// The value of `key`, whatever its type.
    pub fn get(&self, key: &str) -> Option<Value<'a>> {
        let found = self.by_key.binary_search_by(|&i| self.entries[i as usize].key().cmp(key)).ok()?;
        self.entries[self.by_key[found] as usize].value(self.file).ok()
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &'static str,
        take: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match take(value) {
            Some(taken) => Ok(Some(taken)),
            None => Err(GgufError::WrongType { key: key.to_owned(), found: value.type_name(), expected }),
        }
    }

    /// A non-negative integer of any integer type that fits 32 bits.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        let Some(value) = self.typed(key, "a non-negative integer", |v| v.is_integer().then_some(v))? else {
            return Ok(None);
        };
        value.as_u64().and_then(|v| u32::try_from(v).ok()).map(Some).ok_or_else(|| GgufError::BadValue {
            key: key.to_owned(),
            reason: format!("the value {value} is not within 0 to {}", u32::MAX),
        })
    }

    /// A floating-point number.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        self.typed(key, "a floating-point number", |v| v.as_f32())
    }

    /// A bool.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.typed(key, "a bool", |v| if let Value::Bool(v) = v { Some(v) } else { None })
    }

    /// A string.
    pub fn str(&self, key: &str) -> Result<Option<&'a str>, GgufError> {
        self.typed(key, "a string", |v| if let Value::Str(v) = v { Some(v) } else { None })
    }

    fn array(
        &self,
        key: &str,
        expected: &'static str,
        fits: fn(ValueType) -> bool,
    ) -> Result<Option<Array<'a>>, GgufError> {
        self.typed(key, expected, |v| match v {
            Value::Array(array) if fits(array.elem_type()) => Some(array),
            _ => None,
        })
    }

    fn elements<T>(
        &self,
        key: &str,
        array: Option<Array<'a>>,
        take: impl Fn(Value<'a>) -> Option<T>,
        wrong: &str,
    ) -> Result<Option<Vec<T>>, GgufError> {
        let Some(array) = array else { return Ok(None) };
        if array.len() > MAX_ELEMENTS {
            let reason = format!("{} elements are more than the accepted {MAX_ELEMENTS}", array.len());
            return Err(GgufError::BadValue { key: key.to_owned(), reason });
        }
        // The parser has found all elements inside the file.
        let mut out = Vec::with_capacity(array.len());
        for (i, value) in array.iter().enumerate() {
            out.push(value.and_then(&take).ok_or_else(|| GgufError::BadValue {
                key: key.to_owned(),
                reason: format!("element {i} {wrong}"),
            })?);
        }
        Ok(Some(out))
    }

    /// Number of elements of an array of strings, which are not looked at.
    pub fn str_array_len(&self, key: &str) -> Result<Option<usize>, GgufError> {
        Ok(self.array(key, "an array of strings", |t| t == ValueType::Str)?.map(|array| array.len()))
    }

    /// An array of strings, each valid UTF-8.
    pub fn str_array(&self, key: &str) -> Result<Option<Vec<&'a str>>, GgufError> {
        let array = self.array(key, "an array of strings", |t| t == ValueType::Str)?;
        self.elements(key, array, |v| if let Value::Str(v) = v { Some(v) } else { None }, "is not UTF-8")
    }

    /// An array of 32-bit floats.
    pub fn f32_array(&self, key: &str) -> Result<Option<Vec<f32>>, GgufError> {
        let array = self.array(key, "an array of f32", |t| t == ValueType::F32)?;
        self.elements(key, array, |v| v.as_f32(), "is not a number")
    }

    /// An array of non-negative integers of any integer type, each fitting 32 bits.
    pub fn u32_array(&self, key: &str) -> Result<Option<Vec<u32>>, GgufError> {
        use ValueType::{I8, I16, I32, I64, U8, U16, U32, U64};
        let array = self.array(key, "an array of integers", |t| {
            matches!(t, U8 | I8 | U16 | I16 | U32 | I32 | U64 | I64)
        })?;
        let wrong = "is negative or does not fit 32 bits";
        self.elements(key, array, |v| v.as_u64().and_then(|v| u32::try_from(v).ok()), wrong)
    }

    /// An array of bools.
    pub fn bool_array(&self, key: &str) -> Result<Option<Vec<bool>>, GgufError> {
        let array = self.array(key, "an array of bools", |t| t == ValueType::Bool)?;
        self.elements(
            key,
            array,
            |v| if let Value::Bool(v) = v { Some(v) } else { None },
            "is neither 0 nor 1",
        )
    }
}

/// `found`, or the refusal of a file that lacks `key`.
pub fn required<T>(key: &str, found: Option<T>) -> Result<T, GgufError> {
    found.ok_or_else(|| GgufError::MissingKey { key: key.to_owned() })
}
