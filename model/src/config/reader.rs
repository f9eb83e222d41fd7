//! Reads the numbers of one architecture, each inside its bounds.

use crate::error::ModelError;
use crate::gguf::{Metadata, Value, required};
use std::ops::RangeInclusive;

/// Metadata seen through the prefix of an architecture.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'a> {
    metadata: Metadata<'a>,
    prefix: &'a str,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(metadata: Metadata<'a>, prefix: &'a str) -> Self {
        Reader { metadata, prefix }
    }

    pub(crate) fn metadata(&self) -> Metadata<'a> {
        self.metadata
    }

    /// The full key of `name`.
    pub(crate) fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.metadata.get(&self.key(name)).is_some()
    }

    /// A refusal of the value of `name`.
    pub(crate) fn bad(&self, name: &str, reason: String) -> ModelError {
        ModelError::BadConfig { key: self.key(name), reason }
    }

    fn bounded(&self, name: &str, found: u32, bounds: &RangeInclusive<u32>) -> Result<usize, ModelError> {
        match usize::try_from(found) {
            Ok(value) if bounds.contains(&found) => Ok(value),
            _ => Err(self.bad(name, format!("{found} is not within {} to {}", bounds.start(), bounds.end()))),
        }
    }

    /// A required whole number.
    pub(crate) fn number(&self, name: &str, bounds: RangeInclusive<u32>) -> Result<usize, ModelError> {
        let key = self.key(name);
        self.bounded(name, required(&key, self.metadata.u32(&key)?)?, &bounds)
    }

    /// A whole number with a default.
    pub(crate) fn number_or(
        &self,
        name: &str,
        bounds: RangeInclusive<u32>,
        default: usize,
    ) -> Result<usize, ModelError> {
        match self.metadata.u32(&self.key(name))? {
            Some(found) => self.bounded(name, found, &bounds),
            None => Ok(default),
        }
    }

    /// A whole number that some converters write once per layer; layers that differ are refused.
    pub(crate) fn uniform(
        &self,
        name: &str,
        bounds: RangeInclusive<u32>,
        default: Option<usize>,
    ) -> Result<usize, ModelError> {
        let key = self.key(name);
        match (self.metadata.get(&key), default) {
            (Some(Value::Array(_)), _) => {
                let values = self.metadata.u32_array(&key)?.unwrap_or_default();
                let Some(&first) = values.first() else {
                    return Err(self.bad(name, "the list is empty".to_owned()));
                };
                if values.iter().any(|&v| v != first) {
                    let reason = "layers of different sizes are not computed";
                    return Err(ModelError::Unsupported {
                        what: format!("metadata key {key:?}"),
                        reason: reason.to_owned(),
                    });
                }
                self.bounded(name, first, &bounds)
            }
            (None, Some(default)) => Ok(default),
            _ => self.number(name, bounds),
        }
    }

    /// A float when the file states it.
    pub(crate) fn float_maybe(
        &self,
        name: &str,
        bounds: RangeInclusive<f32>,
    ) -> Result<Option<f32>, ModelError> {
        match self.metadata.f32(&self.key(name))? {
            Some(found) if bounds.contains(&found) => Ok(Some(found)),
            Some(found) => {
                Err(self
                    .bad(name, format!("{found} is not within {:e} to {:e}", bounds.start(), bounds.end())))
            }
            None => Ok(None),
        }
    }

    /// A required float.
    pub(crate) fn float(&self, name: &str, bounds: RangeInclusive<f32>) -> Result<f32, ModelError> {
        Ok(required(&self.key(name), self.float_maybe(name, bounds)?)?)
    }
}
