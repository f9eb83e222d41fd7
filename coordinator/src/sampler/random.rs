//! The random numbers behind sampling: xoshiro256** (Blackman and Vigna, 2018), seeded through SplitMix64 as its authors
//! advise. Small, fast, and fixed by this file, so that a seed means the same text in every release.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

/// A seed nobody chose.
pub fn draw_seed() -> u64 {
    // The standard library seeds its hash maps from the system's random numbers.
    // 53 bits survive every JSON reader.
    RandomState::new().build_hasher().finish() >> 11
}

/// A stream of random numbers that depends on its seed alone.
#[derive(Debug, Clone)]
pub(super) struct Random {
    state: [u64; 4],
}

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        let mut state = seed;
        Random { state: std::array::from_fn(|_| split_mix(&mut state)) }
    }

    /// Uniform in `[0, 1)`, 53 random bits.
    pub(super) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn next(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let shifted = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= shifted;
        s[3] = s[3].rotate_left(45);
        result
    }
}

fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First outputs of the authors' C code for the state 1, 2, 3, 4.
    #[test]
    fn the_generator_is_xoshiro256_starstar() {
        let mut random = Random { state: [1, 2, 3, 4] };
        let first: Vec<u64> = (0..4).map(|_| random.next()).collect();
        assert_eq!(first, [11520, 0, 1_509_978_240, 1_215_971_899_390_074_240]);
    }

    /// First outputs of the authors' C code for the seed 1234567.
    #[test]
    fn the_seeding_is_split_mix() {
        let mut state = 1_234_567;
        assert_eq!(split_mix(&mut state), 6_457_827_717_110_365_317);
        assert_eq!(split_mix(&mut state), 3_203_168_211_198_807_973);
    }

    #[test]
    #[expect(clippy::cast_possible_truncation, reason = "the number of a bucket")]
    fn numbers_fill_the_unit_interval_evenly() {
        let mut random = Random::new(42);
        let mut buckets = [0u32; 10];
        for _ in 0..100_000 {
            buckets[(random.unit() * 10.0) as usize] += 1;
        }
        assert!(buckets.iter().all(|&count| (9_600..10_400).contains(&count)), "{buckets:?}");
    }
}
