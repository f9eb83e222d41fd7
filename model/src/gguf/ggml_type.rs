//! The element types a GGUF tensor can have: name, block size, and whether Spillway computes with it.
//!
//! Facts of the format: `ggml.h` (type numbers) and `ggml-common.h` (block layouts) of the ggml project.

/// One row of the type table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TypeInfo {
    /// Name as every tool spells it.
    pub name: &'static str,
    /// Elements of one block (1 for plain types).
    pub block_elems: usize,
    /// Bytes of one block.
    pub block_bytes: usize,
    /// Whether a weight of this type can be used; the others are known by size only.
    pub runnable: bool,
}

/// The type number of a tensor, as the file states it; possibly one that no table knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GgmlType(pub u32);

macro_rules! ggml_types {
    ($($id:literal $constant:ident $elems:literal $bytes:literal $runnable:literal;)*) => {
        impl GgmlType {
            $(
                #[doc = concat!("`", stringify!($constant), "`: ", stringify!($bytes), " bytes per ", stringify!($elems), " elements.")]
                pub const $constant: GgmlType = GgmlType($id);
            )*

            /// Every type the table knows, in numeric order.
            pub const KNOWN: &[GgmlType] = &[$(GgmlType::$constant),*];

            /// The table row of this type, or none for a number the table does not know.
            pub fn info(self) -> Option<TypeInfo> {
                match self.0 {
                    $($id => Some(TypeInfo {
                        name: stringify!($constant),
                        block_elems: $elems,
                        block_bytes: $bytes,
                        runnable: $runnable,
                    }),)*
                    _ => None,
                }
            }
        }
    };
}

ggml_types! {
    // id name       elements bytes runnable
     0 F32            1   4 true;
     1 F16            1   2 true;
     2 Q4_0          32  18 true;
     3 Q4_1          32  20 true;
     6 Q5_0          32  22 true;
     7 Q5_1          32  24 true;
     8 Q8_0          32  34 true;
     9 Q8_1          32  36 false;
    10 Q2_K         256  84 true;
    11 Q3_K         256 110 true;
    12 Q4_K         256 144 true;
    13 Q5_K         256 176 true;
    14 Q6_K         256 210 true;
    15 Q8_K         256 292 false;
    16 IQ2_XXS      256  66 false;
    17 IQ2_XS       256  74 false;
    18 IQ3_XXS      256  98 false;
    19 IQ1_S        256  50 false;
    20 IQ4_NL        32  18 true;
    21 IQ3_S        256 110 false;
    22 IQ2_S        256  82 false;
    23 IQ4_XS       256 136 true;
    24 I8             1   1 false;
    25 I16            1   2 false;
    26 I32            1   4 false;
    27 I64            1   8 false;
    28 F64            1   8 false;
    29 IQ1_M        256  56 false;
    30 BF16           1   2 true;
    34 TQ1_0        256  54 false;
    35 TQ2_0        256  66 false;
    39 MXFP4         32  17 false;
    40 NVFP4         64  36 false;
}

impl GgmlType {
    /// Bytes of a row of `elems` elements; none when the type is unknown, the row is not whole blocks, or the size
    /// does not fit 64 bits.
    pub fn row_bytes(self, elems: u64) -> Option<u64> {
        let info = self.info()?;
        let per = info.block_elems as u64;
        if !elems.is_multiple_of(per) {
            return None;
        }
        (elems / per).checked_mul(info.block_bytes as u64)
    }

    /// Whether weights of this type can be computed with.
    pub fn is_runnable(self) -> bool {
        self.info().is_some_and(|info| info.runnable)
    }

    /// Names of the types that can be computed with, for messages.
    pub fn runnable_names() -> String {
        let names: Vec<_> =
            Self::KNOWN.iter().filter_map(|t| t.info()).filter(|i| i.runnable).map(|i| i.name).collect();
        names.join(", ")
    }
}

impl std::fmt::Display for GgmlType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.info() {
            Some(info) => f.write_str(info.name),
            None => write!(f, "type {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(GgmlType::Q4_K.row_bytes(512), Some(288));
        assert_eq!(GgmlType::Q4_K.row_bytes(288), None, "not a multiple of 256");
        assert_eq!(GgmlType(99).row_bytes(32), None, "unknown type");
        assert_eq!(GgmlType::F32.row_bytes(u64::MAX), None, "size overflows");
    }

    #[test]
    fn names_read_like_other_tools_spell_them() {
        assert_eq!(GgmlType::IQ4_XS.to_string(), "IQ4_XS");
        assert_eq!(GgmlType(77).to_string(), "type 77");
        assert_eq!(GgmlType::KNOWN.iter().filter(|t| t.is_runnable()).count(), 15);
    }
}
