//! CUDA's error numbers as HIP's. HIP took most of them over, so this lists what differs.

use super::super::status::{self, Status};
use super::driver::CuResult;

/// CUDA's number, and what HIP calls it.
const DIFFERENT: &[(i32, Status)] = &[
    (46, status::NO_DEVICE),                  // CUDA_ERROR_DEVICE_UNAVAILABLE
    (220, status::ECC_NOT_CORRECTABLE),       // CUDA_ERROR_NVLINK_UNCORRECTABLE
    (221, status::SHARED_OBJECT_INIT_FAILED), // CUDA_ERROR_JIT_COMPILER_NOT_FOUND
    (222, status::NO_BINARY_FOR_GPU),         // CUDA_ERROR_UNSUPPORTED_PTX_VERSION
    (714, status::LAUNCH_FAILURE),            // CUDA_ERROR_HARDWARE_STACK_ERROR
    (715, status::LAUNCH_FAILURE),            // CUDA_ERROR_ILLEGAL_INSTRUCTION
    (716, status::LAUNCH_FAILURE),            // CUDA_ERROR_MISALIGNED_ADDRESS
    (717, status::LAUNCH_FAILURE),            // CUDA_ERROR_INVALID_ADDRESS_SPACE
    (718, status::LAUNCH_FAILURE),            // CUDA_ERROR_INVALID_PC
    (802, status::INSUFFICIENT_DRIVER),       // CUDA_ERROR_SYSTEM_NOT_READY
    (803, status::INSUFFICIENT_DRIVER),       // CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
];

/// HIP's status for one of CUDA's; a number that HIP does not know is `hipErrorUnknown`.
pub(super) fn from_cuda(CuResult(number): CuResult) -> Status {
    if let Some((_, status)) = DIFFERENT.iter().find(|(cuda, _)| *cuda == number) {
        return *status;
    }
    let same = Status(number.cast_unsigned());
    if status::ALL.iter().any(|(status, ..)| *status == same) {
        return same;
    }
    tracing::error!(number, "libcuda reports an error that HIP has no name for");
    status::UNKNOWN
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers from cuda.h: most carry over, some are translated, the rest is unknown rather than misread.
    #[test]
    fn translates_cudas_numbers() {
        for (cuda, hip) in [
            (0, status::SUCCESS),
            (2, status::OUT_OF_MEMORY),
            (100, status::NO_DEVICE),
            (600, status::NOT_READY),
            (704, status::PEER_ACCESS_ALREADY_ENABLED),
            (716, status::LAUNCH_FAILURE),
            (719, status::LAUNCH_FAILURE),
            (12345, status::UNKNOWN),
            (-1, status::UNKNOWN),
        ] {
            assert_eq!(from_cuda(CuResult(cuda)), hip, "{cuda}");
        }
    }
}
