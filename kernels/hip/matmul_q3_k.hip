// Products with Q3_K weights.
#include "gemm.h"

QUANT_KERNELS(q3_k, Q3_K)
