//! GGUF, the container: opened as a mapping, checked in full before anything is used.
//!
//! Versions 2 and 3, little endian. Every count is compared with what the rest of the file can hold, all arithmetic is
//! checked, and nothing is allocated from a number that the file's length does not back. Fixed-size arrays cost one
//! comparison, string arrays one per string, so a vocabulary of 250,000 tokens opens in milliseconds.
//!
//! A file must not be truncated while it is mapped: a page that has vanished raises SIGBUS, which is the operating
//! system's way and cannot be turned into an error here. Who must not end so reads the part before the tensor data instead, and
//! single tensors as it needs them ([`Gguf::open_header`]).

mod cursor;
mod error;
mod ggml_type;
pub mod limits;
mod metadata;
mod tensor;
mod value;

pub use error::GgufError;
pub use ggml_type::{GgmlType, TypeInfo};
pub use metadata::{Metadata, required};
pub use tensor::TensorInfo;
pub use value::{Array, Value, ValueType, shortened};

use cursor::Cursor;
use limits::{MAX_ALIGNMENT, MAX_HEADER_BYTES, MAX_KEYS, MAX_TENSORS};
use memmap2::{Mmap, UncheckedAdvice};
use metadata::Entry;
use std::borrow::Cow;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use tensor::RawTensor;

/// Bytes of a header to read first: most headers with a tokenizer are smaller.
const FIRST_READ: usize = 16 << 20;
/// Alignment of tensor data when the file does not state one.
const DEFAULT_ALIGNMENT: u32 = 32;

/// What is going to happen to a range of the file, for the kernel's read-ahead and page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Read once from front to back.
    Sequential,
    /// Read soon: start reading now.
    WillNeed,
    /// Not read again soon: the process gives up its pages (they come back from the file when touched).
    DontNeed,
}

/// Where the bytes of a file live.
#[derive(Debug)]
enum Backing {
    Map(Mmap),
    Owned(Vec<u8>),
    /// A copy of the beginning, and the file for the rest.
    Header(Vec<u8>, File),
}

/// What tells a file from another one that has taken its place, or from itself after a change: device, inode, and when the
/// content was last changed, in seconds and nanoseconds.
pub type FileStamp = [i64; 4];

/// An opened, fully checked GGUF file.
#[derive(Debug)]
pub struct Gguf {
    backing: Backing,
    file_len: usize,
    stamp: Option<FileStamp>,
    version: u32,
    entries: Vec<Entry>,
    by_key: Vec<u32>,
    tensors: Vec<TensorInfo>,
    by_name: Vec<u32>,
    data_offset: usize,
    alignment: u32,
    notes: Vec<String>,
}

impl Gguf {
    /// Maps and checks the file at `path`.
    pub fn open(path: &Path) -> Result<Gguf, GgufError> {
        let in_file = |error| GgufError::InFile { path: path.to_owned(), error: Box::new(error) };
        let opened = open(path).and_then(|(file, len, stamp)| {
            let gguf = Gguf::check(Backing::Map(map(&file, len)?), len)?;
            Ok(Gguf { stamp: Some(stamp), ..gguf })
        });
        opened.map_err(in_file)
    }

    /// Reads the part before the tensor data of the file at `path`, and checks as much as [`Gguf::open`] does. Nothing is mapped, so
    /// that nobody who changes the file ends this process; [`Gguf::bytes`] has no tensor, [`Gguf::read`] reads one.
    pub fn open_header(path: &Path) -> Result<Gguf, GgufError> {
        let in_file = |error| GgufError::InFile { path: path.to_owned(), error: Box::new(error) };
        read_header(path).map_err(in_file)
    }

    /// Which file this is; nothing for one held in memory.
    pub fn stamp(&self) -> Option<FileStamp> {
        self.stamp
    }

    /// Checks a file held in memory.
    pub fn parse(bytes: Vec<u8>) -> Result<Gguf, GgufError> {
        let len = bytes.len();
        Gguf::check(Backing::Owned(bytes), len)
    }

