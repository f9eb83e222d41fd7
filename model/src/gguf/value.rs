//! Metadata values: their types, and the values themselves, borrowed from the file.

use super::limits::MAX_QUOTED;

/// Type of a metadata value, numbered as in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the types")]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    Str = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

/// Type, name and size in bytes (0 where the value says its own length), in numeric order.
const VALUE_TYPES: [(ValueType, &str, u64); 13] = [
    (ValueType::U8, "u8", 1),
    (ValueType::I8, "i8", 1),
    (ValueType::U16, "u16", 2),
    (ValueType::I16, "i16", 2),
    (ValueType::U32, "u32", 4),
    (ValueType::I32, "i32", 4),
    (ValueType::F32, "f32", 4),
    (ValueType::Bool, "bool", 1),
    (ValueType::Str, "string", 0),
    (ValueType::Array, "array", 0),
    (ValueType::U64, "u64", 8),
    (ValueType::I64, "i64", 8),
    (ValueType::F64, "f64", 8),
];

impl ValueType {
    pub(super) fn from_id(id: u32) -> Option<ValueType> {
        VALUE_TYPES.get(usize::try_from(id).ok()?).map(|row| row.0)
    }

    /// Name in messages and listings.
    pub fn name(self) -> &'static str {
        VALUE_TYPES[self as usize].1
    }

    /// Bytes of one value; none for strings and arrays.
    pub(super) fn size(self) -> Option<u64> {
        Some(VALUE_TYPES[self as usize].2).filter(|&size| size > 0)
    }
}

/// One value, borrowed from the file.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs, reason = "the names are the types")]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(&'a str),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value<'_> {
    /// The type as a listing shows it: `u32`, `string`, `array of 3 i32`.
    pub fn type_name(&self) -> String {
        let plain = match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::Str(_) => ValueType::Str,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
            Value::Array(array) => {
                return format!("an array of {} {}", array.len(), array.elem_type().name());
            }
        };
        plain.name().to_owned()
    }

    /// The value as an unsigned integer, when it is an integer and not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::U64(v) => Some(v),
            Value::I8(v) => v.try_into().ok(),
            Value::I16(v) => v.try_into().ok(),
            Value::I32(v) => v.try_into().ok(),
            Value::I64(v) => v.try_into().ok(),
            Value::F32(_) | Value::F64(_) | Value::Bool(_) | Value::Str(_) | Value::Array(_) => None,
        }
    }

    /// The value as a number, when it is one.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            #[allow(clippy::cast_precision_loss, reason = "for comparisons with small numbers")]
            Value::I64(v) => Some(v as f64),
            #[allow(clippy::cast_precision_loss, reason = "for comparisons with small numbers")]
            Value::U64(v) => Some(v as f64),
            Value::I8(v) => Some(v.into()),
            Value::I16(v) => Some(v.into()),
            Value::I32(v) => Some(v.into()),
            Value::U8(_) | Value::U16(_) | Value::U32(_) => self.as_u64().map(|v| v as f64),
            Value::Bool(_) | Value::Str(_) | Value::Array(_) => None,
        }
    }

    pub(super) fn is_integer(&self) -> bool {
        use Value::{I8, I16, I32, I64, U8, U16, U32, U64};
        matches!(self, U8(_) | I8(_) | U16(_) | I16(_) | U32(_) | I32(_) | U64(_) | I64(_))
    }

    #[allow(
        clippy::cast_possible_truncation,
        reason = "f64 settings are rounded to the precision we compute in"
    )]
    pub(super) fn as_f32(&self) -> Option<f32> {
        match *self {
            Value::F32(v) => Some(v),
            Value::F64(v) => Some(v as f32),
            _ => None,
        }
    }
}

impl std::fmt::Display for Value<'_> {
    /// The value as a message shows it: long strings shortened, arrays by their type.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Value::U8(v) => v.fmt(f),
            Value::I8(v) => v.fmt(f),
            Value::U16(v) => v.fmt(f),
            Value::I16(v) => v.fmt(f),
            Value::U32(v) => v.fmt(f),
            Value::I32(v) => v.fmt(f),
            Value::F32(v) => v.fmt(f),
            Value::Bool(v) => v.fmt(f),
            Value::Str(v) => write!(f, "{:?}", shortened(v)),
            Value::U64(v) => v.fmt(f),
            Value::I64(v) => v.fmt(f),
            Value::F64(v) => v.fmt(f),
            Value::Array(_) => f.write_str(&self.type_name()),
        }
    }
}

/// `text`, or its beginning when it is too long for a message.
pub fn shortened(text: &str) -> std::borrow::Cow<'_, str> {
    match text.char_indices().nth(MAX_QUOTED) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}

/// Little-endian scalar of type `$t` at the start of `$bytes`, which is long enough.
macro_rules! scalar {
    ($t:ty, $bytes:expr) => {{
        let mut raw = [0u8; size_of::<$t>()];
        raw.copy_from_slice(&$bytes[..size_of::<$t>()]);
        <$t>::from_le_bytes(raw)
    }};
}

/// Decodes a scalar or string whose extent the parser has checked.
pub(super) fn decode<'a>(kind: ValueType, bytes: &'a [u8]) -> Option<Value<'a>> {
    Some(match kind {
        ValueType::U8 => Value::U8(bytes[0]),
        ValueType::I8 => Value::I8(scalar!(i8, bytes)),
        ValueType::U16 => Value::U16(scalar!(u16, bytes)),
        ValueType::I16 => Value::I16(scalar!(i16, bytes)),
        ValueType::U32 => Value::U32(scalar!(u32, bytes)),
        ValueType::I32 => Value::I32(scalar!(i32, bytes)),
        ValueType::F32 => Value::F32(scalar!(f32, bytes)),
        ValueType::U64 => Value::U64(scalar!(u64, bytes)),
        ValueType::I64 => Value::I64(scalar!(i64, bytes)),
        ValueType::F64 => Value::F64(scalar!(f64, bytes)),
        ValueType::Bool => Value::Bool(match bytes[0] {
            0 => false,
            1 => true,
            _ => return None,
        }),
        ValueType::Str => Value::Str(std::str::from_utf8(bytes).ok()?),
        ValueType::Array => return None,
    })
}

/// An array value; its elements are decoded when asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a> {
    pub(super) elem: ValueType,
    pub(super) len: usize,
    pub(super) bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the array has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Type of the elements.
    pub fn elem_type(&self) -> ValueType {
        self.elem
    }

    /// Elements in order; none stands for a string that is not UTF-8, a bool that is neither 0 nor 1, or a nested
    /// array.
    pub fn iter(&self) -> impl Iterator<Item = Option<Value<'a>>> + use<'a> {
        let Array { elem, len, bytes } = *self;
        let mut rest = bytes;
        (0..len).map(move |_| {
            let size = match elem.size() {
                Some(size) => usize::try_from(size).ok()?,
                None if elem == ValueType::Str => {
                    let size = scalar!(u64, rest.get(..8)?);
                    rest = &rest[8..];
                    usize::try_from(size).ok()?
                }
                None => return None,
            };
            let (head, tail) = rest.split_at_checked(size)?;
            rest = tail;
            decode(elem, head)
        })
    }
}
