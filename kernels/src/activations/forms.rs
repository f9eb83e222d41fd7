//! What matrices read their inputs as.

use crate::formats::Format;

/// Columns that share a scale.
pub(crate) const X_BLOCK: usize = 32;
/// 32-bit words that the codes of a block take, per plane and token.
pub(crate) const PLANE_WORDS: usize = X_BLOCK / 4;
/// Bits by which one plane of codes weighs more than the next.
pub(crate) const PLANE_BITS: u32 = 7;
/// Largest code of a plane. Codes are symmetric, so that negating one cannot overflow.
pub(crate) const PLANE_MAX: i32 = 127;

/// What inputs of quantised weights are rounded to; one choice for every weight format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Codes {
    /// One plane of 8-bit codes: steps of 1/127 of the largest value of a block of 32.
    Int8,
    /// Two planes, a code is `128 · high + low`: steps of 1/16256, for up to twice the arithmetic.
    Int16,
}

impl Codes {
    /// Every choice.
    pub const ALL: [Codes; 2] = [Codes::Int8, Codes::Int16];

    /// Planes of 8-bit codes.
    pub(crate) const fn planes(self) -> usize {
        match self {
            Codes::Int8 => 1,
            Codes::Int16 => 2,
        }
    }

    /// 32-bit words of one token's codes, sums and scales.
    pub(crate) const fn token_words(self, cols: usize) -> usize {
        cols.div_ceil(X_BLOCK) * block_words(self.planes())
    }
}

/// 32-bit words of a block with that many planes, per token: the codes, the scale and three sums.
pub(crate) const fn block_words(planes: usize) -> usize {
    planes * PLANE_WORDS + 4
}

/// The forms in which an input is kept for all matrices that read it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Forms {
    /// For quantised weights.
    pub codes: Option<Codes>,
    /// The f32 values, for floating-point weights.
    pub float: bool,
}

impl Forms {
    /// What weights of these formats read, when quantised ones read `codes`.
    pub fn of(formats: impl IntoIterator<Item = Format>, codes: Codes) -> Self {
        formats.into_iter().fold(Self::default(), |forms, format| {
            forms.and(if format.is_quantised() {
                Self { codes: Some(codes), float: false }
            } else {
                Self { codes: None, float: true }
            })
        })
    }

    /// Both; of two kinds of codes the finer one.
    pub fn and(self, other: Self) -> Self {
        Self { codes: self.codes.max(other.codes), float: self.float || other.float }
    }

    /// Whether weights of that format can read the input.
    pub fn serve(self, format: Format) -> bool {
        if format.is_quantised() { self.codes.is_some() } else { self.float }
    }

    /// 32-bit words of one token: codes, then f32 values.
    pub(super) fn token_words(self, cols: usize) -> (usize, usize) {
        (self.codes.map_or(0, |codes| codes.token_words(cols)), if self.float { cols } else { 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_input_has_the_forms_that_its_readers_want() {
        let forms = |formats: &[Format]| Forms::of(formats.iter().copied(), Codes::Int16);
        assert_eq!(forms(&[]), Forms::default());
        assert_eq!(forms(&[Format::BF16, Format::F32]), Forms { codes: None, float: true });
        assert_eq!(forms(&[Format::Q4_K, Format::Q6_K]), Forms { codes: Some(Codes::Int16), float: false });
        let mixed = forms(&[Format::Q4_K, Format::F16]);
        assert_eq!(mixed, Forms { codes: Some(Codes::Int16), float: true });
        assert!(mixed.serve(Format::Q8_0) && mixed.serve(Format::F32));
        assert!(!forms(&[Format::F32]).serve(Format::Q8_0) && !forms(&[Format::Q8_0]).serve(Format::F32));
    }
}