    /// Checks a file of `file_len` bytes, of which `backing` has all, or the first.
    fn check(backing: Backing, file_len: usize) -> Result<Gguf, GgufError> {
        let file = backing.bytes();
        // Reading stops at the header limit; a header that goes on is reported as such, not as a truncated file.
        let limited = file_len > MAX_HEADER_BYTES;
        let mut cursor = Cursor::new(&file[..file.len().min(MAX_HEADER_BYTES)]);
        let header = Header::parse(&mut cursor, file).map_err(|error| match error {
            GgufError::Truncated { what, at, need, .. } if limited => GgufError::TooLarge {
                what: format!("a header that reaches {what}"),
                at,
                found: (at as u64).saturating_add(need),
                limit: MAX_HEADER_BYTES as u64,
                why: "header bytes accepted",
            },
            other => other,
        })?;
        let Header { version, entries, by_key, alignment, raw } = header;
        let data_offset = cursor.pos().next_multiple_of(alignment as usize);
        let tensors = raw
            .into_iter()
            .enumerate()
            .map(|(i, tensor)| tensor.locate(i, data_offset, alignment, file_len))
            .collect::<Result<Vec<_>, _>>()?;
        tensor::check_overlaps(&tensors)?;
        let by_name = sorted_index(&tensors, |t| &t.name).map_err(|(i, name)| GgufError::BadTensor {
            name,
            index: i,
            reason: "the name occurs twice".to_owned(),
        })?;
        let notes = unknown_types(&tensors).into_iter().collect();
        Ok(Gguf {
            backing,
            file_len,
            stamp: None,
            version,
            entries,
            by_key,
            tensors,
            by_name,
            data_offset,
            alignment,
            notes,
        })
    }

    /// Gives back what was read beyond the header.
    fn without_data(mut self) -> Gguf {
        if let Backing::Header(bytes, _) = &mut self.backing {
            bytes.truncate(self.data_offset);
            bytes.shrink_to_fit();
        }
        self
    }

    /// Container version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The key/value section.
    pub fn metadata(&self) -> Metadata<'_> {
        Metadata { file: self.backing.bytes(), entries: &self.entries, by_key: &self.by_key }
    }

    /// All tensors in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let found =
            self.by_name.binary_search_by(|&i| self.tensors[i as usize].name.as_ref().cmp(name)).ok()?;
        Some(&self.tensors[self.by_name[found] as usize])
    }

    /// The data of a tensor of this file, in its own format; empty when the type is unknown, or only the header was read.
    pub fn bytes(&self, tensor: &TensorInfo) -> &[u8] {
        match &self.backing {
            Backing::Header(..) => &[],
            whole => whole.bytes().get(tensor.range.clone()).unwrap_or(&[]),
        }
    }

    /// The same, read from the file when only the header is in memory.
    pub fn read(&self, tensor: &TensorInfo) -> Result<Cow<'_, [u8]>, GgufError> {
        let Backing::Header(_, file) = &self.backing else { return Ok(Cow::Borrowed(self.bytes(tensor))) };
        let mut bytes = vec![0; tensor.range.len()];
        file.read_exact_at(&mut bytes, tensor.range.start as u64).map_err(GgufError::Io)?;
        Ok(Cow::Owned(bytes))
    }

    /// Length of the file in bytes.
    pub fn file_len(&self) -> usize {
        self.file_len
    }

    /// Where tensor data starts, in bytes from the start of the file.
    pub fn data_offset(&self) -> usize {
        self.data_offset
    }

    /// Alignment of tensor data in bytes.
    pub fn alignment(&self) -> u32 {
        self.alignment
    }

    /// Oddities that do not stop the file from being used.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Tells the kernel how a tensor's bytes are going to be used. Advice only: failures are ignored.
    pub fn advise(&self, tensor: &TensorInfo, advice: Advice) {
        let Backing::Map(map) = &self.backing else { return };
        let (start, len) = (tensor.range.start, tensor.range.len());
        if len == 0 {
            return;
        }
        let _ = match advice {
            Advice::Sequential => map.advise_range(memmap2::Advice::Sequential, start, len),
            Advice::WillNeed => map.advise_range(memmap2::Advice::WillNeed, start, len),
            // SAFETY: the mapping is a shared read-only view of a file; dropped pages are read again from the file, so
            // the bytes behind live references stay the same.
            Advice::DontNeed => unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len) },
        };
    }
}

