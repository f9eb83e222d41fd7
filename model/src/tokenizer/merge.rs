//! Greedy pair merging, shared by byte-level BPE and SentencePiece.
//!
//! A piece of text starts as a row of symbols (bytes or characters). As long as some neighbours may be merged, the pair with
//! the lowest rank is, the leftmost on a tie. Candidates wait in a heap, so a piece of n symbols takes O(n log n) however
//! it is made: a megabyte of one letter is no special case.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The id of a symbol that is no token.
pub(super) const NO_TOKEN: u32 = u32::MAX;

/// No neighbour on this side.
const NOWHERE: usize = usize::MAX;

/// A part of the piece: the bytes `start .. start + len`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Symbol {
    pub start: usize,
    /// Zero once merged into the symbol on its left.
    pub len: usize,
    /// Its token, or [`NO_TOKEN`].
    pub id: u32,
    prev: usize,
    next: usize,
}

/// A merge that was possible when it was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: usize,
    right: usize,
    /// Length of both symbols together. They begin where they began, so equal lengths mean unchanged symbols.
    len: usize,
    id: u32,
}

/// Scratch space for merging, reused from piece to piece.
#[derive(Debug, Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<Candidate>>,
}

impl Merger {
    /// Begins a new piece.
    pub fn clear(&mut self) {
        self.symbols.clear();
        self.queue.clear();
    }

    /// Appends a symbol of `len > 0` bytes.
    pub fn push(&mut self, len: usize, id: u32) {
        let index = self.symbols.len();
        let (start, prev) = match self.symbols.last_mut() {
            None => (0, NOWHERE),
            Some(last) => {
                last.next = index;
                (last.start + last.len, index - 1)
            }
        };
        self.symbols.push(Symbol { start, len, id, prev, next: NOWHERE });
    }

    /// Merges what can be merged. `pair(left, right)` gives the rank and the token of a permitted merge.
    pub fn run(&mut self, pair: impl Fn(&Symbol, &Symbol) -> Option<(u32, u32)>) {
        for right in 1..self.symbols.len() {
            self.offer(right - 1, right, &pair);
        }
        while let Some(Reverse(candidate)) = self.queue.pop() {
            let Candidate { left, right, len, id, .. } = candidate;
            let (l, r) = (self.symbols[left], self.symbols[right]);
            if l.len == 0 || r.len == 0 || l.len + r.len != len {
                continue; // one of them has been merged since
            }
            self.symbols[right].len = 0;
            self.symbols[left] = Symbol { len, id, next: r.next, ..l };
            if r.next != NOWHERE {
                self.symbols[r.next].prev = left;
                self.offer(left, r.next, &pair);
            }
            if l.prev != NOWHERE {
                self.offer(l.prev, left, &pair);
            }
        }
    }

    /// The symbols that are left, in order.
    pub fn symbols(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols.iter().filter(|s| s.len > 0)
    }

    fn offer(&mut self, left: usize, right: usize, pair: &impl Fn(&Symbol, &Symbol) -> Option<(u32, u32)>) {
        let (l, r) = (&self.symbols[left], &self.symbols[right]);
        if let Some((rank, id)) = pair(l, r) {
            self.queue.push(Reverse(Candidate { rank, left, right, len: l.len + r.len, id }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Symbols over a toy alphabet where id = length: any two neighbours whose total is at most `limit` merge, rank by length.
    fn lengths(count: usize, limit: usize) -> Vec<usize> {
        let mut merger = Merger::default();
        for _ in 0..count {
            merger.push(1, 1);
        }
        merger.run(|l, r| {
            let len = l.len + r.len;
            (len <= limit).then(|| (u32::try_from(len).unwrap_or(u32::MAX), 1))
        });
        merger.symbols().map(|s| s.len).collect()
    }

    /// Equal ranks merge from the left, as every BPE tool does: five symbols pair up as 2+2+1.
    #[test]
    fn ties_are_broken_from_the_left() {
        assert_eq!(lengths(5, 2), [2, 2, 1]);
        assert_eq!(lengths(7, 4), [4, 3]);
    }

    /// Symbols cover the piece without gaps after any number of merges.
    #[test]
    fn symbols_tile_the_piece() {
        for count in 1..40 {
            assert_eq!(lengths(count, 8).iter().sum::<usize>(), count);
        }
    }
}
