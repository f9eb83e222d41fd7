//! As much of MessagePack as code object metadata uses.

/// A decoded value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    /// nil, booleans, negative numbers, floats and binaries: nothing we read.
    Other,
    Number(u64),
    Text(String),
    Array(Vec<Value>),
    Map(Vec<(Value, Value)>),
}

impl Value {
    /// The value of a text key, in a map.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let Value::Map(pairs) = self else { return None };
        pairs.iter().find(|(name, _)| name.text() == Some(key)).map(|(_, value)| value)
    }

    pub fn number(&self) -> Option<u64> {
        if let Value::Number(number) = self { Some(*number) } else { None }
    }

    pub fn text(&self) -> Option<&str> {
        if let Value::Text(text) = self { Some(text) } else { None }
    }
}

/// Deepest nesting; metadata has four levels.
const MAX_DEPTH: usize = 16;

/// Reads one value.
pub(super) fn read(bytes: &[u8]) -> Result<Value, String> {
    Reader { bytes }.value(MAX_DEPTH).ok_or_else(|| "its metadata is damaged".to_owned())
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.bytes.split_at_checked(count)?;
        self.bytes = rest;
        Some(taken)
    }

    /// A big-endian number of 1, 2, 4 or 8 bytes.
    fn number(&mut self, width: usize) -> Option<u64> {
        Some(self.take(width)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn length(&mut self, width: usize) -> Option<usize> {
        usize::try_from(self.number(width)?).ok()
    }

    fn text(&mut self, len: usize) -> Option<Value> {
        Some(Value::Text(String::from_utf8_lossy(self.take(len)?).into_owned()))
    }

    fn other(&mut self, len: usize) -> Option<Value> {
        self.take(len).map(|_| Value::Other)
    }

    fn array(&mut self, len: usize, depth: usize) -> Option<Value> {
        (0..len).map(|_| self.value(depth)).collect::<Option<_>>().map(Value::Array)
    }

    fn map(&mut self, len: usize, depth: usize) -> Option<Value> {
        (0..len)
            .map(|_| Some((self.value(depth)?, self.value(depth)?)))
            .collect::<Option<_>>()
            .map(Value::Map)
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        let depth = depth.checked_sub(1)?;
        let kind = *self.take(1)?.first()?;
        let low = usize::from(kind);
        match kind {
            0x00..=0x7f => Some(Value::Number(kind.into())),
            0x80..=0x8f => self.map(low & 0xf, depth),
            0x90..=0x9f => self.array(low & 0xf, depth),
            0xa0..=0xbf => self.text(low & 0x1f),
            0xc0..=0xc3 | 0xe0..=0xff => Some(Value::Other),
            0xc4..=0xc6 => {
                let len = self.length(1 << (low - 0xc4))?;
                self.other(len)
            }
            // Extensions: a type byte and content.
            0xc7..=0xc9 => {
                let len = self.length(1 << (low - 0xc7))?;
                self.other(len.checked_add(1)?)
            }
            0xca | 0xcb => self.other(4 << (low - 0xca)),
            0xcc..=0xcf => self.number(1 << (low - 0xcc)).map(Value::Number),
            0xd0..=0xd3 => self.other(1 << (low - 0xd0)),
            0xd4..=0xd8 => self.other((1 << (low - 0xd4)) + 1),
            0xd9..=0xdb => {
                let len = self.length(1 << (low - 0xd9))?;
                self.text(len)
            }
            0xdc | 0xdd => {
                let len = self.length(2 << (low - 0xdc))?;
                self.array(len, depth)
            }
            0xde | 0xdf => {
                let len = self.length(2 << (low - 0xde))?;
                self.map(len, depth)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every kind that metadata uses, by the bytes of the MessagePack specification.
    #[test]
    fn reads_what_metadata_uses() {
        let bytes = [
            0x83, 0xa1, b'a', 0xcd, 0x01, 0x00, 0xd9, 0x01, b'b', 0x93, 0x05, 0xc3, 0xff, 0xa1, b'c', 0xdc,
            0, 1, 0xa0,
        ];
        let value = read(&bytes).unwrap();
        assert_eq!(value.get("a").and_then(Value::number), Some(256));
        assert_eq!(value.get("b"), Some(&Value::Array(vec![Value::Number(5), Value::Other, Value::Other])));
        assert_eq!(value.get("c"), Some(&Value::Array(vec![Value::Text(String::new())])));
    }

    /// Cut anywhere, nested too deep or promising too much, it is refused without allocating what it promises.
    #[test]
    fn damaged_metadata_is_refused() {
        assert!(read(&[]).is_err());
        assert!(read(&[0x82, 0x01, 0x02]).is_err());
        assert!(read(&[0xdd, 0xff, 0xff, 0xff, 0xff]).is_err());
        assert!(read(&[0x91; 64]).is_err());
    }
}
