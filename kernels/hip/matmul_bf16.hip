// Products with BF16 weights.
#include "gemm_floats.h"

FLOAT_KERNELS(bf16, BF16)
