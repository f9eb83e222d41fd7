// Products with Q5_K weights.
#include "gemm.h"

QUANT_KERNELS(q5_k, Q5_K)
