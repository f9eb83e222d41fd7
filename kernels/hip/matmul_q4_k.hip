// Products with Q4_K weights.
#include "matmul.h"

MATMUL_KERNELS(q4_k, Q4_K)
