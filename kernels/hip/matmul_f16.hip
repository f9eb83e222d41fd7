// Products with F16 weights.
#include "gemm_floats.h"

FLOAT_KERNELS(f16, F16)
