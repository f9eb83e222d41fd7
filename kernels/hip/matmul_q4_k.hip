// Products with Q4_K weights.
#include "gemm.h"

QUANT_KERNELS(q4_k, Q4_K)
