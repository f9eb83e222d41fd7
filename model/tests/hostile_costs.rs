//! What refusing the most expensive headers costs. One test, alone in its process, because it looks at peak memory.

#![allow(clippy::unwrap_used, reason = "a test that fails should say where")]

use spillway_model::file::ModelFile;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Duration;

const HEADER_LIMIT: u64 = 128 << 20;

/// Peak resident memory of this process in MB.
fn peak_mb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

/// Time this thread has spent on a processor, which a loaded machine does not stretch.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(stat.split_whitespace().next().unwrap().parse().unwrap())
}

fn begin(path: &Path, tensors: u64, keys: u64) -> BufWriter<File> {
    let mut file = BufWriter::new(File::create(path).unwrap());
    file.write_all(b"GGUF\x03\0\0\0").unwrap();
    file.write_all(&tensors.to_le_bytes()).unwrap();
    file.write_all(&keys.to_le_bytes()).unwrap();
    file
}

fn string(file: &mut impl Write, text: &str) {
    file.write_all(&(text.len() as u64).to_le_bytes()).unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

/// As many keys as are accepted, each as long as accepted.
fn long_keys(path: &Path) {
    let mut file = begin(path, 0, 1 << 16);
    for i in 0..1 << 16 {
        string(&mut file, &format!("{i:01024}"));
        file.write_all(&[0, 0, 0, 0, 1]).unwrap();
    }
}

/// As many tensors as are accepted, all of an unknown type (known ones would need bytes of their own).
fn many_tensors(path: &Path) {
    let mut file = begin(path, 1 << 16, 0);
    for i in 0..1 << 16 {
        string(&mut file, &format!("{i:0256}"));
        file.write_all(&4u32.to_le_bytes()).unwrap();
        file.write_all(&1u64.to_le_bytes().repeat(4)).unwrap();
        file.write_all(&[99, 0, 0, 0]).unwrap();
        file.write_all(&0u64.to_le_bytes()).unwrap();
    }
    file.write_all(&[0; 64]).unwrap();
}

/// A header full of arrays of empty arrays.
fn nested_arrays(path: &Path) {
    let mut file = begin(path, 0, 1);
    string(&mut file, "k");
    file.write_all(&[9, 0, 0, 0, 9, 0, 0, 0]).unwrap();
    let count = (HEADER_LIMIT - 1024) / 12;
    file.write_all(&count.to_le_bytes()).unwrap();
    for _ in 0..count {
        file.write_all(&[0; 12]).unwrap();
    }
}

/// A list of layers that fills the header.
fn long_list(path: &Path) {
    let mut file = begin(path, 0, 3);
    string(&mut file, "general.architecture");
    file.write_all(&8u32.to_le_bytes()).unwrap();
    string(&mut file, "llama");
    for (key, value) in [("llama.block_count", 1u32), ("llama.embedding_length", 64)] {
        string(&mut file, key);
        file.write_all(&4u32.to_le_bytes()).unwrap();
        file.write_all(&value.to_le_bytes()).unwrap();
    }
    let position = 16;
    string(&mut file, "llama.attention.head_count");
    file.write_all(&[9, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    let count = HEADER_LIMIT - 1024;
    file.write_all(&count.to_le_bytes()).unwrap();
    let block = [4u8; 4096];
    for _ in 0..count / 4096 + 1 {
        file.write_all(&block).unwrap();
    }
    let mut file = file.into_inner().unwrap();
    std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(position)).unwrap();
    file.write_all(&4u64.to_le_bytes()).unwrap();
}

/// The most strings accepted, all empty, as a vocabulary.
fn empty_strings(path: &Path) {
    let mut file = begin(path, 0, 1);
    string(&mut file, "tokenizer.ggml.tokens");
    file.write_all(&[9, 0, 0, 0, 8, 0, 0, 0]).unwrap();
    file.write_all(&(2u64 << 20).to_le_bytes()).unwrap();
    file.write_all(&vec![0; 16 << 20]).unwrap();
}

#[test]
fn the_most_expensive_headers_are_refused_cheaply() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hostile.gguf");
    for (name, write) in [
        ("long keys", long_keys as fn(&Path)),
        ("many tensors", many_tensors),
        ("nested arrays", nested_arrays),
        ("a long list", long_list),
        ("empty strings", empty_strings),
    ] {
        write(&path);
        let start = cpu_time();
        let error = ModelFile::open(&path).expect_err(name);
        let took = cpu_time() - start;
        assert!(took < Duration::from_secs(2), "{name}: refused after {took:?}");
        assert!(error.to_string().len() < 8192, "{name}: a message of {} bytes", error.to_string().len());
        eprintln!("{name}: {took:?}, peak {} MB: {error}", peak_mb());
        assert!(peak_mb() < 300, "{name}: peak {} MB", peak_mb());
    }
}
