//! Limits that keep a hostile header cheap to refuse. Real files stay two orders of magnitude below them, except the
//! header size (a 250,000-token vocabulary with its merges is about 16 MB).

/// Bytes of header (keys, values, tensor descriptions) that are read.
pub const MAX_HEADER_BYTES: usize = 128 << 20;
/// Metadata keys.
pub const MAX_KEYS: u64 = 1 << 16;
/// Tensors.
pub const MAX_TENSORS: u64 = 1 << 16;
/// Bytes of a metadata key.
pub const MAX_KEY_BYTES: u64 = 1024;
/// Bytes of a tensor name.
pub const MAX_NAME_BYTES: u64 = 256;
/// Strings of an array, and elements of any array whose elements are looked at.
pub const MAX_ELEMENTS: usize = 2 << 20;
/// Levels of arrays in arrays that are skipped over.
pub const MAX_ARRAY_DEPTH: usize = 4;
/// Largest `general.alignment`.
pub const MAX_ALIGNMENT: u32 = 1 << 20;
/// Characters of a string of the file that a message quotes.
pub const MAX_QUOTED: usize = 64;
