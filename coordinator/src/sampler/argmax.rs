//! The largest value of a row in one pass over memory.

/// The largest value and the first index that holds it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Peak {
    pub index: u32,
    pub value: f32,
}

/// Values per block: small enough to stay in the first cache level for the look-up of the index.
const BLOCK: usize = 1024;

/// Independent maxima, so that the compiler can use whole registers.
const LANES: usize = 16;

/// The peak of `values`; none when the row is empty or a value is NaN or +inf.
pub(super) fn peak(values: &[f32]) -> Option<Peak> {
    let mut best: Option<Peak> = None;
    for (block, start) in values.chunks(BLOCK).zip((0u32..).step_by(BLOCK)) {
        let value = block_max(block)?;
        if best.is_none_or(|best| value > best.value) {
            let offset = (0u32..).zip(block).find(|(_, other)| **other == value)?.0;
            best = Some(Peak { index: start + offset, value });
        }
    }
    best
}

fn block_max(block: &[f32]) -> Option<f32> {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut sound = [true; LANES];
    let (chunks, rest) = block.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            // False for NaN and for +inf.
            sound[lane] &= chunk[lane] <= f32::MAX;
            lanes[lane] = if chunk[lane] > lanes[lane] { chunk[lane] } else { lanes[lane] };
        }
    }
    for &value in rest {
        sound[0] &= value <= f32::MAX;
        lanes[0] = lanes[0].max(value);
    }
    sound.iter().all(|&sound| sound).then(|| lanes.into_iter().fold(f32::NEG_INFINITY, f32::max))
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
            prop_assert_eq!(peak(&row), Some(Peak { index, value: largest }));
        }

        #[test]
        fn a_single_unsound_value_anywhere_is_seen(
            length in 1usize..3000, at in any::<prop::sample::Index>(), infinite: bool,
        ) {
            let mut row = vec![1.0; length];
            row[at.index(length)] = if infinite { f32::INFINITY } else { f32::NAN };
            prop_assert_eq!(peak(&row), None);
        }
    }

    #[test]
    fn banned_tokens_are_sound() {
        let row = [f32::NEG_INFINITY, -1.0];
        assert_eq!(peak(&row), Some(Peak { index: 1, value: -1.0 }));
        assert_eq!(peak(&[]), None);
    }
}
