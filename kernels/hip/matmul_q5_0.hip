// Products with Q5_0 weights.
#include "gemm.h"

QUANT_KERNELS(q5_0, Q5_0)
