// Products with Q6_K weights.
#include "gemm.h"

QUANT_KERNELS(q6_k, Q6_K)
