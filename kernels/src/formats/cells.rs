//! The bits of every quantised block format in the order in which GPUs read them.
//!
//! [`unpack`](super::unpack) says what the bits mean, [`device_layout`](crate::device_layout) where they go; a test there holds these
//! functions against both. Loads are bound by them, so they move eight bytes at a time and never look at a single code.

use super::unpack::{self, MAX_BLOCK, MAX_SUBS, array};

/// Columns that are sorted at a time: one large block, or eight small ones.
pub(crate) const SPAN_COLS: usize = MAX_BLOCK;
/// Blocks of the smallest kind in a span.
const SPAN_BLOCKS: usize = SPAN_COLS / 32;

/// Up to [`SPAN_COLS`] columns of one row, cell after cell. Only the part that the format has is written.
#[derive(Debug)]
pub(crate) struct Cells {
    /// Low code bits.
    pub(crate) low: [u8; SPAN_COLS],
    /// High code bits.
    pub(crate) high: [u8; SPAN_COLS / 4],
    /// Scales and mins of runs.
    pub(crate) numbers: [u8; MAX_SUBS],
    /// Factors of scales and mins, block after block.
    pub(crate) factors: [u8; 4 * SPAN_BLOCKS],
}

impl Default for Cells {
    fn default() -> Self {
        let (low, high) = ([0; SPAN_COLS], [0; SPAN_COLS / 4]);
        Self { low, high, numbers: [0; MAX_SUBS], factors: [0; 4 * SPAN_BLOCKS] }
    }
}

/// Every other bit.
const SINGLES: u64 = 0x5555_5555_5555_5555;
/// Every other two bits.
const PAIRS: u64 = 0x3333_3333_3333_3333;
/// The lower half of every byte.
const HALVES: u64 = 0x0f0f_0f0f_0f0f_0f0f;
/// Upper byte of the sign bit of an f16.
const F16_SIGN: u8 = 0x80;

/// Swaps the bits of `first` that `mask` picks after a shift down by `shift` with those that it picks of `second`.
fn exchange(first: u64, second: u64, shift: usize, mask: u64) -> [u64; 2] {
    let moved = (first >> shift ^ second) & mask;
    [first ^ moved << shift, second ^ moved]
}

/// Of each four fields of `BITS` bits, 1 or 2, swaps field `i` of word `j` with field `j` of word `i`.
fn transpose<const BITS: usize>([a, b, c, d]: [u64; 4]) -> [u64; 4] {
    let (near, far) = if BITS == 1 { (SINGLES, PAIRS) } else { (PAIRS, HALVES) };
    let ([a, b], [c, d]) = (exchange(a, b, BITS, near), exchange(c, d, BITS, near));
    let ([a, c], [b, d]) = (exchange(a, c, 2 * BITS, far), exchange(b, d, 2 * BITS, far));
    [a, b, c, d]
}

/// Words `i` and `i + 4` of 32 bytes side by side.
fn word_pairs(bytes: &[u8; 32]) -> [u64; 4] {
    let (words, _) = bytes.as_chunks::<4>();
    let word = |i: usize| u64::from(u32::from_le_bytes(words[i]));
    std::array::from_fn(|i| word(i) | word(i + 4) << 32)
}

/// Two cells of four-bit codes: the lower halves of 32 bytes, and the upper ones.
fn half_cells(bytes: &[u8; 32]) -> [[u8; 16]; 2] {
    let (words, _) = bytes.as_chunks::<8>();
    let words: [u64; 4] = std::array::from_fn(|i| u64::from_le_bytes(words[i]));
    let mut out = [[0; 16]; 2];
    for i in 0..2 {
        let (first, second) = (words[i], words[i + 2]);
        let cells = [first & HALVES | (second & HALVES) << 4, first >> 4 & HALVES | second & !HALVES];
        for (out, cell) in out.iter_mut().zip(cells) {
            out[8 * i..][..8].copy_from_slice(&cell.to_le_bytes());
        }
    }
    out
}

