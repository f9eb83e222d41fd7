// Products with Q2_K weights.
#include "gemm.h"

QUANT_KERNELS(q2_k, Q2_K)
