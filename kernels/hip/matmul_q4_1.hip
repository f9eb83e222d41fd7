// Products with Q4_1 weights.
#include "gemm.h"

QUANT_KERNELS(q4_1, Q4_1)
