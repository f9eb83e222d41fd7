// Products with Q2_K weights.
#include "matmul.h"

MATMUL_KERNELS(q2_k, Q2_K)
