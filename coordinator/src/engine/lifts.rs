//! Which positions of a sequence spilled layers are lifted for: a GPU runs them there, CPU workers elsewhere.
//!
//! Both sum in another order, so whoever runs a position again must run it as before. It depends on the sequence alone, never on what
//! shares its steps: a prompt of enough new tokens is lifted as a whole, answers never are.

use std::ops::Range;

/// Lifted positions, as ranges that do not touch, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Lifts(Vec<Range<usize>>);

impl Lifts {
    /// Adds positions behind all others.
    pub(super) fn push(&mut self, range: Range<usize>) {
        match self.0.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => self.0.push(range),
        }
    }

    /// Adds those of `other` from `start` on.
    pub(super) fn extend(&mut self, other: &Lifts, start: usize) {
        other.0.iter().for_each(|range| self.push(range.start.max(start)..range.end));
    }

    /// Forgets positions from `end` on.
    pub(super) fn truncate(&mut self, end: usize) {
        self.0.retain_mut(|range| {
            range.end = range.end.min(end);
            range.start < range.end
        });
    }

    /// The first position that is lifted in one of both only.
    pub(super) fn agree_until(&self, other: &Lifts) -> usize {
        let mut position = 0;
        while position < usize::MAX {
            let ((one, until), (two, two_until)) = (self.at(position), other.at(position));
            if one != two {
                return position;
            }
            position = until.min(two_until);
        }
        position
    }

    /// Whether `position` is lifted, and the first one behind it that is run otherwise.
    pub(super) fn at(&self, position: usize) -> (bool, usize) {
        match self.0.iter().find(|range| position < range.end) {
            Some(range) if range.contains(&position) => (true, range.end),
            Some(range) => (false, range.start),
            None => (false, usize::MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// However ranges are added and cut off, they say of every position what a list of positions says.
        #[test]
        fn ranges_are_what_a_list_of_positions_is(
            steps in prop::collection::vec((0usize..10, 0usize..10), 0..8), end in 0usize..60, start in 0usize..60,
        ) {
            let (mut lifts, mut list, mut from) = (Lifts::default(), vec![false; 200], 0);
            for (gap, len) in steps {
                lifts.push(from + gap..from + gap + len);
                list[from + gap..from + gap + len].fill(true);
                from += gap + len;
            }
            let mut later = Lifts::default();
            later.extend(&lifts, start);
            lifts.truncate(end);
            for (position, &listed) in list.iter().enumerate().take(100) {
                let (lifted, until) = lifts.at(position);
                prop_assert_eq!(lifted, listed && position < end);
                prop_assert!(until > position);
                prop_assert!((position..until.min(100)).all(|other| lifts.at(other).0 == lifted));
                prop_assert_eq!(later.at(position).0, listed && position >= start);
            }
            let differ = |position: &usize| lifts.at(*position).0 != later.at(*position).0;
            prop_assert_eq!(lifts.agree_until(&later), (0..200).find(differ).unwrap_or(usize::MAX));
            prop_assert_eq!(lifts.agree_until(&lifts), usize::MAX);
        }
    }
}