/// Cells of codes of which each 32 bytes hold two runs, lower halves first.
fn four_bit_runs(bytes: &[u8; 128], out: &mut Cells) {
    let (cells, _) = out.low.as_chunks_mut::<16>();
    for (bytes, pair) in bytes.as_chunks().0.iter().zip(cells.as_chunks_mut().0) {
        *pair = half_cells(bytes);
    }
}

/// Cells of two-bit codes of which each 32 bytes hold four runs, lowest bits first.
fn two_bit_runs(bytes: &[u8; 64], out: &mut Cells) {
    let (cells, _) = out.low.as_chunks_mut::<8>();
    for (bytes, runs) in bytes.as_chunks::<32>().0.iter().zip(cells.as_chunks_mut().0) {
        let (words, _) = bytes.as_chunks::<8>();
        let words = std::array::from_fn(|i| u64::from_le_bytes(words[i]));
        *runs = transpose::<2>(words).map(u64::to_le_bytes);
    }
}

/// High bits of eight runs, run `r` in bit `r` of 32 bytes.
fn one_bit_runs(bytes: &[u8; 32], out: &mut Cells) {
    for (i, pair) in transpose::<1>(word_pairs(bytes)).into_iter().enumerate() {
        // Left to swap are the upper halves of a pair's first word and the lower halves of its second.
        let moved = (pair >> 28 ^ pair) & 0xf0f0_f0f0;
        let run = (pair ^ moved ^ moved << 28).to_le_bytes();
        out.high[4 * i..][..4].copy_from_slice(&run[..4]);
        out.high[4 * (i + 4)..][..4].copy_from_slice(&run[4..]);
    }
}

/// Fifth bits, bit `i` that of element `i`.
fn fifth_bits(mask: [u8; 4]) -> [u8; 4] {
    // Bit 4 j + i goes to 8 i + j: of the five bits of a place, the lower two become the upper two.
    let places = [(4, 1), (3, 0), (2, 1), (1, 0)];
    let bits = places.into_iter().fold(u32::from_le_bytes(mask), |bits, (a, b)| swap_places(bits, a, b));
    bits.to_le_bytes()
}

/// Moves every bit to the place that has bits `a` and `b < a` of its number swapped.
fn swap_places(bits: u32, a: usize, b: usize) -> u32 {
    /// Places that have bit `i` of their number set.
    const SET: [u32; 5] = [0xaaaa_aaaa, 0xcccc_cccc, 0xf0f0_f0f0, 0xff00_ff00, 0xffff_0000];
    let distance = (1 << a) - (1 << b);
    let moved = (bits >> distance ^ bits) & SET[b] & !SET[a];
    bits ^ moved ^ moved << distance
}

/// Scale and min of each run in turn.
fn pairs([scales, mins]: [[u8; 8]; 2], out: &mut Cells) {
    for (i, (scale, min)) in scales.into_iter().zip(mins).enumerate() {
        out.numbers[2 * i] = scale;
        out.numbers[2 * i + 1] = min;
    }
}

/// Sorts small blocks of `BLOCK` bytes, of which `sort` makes factors, fifth bits (if there are any) and `LOW` bytes of codes.
fn small_blocks<const BLOCK: usize, const FACTORS: usize, const LOW: usize>(
    bytes: &[u8],
    out: &mut Cells,
    sort: impl Fn(&[u8; BLOCK]) -> ([u8; FACTORS], [u8; 4], [u8; LOW]),
) {
    let (low, _) = out.low.as_chunks_mut();
    let (factors, _) = out.factors.as_chunks_mut();
    let (high, _) = out.high.as_chunks_mut();
    for (((block, low), high), factors) in bytes.as_chunks().0.iter().zip(low).zip(high).zip(factors) {
        (*factors, *high, *low) = sort(block);
    }
}

