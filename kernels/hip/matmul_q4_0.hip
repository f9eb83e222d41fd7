// Products with Q4_0 weights.
#include "gemm.h"

QUANT_KERNELS(q4_0, Q4_0)
