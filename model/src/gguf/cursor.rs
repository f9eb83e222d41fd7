//! A reader over untrusted bytes: every read is checked, nothing is allocated.

use super::error::GgufError;

/// A position in the header of a file.
#[derive(Debug, Clone)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    pos: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Cursor { bytes, pos: 0 }
    }

    pub(super) fn pos(&self) -> usize {
        self.pos
    }

    /// Bytes not read yet.
    pub(super) fn remaining(&self) -> usize {
        self.bytes.len() - self.pos
    }

    /// The next `len` bytes; `what` names them in the error.
    pub(super) fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8], GgufError> {
        let taken = usize::try_from(len).ok().and_then(|len| self.bytes.get(self.pos..)?.get(..len));
        let Some(taken) = taken else {
            return Err(GgufError::Truncated {
                what: what.to_owned(),
                at: self.pos,
                need: len,
                have: self.remaining() as u64,
            });
        };
        self.pos += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A string of at most `limit` bytes, as bytes.
    pub(super) fn string(&mut self, limit: u64, what: &str) -> Result<&'a [u8], GgufError> {
        let at = self.pos;
        let len = self.u64(what)?;
        if len > limit {
            let what = format!("a length of {what}");
            return Err(GgufError::TooLarge { what, at, found: len, limit, why: "that is accepted" });
        }
        self.take(len, what)
    }

    /// Skips `count` length-prefixed strings; one comparison per string, nothing else.
    pub(super) fn skip_strings(&mut self, count: u64, what: &str) -> Result<(), GgufError> {
        for _ in 0..count {
            let len = self.u64(what)?;
            self.take(len, what)?;
        }
        Ok(())
    }
}
