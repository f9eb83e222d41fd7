//! The dispatch table: every leaf kernel compiled once per instruction set.
//!
//! One line per kernel; the macro makes the table's type and an instance per instruction set, in which the generic
//! kernel is inlined into a function that may use that set's instructions.

use super::attention::kernel as attention;
use super::deltanet::kernel as deltanet;
use super::{rope, rows};
use crate::isa::KernelSet;
use crate::lanes;
use half::f16;

macro_rules! kernel_table {
    ($($name:ident($($arg:ident: $ty:ty),* $(,)?) = $module:ident::$kernel:ident $(<$element:ty>)?;)*) => {
        /// Leaf kernels of one instruction set. See the generic function of each for what it does and requires.
        pub(crate) struct KernelTable {
            $(pub(crate) $name: unsafe fn($($ty),*),)*
        }

        kernel_table! { @instance PLAIN, lanes::Plain, inline, $($name($($arg: $ty),*) = $module::$kernel $(<$element>)?;)* }
        #[cfg(target_arch = "x86_64")]
        kernel_table! {
            @instance AVX2, lanes::Avx2, target_feature(enable = "avx2,fma,f16c"),
            $($name($($arg: $ty),*) = $module::$kernel $(<$element>)?;)*
        }
        #[cfg(target_arch = "x86_64")]
        kernel_table! {
            @instance AVX512, lanes::Avx512, target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"),
            $($name($($arg: $ty),*) = $module::$kernel $(<$element>)?;)*
        }
    };
    (@instance $table:ident, $lanes:ty, $attribute:meta,
        $($name:ident($($arg:ident: $ty:ty),*) = $module:ident::$kernel:ident $(<$element:ty>)?;)*) => {
        static $table: KernelTable = {
            $(
                #[$attribute]
                unsafe fn $name($($arg: $ty),*) {
                    // SAFETY: the caller keeps the kernel's contract; the instruction set is there, because the
                    // table of a set is handed out only after detection.
                    unsafe { $module::$kernel::<$lanes $(, $element)?>($($arg),*) }
                }
            )*
            KernelTable { $($name),* }
        };
    };
}

kernel_table! {
    rms_norm(src: *const f32, dst: *mut f32, weight: &[f32], eps: f32) = rows::rms_norm;
    silu_mul(gate: &mut [f32], up: &[f32]) = rows::silu_mul;
    sigmoid_mul(dst: &mut [f32], gate: &[f32]) = rows::sigmoid_mul;
    weigh(values: &mut [f32], exponents: rows::Exponents, sum: &mut f32) = rows::weigh;
    add(dst: &mut [f32], src: &[f32]) = rows::add;
    rope_halves(row: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) = rope::halves;
    rope_adjacent(row: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) = rope::adjacent;
    append_f32(from: &attention::Rows<'_>, to: attention::BlockMut<f32>) = attention::append<f32>;
    append_f16(from: &attention::Rows<'_>, to: attention::BlockMut<f16>) = attention::append<f16>;
    attend_f32(tile: &attention::Tile<'_, f32>, scratch: &mut attention::TileScratch) = attention::attend<f32>;
    attend_f16(tile: &attention::Tile<'_, f16>, scratch: &mut attention::TileScratch) = attention::attend<f16>;
    fold(into: attention::RowState<'_>, part: attention::RowPart<'_>) = attention::fold;
    finish(state: attention::RowState<'_>, gate: Option<&[f32]>, out: &mut [f32]) = attention::finish;
    conv(job: &deltanet::Conv<'_>, out: &mut [f32]) = deltanet::conv;
    delta_rule(job: &mut deltanet::Head<'_>) = deltanet::delta_rule;
}

/// The table that needs nothing of a CPU.
pub(crate) fn plain() -> &'static KernelTable {
    &PLAIN
}

/// The table of `set`, or `None` where this CPU lacks it.
pub(crate) fn kernel_table(set: KernelSet) -> Option<&'static KernelTable> {
    let table = match set {
        KernelSet::Scalar => &PLAIN,
        #[cfg(target_arch = "x86_64")]
        KernelSet::Avx2 => &AVX2,
        #[cfg(target_arch = "x86_64")]
        KernelSet::Avx512 | KernelSet::Avx512Vnni => &AVX512,
        #[cfg(not(target_arch = "x86_64"))]
        KernelSet::Avx2 | KernelSet::Avx512 | KernelSet::Avx512Vnni => return None,
    };
    set.is_supported().then_some(table)
}
