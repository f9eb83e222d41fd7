//! The largest values of a row: one pass over memory for all that choosing a token has to know of most of it.

/// The largest value and the first index that holds it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Peak {
    pub index: u32,
    pub value: f32,
}

/// Values per block: few enough that looking at the blocks of the best tokens again costs little, and enough that there are
/// few blocks.
const BLOCK: usize = 512;

/// Independent maxima, so that the compiler can use whole registers.
const LANES: usize = 16;

/// The largest value of each block of a row. Its memory serves for any number of rows.
#[derive(Debug, Clone, Default)]
pub(super) struct Peaks {
    blocks: Vec<f32>,
    ranked: Vec<f32>,
}

impl Peaks {
    /// Looks at a row. Its peak; none when the row is empty or a value is NaN or +inf.
    pub fn scan(&mut self, values: &[f32]) -> Option<Peak> {
        self.blocks.clear();
        let mut sound = true;
        self.blocks.extend(values.chunks(BLOCK).map(|block| block_max(block, &mut sound)));
        let value = self.blocks.iter().copied().reduce(larger).filter(|_| sound)?;
        let block = self.blocks.iter().position(|max| *max == value)?;
        let start = block * BLOCK;
        let index = start + values[start..].iter().position(|other| *other == value)?;
        Some(Peak { index: u32::try_from(index).ok()?, value })
    }

    /// A value that at least `count` values of the row reach; none when there are too few blocks to know.
    pub fn reached_by(&mut self, count: usize) -> Option<f32> {
        let rank = count.checked_sub(1).filter(|rank| *rank < self.blocks.len())?;
        self.ranked.clone_from(&self.blocks);
        let (_, value, _) = self.ranked.select_nth_unstable_by(rank, |a, b| b.total_cmp(a));
        Some(*value)
    }

    /// All blocks of the row, each with its largest value.
    pub fn blocks_mut<'a>(&'a self, values: &'a mut [f32]) -> impl Iterator<Item = (f32, &'a mut [f32])> {
        self.blocks.iter().copied().zip(values.chunks_mut(BLOCK))
    }

    /// A block of the row, with the index of its first value.
    pub fn block<'a>(&self, values: &'a [f32], number: usize) -> Option<(u32, &'a [f32])> {
        let first = u32::try_from(number * BLOCK).ok()?;
        Some((first, values.chunks(BLOCK).nth(number)?))
    }

    /// The blocks of the row whose largest value is `wanted`, with the index of their first value.
    pub fn blocks<'a>(
        &'a self,
        values: &'a [f32],
        wanted: impl Fn(f32) -> bool + 'a,
    ) -> impl Iterator<Item = (u32, &'a [f32])> {
        let blocks = (0u32..).step_by(BLOCK).zip(values.chunks(BLOCK)).zip(&self.blocks);
        blocks.filter(move |(_, max)| wanted(**max)).map(|(block, _)| block)
    }
}

/// The largest value of a block; `sound` becomes false if a value is NaN or +inf.
fn block_max(block: &[f32], sound: &mut bool) -> f32 {
    let (mut lanes, mut finite) = ([f32::NEG_INFINITY; LANES], [true; LANES]);
    let mut look = |lane: usize, value: f32| {
        // False for NaN and for +inf.
        finite[lane] &= value <= f32::MAX;
        lanes[lane] = larger(value, lanes[lane]);
    };
    let (chunks, rest) = block.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, value) in chunk.iter().enumerate() {
            look(lane, *value);
        }
    }
    rest.iter().enumerate().for_each(|(lane, value)| look(lane, *value));
    *sound &= finite == [true; LANES];
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            lanes[lane] = larger(lanes[lane], lanes[lane + width]);
        }
    }
    lanes[0]
}

/// A single instruction, unlike `f32::max`, which never returns NaN.
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_peak_is_the_first_largest_value(values in prop::collection::vec(-4i8..4, 1..3000)) {
            let row: Vec<f32> = values.iter().map(|&value| f32::from(value)).collect();
            let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let (index, _) = (0u32..).zip(&row).find(|(_, value)| **value == largest).unwrap();
            prop_assert_eq!(Peaks::default().scan(&row), Some(Peak { index, value: largest }));
        }

        #[test]
        fn a_single_unsound_value_anywhere_is_seen(
            length in 1usize..3000, at in any::<prop::sample::Index>(), infinite: bool,
        ) {
            let mut row = vec![1.0; length];
            row[at.index(length)] = if infinite { f32::INFINITY } else { f32::NAN };
            prop_assert_eq!(Peaks::default().scan(&row), None);
        }
    }

    proptest! {
        #[test]
        fn as_many_values_as_asked_for_reach_the_limit(
            values in prop::collection::vec(-9i8..9, 1..9000), count in 0usize..20,
        ) {
            let row: Vec<f32> = values.iter().map(|&value| f32::from(value)).collect();
            let mut peaks = Peaks::default();
            peaks.scan(&row).unwrap();
            match peaks.reached_by(count) {
                Some(limit) => prop_assert!(row.iter().filter(|value| **value >= limit).count() >= count),
                None => prop_assert!(count == 0 || count > row.len().div_ceil(BLOCK)),
            }
        }
    }

    #[test]
    fn banned_tokens_are_sound() {
        let row = [f32::NEG_INFINITY, -1.0];
        assert_eq!(Peaks::default().scan(&row), Some(Peak { index: 1, value: -1.0 }));
        assert_eq!(Peaks::default().scan(&[]), None);
    }
}
