// Products with F32 weights.
#include "matmul.h"

MATMUL_KERNELS(f32, F32)
