//! Containers that lie. Each test is named after what is wrong with the file; each refusal says where and why.
//!
//! The attacks are those reported against other readers: sizes that wrap, counts nothing backs, types that do not exist.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test that fails should say where")]

use spillway_model::gguf::{GgmlType, Gguf, GgufError};
use spillway_model::testing::{GgufWriter, MetaValue, TinyModel};
use std::path::Path;

const F32: GgmlType = GgmlType::F32;

fn refusal(bytes: Vec<u8>) -> GgufError {
    Gguf::parse(bytes).expect_err("the file must be refused")
}

/// The file is refused with this code, and the message holds all of these.
fn assert_refused(file: &GgufWriter, code: &str, says: &[&str]) {
    assert_says(&refusal(file.to_bytes()), code, says);
}

fn assert_says(error: &GgufError, code: &str, says: &[&str]) {
    let message = error.to_string();
    assert_eq!(error.code(), code, "{message}");
    for part in says {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

/// A small valid file with one key of every kind and two tensors.
fn valid() -> GgufWriter {
    let mut file = GgufWriter::new();
    file.key("general.architecture", "none")
        .key("n", 7u32)
        .key("list", vec![1u32, 2, 3])
        .key("words", vec!["a".to_owned(), "bc".to_owned()])
        .tensor("a", &[4, 2], F32, vec![0; 32])
        .tensor("b", &[32], GgmlType::Q8_0, vec![0; 34]);
    file
}

/// A file whose header fields after the magic are these, followed by `rest`.
fn header(version: u32, tensors: u64, keys: u64, rest: &[u8]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(version.to_le_bytes());
    out.extend(tensors.to_le_bytes());
    out.extend(keys.to_le_bytes());
    out.extend(rest);
    out
}

fn with_tensor(dims: &[u64], ggml_type: GgmlType, bytes: usize) -> GgufWriter {
    let mut file = GgufWriter::new();
    file.tensor("w", dims, ggml_type, vec![0; bytes]);
    file
}

fn array(elem: u32, count: u64, rest: &[u8]) -> MetaValue {
    let mut raw = elem.to_le_bytes().to_vec();
    raw.extend(count.to_le_bytes());
    raw.extend(rest);
    MetaValue::Raw(9, raw)
}

fn with_value(value: MetaValue) -> GgufWriter {
    let mut file = GgufWriter::new();
    file.key("k", value);
    file
}

#[test]
fn truncated_anywhere() {
    let whole = TinyModel::new("qwen35").layers(1).to_bytes().unwrap();
    let data = Gguf::parse(whole.clone()).unwrap();
    let end = data.tensors().iter().map(|t| t.range.end).max().unwrap();
    for len in (0..end).step_by(64) {
        let error = refusal(whole[..len].to_vec());
        let codes = ["not_gguf", "gguf_truncated", "gguf_too_large", "gguf_bad_metadata", "gguf_bad_tensor"];
        assert!(codes.contains(&error.code()), "{len} of {end} bytes: {error}");
    }
    assert!(Gguf::parse(whole[..end].to_vec()).is_ok(), "padding after the last tensor is not needed");
}

#[test]
fn empty_and_foreign_files() {
    assert_says(&refusal(Vec::new()), "not_gguf", &["starts with []"]);
    assert_says(&refusal(b"PK\x03\x04 a zip archive".to_vec()), "not_gguf", &["[50, 4b, 03, 04]"]);
    assert_says(&refusal(b"GGUF".to_vec()), "gguf_truncated", &["the version at byte 4"]);
}

#[test]
fn versions_that_are_not_read() {
    assert_says(&refusal(header(1, 0, 0, &[])), "gguf_version", &["version 1", "2 and 3"]);
    assert_says(&refusal(header(4, 0, 0, &[])), "gguf_version", &["version 4"]);
    assert_says(&refusal(header(3u32.swap_bytes(), 0, 0, &[])), "gguf_big_endian", &["big-endian"]);
}

#[test]
fn both_versions_that_are_read() {
    for version in [2, 3] {
        assert_eq!(Gguf::parse(valid().version(version).to_bytes()).unwrap().version(), version);
    }
}

#[test]
fn counts_of_2_to_the_60() {
    assert_says(
        &refusal(header(3, 0, 1 << 60, &[0; 64])),
        "gguf_too_large",
        &["metadata key count", "byte 16"],
    );
    assert_says(&refusal(header(3, 1 << 60, 0, &[0; 64])), "gguf_too_large", &["tensor count", "byte 8"]);
    assert_says(&refusal(header(3, u64::MAX, u64::MAX, &[])), "gguf_too_large", &["18446744073709551615"]);
    // A count the file could hold, but no model has.
    assert_says(&refusal(header(3, 0, 70_000, &vec![0; 70_000 * 13])), "gguf_too_large", &["65536"]);
}

#[test]
fn element_count_that_wraps() {
    // 2^64 - 16 elements: rounding up to a block wraps to zero.
    let wraps = with_tensor(&[u64::MAX - 15], F32, 64);
    assert_refused(&wraps, "gguf_bad_tensor", &["\"w\"", "does not fit 63 bits"]);
    let product = with_tensor(&[1 << 32, 1 << 32], F32, 64);
    assert_refused(&product, "gguf_bad_tensor", &["does not fit 63 bits"]);
    let product = with_tensor(&[1 << 31, 1 << 31, 1 << 31, 1 << 31], F32, 64);
    assert_refused(&product, "gguf_bad_tensor", &["does not fit 63 bits"]);
    let bytes = with_tensor(&[1 << 62], GgmlType::F64, 64);
    assert_refused(&bytes, "gguf_bad_tensor", &["F64", "does not fit 64 bits"]);
}

#[test]
fn data_beyond_the_end_of_the_file() {
    assert_refused(&with_tensor(&[64, 64], F32, 64), "gguf_bad_tensor", &["16384 bytes", "beyond the end"]);
    for offset in [1 << 20, u64::MAX - 31, 1 << 63] {
        let mut file = with_tensor(&[4], F32, 16);
        assert_refused(file.at_offset(offset), "gguf_bad_tensor", &["beyond the end", &offset.to_string()]);
    }
}

#[test]
fn offset_that_is_not_aligned() {
    assert_refused(
        with_tensor(&[4], F32, 64).at_offset(16),
        "gguf_bad_tensor",
        &["offset 16", "alignment 32"],
    );
}

#[test]
fn tensors_that_overlap() {
    let mut file = with_tensor(&[64], F32, 256);
    file.tensor("x", &[8], F32, vec![0; 32]).at_offset(224);
    assert_refused(&file, "gguf_bad_tensor", &["\"x\"", "overlap", "\"w\""]);
}

#[test]
fn dimensions_that_cannot_be() {
    assert_refused(&with_tensor(&[], F32, 4), "gguf_bad_tensor", &["0 dimensions"]);
    assert_refused(&with_tensor(&[1; 5], F32, 4), "gguf_bad_tensor", &["5 dimensions"]);
    assert_refused(&with_tensor(&[4, 0], F32, 4), "gguf_bad_tensor", &["zero dimension"]);
}

#[test]
fn rows_that_are_not_whole_blocks() {
    assert_refused(
        &with_tensor(&[33], GgmlType::Q4_0, 64),
        "gguf_bad_tensor",
        &["33 elements", "Q4_0 blocks of 32"],
    );
    // 576 columns: a multiple of 32, not of 256.
    assert_refused(&with_tensor(&[576, 4], GgmlType::Q4_K, 4096), "gguf_bad_tensor", &["Q4_K blocks of 256"]);
}

#[test]
fn unknown_tensor_type_is_noted() {
    let file = Gguf::parse(with_tensor(&[4], GgmlType(200), 16).to_bytes()).unwrap();
    assert_eq!(file.bytes(&file.tensors()[0]), [0u8; 0]);
    assert!(file.notes()[0].contains("\"w\" (type 200)"), "{:?}", file.notes());
}

#[test]
fn names_that_occur_twice() {
    assert_refused(valid().key("n", 8u32), "gguf_bad_metadata", &["\"n\"", "twice"]);
    assert_refused(valid().tensor("a", &[4], F32, vec![0; 16]), "gguf_bad_tensor", &["\"a\"", "twice"]);
}

#[test]
fn names_that_are_not_names() {
    assert_refused(valid().key("", 8u32), "gguf_bad_metadata", &["empty"]);
    assert_refused(valid().tensor("", &[4], F32, vec![0; 16]), "gguf_bad_tensor", &["empty"]);
    assert_refused(valid().key(&"k".repeat(1025), 8u32), "gguf_too_large", &["1025", "1024"]);
    assert_refused(valid().tensor(&"t".repeat(257), &[4], F32, vec![0; 16]), "gguf_too_large", &["257"]);
    let mut bytes = valid().to_bytes();
    let at = bytes.windows(7).position(|w| w == b"general").unwrap();
    bytes[at] = 0xff;
    assert_says(&refusal(bytes), "gguf_bad_metadata", &["number 0", "not UTF-8"]);
    let mut bytes = with_tensor(&[4], F32, 16).to_bytes();
    let at = bytes.iter().position(|&b| b == b'w').unwrap();
    bytes[at] = 0xff;
    assert_says(&refusal(bytes), "gguf_bad_tensor", &["number 0", "not UTF-8"]);
}

#[test]
fn value_types_that_do_not_exist() {
    assert_refused(&with_value(MetaValue::Raw(13, vec![0; 8])), "gguf_bad_metadata", &["value type 13"]);
    assert_refused(&with_value(array(99, 1, &[0; 8])), "gguf_bad_metadata", &["\"k\"", "value type 99"]);
}

#[test]
fn arrays_longer_than_the_file() {
    assert_refused(
        &with_value(array(4, 1 << 60, &[0; 8])),
        "gguf_bad_metadata",
        &["1152921504606846976 u32s"],
    );
    // 2^62 elements of 4 bytes: the size wraps to zero.
    assert_refused(&with_value(array(6, 1 << 62, &[])), "gguf_bad_metadata", &["f32"]);
    assert_refused(&with_value(array(8, 1 << 61, &[0; 64])), "gguf_bad_metadata", &["string"]);
}

#[test]
fn strings_longer_than_the_file() {
    let long = MetaValue::Raw(8, u64::MAX.to_le_bytes().to_vec());
    assert_refused(
        &with_value(long),
        "gguf_truncated",
        &["the value of metadata key \"k\"", "18446744073709551615"],
    );
    let mut inside = 4u64.to_le_bytes().to_vec();
    inside.extend(*b"fine");
    inside.extend((1u64 << 40).to_le_bytes());
    assert_refused(&with_value(array(8, 2, &inside)), "gguf_truncated", &["\"k\""]);
}

#[test]
fn arrays_in_arrays() {
    let pair: Vec<u8> = [4u32.to_le_bytes().as_slice(), &1u64.to_le_bytes(), &7u32.to_le_bytes()].concat();
    let nested = with_value(array(9, 2, &pair.repeat(2)));
    assert_eq!(Gguf::parse(nested.to_bytes()).unwrap().metadata().len(), 1, "skipped over, not refused");
    let level: Vec<u8> = [9u32.to_le_bytes().as_slice(), &1u64.to_le_bytes()].concat();
    assert_refused(&with_value(array(9, 1, &level.repeat(1000))), "gguf_bad_metadata", &["nested deeper"]);
    assert_refused(&with_value(array(9, 1 << 59, &pair)), "gguf_bad_metadata", &["arrays"]);
}

#[test]
fn strings_and_bools_that_are_neither() {
    let text = MetaValue::Raw(8, [2u64.to_le_bytes().as_slice(), &[0xc3, 0x28]].concat());
    assert_refused(&with_value(text), "gguf_bad_metadata", &["not UTF-8"]);
    assert_refused(&with_value(MetaValue::Raw(7, vec![2])), "gguf_bad_metadata", &["neither 0 nor 1"]);
}

#[test]
fn alignments_that_are_not_powers_of_two() {
    for alignment in [0u32, 3, 4, 33, 1 << 21, u32::MAX] {
        let mut file = valid();
        file.key("general.alignment", alignment);
        assert_refused(&file, "metadata_bad_value", &["general.alignment", "power of two"]);
    }
    assert_refused(valid().key("general.alignment", "32"), "metadata_wrong_type", &["string", "integer"]);
    let file = Gguf::parse(valid().alignment(256).to_bytes()).unwrap();
    assert_eq!((file.alignment(), file.data_offset() % 256), (256, 0));
}

#[test]
fn one_part_of_a_split_model() {
    let mut file = valid();
    file.key("split.no", MetaValue::U16(1)).key("split.count", MetaValue::U16(3));
    assert_refused(&file, "gguf_split", &["part 2 of 3", "merge"]);
    assert!(
        Gguf::parse(valid().key("split.count", MetaValue::U16(1)).to_bytes()).is_ok(),
        "a split of one is whole"
    );
}

#[test]
fn a_getter_names_the_type_it_found() {
    let file = Gguf::parse(valid().key("negative", -1i32).key("big", 1u64 << 40).to_bytes()).unwrap();
    let meta = file.metadata();
    assert_eq!(meta.u32("n").unwrap(), Some(7));
    assert_eq!(meta.u32("absent").unwrap(), None);
    assert_eq!(meta.u32_array("list").unwrap(), Some(vec![1, 2, 3]));
    assert_eq!(meta.str_array("words").unwrap(), Some(vec!["a", "bc"]));
    assert_says(&meta.u32("words").unwrap_err(), "metadata_wrong_type", &["an array of 2 string", "integer"]);
    assert_says(&meta.f32("n").unwrap_err(), "metadata_wrong_type", &["u32", "floating-point"]);
    assert_says(&meta.f32_array("list").unwrap_err(), "metadata_wrong_type", &["an array of 3 u32"]);
    assert_says(&meta.bool("n").unwrap_err(), "metadata_wrong_type", &["bool"]);
    assert_says(&meta.u32("negative").unwrap_err(), "metadata_bad_value", &["-1"]);
    assert_says(&meta.u32("big").unwrap_err(), "metadata_bad_value", &["1099511627776"]);
}

#[test]
fn paths_that_are_not_files() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent.gguf");
    assert_says(&Gguf::open(&absent).unwrap_err(), "file_unreadable", &["absent.gguf"]);
    assert_says(&Gguf::open(dir.path()).unwrap_err(), "not_a_file", &["a directory"]);
    assert_says(&Gguf::open(Path::new("/dev/zero")).unwrap_err(), "not_a_file", &["/dev/zero", "device"]);
    let empty = dir.path().join("empty.gguf");
    std::fs::write(&empty, []).unwrap();
    assert_says(&Gguf::open(&empty).unwrap_err(), "file_empty", &["empty.gguf", "is empty"]);
}

#[test]
fn a_header_without_end() {
    // A sparse file of a terabyte whose first value is a string of a terabyte: refused by the header limit, not read.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("endless.gguf");
    let mut value = 8u32.to_le_bytes().to_vec();
    value.extend((1u64 << 39).to_le_bytes());
    let key = [1u64.to_le_bytes().as_slice(), b"k"].concat();
    std::fs::write(&path, header(3, 0, 1, &[key, value].concat())).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    assert_says(&Gguf::open(&path).unwrap_err(), "gguf_too_large", &["\"k\"", "134217728", "header bytes"]);
}
