//! Architectures as data: each file turns a [`ModelConfig`] into a [`Program`]. A new dense architecture is one file and
//! one row of [`ARCHITECTURES`].

mod build;
mod llama;
mod qwen2;
mod qwen3;
mod qwen35;
mod refusals;

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::gguf::shortened;
use crate::program::Program;
use build::ProgramBuilder;

pub(crate) use refusals::{layer_of, note_keys, refuse_keys, refuse_tensors};

/// One row of the registry.
#[derive(Debug, Clone, Copy)]
pub struct Architecture {
    /// Value of `general.architecture`.
    pub name: &'static str,
    /// Whether some layers are recurrent (the configuration then has [`ModelConfig::recurrent`]).
    pub hybrid: bool,
    /// Adds the layers to a program.
    build: fn(&mut ProgramBuilder<'_>) -> Result<(), ModelError>,
}

/// Every supported architecture.
pub const ARCHITECTURES: &[Architecture] = &[
    Architecture { name: "llama", hybrid: false, build: llama::build },
    Architecture { name: "qwen2", hybrid: false, build: qwen2::build },
    Architecture { name: "qwen3", hybrid: false, build: qwen3::build },
    Architecture { name: "qwen35", hybrid: true, build: qwen35::build },
];

impl Architecture {
    /// The architecture called `name`, or the refusal that lists the supported ones.
    pub fn find(name: &str) -> Result<&'static Architecture, ModelError> {
        ARCHITECTURES.iter().find(|a| a.name == name).ok_or_else(|| {
            let names: Vec<_> = ARCHITECTURES.iter().map(|a| a.name).collect();
            ModelError::UnknownArchitecture {
                found: shortened(name).into_owned(),
                supported: names.join(", "),
            }
        })
    }

    /// The program of a model of this architecture. `has` tells which tensors the file holds: output projection and
    /// some biases are optional. `divisors` are the file's own divisors of the rotary frequencies.
    pub(crate) fn program(
        &self,
        config: &ModelConfig,
        has: &dyn Fn(&str) -> bool,
        divisors: Option<&[f32]>,
    ) -> Result<Program, ModelError> {
        let mut builder = ProgramBuilder::new(config, has, divisors);
        (self.build)(&mut builder)?;
        Ok(builder.finish())
    }
}