impl Backing {
    fn bytes(&self) -> &[u8] {
        match self {
            Backing::Map(map) => map,
            Backing::Owned(bytes) | Backing::Header(bytes, _) => bytes,
        }
    }
}

/// The part of a file before its tensor data.
struct Header {
    version: u32,
    entries: Vec<Entry>,
    by_key: Vec<u32>,
    alignment: u32,
    raw: Vec<RawTensor>,
}

impl Header {
    fn parse(cursor: &mut Cursor<'_>, file: &[u8]) -> Result<Header, GgufError> {
        if !file.starts_with(b"GGUF") {
            return Err(GgufError::NotGguf { found: file[..file.len().min(4)].to_vec() });
        }
        cursor.take(4, "the magic")?;
        let version = cursor.u32("the version")?;
        match version {
            2 | 3 => {}
            _ if matches!(version.swap_bytes(), 1..=3) => return Err(GgufError::BigEndian),
            _ => return Err(GgufError::Version { found: version }),
        }
        // 24 and 13 bytes are the smallest description of a tensor and of a key.
        let n_tensors = count(cursor, "a tensor count", MAX_TENSORS, 24)?;
        let n_keys = count(cursor, "a metadata key count", MAX_KEYS, 13)?;
        let mut entries = Vec::new();
        for i in 0..n_keys {
            let entry = Entry::parse(cursor, i)?;
            entry.check(file)?;
            entries.push(entry);
        }
        let by_key = sorted_index(&entries, Entry::key).map_err(|(i, key)| GgufError::BadMetadata {
            reason: format!("the key occurs twice, the second time as number {i}"),
            key,
            at: 24,
        })?;
        let metadata = Metadata { file, entries: &entries, by_key: &by_key };
        refuse_split(metadata)?;
        let alignment = alignment(metadata)?;
        let raw = (0..n_tensors)
            .map(|i| RawTensor::parse(cursor, usize::try_from(i).unwrap_or(usize::MAX)))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Header { version, entries, by_key, alignment, raw })
    }
}

/// A note on tensors whose extent cannot be known.
fn unknown_types(tensors: &[TensorInfo]) -> Option<String> {
    let mut unknown = tensors.iter().filter(|t| t.ggml_type.info().is_none());
    let first = unknown.next()?;
    let (count, name, kind) = (1 + unknown.count(), &first.name, first.ggml_type);
    Some(format!("tensors of unknown type, not checked: {count}, the first is {name:?} ({kind})"))
}

/// A count that `limit` and the rest of the file allow, where each item takes `least` bytes or more.
fn count(cursor: &mut Cursor<'_>, what: &str, limit: u64, least: u64) -> Result<u64, GgufError> {
    let at = cursor.pos();
    let found = cursor.u64(what)?;
    let room = cursor.remaining() as u64 / least;
    let (limit, why) =
        if room < limit { (room, "the rest of the file can hold") } else { (limit, "that is accepted") };
    if found > limit {
        return Err(GgufError::TooLarge { what: what.to_owned(), at, found, limit, why });
    }
    Ok(found)
}

/// Positions of `items` sorted by name; the position and name of a repeated one otherwise.
fn sorted_index<T>(items: &[T], name: impl Fn(&T) -> &str) -> Result<Vec<u32>, (usize, String)> {
    // Counts are limited to 2^16.
    #[allow(clippy::cast_possible_truncation, reason = "MAX_KEYS and MAX_TENSORS are 2^16")]
    let mut order: Vec<u32> = (0..items.len() as u32).collect();
    order.sort_by(|&a, &b| name(&items[a as usize]).cmp(name(&items[b as usize])));
    match order.windows(2).find(|pair| name(&items[pair[0] as usize]) == name(&items[pair[1] as usize])) {
        Some(pair) => Err((pair[1] as usize, name(&items[pair[1] as usize]).to_owned())),
        None => Ok(order),
    }
}

