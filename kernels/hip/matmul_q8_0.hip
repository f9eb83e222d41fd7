// Products with Q8_0 weights.
#include "gemm.h"

QUANT_KERNELS(q8_0, Q8_0)
