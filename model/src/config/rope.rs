//! Rotary embedding as the file describes it, and the frequencies that follow.
//!
//! Scalings: `linear` divides every frequency; `yarn` (arXiv 2309.00071) divides low frequencies, keeps high ones, ramps
//! between, and scales cos and sin by `1 + 0.1 ln(factor)`; llama 3 writes its scaling as a divisor per frequency
//! (`rope_freqs.weight`), which comes before the others.

use super::reader::Reader;
use crate::error::ModelError;
use crate::gguf::shortened;
use std::f64::consts::PI;
use std::ops::RangeInclusive;

const BASE: RangeInclusive<f32> = 1.001..=1e12;
const FACTOR: RangeInclusive<f32> = 1.0..=1e6;
const DEFAULT_BASE: f32 = 10_000.0;

/// Rotary embedding of a model.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RopeConfig {
    /// Base of the frequencies: pair `i` turns by `base^(-2 i / rotary_dim)` radians per position.
    pub base: f32,
    /// Rotated dimensions of a head; even, at most the head's width.
    pub rotary_dim: usize,
    /// How frequencies are changed for contexts longer than the trained one.
    pub scaling: RopeScaling,
    /// Extra factor on cos and sin that the file states.
    pub attention_factor: f32,
}

/// Change of frequencies for long contexts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// None.
    None,
    /// Every frequency divided by the factor.
    Linear(f32),
    /// By frequency.
    Yarn(Yarn),
}

/// Parameters of YaRN.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Yarn {
    /// Divisor of the low frequencies.
    pub factor: f32,
    /// Context the model was trained with before scaling, in tokens.
    pub original_context: usize,
    /// Weight of keeping high frequencies as they are: 1 keeps them, 0 divides them like the others.
    pub ext_factor: f32,
    /// Turns within the original context above which a frequency is kept.
    pub beta_fast: f32,
    /// Turns within the original context below which a frequency is divided.
    pub beta_slow: f32,
}

impl RopeConfig {
    pub(super) fn read(keys: &Reader<'_>, key_dim: usize, context: usize) -> Result<RopeConfig, ModelError> {
        let name = "rope.dimension_count";
        let rotary_dim = keys.number_or(name, 1..=u32::MAX, key_dim)?;
        if rotary_dim > key_dim || rotary_dim % 2 != 0 {
            return Err(
                keys.bad(name, format!("{rotary_dim} is not an even number up to the head width {key_dim}"))
            );
        }
        let stated = keys.float_maybe("rope.scaling.attn_factor", 1e-3..=1e3)?;
        let yarn = keys.float_maybe("rope.scaling.yarn_attn_factor", 1e-3..=1e3)?;
        let rope = RopeConfig {
            base: keys.float_maybe("rope.freq_base", BASE)?.unwrap_or(DEFAULT_BASE),
            rotary_dim,
            scaling: RopeScaling::read(keys, context)?,
            attention_factor: stated.unwrap_or(1.0) * yarn.unwrap_or(1.0),
        };
        rope.check_sections(keys)?;
        Ok(rope)
    }

    /// Sections assign frequencies to the axes of an image; text has one position on all of them, so they do not matter
    /// as long as every frequency belongs to an axis.
    fn check_sections(&self, keys: &Reader<'_>) -> Result<(), ModelError> {
        let name = "rope.dimension_sections";
        let Some(sections) = keys.metadata().u32_array(&keys.key(name))? else { return Ok(()) };
        let pairs = self.rotary_dim / 2;
        let axes: u64 = sections.iter().take(3).map(|&n| u64::from(n)).sum();
        if axes == pairs as u64 {
            return Ok(());
        }
        Err(keys.bad(
            name,
            format!("the first three sections add up to {axes}, not to the {pairs} rotated pairs"),
        ))
    }

    /// Angular frequency per pair, radians per position. `divisors` are the file's own, one per pair.
    pub(crate) fn inv_freq(&self, divisors: Option<&[f32]>) -> Vec<f32> {
        let (base, dim) = (f64::from(self.base), self.rotary_dim as f64);
        let divisor = |i: usize| divisors.map_or(1.0, |d| f64::from(d[i]));
        let plain = (0..self.rotary_dim / 2).map(|i| base.powf(-2.0 * i as f64 / dim) / divisor(i));
        let scaled = plain.enumerate().map(|(i, freq)| match self.scaling {
            RopeScaling::None => freq,
            RopeScaling::Linear(factor) => freq / f64::from(factor),
            RopeScaling::Yarn(yarn) => freq * yarn.scale(i, base, dim),
        });
        #[expect(clippy::cast_possible_truncation, reason = "computed in f64, used in f32")]
        scaled.map(|freq| freq as f32).collect()
    }

    /// Factor on cos and sin.
    pub(crate) fn magnitude(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn(yarn) if yarn.ext_factor != 0.0 => {
                self.attention_factor * (1.0 + 0.1 * yarn.factor.ln())
            }
            _ => self.attention_factor,
        }
    }
}

impl Yarn {
    /// Factor on the frequency of pair `i` of `dim / 2`.
    fn scale(&self, i: usize, base: f64, dim: f64) -> f64 {
        // The (fractional) pair that makes `turns` turns within the original context.
        let pair_of = |turns: f32| {
            let wave = self.original_context as f64 / (f64::from(turns) * 2.0 * PI);
            dim * wave.ln() / (2.0 * base.ln())
        };
        let low = pair_of(self.beta_fast).floor().max(0.0);
        let high = pair_of(self.beta_slow).ceil().min(dim - 1.0);
        let ramp = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
        let keep = (1.0 - ramp) * f64::from(self.ext_factor);
        keep + (1.0 - keep) / f64::from(self.factor)
    }
}

impl RopeScaling {
    fn read(keys: &Reader<'_>, context: usize) -> Result<RopeScaling, ModelError> {
        let name = "rope.scaling.type";
        let factor_name = "rope.scaling.factor";
        let legacy = "rope.scale_linear";
        let kind = keys.metadata().str(&keys.key(name))?;
        match kind {
            Some("none") => Ok(RopeScaling::None),
            // Files that state a factor and no type mean linear; before that, the factor had another key.
            None | Some("linear") => {
                let factor = keys.float_maybe(factor_name, FACTOR)?.or(keys.float_maybe(legacy, FACTOR)?);
                Ok(factor.filter(|&f| f != 1.0).map_or(RopeScaling::None, RopeScaling::Linear))
            }
            Some("yarn") => {
                let original = "rope.scaling.original_context_length";
                Ok(RopeScaling::Yarn(Yarn {
                    factor: keys.float(factor_name, FACTOR)?,
                    original_context: keys.number_or(original, 1..=1 << 27, context)?,
                    ext_factor: keys.float_maybe("rope.scaling.yarn_ext_factor", 0.0..=1.0)?.unwrap_or(1.0),
                    beta_fast: keys.float_maybe("rope.scaling.yarn_beta_fast", 1e-3..=1e6)?.unwrap_or(32.0),
                    beta_slow: keys.float_maybe("rope.scaling.yarn_beta_slow", 1e-3..=1e6)?.unwrap_or(1.0),
                }))
            }
            Some(other) => Err(ModelError::Unsupported {
                what: format!("rope scaling {:?} (metadata key {:?})", shortened(other), keys.key(name)),
                reason: "none, linear, yarn and llama 3 frequency factors are computed".to_owned(),
            }),
        }
    }
}

#[cfg(test)]
#[path = "rope_tests.rs"]
mod tests;
