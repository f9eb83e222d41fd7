// Products with F32 weights.
#include "gemm_floats.h"

FLOAT_KERNELS(f32, F32)
