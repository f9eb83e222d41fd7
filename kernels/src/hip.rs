//! Device sources: what a GPU runs, as text for the kernel compiler of `worker-gpu`.
//!
//! Every source is a single file over [`HEADERS`]; it compiles for AMD, NVIDIA and the emulated device. Adding a kernel is
//! a file in `hip/` and a row in [`SOURCES`].

/// One translation unit.
#[derive(Debug, Clone, Copy)]
pub struct DeviceSource<'a> {
    /// Name of the file without its ending; also names the compiled object.
    pub name: &'a str,
    /// The text.
    pub text: &'a str,
    /// Entry points that the compiled object must have.
    pub entries: &'a [&'a str],
}

/// A header that sources may include, by file name.
#[derive(Debug, Clone, Copy)]
pub struct DeviceHeader {
    /// File name as written in `#include`.
    pub name: &'static str,
    /// The text.
    pub text: &'static str,
}

macro_rules! headers {
    ($($name:literal),* $(,)?) => {
        &[$(DeviceHeader { name: $name, text: include_str!(concat!("../hip/", $name)) }),*]
    };
}

macro_rules! sources {
    ($($name:literal: [$($entry:literal),*]),* $(,)?) => {
        &[$(DeviceSource {
            name: $name,
            text: include_str!(concat!("../hip/", $name, ".hip")),
            entries: &[$($entry),*],
        }),*]
    };
}

/// The prelude and what it includes.
pub const HEADERS: &[DeviceHeader] = headers![
    "prelude.h",
    "mma.h",
    "step.h",
    "attention.h",
    "formats.h",
    "matmul.h",
    "few.h",
    "gated.h",
    "quantize.h",
    "delta_net.h",
    "gemm.h",
    "gemm_floats.h",
    "target_amd.h",
    "target_nvidia.h",
    "target_emulated.h",
    "emulated_fibers.h",
];

