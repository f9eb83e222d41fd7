//! Weight formats against golden vectors that the reference package made (`data/generate.py`).

#![allow(clippy::panic, reason = "a test fails by panicking")]

use spillway_kernels::formats::Format;
use std::path::Path;

fn data(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Names, type numbers and block sizes are those of the reference, and every format it lists is found.
#[test]
fn the_table_agrees_with_the_reference() {
    let table = String::from_utf8(data("formats.csv")).unwrap();
    assert_eq!(table.lines().count(), Format::ALL.len());
    for (line, format) in table.lines().zip(Format::ALL) {
        let row = [format.ggml_id() as usize, format.block_len(), format.block_bytes()]
            .map(|number| number.to_string());
        assert_eq!(line, format!("{},{}", format.name(), row.join(",")));
        assert_eq!(Format::from_name(format.name()), Some(format));
        assert_eq!(Format::from_ggml(format.ggml_id()), Some(format));
        assert_eq!(Format::ALL[format as usize], format, "the rows stand in the order of the variants");
    }
    assert_eq!(Format::from_name("Q4_X"), None);
    assert_eq!(Format::from_ggml(9999), None);
}

/// Decoding gives the very bits of the reference.
#[test]
fn decoding_is_exact() {
    for format in Format::ALL {
        let file = data(&format!("{}.bin", format.name()));
        let elements = if format.block_len() == 1 { 64 } else { 2 * format.block_len() };
        let (bytes, exact) = file.split_at(format.row_bytes(elements).unwrap());
        let mut decoded = vec![0.0; elements];
        format.decode(bytes, &mut decoded).unwrap();
        let exact: Vec<f32> = exact.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
        assert_eq!(decoded.len(), exact.len());
        for (i, (ours, theirs)) in decoded.iter().zip(&exact).enumerate() {
            assert!(ours == theirs, "{} element {i}: {ours} instead of {theirs}", format.name());
        }
    }
}

/// Lengths that do not fit are refused with both numbers.
#[test]
fn wrong_lengths_are_refused() {
    let error = Format::Q4_K.row_bytes(100).unwrap_err();
    assert_eq!(error.code(), "weight_columns");
    assert!(error.to_string().contains("256") && error.to_string().contains("100"), "{error}");
    let error = Format::Q8_0.decode(&[0; 33], &mut [0.0; 32]).unwrap_err();
    assert_eq!(error.code(), "weight_length");
    assert!(error.to_string().contains("34") && error.to_string().contains("33"), "{error}");
}
