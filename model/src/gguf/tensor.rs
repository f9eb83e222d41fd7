//! Tensor descriptions: shape, type, and where the data lies. Everything is checked against the file's length.

use super::cursor::Cursor;
use super::error::GgufError;
use super::ggml_type::GgmlType;
use super::limits::MAX_NAME_BYTES;
use std::ops::Range;

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name as the file spells it.
    pub name: Box<str>,
    /// Dimensions, the contiguous one first (`ne`); one to four, none zero.
    pub dims: Vec<u64>,
    /// Element type.
    pub ggml_type: GgmlType,
    /// Bytes of the data from the start of the file; empty when the type is unknown.
    pub range: Range<usize>,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elems(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Bytes of the data.
    pub fn size(&self) -> u64 {
        self.range.len() as u64
    }

    /// Columns (the contiguous dimension) and rows (all others together): a vector has one row.
    pub fn matrix_shape(&self) -> (u64, u64) {
        (self.dims[0], self.dims[1..].iter().product())
    }
}

/// A description as the file states it, its data not located yet.
pub(super) struct RawTensor {
    name: Box<str>,
    dims: Vec<u64>,
    ggml_type: GgmlType,
    offset: u64,
}

impl RawTensor {
    pub(super) fn parse(cursor: &mut Cursor<'_>, index: usize) -> Result<RawTensor, GgufError> {
        let number = format!("tensor number {index}");
        let name = cursor.string(MAX_NAME_BYTES, &number)?;
        let bad = |name: &str, reason: String| GgufError::BadTensor { name: name.to_owned(), index, reason };
        let name = std::str::from_utf8(name).map_err(|_| bad("", "the name is not UTF-8".to_owned()))?;
        if name.is_empty() {
            return Err(bad("", "the name is empty".to_owned()));
        }
        let what = format!("the description of tensor {name:?}");
        let n_dims = cursor.u32(&what)?;
        if !(1..=4).contains(&n_dims) {
            return Err(bad(name, format!("has {n_dims} dimensions, 1 to 4 are possible")));
        }
        let dims = (0..n_dims).map(|_| cursor.u64(&what)).collect::<Result<Vec<_>, _>>()?;
        if dims.contains(&0) {
            return Err(bad(name, format!("has a zero dimension: {dims:?}")));
        }
        if dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).is_none_or(|n| n > i64::MAX as u64) {
            return Err(bad(name, format!("the number of elements of {dims:?} does not fit 63 bits")));
        }
        let ggml_type = GgmlType(cursor.u32(&what)?);
        let offset = cursor.u64(&what)?;
        Ok(RawTensor { name: name.into(), dims, ggml_type, offset })
    }

    /// Finds the data in a file of `file_len` bytes whose data section starts at `data`.
    pub(super) fn locate(
        self,
        index: usize,
        data: usize,
        alignment: u32,
        file_len: usize,
    ) -> Result<TensorInfo, GgufError> {
        let bad = |reason: String| GgufError::BadTensor { name: self.name.to_string(), index, reason };
        if !self.offset.is_multiple_of(u64::from(alignment)) {
            return Err(bad(format!(
                "offset {} is not a multiple of the alignment {alignment}",
                self.offset
            )));
        }
        let size = match self.ggml_type.info() {
            None => 0,
            Some(info) => {
                let (dims, per) = (&self.dims, info.block_elems as u64);
                if !dims[0].is_multiple_of(per) {
                    return Err(bad(format!(
                        "rows of {} elements are not whole {} blocks of {per}",
                        dims[0], info.name
                    )));
                }
                // At most 2^63 elements, so only the bytes can overflow.
                let blocks = dims.iter().product::<u64>() / per;
                blocks
                    .checked_mul(info.block_bytes as u64)
                    .ok_or_else(|| bad(format!("the size of {} {dims:?} does not fit 64 bits", info.name)))?
            }
        };
        let start = (data as u64).checked_add(self.offset);
        let end = start.and_then(|start| start.checked_add(size));
        let range = match (start.map(usize::try_from), end.map(usize::try_from)) {
            (Some(Ok(start)), Some(Ok(end))) if end <= file_len => start..end,
            _ => {
                let (dims, kind, offset) = (&self.dims, self.ggml_type, self.offset);
                return Err(bad(format!(
                    "its {size} bytes ({kind} {dims:?}) at offset {offset} of the data section (byte {data}) lie \
                     beyond the end of the file ({file_len} bytes); the file is truncated or damaged"
                )));
            }
        };
        Ok(TensorInfo { name: self.name, dims: self.dims, ggml_type: self.ggml_type, range })
    }
}

/// Refuses tensors that share bytes.
pub(super) fn check_overlaps(tensors: &[TensorInfo]) -> Result<(), GgufError> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_unstable_by_key(|&i| (tensors[i].range.start, tensors[i].range.end));
    for pair in order.windows(2) {
        let (first, second) = (&tensors[pair[0]], &tensors[pair[1]]);
        if first.range.end > second.range.start {
            return Err(GgufError::BadTensor {
                name: second.name.to_string(),
                index: pair[1],
                reason: format!(
                    "its bytes {:?} overlap tensor {:?} at {:?}",
                    second.range, first.name, first.range
                ),
            });
        }
    }
    Ok(())
}
