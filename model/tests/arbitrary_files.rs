//! Whatever the bytes, reading them ends in a value or a refusal: the fuzzer's property, in every test run.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test that fails should say where"
)]

use proptest::collection::vec;
use proptest::prelude::*;
use spillway_model::arch::ARCHITECTURES;
use spillway_model::file::ModelFile;
use spillway_model::gguf::{GgmlType, Gguf, Value};
use spillway_model::testing::{GgufWriter, MetaValue, TinyModel};
use std::sync::LazyLock;

static SEEDLINGS: LazyLock<Vec<Vec<u8>>> =
    LazyLock::new(|| ARCHITECTURES.iter().map(|a| TinyModel::seedling(a.name).to_bytes().unwrap()).collect());

/// Numbers that break arithmetic.
const HOSTILE: &[u64] =
    &[0, 1, 7, 255, 1 << 31, u32::MAX as u64, 1 << 32, 1 << 60, 1 << 62, 1 << 63, u64::MAX - 15, u64::MAX];

/// One change of a file.
#[derive(Debug, Clone)]
enum Mutation {
    Byte(usize, u8),
    Word(usize, u32),
    Number(usize, u64),
    Cut(usize),
    Repeat(usize, usize),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = 0..8192usize;
    prop_oneof![
        (at.clone(), any::<u8>()).prop_map(|(at, v)| Mutation::Byte(at, v)),
        (at.clone(), 0..45u32).prop_map(|(at, v)| Mutation::Word(at, v)),
        (at.clone(), proptest::sample::select(HOSTILE)).prop_map(|(at, v)| Mutation::Number(at, v)),
        at.clone().prop_map(Mutation::Cut),
        (at, 1..64usize).prop_map(|(at, len)| Mutation::Repeat(at, len)),
    ]
}

fn mutate(file: &mut Vec<u8>, mutation: &Mutation) {
    let mut put = |at: usize, bytes: &[u8]| {
        let at = at % file.len().max(1);
        let len = bytes.len().min(file.len().saturating_sub(at));
        file[at..at + len].copy_from_slice(&bytes[..len]);
    };
    match *mutation {
        Mutation::Byte(at, v) => put(at, &[v]),
        Mutation::Word(at, v) => put(at, &v.to_le_bytes()),
        Mutation::Number(at, v) => put(at, &v.to_le_bytes()),
        Mutation::Cut(at) => file.truncate(at),
        Mutation::Repeat(at, len) => {
            let at = at % file.len().max(1);
            let piece = file[at..(at + len).min(file.len())].to_vec();
            file.splice(at..at, piece);
        }
    }
}

