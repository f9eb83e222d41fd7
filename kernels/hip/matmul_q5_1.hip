// Products with Q5_1 weights.
#include "gemm.h"

QUANT_KERNELS(q5_1, Q5_1)
