//! Lines from a client, bounded: a line that is too long is reported and skipped without being kept.

use spillway_protocol::jsonl::{LineError, MAX_LINE_BYTES};
use std::io;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};

/// Reads lines. [`LineReader::next`] may be cancelled at any time without losing bytes.
#[derive(Debug)]
pub struct LineReader<R> {
    reader: BufReader<R>,
    /// Bytes of the line so far; at most one more than allowed.
    line: Vec<u8>,
    /// The line is too long; the rest of it is skipped.
    skipping: bool,
}

impl<R: AsyncRead + Unpin> LineReader<R> {
    /// Reads from `reader`.
    pub fn new(reader: R) -> Self {
        LineReader { reader: BufReader::with_capacity(64 << 10, reader), line: Vec::new(), skipping: false }
    }

    /// The next line without its line feed, or why it cannot be used; none at end of file. A last line without line feed
    /// counts. Blank lines are passed over.
    pub async fn next(&mut self) -> io::Result<Option<Result<String, LineError>>> {
        loop {
            let available = self.reader.fill_buf().await?;
            if available.is_empty() {
                let ended = self.skipping || !self.line.is_empty();
                return Ok(if ended { self.take() } else { None });
            }
            let end = available.iter().position(|&byte| byte == b'\n');
            let piece = &available[..end.unwrap_or(available.len())];
            let used = piece.len() + usize::from(end.is_some());
            if !self.skipping {
                self.line.extend_from_slice(piece);
                if self.line.len() > MAX_LINE_BYTES {
                    self.skipping = true;
                    self.line = Vec::new();
                }
            }
            self.reader.consume(used);
            if end.is_some()
                && let Some(line) = self.take()
            {
                return Ok(Some(line));
            }
        }
    }

    /// The line that has ended; none if it was blank.
    fn take(&mut self) -> Option<Result<String, LineError>> {
        if std::mem::take(&mut self.skipping) {
            return Some(Err(LineError::TooLong { limit: MAX_LINE_BYTES }));
        }
        let line = std::mem::take(&mut self.line);
        if line.iter().all(u8::is_ascii_whitespace) {
            return None;
        }
        Some(
            String::from_utf8(line)
                .map_err(|error| LineError::NotUtf8 { offset: error.utf8_error().valid_up_to() }),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn lines(input: &[u8]) -> Vec<Result<String, LineError>> {
        let mut reader = LineReader::new(input);
        let mut all = Vec::new();
        while let Some(line) = reader.next().await.unwrap() {
            all.push(line);
        }
        all
    }

    #[tokio::test]
    async fn a_partial_last_line_counts_and_blank_lines_do_not() {
        assert_eq!(lines(b"a\n\n \r\nb").await, [Ok("a".to_owned()), Ok("b".to_owned())]);
        assert_eq!(lines(b"").await, []);
    }

    #[tokio::test]
    async fn a_line_that_is_too_long_is_skipped_and_the_next_one_read() {
        let mut input = vec![b'x'; MAX_LINE_BYTES + 1];
        input.extend_from_slice(b"\nnext\n");
        let too_long = LineError::TooLong { limit: MAX_LINE_BYTES };
        assert_eq!(lines(&input).await, [Err(too_long.clone()), Ok("next".to_owned())]);
        assert_eq!(lines(&vec![b'x'; 3 * MAX_LINE_BYTES]).await, [Err(too_long)]);
        assert!(lines(&vec![b'x'; MAX_LINE_BYTES]).await[0].is_ok());
    }

    #[tokio::test]
    async fn bytes_that_are_not_utf8_are_located() {
        assert_eq!(lines(b"ab\xff\nc").await, [Err(LineError::NotUtf8 { offset: 2 }), Ok("c".to_owned())]);
    }
}
