//! The kernels that a band needs: those for the formats of its matrices.

use super::error::BandError;
use super::spec::BandSpec;
use crate::compile::KernelCompiler;
use crate::hip::Device;
use crate::launch::{Kernels, LaunchError};
use spillway_kernels::formats::Format;
use spillway_kernels::hip::{DeviceSource, SOURCES};
use spillway_model::file::ModelFile;
use spillway_model::program::Program;
use spillway_worker::LoadProgress;
use spillway_worker::weights::{self, format_of};
use std::time::Duration;

/// How often a load says that kernels are still being compiled.
const COMPILE_TICK: Duration = Duration::from_millis(100);

/// Compiles what is not in the cache, all at once, telling that the load goes on, then loads the kernels.
pub(super) fn kernels(
    model: &ModelFile,
    spec: &BandSpec,
    device: &Device,
    compiler: &KernelCompiler,
    progress: &mut LoadProgress<'_>,
) -> Result<Kernels, BandError> {
    let formats = formats(model, spec)?;
    let sources: Vec<DeviceSource<'_>> =
        SOURCES.iter().filter(|source| serves(source, &formats)).copied().collect();
    let arch = device.info().arch.parse().map_err(LaunchError::from)?;
    let compiled = std::thread::scope(|scope| {
        let compiling = scope.spawn(|| compiler.compile_all(&sources, &arch));
        while !compiling.is_finished() {
            if progress(0, 1).is_break() {
                return Err(BandError::Cancelled);
            }
            std::thread::park_timeout(COMPILE_TICK);
        }
        Ok(compiling.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    for artifact in compiled {
        artifact.map_err(LaunchError::from)?;
    }
    Ok(Kernels::load(device, compiler, &formats)?)
}

/// Formats of the band's matrices.
fn formats(model: &ModelFile, spec: &BandSpec) -> Result<Vec<Format>, BandError> {
    let Program { layers, head, .. } = model.program();
    let mut formats = weights::formats(model, &layers[spec.all_layers()])?;
    if spec.head {
        let format = format_of(&head.output, &model.weight(&head.output)?)?;
        if !formats.contains(&format) {
            formats.push(format);
        }
    }
    Ok(formats)
}

/// Whether a band with matrices of `formats` needs a source: those of other formats it does not.
fn serves(source: &DeviceSource<'_>, formats: &[Format]) -> bool {
    let of = source.name.strip_prefix("matmul_");
    of.is_none_or(|name| formats.iter().any(|format| format.name().eq_ignore_ascii_case(name)))
}