fn alignment(metadata: Metadata<'_>) -> Result<u32, GgufError> {
    let key = "general.alignment";
    let alignment = metadata.u32(key)?.unwrap_or(DEFAULT_ALIGNMENT);
    if alignment.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(&alignment) {
        return Ok(alignment);
    }
    let reason = format!("{alignment} is not a power of two from 8 to {MAX_ALIGNMENT}");
    Err(GgufError::BadValue { key: key.to_owned(), reason })
}

fn refuse_split(metadata: Metadata<'_>) -> Result<(), GgufError> {
    match metadata.u32("split.count")? {
        Some(parts) if parts > 1 => {
            let part = u64::from(metadata.u32("split.no")?.unwrap_or(0)) + 1;
            Err(GgufError::Split { part, count: parts.into() })
        }
        _ => Ok(()),
    }
}

/// Which file a path names now.
///
/// # Errors
/// Those of the file system.
pub fn stamp_of(path: &Path) -> std::io::Result<FileStamp> {
    Ok(stamp(&fs::metadata(path)?))
}

fn stamp(facts: &fs::Metadata) -> FileStamp {
    [facts.dev().cast_signed(), facts.ino().cast_signed(), facts.mtime(), facts.mtime_nsec()]
}

/// Reads a header of unknown length: more and more, until it is whole.
fn read_header(path: &Path) -> Result<Gguf, GgufError> {
    let (file, len, stamp) = open(path)?;
    let most = len.min(MAX_HEADER_BYTES);
    let mut room = FIRST_READ.min(most);
    loop {
        let mut bytes = vec![0; room];
        file.read_exact_at(&mut bytes, 0).map_err(GgufError::Io)?;
        let backing = Backing::Header(bytes, file.try_clone().map_err(GgufError::Io)?);
        // What one attempt lacks is in the file as long as the attempt was shorter than a header may be.
        match Gguf::check(backing, len) {
            Ok(gguf) => return Ok(Gguf { stamp: Some(stamp), ..gguf.without_data() }),
            Err(GgufError::Truncated { .. } | GgufError::TooLarge { .. }) if room < most => {}
            Err(error) => return Err(error),
        }
        room = room.saturating_mul(4).min(most);
    }
}

/// Opens a regular file that is not empty: the file, its length, and which one it is.
fn open(path: &Path) -> Result<(File, usize, FileStamp), GgufError> {
    // Asked before opening: opening a pipe would wait for its writer.
    let kind = fs::metadata(path).map_err(GgufError::Io)?.file_type();
    if !kind.is_file() {
        return Err(GgufError::NotAFile {
            kind: if kind.is_dir() { "a directory" } else { "a device, pipe or socket" },
        });
    }
    let file = File::open(path).map_err(GgufError::Io)?;
    let facts = file.metadata().map_err(GgufError::Io)?;
    let bytes = facts.len();
    if bytes == 0 {
        return Err(GgufError::Empty);
    }
    let len = usize::try_from(bytes).map_err(|_| GgufError::AddressSpace { bytes })?;
    Ok((file, len, stamp(&facts)))
}

/// Maps a file for reading.
fn map(file: &File, len: usize) -> Result<Mmap, GgufError> {
    // SAFETY: the mapping is read-only and never written through; the module documentation states that the file must
    // not shrink while it is mapped.
    unsafe { memmap2::MmapOptions::new().len(len).map(file) }.map_err(|error| match error.kind() {
        ErrorKind::OutOfMemory => GgufError::AddressSpace { bytes: len as u64 },
        _ => GgufError::Io(error),
    })
}
