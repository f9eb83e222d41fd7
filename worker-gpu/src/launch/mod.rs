//! One typed function per operation: checks sizes, chooses shapes, queues the kernel.
//!
//! Everything works on device memory that the caller owns, and only queues: nothing allocates, nothing waits. Sizes are
//! checked here against the slices; numbers that live on the device ([`RowMeta`], [`SpanMeta`], block tables, token ids)
//! are read by the kernels as they are, so the caller validates them before it writes them. All of a step's variable
//! facts live on the device, so that a captured graph can be replayed with others.
//!
//! **The promise.** What a row of a step gets depends on that row, its sequence's state and the weights alone: not on the
//! batch, the chunking of a prompt, or the shapes chosen here. There are no atomics; every sum has one fixed order.

#![expect(
    clippy::cast_possible_truncation,
    reason = "sizes of blocks are at most 1024; dimensions are checked"
)]

mod attention;
mod delta_net;
mod error;
mod gated;
mod kv_cache;
mod matmul;
mod rows;

pub use attention::{Attention, AttentionBuffers, HeadSteps, Heads, MAX_ALONE, PARTITION, StepSize};
pub use delta_net::{DeltaNet, DeltaNetBuffers, DeltaNetDims};
pub use error::LaunchError;
pub use gated::GatedBuffers;
pub use kv_cache::{KvCache, KvElement};
pub use matmul::{Inputs, Int8Rows, Matrix, Output, Products};
pub use rows::{Norm, NormRows, Pairing, Rope};

use crate::compile::{Arch, KernelCompiler};
use crate::hip::{Arg, Device, DeviceSlice, Function, Launch, Module, Stream};
use spillway_kernels::formats::Format;
use std::collections::BTreeMap;

/// What kernels know of a row (token) of the step. An array of these, one per row, is written to the device for each step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct RowMeta {
    /// Position of the token in its sequence.
    pub position: u32,
    /// Where the sequence's KV blocks start in the step's array of block numbers.
    pub table: u32,
    /// Index of the token's span in the step's array of [`SpanMeta`].
    pub span: u32,
}

/// What kernels know of a span: consecutive tokens of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct SpanMeta {
    /// Row of its first token.
    pub first_row: u32,
    /// Tokens.
    pub tokens: u32,
    /// State slot of the sequence.
    pub slot: u32,
    /// 1 to start from the empty state instead of the slot's.
    pub reset: u32,
}

/// The kernels of one device, loaded.
#[derive(Debug)]
pub struct Kernels {
    rows: rows::Entries,
    quantize: rows::QuantizeEntries,
    norm: rows::NormEntries,
    residual: rows::ResidualEntries,
    attention: attention::Entries,
    attention_tiles: attention::Tiles,
    delta_net: delta_net::Entries,
    delta_step: delta_net::StepEntries,
    matmul: BTreeMap<Format, matmul::Entries>,
    gated: gated::Entries,
    compute_units: usize,
    matrix_units: bool,
    products: Products,
}

impl Kernels {
    /// Compiles (or finds in the cache) and loads everything that matrices of `formats` need.
    ///
    /// # Errors
    /// [`LaunchError::Compile`], [`LaunchError::Hip`].
    pub fn load(device: &Device, compiler: &KernelCompiler, formats: &[Format]) -> Result<Self, LaunchError> {
        let arch: Arch = device.info().arch.parse()?;
        let matrix_units = arch.has_matrix_units();
        let loader = Loader { device, compiler, arch };
        let matmul = formats.iter().map(|format| Ok((*format, matmul::Entries::load(&loader, *format)?)));
        Ok(Self {
            rows: rows::Entries::load(&loader)?,
            quantize: rows::QuantizeEntries::load(&loader)?,
            norm: rows::NormEntries::load(&loader)?,
            residual: rows::ResidualEntries::load(&loader)?,
            attention: attention::Entries::load(&loader)?,
            attention_tiles: attention::Tiles::load(&loader)?,
            delta_net: delta_net::Entries::load(&loader)?,
            delta_step: delta_net::StepEntries::load(&loader)?,
            matmul: matmul.collect::<Result<_, LaunchError>>()?,
            gated: gated::Entries::load(&loader)?,
            compute_units: device.info().compute_units as usize,
            matrix_units,
            products: Products::Fitting,
        })
    }

