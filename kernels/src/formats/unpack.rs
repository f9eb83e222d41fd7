//! The bits of every quantised block format, read into one common shape.

/// Most elements of a block.
pub(crate) const MAX_BLOCK: usize = 256;
/// Most scales of a block.
pub(crate) const MAX_SUBS: usize = 16;

/// A block as integers: see [`Quant`](super::Quant) for what they mean. Only the part that the format has is written.
#[derive(Debug)]
pub(crate) struct Unpacked {
    /// Stored codes, in element order.
    pub(crate) codes: [u8; MAX_BLOCK],
    /// Integer scales; all 1 where the format has none.
    pub(crate) scales: [i8; MAX_SUBS],
    /// Integer mins; all 1 where the format has none.
    pub(crate) mins: [i8; MAX_SUBS],
    /// Bits of the f16 factor of the scales.
    pub(crate) d: u16,
    /// Bits of the f16 factor of the mins, which are subtracted.
    pub(crate) dmin: u16,
}

impl Default for Unpacked {
    fn default() -> Self {
        Self { codes: [0; MAX_BLOCK], scales: [1; MAX_SUBS], mins: [1; MAX_SUBS], d: 0, dmin: 0 }
    }
}

/// Sign bit of an f16.
const F16_SIGN: u16 = 0x8000;

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// The `N` bytes at `at`.
pub(super) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// `out[i]`, `out[n + i]` = low and high half of byte `i` of the `n` bytes.
fn nibbles(bytes: &[u8], out: &mut [u8]) {
    let (low, high) = out.split_at_mut(bytes.len());
    for ((&byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = byte & 15;
        *high = byte >> 4;
    }
}

/// Ors bit `i` of the little-endian mask into bit 4 of code `i`.
fn fifth_bits(mask: &[u8], codes: &mut [u8]) {
    for (codes, &byte) in codes.chunks_exact_mut(8).zip(mask) {
        for (i, code) in codes.iter_mut().enumerate() {
            *code |= (byte >> i & 1) << 4;
        }
    }
}

/// `d: f16, 16 bytes`; the low halves are elements 0-15. Also IQ4_NL, whose codes are indices.
pub(super) fn q4_0(bytes: &[u8], out: &mut Unpacked) {
    out.d = u16_at(bytes, 0);
    nibbles(&bytes[2..18], &mut out.codes[..32]);
}

/// `d: f16, m: f16 (added), 16 bytes`.
pub(super) fn q4_1(bytes: &[u8], out: &mut Unpacked) {
    out.d = u16_at(bytes, 0);
    out.dmin = u16_at(bytes, 2) ^ F16_SIGN;
    nibbles(&bytes[4..20], &mut out.codes[..32]);
}

/// `d: f16, 32 fifth bits, 16 bytes`.
pub(super) fn q5_0(bytes: &[u8], out: &mut Unpacked) {
    out.d = u16_at(bytes, 0);
    nibbles(&bytes[6..22], &mut out.codes[..32]);
    fifth_bits(&bytes[2..6], &mut out.codes[..32]);
}

/// `d: f16, m: f16 (added), 32 fifth bits, 16 bytes`.
pub(super) fn q5_1(bytes: &[u8], out: &mut Unpacked) {
    out.d = u16_at(bytes, 0);
    out.dmin = u16_at(bytes, 2) ^ F16_SIGN;
    nibbles(&bytes[8..24], &mut out.codes[..32]);
    fifth_bits(&bytes[4..8], &mut out.codes[..32]);
}

/// `d: f16, 32 signed bytes`.
pub(super) fn q8_0(bytes: &[u8], out: &mut Unpacked) {
    out.d = u16_at(bytes, 0);
    for (code, &byte) in out.codes[..32].iter_mut().zip(&bytes[2..34]) {
        *code = byte ^ 0x80;
    }
}

/// Bits `shift..shift + 2` of every byte.
fn two_bits(bytes: &[u8], shift: usize, out: &mut [u8]) {
    for (code, &byte) in out.iter_mut().zip(bytes) {
        *code = byte >> shift & 3;
    }
}

/// Two-bit codes: each 32 bytes hold four runs of 32 elements, lowest bits first.
fn two_bit_runs(bytes: &[u8], codes: &mut [u8; MAX_BLOCK]) {
    for (run, out) in codes.chunks_exact_mut(32).enumerate() {
        two_bits(&bytes[run / 4 * 32..][..32], run % 4 * 2, out);
    }
}

/// `16 x (scale | min << 4), 64 bytes, d: f16, dmin: f16`.
pub(super) fn q2_k(bytes: &[u8], out: &mut Unpacked) {
    for (j, &byte) in bytes[..16].iter().enumerate() {
        out.scales[j] = (byte & 15) as i8;
        out.mins[j] = (byte >> 4) as i8;
    }
    two_bit_runs(&bytes[16..80], &mut out.codes);
    out.d = u16_at(bytes, 80);
    out.dmin = u16_at(bytes, 82);
}

/// The 6-bit scales of Q3_K, which are 32 too high.
pub(super) fn q3_k_scales(packed: &[u8; 12]) -> [i8; MAX_SUBS] {
    std::array::from_fn(|j| {
        let low = packed[j % 8] >> (j / 8 * 4) & 15;
        let high = packed[8 + j % 4] >> (j / 4 * 2) & 3;
        (low | high << 4) as i8 - 32
    })
}

/// `32 bytes of third bits, 64 bytes, 12 bytes of 6-bit scales, d: f16`.
pub(super) fn q3_k(bytes: &[u8], out: &mut Unpacked) {
    two_bit_runs(&bytes[32..96], &mut out.codes);
    for (run, codes) in out.codes.chunks_exact_mut(32).enumerate() {
        for (code, &mask) in codes.iter_mut().zip(&bytes[..32]) {
            *code |= (mask >> run & 1) << 2;
        }
    }
    out.scales = q3_k_scales(&array(bytes, 96));
    out.d = u16_at(bytes, 108);
}

/// The 6-bit scales and mins of Q4_K and Q5_K.
pub(super) fn six_bit_pairs(packed: &[u8; 12]) -> [[u8; 8]; 2] {
    let mut out = [[0; 8]; 2];
    for j in 0..4 {
        let (s, m, both) = (packed[j], packed[4 + j], packed[8 + j]);
        (out[0][j], out[0][4 + j]) = (s & 63, both & 15 | s >> 2 & 48);
        (out[1][j], out[1][4 + j]) = (m & 63, both >> 4 | m >> 2 & 48);
    }
    out
}

/// Writes [`six_bit_pairs`].
fn scales_and_mins(packed: &[u8; 12], out: &mut Unpacked) {
    let [scales, mins] = six_bit_pairs(packed);
    out.scales[..8].copy_from_slice(&scales.map(u8::cast_signed));
    out.mins[..8].copy_from_slice(&mins.map(u8::cast_signed));
}

/// Four-bit codes: each 32 bytes hold two runs of 32 elements, low halves first.
fn four_bit_runs(bytes: &[u8], codes: &mut [u8; MAX_BLOCK]) {
    for (bytes, out) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
        nibbles(bytes, out);
    }
}