/// All kernels.
pub const SOURCES: &[DeviceSource<'static>] = sources![
    "residual_add": ["residual_add"],
    "rms_norm": ["rms_norm"],
    "rows": ["silu_mul", "sigmoid_mul", "split_heads", "rope_halves", "rope_adjacent"],
    "quantize_rows": ["quantize_rows"],
    "silu_quantize": ["silu_quantize"],
    "attention": [
        "attention_prepare_f32", "attention_prepare_f16",
        "attend_f32_1", "attend_f32_2", "attend_f32_4", "attend_f32_8",
        "attend_f16_1", "attend_f16_2", "attend_f16_4", "attend_f16_8",
        "attend_fold"
    ],
    "attention_tiles": [
        "attend_tiles_64", "attend_tiles_128", "attend_tiles_256",
        "attend_prompt_64", "attend_prompt_128", "attend_prompt_256"
    ],
    "delta_net": [
        "delta_conv_32", "delta_conv_64", "delta_conv_128", "delta_conv_256",
        "delta_rule_32", "delta_rule_64", "delta_rule_128", "delta_rule_256",
        "delta_finish_32", "delta_finish_64", "delta_finish_128", "delta_finish_256"
    ],
    "delta_step": ["delta_step_32", "delta_step_64", "delta_step_128"],
    "matmul_f32": ["matvec_f32_1", "matvec_f32_2", "matvec_f32_4", "matvec_f32_8", "embed_f32", "gemm_many_f32"],
    "matmul_f16": ["matvec_f16_1", "matvec_f16_2", "matvec_f16_4", "matvec_f16_8", "embed_f16", "gemm_many_f16"],
    "matmul_bf16": ["matvec_bf16_1", "matvec_bf16_2", "matvec_bf16_4", "matvec_bf16_8", "embed_bf16", "gemm_many_bf16"],
    "matmul_q4_0": [
        "matvec_q4_0_1", "matvec_q4_0_2", "matvec_q4_0_4", "matvec_q4_0_8", "embed_q4_0",
        "few_q4_0_8", "few_q4_0_16", "gated_q4_0", "gemm_many_q4_0", "gemm_few_q4_0"
    ],
    "matmul_q4_1": [
        "matvec_q4_1_1", "matvec_q4_1_2", "matvec_q4_1_4", "matvec_q4_1_8", "embed_q4_1",
        "few_q4_1_8", "few_q4_1_16", "gated_q4_1", "gemm_many_q4_1", "gemm_few_q4_1"
    ],
    "matmul_q5_0": [
        "matvec_q5_0_1", "matvec_q5_0_2", "matvec_q5_0_4", "matvec_q5_0_8", "embed_q5_0",
        "few_q5_0_8", "few_q5_0_16", "gated_q5_0", "gemm_many_q5_0", "gemm_few_q5_0"
    ],
    "matmul_q5_1": [
        "matvec_q5_1_1", "matvec_q5_1_2", "matvec_q5_1_4", "matvec_q5_1_8", "embed_q5_1",
        "few_q5_1_8", "few_q5_1_16", "gated_q5_1", "gemm_many_q5_1", "gemm_few_q5_1"
    ],
    "matmul_q8_0": [
        "matvec_q8_0_1", "matvec_q8_0_2", "matvec_q8_0_4", "matvec_q8_0_8", "embed_q8_0",
        "few_q8_0_8", "few_q8_0_16", "gated_q8_0", "gemm_many_q8_0", "gemm_few_q8_0"
    ],
    "matmul_q2_k": [
        "matvec_q2_k_1", "matvec_q2_k_2", "matvec_q2_k_4", "matvec_q2_k_8", "embed_q2_k",
        "few_q2_k_8", "few_q2_k_16", "gated_q2_k", "gemm_many_q2_k", "gemm_few_q2_k"
    ],
    "matmul_q3_k": [
        "matvec_q3_k_1", "matvec_q3_k_2", "matvec_q3_k_4", "matvec_q3_k_8", "embed_q3_k",
        "few_q3_k_8", "few_q3_k_16", "gated_q3_k", "gemm_many_q3_k", "gemm_few_q3_k"
    ],
    "matmul_q4_k": [
        "matvec_q4_k_1", "matvec_q4_k_2", "matvec_q4_k_4", "matvec_q4_k_8", "embed_q4_k",
        "few_q4_k_8", "few_q4_k_16", "gated_q4_k", "gemm_many_q4_k", "gemm_few_q4_k"
    ],
    "matmul_q5_k": [
        "matvec_q5_k_1", "matvec_q5_k_2", "matvec_q5_k_4", "matvec_q5_k_8", "embed_q5_k",
        "few_q5_k_8", "few_q5_k_16", "gated_q5_k", "gemm_many_q5_k", "gemm_few_q5_k"
    ],
    "matmul_q6_k": [
        "matvec_q6_k_1", "matvec_q6_k_2", "matvec_q6_k_4", "matvec_q6_k_8", "embed_q6_k",
        "few_q6_k_8", "few_q6_k_16", "gated_q6_k", "gemm_many_q6_k", "gemm_few_q6_k"
    ],
    "matmul_iq4_nl": [
        "matvec_iq4_nl_1", "matvec_iq4_nl_2", "matvec_iq4_nl_4", "matvec_iq4_nl_8", "embed_iq4_nl",
        "few_iq4_nl_8", "few_iq4_nl_16", "gated_iq4_nl", "gemm_many_iq4_nl", "gemm_few_iq4_nl"
    ],
    "matmul_iq4_xs": [
        "matvec_iq4_xs_1", "matvec_iq4_xs_2", "matvec_iq4_xs_4", "matvec_iq4_xs_8", "embed_iq4_xs",
        "few_iq4_xs_8", "few_iq4_xs_16", "gated_iq4_xs", "gemm_many_iq4_xs", "gemm_few_iq4_xs"
    ],
];

/// The source with this name.
pub fn source(name: &str) -> Option<&'static DeviceSource<'static>> {
    SOURCES.iter().find(|source| source.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry point in the table without a definition would only be noticed on a device.
    #[test]
    fn every_entry_is_defined_in_its_source() {
        for source in SOURCES {
            for entry in source.entries {
                let defined = match source.name.strip_prefix("matmul_") {
                    Some(format) => {
                        let macros = ["FLOAT_KERNELS", "QUANT_KERNELS"];
                        macros.iter().any(|name| source.text.contains(&format!("{name}({format},")))
                            && entry.contains(format)
                    }
                    None => ["KERNEL", "KERNEL_TOGETHER"]
                        .iter()
                        .any(|name| source.text.contains(&format!("{name}({entry},"))),
                };
                assert!(defined, "{} lacks {entry}", source.name);
            }
        }
    }

    /// A header that is not in the table is missing on a machine without this source tree.
    #[test]
    fn every_included_header_is_embedded() {
        let texts = HEADERS.iter().map(|header| header.text).chain(SOURCES.iter().map(|source| source.text));
        for line in texts.flat_map(str::lines).filter(|line| line.starts_with("#include \"")) {
            let name = line.split('"').nth(1).unwrap();
            assert!(HEADERS.iter().any(|header| header.name == name), "{name} is not in HEADERS");
        }
    }
}
