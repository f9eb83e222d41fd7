//! Shapes and arguments of kernel launches.

use super::DeviceSlice;
use std::ffi::c_void;

/// Most arguments a kernel may have.
pub(super) const MAX_ARGS: usize = 32;

/// How many threads run a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in each direction.
    pub grid: [u32; 3],
    /// Threads of a block: whole waves.
    pub block: u32,
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
}

impl Launch {
    /// `blocks` blocks of `block` threads, without dynamic shared memory.
    pub fn linear(blocks: u32, block: u32) -> Self {
        Self { grid: [blocks, 1, 1], block, shared_bytes: 0 }
    }

    /// Limits that all devices share.
    pub(super) fn check(self, wave: u32, max_threads: u32) -> Result<(), String> {
        let [x, y, z] = self.grid;
        if x == 0 || y == 0 || z == 0 || x > i32::MAX as u32 || y > 65535 || z > 65535 {
            return Err(format!("a grid of {x} x {y} x {z} blocks"));
        }
        if self.block == 0 || !self.block.is_multiple_of(wave) || self.block > max_threads {
            return Err(format!(
                "a block of {} threads; it takes multiples of {wave} up to {max_threads}",
                self.block
            ));
        }
        Ok(())
    }
}

/// Words of the largest kernel argument.
const MAX_ARG_WORDS: usize = 4;

/// One kernel argument, by value: an address, a number of up to 8 bytes, or a structure of 32.
#[derive(Debug, Clone, Copy)]
pub struct Arg {
    // Little-endian, so that a pointer to it is a pointer to the narrower number too.
    bits: [u64; MAX_ARG_WORDS],
}

impl Arg {
    pub(super) fn as_ptr(&self) -> *mut c_void {
        std::ptr::from_ref(&self.bits).cast_mut().cast()
    }
}

#[cfg(target_endian = "big")]
compile_error!("kernel arguments are passed as the low bytes of 64-bit words");

macro_rules! arg_from {
    ($($type:ty: |$value:ident| $bits:expr;)*) => {
        $(impl From<$type> for Arg {
            fn from($value: $type) -> Self {
                Self { bits: [$bits, 0, 0, 0] }
            }
        })*
    };
}

impl From<[u64; MAX_ARG_WORDS]> for Arg {
    fn from(bits: [u64; MAX_ARG_WORDS]) -> Self {
        Self { bits }
    }
}

arg_from! {
    DeviceSlice: |slice| slice.address();
    u64: |value| value;
    u32: |value| value.into();
    i32: |value| value.cast_unsigned().into();
    f32: |value| value.to_bits().into();
}