/// `d: f16, dmin: f16, 12 bytes of 6-bit scales and mins, 128 bytes`.
pub(super) fn q4_k(bytes: &[u8], out: &mut Unpacked) {
    out.d = u16_at(bytes, 0);
    out.dmin = u16_at(bytes, 2);
    scales_and_mins(&array(bytes, 4), out);
    four_bit_runs(&bytes[16..144], &mut out.codes);
}

/// `d: f16, dmin: f16, 12 bytes of 6-bit scales and mins, 32 bytes of fifth bits, 128 bytes`.
pub(super) fn q5_k(bytes: &[u8], out: &mut Unpacked) {
    out.d = u16_at(bytes, 0);
    out.dmin = u16_at(bytes, 2);
    scales_and_mins(&array(bytes, 4), out);
    four_bit_runs(&bytes[48..176], &mut out.codes);
    for (run, codes) in out.codes.chunks_exact_mut(32).enumerate() {
        for (code, &mask) in codes.iter_mut().zip(&bytes[16..48]) {
            *code |= (mask >> run & 1) << 4;
        }
    }
}

/// `128 bytes of low halves, 64 bytes of high bits, 16 signed scales, d: f16`; two halves of 128 elements.
pub(super) fn q6_k(bytes: &[u8], out: &mut Unpacked) {
    for (half, codes) in out.codes.chunks_exact_mut(128).enumerate() {
        nibbles(&bytes[half * 64..][..64], codes);
        let high = &bytes[128 + half * 32..][..32];
        for (run, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (code, &byte) in codes.iter_mut().zip(high) {
                *code |= (byte >> (run * 2) & 3) << 4;
            }
        }
    }
    for (scale, &byte) in out.scales.iter_mut().zip(&bytes[192..208]) {
        *scale = byte as i8;
    }
    out.d = u16_at(bytes, 208);
}

/// The 6-bit scales of IQ4_XS, which are 32 too high: 8 x 2 high bits, 8 x 4 low bits.
pub(super) fn iq4_xs_scales(packed: &[u8; 6]) -> [i8; 8] {
    let high = u16_at(packed, 0);
    std::array::from_fn(|j| {
        let low = packed[2 + j / 2] >> (j % 2 * 4) & 15;
        (low | ((high >> (2 * j) & 3) as u8) << 4) as i8 - 32
    })
}

/// `d: f16, 6 bytes of 6-bit scales, 128 bytes`; runs of 32 elements, low halves first.
pub(super) fn iq4_xs(bytes: &[u8], out: &mut Unpacked) {
    out.d = u16_at(bytes, 0);
    out.scales[..8].copy_from_slice(&iq4_xs_scales(&array(bytes, 2)));
    for (bytes, out) in bytes[8..136].chunks_exact(16).zip(out.codes.chunks_exact_mut(32)) {
        nibbles(bytes, out);
    }
}