/// Factors of formats whose min is added in the file and subtracted here.
fn factors_of_added_min(bytes: &[u8]) -> [u8; 4] {
    [bytes[0], bytes[1], bytes[2], bytes[3] ^ F16_SIGN]
}

pub(super) fn q4_0(bytes: &[u8], out: &mut Cells) {
    small_blocks(bytes, out, |block: &[u8; 18]| (array::<2>(block, 0), [0; 4], array::<16>(block, 2)));
}

pub(super) fn q4_1(bytes: &[u8], out: &mut Cells) {
    small_blocks(bytes, out, |block: &[u8; 20]| (factors_of_added_min(block), [0; 4], array::<16>(block, 4)));
}

pub(super) fn q5_0(bytes: &[u8], out: &mut Cells) {
    small_blocks(bytes, out, |block: &[u8; 22]| {
        (array::<2>(block, 0), fifth_bits(array(block, 2)), array::<16>(block, 6))
    });
}

pub(super) fn q5_1(bytes: &[u8], out: &mut Cells) {
    small_blocks(bytes, out, |block: &[u8; 24]| {
        (factors_of_added_min(block), fifth_bits(array(block, 4)), array::<16>(block, 8))
    });
}

pub(super) fn q8_0(bytes: &[u8], out: &mut Cells) {
    small_blocks(bytes, out, |block: &[u8; 34]| (array::<2>(block, 0), [0; 4], array::<32>(block, 2)));
}

pub(super) fn q2_k(bytes: &[u8], out: &mut Cells) {
    out.numbers = array(bytes, 0);
    two_bit_runs(&array(bytes, 16), out);
    out.factors[..4].copy_from_slice(&bytes[80..84]);
}

pub(super) fn q3_k(bytes: &[u8], out: &mut Cells) {
    one_bit_runs(&array(bytes, 0), out);
    two_bit_runs(&array(bytes, 32), out);
    out.numbers = unpack::q3_k_scales(&array(bytes, 96)).map(i8::cast_unsigned);
    out.factors[..2].copy_from_slice(&bytes[108..110]);
}

pub(super) fn q4_k(bytes: &[u8], out: &mut Cells) {
    out.factors[..4].copy_from_slice(&bytes[..4]);
    pairs(unpack::six_bit_pairs(&array(bytes, 4)), out);
    four_bit_runs(&array(bytes, 16), out);
}

pub(super) fn q5_k(bytes: &[u8], out: &mut Cells) {
    out.factors[..4].copy_from_slice(&bytes[..4]);
    pairs(unpack::six_bit_pairs(&array(bytes, 4)), out);
    one_bit_runs(&array(bytes, 16), out);
    four_bit_runs(&array(bytes, 48), out);
}

pub(super) fn q6_k(bytes: &[u8], out: &mut Cells) {
    let (low_cells, _) = out.low.as_chunks_mut::<64>();
    let (high_cells, _) = out.high.as_chunks_mut::<32>();
    for (half, (low, high)) in low_cells.iter_mut().zip(high_cells).enumerate() {
        let a = half_cells(&array(bytes, 64 * half));
        let b = half_cells(&array(bytes, 64 * half + 32));
        low.as_chunks_mut().0.copy_from_slice(&[a[0], b[0], a[1], b[1]]);
        let runs = transpose::<2>(word_pairs(&array(bytes, 128 + 32 * half)));
        high.as_chunks_mut().0.copy_from_slice(&runs.map(u64::to_le_bytes));
    }
    out.numbers = array(bytes, 192);
    out.factors[..2].copy_from_slice(&bytes[208..210]);
}

pub(super) fn iq4_xs(bytes: &[u8], out: &mut Cells) {
    out.factors[..2].copy_from_slice(&bytes[..2]);
    out.numbers[..8].copy_from_slice(&unpack::iq4_xs_scales(&array(bytes, 2)).map(i8::cast_unsigned));
    out.low[..128].copy_from_slice(&bytes[8..136]);
}