    /// The same with or without the kernels for matrix units, whatever the device has. Products are the same bits; attention
    /// on matrix units rounds queries and weights to f16. For tests and measurements.
    #[must_use]
    pub fn with_matrix_units(self, matrix_units: bool) -> Self {
        Self { matrix_units, ..self }
    }

    /// The same with these kernels for products, whatever the device has: for tests and measurements.
    #[must_use]
    pub fn with_products(self, products: Products) -> Self {
        Self { products, ..self }
    }
}

/// Finds entry points.
struct Loader<'a> {
    device: &'a Device,
    compiler: &'a KernelCompiler,
    arch: Arch,
}

impl Loader<'_> {
    fn module(&self, source: &str) -> Result<Module, LaunchError> {
        let Some(source) = spillway_kernels::hip::source(source) else {
            return Err(LaunchError::NoSource { name: source.to_owned() });
        };
        let artifact = self.compiler.compile(source, &self.arch)?;
        Ok(Module::load(self.device, source.name, &artifact.image)?)
    }
}

/// A struct of functions, named as the entry points of a source.
macro_rules! entries {
    ($name:ident: $source:literal { $($field:ident),* $(,)? }) => {
        #[derive(Debug)]
        pub(super) struct $name {
            $($field: crate::hip::Function,)*
        }
        impl $name {
            pub(super) fn load(loader: &super::Loader<'_>) -> Result<Self, super::LaunchError> {
                let module = loader.module($source)?;
                Ok(Self { $($field: module.function(stringify!($field))?,)* })
            }
        }
    };
}
use entries;

/// Queues a kernel whose arguments were checked.
fn queue(stream: &Stream, function: &Function, launch: Launch, args: &[Arg]) -> Result<(), LaunchError> {
    // SAFETY: arguments are built next to the kernels' declarations by the functions of this module, which check the sizes
    // of all memory they name; what kernels read from device arrays is the caller's promise (module documentation), and
    // harms only the device's own memory.
    Ok(unsafe { stream.launch(function, launch, args) }?)
}

/// An operation's name and its checks.
#[derive(Clone, Copy)]
struct Check(&'static str);

impl Check {
    /// `slice` holds at least `count` values of `T`.
    fn holds<T>(self, what: &'static str, slice: DeviceSlice, count: usize) -> Result<Arg, LaunchError> {
        let want = count.saturating_mul(size_of::<T>());
        if slice.len() < want {
            return Err(LaunchError::Size { operation: self.0, what, got: slice.len(), want });
        }
        Ok(slice.into())
    }

    /// Codes and scales of an 8-bit form of `rows` rows of `cols`, or nothing.
    fn int8(self, form: Option<&Int8Rows>, rows: usize, cols: usize) -> Result<[Arg; 2], LaunchError> {
        let Some(form) = form else { return Ok([optional(None), optional(None)]) };
        self.rule(form.cols() == cols, "columns of the 8-bit form", form.cols(), "those of the rows")?;
        self.rule(form.rows() >= rows, "rows of the 8-bit form", form.rows(), "as many as are written")?;
        Ok([form.codes().into(), form.scales().into()])
    }

    /// A dimension as kernels take it.
    fn number(self, what: &'static str, value: usize) -> Result<u32, LaunchError> {
        u32::try_from(value).map_err(|_| self.unsupported(what, value, "below 2^32"))
    }

    fn unsupported(self, what: &'static str, got: usize, rule: &'static str) -> LaunchError {
        LaunchError::Unsupported { operation: self.0, what, got, rule }
    }

    /// `Ok` when a rule holds.
    fn rule(
        self,
        holds: bool,
        what: &'static str,
        got: usize,
        rule: &'static str,
    ) -> Result<(), LaunchError> {
        if holds { Ok(()) } else { Err(self.unsupported(what, got, rule)) }
    }
}

/// No memory, for kernels whose argument is optional.
fn optional(argument: Option<Arg>) -> Arg {
    argument.unwrap_or(Arg::from(0u64))
}