/// Reads everything a file offers; the value of the property is that this returns.
fn read(bytes: Vec<u8>) {
    let len = bytes.len();
    let Ok(gguf) = Gguf::parse(bytes) else { return };
    for (_, value) in gguf.metadata().iter() {
        if let Value::Array(array) = value {
            assert!(array.len() <= len, "an array of {} elements in a file of {len} bytes", array.len());
            assert_eq!(array.iter().count(), array.len());
        }
    }
    for tensor in gguf.tensors() {
        assert_eq!(gguf.bytes(tensor).len() as u64, tensor.size());
    }
    match ModelFile::from_gguf(gguf) {
        Ok(file) => {
            for weight in file.program().weights() {
                let weight = file.weight(weight).unwrap();
                let row = weight.info.ggml_type.row_bytes(weight.cols as u64).unwrap();
                assert_eq!(weight.bytes.len() as u64, row * weight.rows as u64);
            }
        }
        Err(error) => {
            assert!(error.to_string().len() < 8192, "a message of {} bytes", error.to_string().len())
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_models_are_read_or_refused(seed in 0..4usize, mutations in vec(mutation(), 1..6)) {
        let mut file = SEEDLINGS[seed].clone();
        mutations.iter().for_each(|m| mutate(&mut file, m));
        read(file);
    }

    #[test]
    fn random_bytes_after_a_sound_start_are_read_or_refused(rest in vec(any::<u8>(), 0..512)) {
        let mut file = b"GGUF\x03\0\0\0".to_vec();
        file.extend(rest);
        read(file);
    }
}

fn value() -> impl Strategy<Value = MetaValue> {
    prop_oneof![
        any::<u8>().prop_map(MetaValue::U8),
        any::<i8>().prop_map(MetaValue::I8),
        any::<u16>().prop_map(MetaValue::U16),
        any::<i16>().prop_map(MetaValue::I16),
        any::<u32>().prop_map(MetaValue::U32),
        any::<i32>().prop_map(MetaValue::I32),
        any::<f32>().prop_map(MetaValue::F32),
        any::<bool>().prop_map(MetaValue::Bool),
        ".{0,40}".prop_map(MetaValue::Str),
        any::<u64>().prop_map(MetaValue::U64),
        any::<i64>().prop_map(MetaValue::I64),
        any::<f64>().prop_map(MetaValue::F64),
        vec(any::<u32>(), 0..20).prop_map(MetaValue::U32s),
        vec(any::<f32>(), 0..20).prop_map(MetaValue::F32s),
        vec(any::<bool>(), 0..20).prop_map(MetaValue::Bools),
        vec(".{0,12}", 0..20).prop_map(MetaValue::Strs),
    ]
}

/// Whether what was read is what was written.
fn same(written: &MetaValue, read: Value<'_>) -> bool {
    let elements = |array: spillway_model::gguf::Array<'_>, len: usize| {
        array.len() == len && array.iter().all(|element| element.is_some())
    };
    match (written, read) {
        (MetaValue::U8(a), Value::U8(b)) => *a == b,
        (MetaValue::I8(a), Value::I8(b)) => *a == b,
        (MetaValue::U16(a), Value::U16(b)) => *a == b,
        (MetaValue::I16(a), Value::I16(b)) => *a == b,
        (MetaValue::U32(a), Value::U32(b)) => *a == b,
        (MetaValue::I32(a), Value::I32(b)) => *a == b,
        (MetaValue::F32(a), Value::F32(b)) => a.to_bits() == b.to_bits(),
        (MetaValue::Bool(a), Value::Bool(b)) => *a == b,
        (MetaValue::Str(a), Value::Str(b)) => a == b,
        (MetaValue::U64(a), Value::U64(b)) => *a == b,
        (MetaValue::I64(a), Value::I64(b)) => *a == b,
        (MetaValue::F64(a), Value::F64(b)) => a.to_bits() == b.to_bits(),
        (MetaValue::U32s(a), Value::Array(b)) => {
            elements(b, a.len()) && a.iter().zip(b.iter()).all(|(a, b)| b == Some(Value::U32(*a)))
        }
        (MetaValue::F32s(a), Value::Array(b)) => {
            let bits =
                |v: Option<Value<'_>>| if let Some(Value::F32(v)) = v { Some(v.to_bits()) } else { None };
            elements(b, a.len()) && a.iter().zip(b.iter()).all(|(a, b)| bits(b) == Some(a.to_bits()))
        }
        (MetaValue::Bools(a), Value::Array(b)) => {
            elements(b, a.len()) && a.iter().zip(b.iter()).all(|(a, b)| b == Some(Value::Bool(*a)))
        }
        (MetaValue::Strs(a), Value::Array(b)) => {
            elements(b, a.len()) && a.iter().zip(b.iter()).all(|(a, b)| b == Some(Value::Str(a)))
        }
        _ => false,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_read(
        values in vec(value(), 0..12),
        tensors in vec((1..5u64, 1..4u64, proptest::sample::select(GgmlType::KNOWN)), 0..8),
        alignment in proptest::sample::select(&[8u32, 32, 64, 4096][..]),
        version in 2..4u32,
    ) {
        let mut file = GgufWriter::new();
        file.version(version).alignment(alignment);
        for (i, value) in values.iter().enumerate() {
            file.key(&format!("key.{i}"), value.clone());
        }
        for (i, (blocks, rows, kind)) in tensors.iter().enumerate() {
            let info = kind.info().unwrap();
            let bytes = (0..*blocks * *rows * info.block_bytes as u64).map(|b| (b as u8) ^ (i as u8)).collect();
            file.tensor(&format!("tensor.{i}"), &[blocks * info.block_elems as u64, *rows], *kind, bytes);
        }
        let gguf = Gguf::parse(file.to_bytes()).unwrap();
        prop_assert_eq!(gguf.alignment(), alignment);
        for (i, value) in values.iter().enumerate() {
            let read = gguf.metadata().get(&format!("key.{i}")).unwrap();
            prop_assert!(same(value, read), "{:?} was read as {:?}", value, read);
        }
        for written in file.tensors() {
            let read = gguf.tensor(&written.name).unwrap();
            prop_assert_eq!((&read.dims, read.ggml_type), (&written.dims, written.ggml_type));
            prop_assert_eq!(gguf.bytes(read), &written.bytes);
        }
    }
}
