// Products with Q6_K weights.
#include "matmul.h"

MATMUL_KERNELS(q6_k, Q6_K)
