//! Writes GGUF files for tests, valid ones and, on request, subtly invalid ones.

use crate::gguf::GgmlType;

/// A metadata value to write.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the names are the types")]
pub enum MetaValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(String),
    U64(u64),
    I64(i64),
    F64(f64),
    U32s(Vec<u32>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Bools(Vec<bool>),
    Strs(Vec<String>),
    /// A type number followed by these bytes, whatever they mean.
    Raw(u32, Vec<u8>),
}

macro_rules! from {
    ($($t:ty => $variant:ident),* $(,)?) => {
        $(impl From<$t> for MetaValue {
            fn from(value: $t) -> Self {
                MetaValue::$variant(value)
            }
        })*
    };
}

from!(u32 => U32, i32 => I32, f32 => F32, bool => Bool, String => Str, u64 => U64, Vec<u32> => U32s, Vec<i32> => I32s,
    Vec<f32> => F32s, Vec<bool> => Bools, Vec<String> => Strs);

impl From<&str> for MetaValue {
    fn from(value: &str) -> Self {
        MetaValue::Str(value.to_owned())
    }
}

/// A tensor to write.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorData {
    /// Name.
    pub name: String,
    /// Dimensions, the contiguous one first.
    pub dims: Vec<u64>,
    /// Format.
    pub ggml_type: GgmlType,
    /// The data; its length is not checked.
    pub bytes: Vec<u8>,
}

/// A GGUF file under construction. Everything is written as given: sense is the caller's business.
#[derive(Debug, Clone)]
pub struct GgufWriter {
    version: u32,
    alignment: usize,
    metadata: Vec<(String, MetaValue)>,
    tensors: Vec<(TensorData, Option<u64>)>,
}

impl Default for GgufWriter {
    fn default() -> Self {
        GgufWriter::new()
    }
}

impl GgufWriter {
    /// An empty version 3 file.
    pub fn new() -> Self {
        GgufWriter { version: 3, alignment: 32, metadata: Vec::new(), tensors: Vec::new() }
    }

    /// Changes the version field.
    pub fn version(&mut self, version: u32) -> &mut Self {
        self.version = version;
        self
    }

    /// Appends a key.
    pub fn key(&mut self, key: &str, value: impl Into<MetaValue>) -> &mut Self {
        self.metadata.push((key.to_owned(), value.into()));
        self
    }

    /// Changes the value of a key, or appends it.
    pub fn set(&mut self, key: &str, value: impl Into<MetaValue>) -> &mut Self {
        self.remove(key);
        self.key(key, value)
    }

    /// Removes a key.
    pub fn remove(&mut self, key: &str) -> &mut Self {
        self.metadata.retain(|(k, _)| k != key);
        self
    }

    /// Sets the alignment of tensor data and the key that states it.
    pub fn alignment(&mut self, alignment: u32) -> &mut Self {
        self.alignment = alignment as usize;
        self.set("general.alignment", alignment)
    }

    /// Appends a tensor.
    pub fn tensor(&mut self, name: &str, dims: &[u64], ggml_type: GgmlType, bytes: Vec<u8>) -> &mut Self {
        self.tensors
            .push((TensorData { name: name.to_owned(), dims: dims.to_vec(), ggml_type, bytes }, None));
        self
    }

    /// Removes a tensor.
    pub fn remove_tensor(&mut self, name: &str) -> &mut Self {
        self.tensors.retain(|(t, _)| t.name != name);
        self
    }

    /// Tensors so far, to be changed in place.
    pub fn tensors(&mut self) -> impl Iterator<Item = &mut TensorData> {
        self.tensors.iter_mut().map(|(t, _)| t)
    }

    /// States another offset for the last tensor than the one its data has.
    pub fn at_offset(&mut self, offset: u64) -> &mut Self {
        if let Some((_, stated)) = self.tensors.last_mut() {
            *stated = Some(offset);
        }
        self
    }

    /// The file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut out, key);
            value.write(&mut out);
        }
        let mut offset = 0u64;
        for (tensor, stated) in &self.tensors {
            string(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(tensor.ggml_type.0.to_le_bytes());
            out.extend(stated.unwrap_or(offset).to_le_bytes());
            offset += tensor.bytes.len().next_multiple_of(self.alignment) as u64;
        }
        for (tensor, _) in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(&tensor.bytes);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl MetaValue {
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            MetaValue::U8(v) => scalar(out, 0, &[*v]),
            MetaValue::I8(v) => scalar(out, 1, &v.to_le_bytes()),
            MetaValue::U16(v) => scalar(out, 2, &v.to_le_bytes()),
            MetaValue::I16(v) => scalar(out, 3, &v.to_le_bytes()),
            MetaValue::U32(v) => scalar(out, 4, &v.to_le_bytes()),
            MetaValue::I32(v) => scalar(out, 5, &v.to_le_bytes()),
            MetaValue::F32(v) => scalar(out, 6, &v.to_le_bytes()),
            MetaValue::Bool(v) => scalar(out, 7, &[u8::from(*v)]),
            MetaValue::Str(v) => {
                scalar(out, 8, &[]);
                string(out, v);
            }
            MetaValue::U64(v) => scalar(out, 10, &v.to_le_bytes()),
            MetaValue::I64(v) => scalar(out, 11, &v.to_le_bytes()),
            MetaValue::F64(v) => scalar(out, 12, &v.to_le_bytes()),
            MetaValue::U32s(v) => array(out, 4, v, |out, v| out.extend(v.to_le_bytes())),
            MetaValue::I32s(v) => array(out, 5, v, |out, v| out.extend(v.to_le_bytes())),
            MetaValue::F32s(v) => array(out, 6, v, |out, v| out.extend(v.to_le_bytes())),
            MetaValue::Bools(v) => array(out, 7, v, |out, v| out.push(u8::from(*v))),
            MetaValue::Strs(v) => array(out, 8, v, |out, v| string(out, v)),
            MetaValue::Raw(kind, bytes) => scalar(out, *kind, bytes),
        }
    }
}

fn scalar(out: &mut Vec<u8>, kind: u32, bytes: &[u8]) {
    out.extend(kind.to_le_bytes());
    out.extend(bytes);
}

fn array<T>(out: &mut Vec<u8>, kind: u32, values: &[T], write: impl Fn(&mut Vec<u8>, &T)) {
    scalar(out, 9, &kind.to_le_bytes());
    out.extend((values.len() as u64).to_le_bytes());
    values.iter().for_each(|v| write(out, v));
}
